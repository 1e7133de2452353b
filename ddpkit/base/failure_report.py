"""Which rank failed first, and why: one report per process group, kept in its store.

A rank that fails takes the others with it: their next collective ends in "Connection closed by peer", which says
nothing. So the rank that fails says so in the store, and the others turn the lost connection into a
:class:`~ddpkit.errors.RankFailedError` that names the rank and the reason.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ddpkit.base.rank_status import POSITION, line_of
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

T = TypeVar("T")

NAP_SECONDS = 0.02
LONGEST_REASON = 4000
LONGEST_TRACE = 20_000
PLACE = "_ddpkit_place"  # attribute of an exception: where in the run it has left fit or evaluate

# How torch raises in a rank what was raised in a worker of its loader.
OF_WORKER = re.compile(r"Caught \w+ in (?P<worker>\w+ worker process \d+)\.\nOriginal (?P<trace>.*)", re.DOTALL)

# How gloo, NCCL and torch's store say that the other side has gone.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "No route to host",
    "is unreachable",
    "Connection was likely closed",
    "Broken pipe",
    "Socket closed",
    "remote process exiting",
    "failed to recv",
)


@dataclass(frozen=True)
class Reason:
    """Which rank failed first, and why.

    Attributes:
        rank: its number.
        text: type and message of its exception, or how the process ended.
        host: name of its machine.
        pid: its process.
        place: such as ``"in TRAIN of epoch 3 at step 1204"``.
        trace: its traceback; empty if another process reported the failure.
        session: in which call of ``fit`` or ``evaluate`` it was, from 1; 0: in none.
        is_final: whether its process has ended with it.
        line: of the user's code where it failed, such as ``"train.py:12 in compute_forward"``.

    Ranks: local.

    Example:
        >>> Reason(1, "ValueError: boom", "node7", 4711, "in TRAIN of epoch 1 at step 9", "Traceback ...").summary()
        'rank 1 (node7, pid 4711) failed first, in TRAIN of epoch 1 at step 9: ValueError: boom'
    """

    rank: int
    text: str
    host: str = ""
    pid: int = 0
    place: str = ""
    trace: str = ""
    session: int = 0
    is_final: bool = False
    line: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_final: bool) -> Reason:
        """Describe an exception of this process."""
        here = POSITION.own_status(rank, 0.0, look=False)
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        place = here.place() or str(vars(error).get(PLACE, ""))
        text, line = text_and_line(error)
        return cls(rank, text, here.host, here.pid, place, trace, here.session, is_final, line)

    def who(self) -> str:
        """Return ``"rank 1 (node7, pid 4711)"``."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.host else f"rank {self.rank}"

    def heading(self) -> str:
        """Return a line to stand above the traceback."""
        return f"{self.who()} failed{' ' if self.place else ''}{self.place}:"

    def summary(self) -> str:
        """Return one line."""
        if not self.trace:
            return f"{self.who()} {self.text}"
        return f"{self.who()} failed first{self.where() and f', {self.where()}'}: {self.text}"

    def where(self) -> str:
        """Return ``"in TRAIN of epoch 3 at step 1204, at train.py:12 in compute_forward"``, or what is known of it."""
        return ", ".join(words for words in (self.place, self.line and f"at {self.line}") if words)


def text_and_line(error: BaseException) -> tuple[str, str]:
    """Return the type and message of an exception, cut where very long, and the line of user code where it was raised.

    The worker's traceback is left out of an exception from a loader's worker: the rank itself prints it.

    Ranks: local.

    Example:
        >>> text_and_line(ValueError("boom"))
        ('ValueError: boom', '')
    """
    of_worker = OF_WORKER.search(str(error))
    if of_worker is None:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
        causes = [one.__traceback__ for one in (error, error.__cause__) if one is not None]
        return text, line_of([frame for trace in causes for frame in traceback.extract_tb(trace)])
    last = of_worker["trace"].rstrip().splitlines()[-1]
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', of_worker["trace"])
    frames = [traceback.FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in found]
    return f"{last} (in {of_worker['worker']})", line_of(frames)


class FailureReport:
    """What the ranks of a process group tell each other when they end; kept in its store.

    Args:
        store: of the process group.
        rank: this process.
        world_size: number of processes.

    Attributes:
        store_is_lost: whether the store has gone with the process that held it. It is not asked again: torch logs each
            attempt to reach it at length.
        process: the rank's own; one that it forks inherits the report, and must not use it.
        awaited: the rank that this one waits for, outside of collectives; None: none.
        find_reason: looks for the rank behind a lost connection, if none has told of itself; may wait a little.

    Ranks: local; only :meth:`await_departures` waits for others.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> FailureReport(store, rank=1, world_size=2).tell(Reason.of(1, ValueError("boom"), is_final=True))
        True
        >>> FailureReport(store, rank=0, world_size=2).first_failure()
        Reason(rank=1, text='ValueError: boom', ...)
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.store_is_lost = False
        self.process = os.getpid()
        self.awaited: int | None = None
        self.find_reason: Callable[[], Reason | None] = lambda: None

    @property
    def is_forked(self) -> bool:
        """Say whether this process is not the rank, but was forked from it."""
        return self.process != os.getpid()

    def tell(self, reason: Reason) -> bool:
        """Record a failure as the first, unless there is one already; return whether it was recorded.

        A failure that is not final may be caught by the script: it counts only for ranks in the same call of ``fit``.
        """
        key = _reason_key(None if reason.is_final else reason.session)

        def note(store: Store) -> bool:
            is_first = store.add(f"{key}/count", 1) == 1
            if is_first:
                store.set(key, json.dumps(asdict(reason)))
            return is_first

        return self._asked(note, otherwise=False)

    def first_failure(self) -> Reason | None:
        """Return what another rank has noted, in this call of ``fit`` or ``evaluate`` or for good; or None."""

        def find(store: Store) -> Reason | None:
            for session in (None, POSITION.session):
                key = _reason_key(session)
                if session != 0 and store.check([key]):  # 0: outside of any, where a failure counts only for good
                    reason = Reason(**json.loads(store.get(key)))
                    if reason.rank != self.rank:
                        return reason
            return None

        return self._asked(find, otherwise=None)

    def is_first_to(self, what: str) -> bool:
        """Say whether this rank is the first of all that asks this."""
        return self._asked(lambda store: store.add(f"ddpkit/first/{what}", 1) == 1, otherwise=False)

    def depart(self, rank: int | None = None) -> None:
        """Note that nothing more will come from this rank, or from one that can not say so itself."""
        key = _departed_key(self.rank if rank is None else rank)
        self._asked(lambda store: store.set(key, "1"), otherwise=None)

    def has_departed(self, rank: int) -> bool:
        """Say whether nothing more will come from a rank; raise if the store has gone."""
        return bool(self.store.check([_departed_key(rank)]))

    def departed(self) -> list[int]:
        """Return the other ranks from which nothing more will come."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return self._asked(lambda _: [rank for rank in others if self.has_departed(rank)], otherwise=[])

    def await_departures(self, seconds: float) -> None:
        """Wait, for so long at most, until every rank has departed."""
        end, keys = time.monotonic() + seconds, [_departed_key(rank) for rank in range(self.world_size)]
        while time.monotonic() < end and not self._asked(lambda store: store.check(keys), otherwise=True):
            time.sleep(NAP_SECONDS)

    def _asked(self, ask: Callable[[Store], T], *, otherwise: T) -> T:
        if not self.store_is_lost:
            try:
                return ask(self.store)
            except RuntimeError:
                self.store_is_lost = True
        return otherwise


def _reason_key(session: int | None) -> str:
    return f"ddpkit/failure/{'final' if session is None else session}"


def _departed_key(rank: int) -> str:
    return f"ddpkit/departed/{rank}"


class _Process:
    """What this process knows of its own end."""

    report: FailureReport | None = None  # of its process group
    log: Callable[[BaseException], object] | None = None  # writes an uncaught exception into the experiment's log
    failed: BaseException | None = None  # the uncaught exception that ends it
    file: Path | None = None  # what was written for the launcher
    left: Reason | None = None  # what fit or evaluate has left with, while its script goes on


PROCESS = _Process()


def is_second_hand(error: BaseException) -> bool:
    """Say whether an exception only tells that another rank has failed.

    Ranks: local.

    Example:
        >>> is_second_hand(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:9"))
        True
        >>> is_second_hand(RuntimeError("shapes do not fit"))
        False
    """
    is_lost = isinstance(error, (RuntimeError, ConnectionError)) and any(
        words in str(error) for words in LOST_CONNECTION
    )
    return isinstance(error, RankFailedError) or is_lost


def explained(error: BaseException) -> BaseException:
    """Turn a lost connection into the failure of the lost rank; return other errors unchanged.

    Args:
        error: the exception on this rank.

    Returns:
        A :class:`~ddpkit.errors.RankFailedError`, or ``error`` itself. ``error`` becomes its
        cause only if the reason is unknown; otherwise its traceback would mislead.

    Ranks: local; asks the process group's store.

    Example:
        >>> explained(ValueError("own fault"))
        ValueError('own fault')
    """
    if isinstance(error, RankFailedError) or not is_second_hand(error):
        return error
    report = PROCESS.report
    if report is not None:
        reason = report.first_failure()
        departed = [] if reason is not None else report.departed()
        if reason is None and not departed:
            reason = report.find_reason()
        if reason is not None:
            return RankFailedError(reason.summary())
        if departed:
            return RankFailedError(
                f"rank {', '.join(map(str, departed))} came to the end of its script or function, while this one still "
                "waits for it: they took different paths. Do all ranks run the same epochs and collectives?"
            )
    news = RankFailedError(
        "the connection to another rank or to the store was lost, and no rank has left a reason: a process has ended "
        "early, or was killed (out of memory? a signal?). Look at the output and the exit codes of the other processes."
    )
    news.__cause__ = error
    return news
