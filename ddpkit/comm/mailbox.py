"""Values and errors handed from one rank to the others through the process group's store.

A collective is positional: the n-th call of one rank meets the n-th call of the others, so a call
that only the main process makes leaves it waiting forever. Here a value is *posted* under a key
that names the call, and ranks that make the same call read it. The poster never waits, so a call
that only one rank makes is legal. A reader waits as long as the poster is alive, however long its
work takes. A wait on the store does not notice a process that has ended on another machine; so a
reader also asks once a second for its own connection to the poster.

The key of a call is the path of code lines that led to it (the *call site*) and how often this rank
has taken that path. A helper that is called both under ``if if_main_process():`` and by all ranks
therefore has two call sites, and their counts cannot be mixed up.

Source: torch's libuv ``TCPStore`` backend limits a payload to 8 MiB (measured with torch 2.13: 7
MiB pass, 9 MiB break the connection); larger values are cut into pieces.

Mailbox, store and watchdog of a process group are kept by its :class:`Runtime`, made on first use.
The watchdog comes from ``ddpkit.control``, which asking for a rank does not import.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import logging
import pickle
import re
import time
import weakref
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ddpkit.base import (
    POSITION,
    PROCESS,
    FailureReport,
    Reason,
    explained,
    is_distributed_initialized,
    waits_for_ranks,
)
from ddpkit.errors import MainProcessError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ddpkit.control import Watchdog

logger = logging.getLogger(__name__)  # each message names its rank

PIECE_BYTES = 4 << 20
FIRST_WARNING_SECONDS = 30.0
CONNECTION_SECONDS = 1.0
TROUBLE_SECONDS = 5.0
FAILED_SECONDS = 5.0
WARNING_INTERVAL_SECONDS = 60.0
LONGEST_NAP_SECONDS = 0.02
CONNECTION_TAG = 0x64647000  # of sends that nobody receives
CONTROL = ("control", "gloo")  # use and backend of the group for small CPU tensors


@dataclass(frozen=True)
class Outcome:
    """The result of a call on the rank that made it.

    Attributes:
        value: its return value.
        reason: why it failed; None if it succeeded.

    Ranks: local.

    Example:
        >>> from ddpkit.base import Reason
        >>> Outcome(reason=Reason.of(0, ValueError("no"), is_final=False)).reason.text
        'ValueError: no'
    """

    value: Any = None
    reason: Reason | None = None


def call_site(frame: FrameType | None) -> str:
    """Name the code path that leads to ``frame``, the same on every rank that takes the same path.

    The path ends at the first module-level frame (the recipe script itself), so that a debugger or
    a profiler that runs the script on one rank only does not change it.

    Args:
        frame: the innermost frame that counts.

    Returns:
        ``"file.py:12 in prepare"`` followed by a digest of the whole path.

    Ranks: local.
    """
    steps = list(_steps(frame))
    digest = hashlib.blake2b("".join(steps).encode(), digest_size=8)
    return f"{steps[0] if steps else '?'} #{digest.hexdigest()}"


def call_path(frame: FrameType | None) -> str:
    """Name the code path that leads to ``frame``, whole and for a person: what :func:`call_site` is
    a digest of.

    Args:
        frame: the innermost frame that counts.

    Returns:
        ``"file.py:12 in prepare, from file.py:40 in main, from file.py:44 in <module>"``.

    Ranks: local.

    Example:
        >>> call_path(outside_frame(0)).endswith("in <module>")
        True
    """
    return ", from ".join(_steps(frame)) or "?"


def _steps(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        yield f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        if code.co_name == "<module>":
            break
        frame = frame.f_back


def outside_frame(depth: int = 1) -> FrameType | None:
    """Return the frame ``depth`` calls above the caller of this function.

    Ranks: local.

    Example:
        >>> outside_frame(0).f_code.co_name
        '<module>'
    """
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame and frame.f_back
    return frame


def place(site: str) -> str:
    """Return the readable part of a call site.

    Ranks: local.

    Example:
        >>> place("from rank 1 train.py:12 in prepare #0a1b")
        'train.py:12 in prepare'
    """
    return re.sub(r"^(from rank \d+ |all )+", "", site.partition(" #")[0])


class Mailbox:
    """Posts and reads outcomes on one store; one object per process group.

    Args:
        report: of the process group; the store is the same.
        check_connection: raises a RuntimeError if the connection to a rank, by its number, is lost;
            never waits.

    Ranks: local; each method says which ranks take part.

    Example:
        >>> from torch.distributed import HashStore
        >>> from ddpkit.base import FailureReport
        >>> box = Mailbox(FailureReport(HashStore(), rank=0, world_size=1))
        >>> box.post("site", box.next_count("site"), Outcome(3), readers=1)
        >>> box.read("site", "0.1", poster=0, readers=1).value
        3
    """

    def __init__(
        self,
        report: FailureReport,
        check_connection: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.report = report
        self.store = report.store
        self.check_connection = check_connection
        self.rank = report.rank
        self.world_size = report.world_size
        self._counts: dict[str, int] = {}
        self._collectives = 0
        self._posted: list[list[str]] = []
        self._has_failed = False

    def next_count(self, site: str) -> str:
        """Number this rank's visits to ``site`` since the last collective, which all ranks have
        passed alike.
        """
        self._counts[site] = self._counts.get(site, 0) + 1
        return f"{self._collectives}.{self._counts[site]}"

    def post(
        self,
        site: str,
        count: str,
        outcome: Outcome,
        readers: int,
    ) -> None:
        """Leave an outcome for those who make the same call; never waits.

        A value that cannot be pickled is replaced by None with a warning that names the call.
        """
        if readers < 1:
            return
        payload = self._pickled(site, outcome)
        key = _key(site, count)
        pieces = range(0, max(len(payload), 1), PIECE_BYTES)
        self._posted.append(_names(key, len(pieces)))
        for number, start in enumerate(pieces):
            self.store.set(f"{key}/{number}", payload[start : start + PIECE_BYTES])  # type: ignore[arg-type]
        self.store.set(key, str(len(pieces)))

    @waits_for_ranks
    def read(
        self,
        site: str,
        count: str,
        *,
        poster: int,
        readers: int,
    ) -> Outcome:
        """Wait until ``poster`` has posted call number ``count`` of ``site`` and return its
        outcome.

        Raises:
            RankFailedError: the poster has come to its end without making this call, or the
                connection to it is lost, or it has been silent for too long.
        """
        key = _key(site, count)
        try:
            self._wait(key, site, poster)
            pieces = int(self.store.get(key))
            payload = b"".join(self.store.get(f"{key}/{number}") for number in range(pieces))
            if self.store.add(f"{key}/read", 1) >= readers:
                for name in _names(key, pieces):
                    self.store.delete_key(name)
        except RankFailedError:
            raise
        except RuntimeError as error:
            self.report.store_is_lost = True
            self._raise_lost(error, site, poster)
        return self._unpickled(site, payload)

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Start afresh after a collective: delete unread values, and number the visits from 1
        again.

        A rank that takes part in the collective has made every earlier call, so nobody reads older
        values any more; and an earlier call by one rank alone cannot shift the numbers of later
        calls.
        """
        posted = self._posted
        self._posted = []
        yield
        self._counts.clear()
        self._collectives += 1
        for names in posted:
            if self.store.delete_key(names[0]):
                for name in names[1:]:
                    self.store.delete_key(name)

    @contextlib.contextmanager
    def after_failure(self) -> Iterator[None]:
        """Return a context in which this rank, which has failed and tells it, waits for each other
        one for some seconds only: that may be waiting for this one in a collective of the work.

        Raises:
            RankFailedError: a rank has not come.
        """
        self._has_failed = True
        try:
            yield
        finally:
            self._has_failed = False

    def _pickled(self, site: str, outcome: Outcome) -> bytes:
        try:
            return pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 -- the value's own code may raise anything, and others wait for an answer
            kind = type(outcome.value).__name__
            text = (
                "%s: the value of this main-only call, a %s, cannot be handed to others (%s); "
                "they get None."
            )
            logger.warning(text, place(site), kind, error)
            return pickle.dumps(Outcome())

    def _unpickled(self, site: str, payload: bytes) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(payload)  # noqa: S301 -- written by a rank of this very job
        except Exception as error:  # noqa: BLE001 -- as above: the work was done, only its value is lost
            text = (
                "%s: the value of this main-only call cannot be read on rank %d (%s: %s), which "
                "gets None."
            )
            logger.warning(
                text,
                place(site),
                self.rank,
                type(error).__name__,
                error,
            )
            return Outcome()
        return outcome

    @waits_for_ranks
    def _wait(
        self,
        key: str,
        site: str,
        poster: int,
    ) -> None:
        started = time.monotonic()
        next_warning = started + FIRST_WARNING_SECONDS
        next_look = CONNECTION_SECONDS
        nap = 0.0005
        try:
            while not self.store.check([key]):
                if self.report.has_departed(poster) and not self.store.check([key]):
                    raise RankFailedError(self._why_gone(site, poster))
                waited = time.monotonic() - started
                if waited >= next_look:
                    next_look = waited + CONNECTION_SECONDS
                    self._look_at_connection(key, site, poster)
                if self._has_failed and waited > FAILED_SECONDS:
                    raise RankFailedError(
                        f"rank {self.rank} has failed, and waits no longer at {place(site)} for "
                        f"rank {poster}."
                    )
                if waited > TROUBLE_SECONDS:
                    self.report.awaited = poster
                if started + waited >= next_warning:
                    next_warning += WARNING_INTERVAL_SECONDS
                    self._warn_waiting(site, poster, waited)
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP_SECONDS)
        finally:
            self.report.awaited = None

    def _look_at_connection(
        self,
        key: str,
        site: str,
        poster: int,
    ) -> None:
        try:
            self.check_connection(poster)
        except RuntimeError as error:
            if not self.store.check([key]):  # else it has posted, and ended
                self._raise_lost(error, site, poster, lost=poster)

    def _waiting(self, site: str, poster: int) -> str:
        return f"(rank {self.rank} was waiting at {place(site)} for rank {poster})"

    @waits_for_ranks
    def _raise_lost(
        self,
        error: RuntimeError,
        site: str,
        poster: int,
        lost: int | None = None,
    ) -> NoReturn:
        """Say which rank was lost with a connection, if that becomes known soon."""
        news = explained(error, lost)
        cause = error if news is error else news.__cause__
        raise RankFailedError(f"{news}\n{self._waiting(site, poster)}") from cause

    def _why_gone(self, site: str, poster: int) -> str:
        reason = self.report.first_failure()
        if reason is not None:
            return f"{reason.summary()}\n{self._waiting(site, poster)}"
        return (
            f"rank {self.rank} waits at {place(site)} for rank {poster}, which has come to its "
            "end without making this call. Look for the reason in its output, or for a path "
            "through the script that it did not take."
        )

    def _warn_waiting(
        self,
        site: str,
        poster: int,
        seconds: float,
    ) -> None:
        text = (
            "rank %d has waited %.0f s at %s for rank %d. If that is not working on this call, "
            "the ranks have taken different paths through the script."
        )
        logger.warning(text, self.rank, seconds, place(site), poster)


def raise_as_reader(reason: Reason, site: str, poster: int) -> None:
    """Raise the poster's failure on a rank that read it.

    Args:
        reason: why its call failed.
        site: of the call.
        poster: the rank that made it.

    Raises:
        MainProcessError: the poster is rank 0; the text holds its own traceback.
        RankFailedError: the poster is another rank (once-per-node work); likewise.

    Ranks: local.

    Example:
        >>> from ddpkit.base import Reason
        >>> raise_as_reader(Reason(0, "ValueError: no", trace="..."), "train.py:3 in prepare", 0)
        Traceback (most recent call last):
        ddpkit.errors.MainProcessError: rank 0 failed in the call at train.py:3 in prepare:
        ValueError: no
        --- traceback of rank 0 ---
        ...
    """
    kind = MainProcessError if poster == 0 else RankFailedError
    raise kind(
        f"rank {poster} failed in the call at {place(site)}: {reason.text}\n"
        f"--- traceback of rank {poster} ---\n{reason.trace.rstrip()}\n{reason.summary()}"
    )


def _key(site: str, count: str) -> str:
    return f"ddpkit/call/{site}/{count}"


def _names(key: str, pieces: int) -> list[str]:
    """List all that a posted outcome has in the store."""
    return [key, f"{key}/read", *(f"{key}/{number}" for number in range(pieces))]


# ------------------------------------------------------------------- the runtime of a process group


class Runtime:
    """What belongs to one process group.

    Made for the default process group.

    Args:
        report: of its ranks; None: they have none yet, and get one in the group's own store.

    Attributes:
        group: gives that group, if it is still there.
        store: its store.
        report: which rank failed first; which ranks have departed.
        mailbox: values and errors of main-only work.
        watchdog: sees to it that nothing hangs; None: there is none.
        timeout: how long the group's collectives wait at its start; None: it does not say.
        epochs_of_sums: numbers of the epochs with virtual ranks, on all ranks alike.
        machine: number of this process's machine, and the ranks on it; None unless they had to tell
            each other, for want of a launcher.
        is_guarded: whether the group's end and its failures are told to the other ranks.
        hosts_store: whether this process keeps the store.
        is_over: whether another group has taken its place.
        has_left: whether this process has departed at its end.

    Ranks: local.
    """

    def __init__(self, report: FailureReport | None = None) -> None:
        # reaches into torch: not for those who ask for a rank
        from ddpkit.compat import default_store, timeout_of

        self.report = report or FailureReport(
            default_store(),
            dist.get_rank(),
            dist.get_world_size(),
        )
        self.store: dist.Store = self.report.store
        self.mailbox = Mailbox(self.report, self.check_connection)
        # A weak reference: torch owns the groups. A strong one would keep a destroyed group's
        # threads running, and the process would abort at exit.
        self.group: Callable[[], dist.ProcessGroup | None] = weakref.ref(dist.group.WORLD)
        self._own_groups: dict[
            tuple[str, str | None],
            Callable[[], dist.ProcessGroup | None],
        ] = {}
        self.epochs_of_sums = itertools.count()
        self.timeout = timeout_of(dist.group.WORLD)
        self.machine: tuple[int, tuple[int, ...]] | None = None
        self.is_guarded = self.hosts_store = self.is_over = self.has_left = False
        self.watchdog: Watchdog | None = None

    def take_report(self, report: FailureReport) -> None:
        """Put a report in another store in the place of the first: all ranks do it at one place of
        their code.
        """
        self.report = report
        self.store = report.store
        self.mailbox = Mailbox(report, self.check_connection)

    def own_group(
        self,
        use: str,
        backend: str | None = None,
    ) -> dist.ProcessGroup:
        """Return the group of all ranks for one use alone, made on first use.

        Collectives of one group are matched by the order in which each rank starts them. Those of
        different uses may come in another order on another rank.

        Args:
            use: a name.
            backend: None: that of the default group.

        Ranks: collective on the first call for a use and a backend, local afterwards.
        """
        group = self._made_group(use, backend)
        if group is None:
            group = dist.new_group(backend=backend, timeout=self.timeout)
            self._own_groups[use, backend] = weakref.ref(group)
        return group

    def _made_group(
        self,
        use: str,
        backend: str | None,
    ) -> dist.ProcessGroup | None:
        """Return such a group if it has been made, and is still there."""
        reference = self._own_groups.get((use, backend))
        return None if reference is None else reference()

    def check_connection(self, rank: int) -> None:
        """Raise if the control group's connection to a rank is lost, as it is once the process has
        ended; never wait.

        A byte is offered that the rank never asks for: gloo refuses at once where the connection
        has broken, and sends only the offer otherwise.

        Args:
            rank: another one than this.

        Raises:
            RuntimeError: it is lost.
        """
        group = self._made_group(*CONTROL)
        if group is not None:
            dist.isend(
                torch.zeros(1, dtype=torch.uint8),
                rank,
                group=group,
                tag=CONNECTION_TAG,
            )

    def end(self) -> None:
        """End all that belongs to the group, because another one takes its place.

        The store is left alone: slower ranks may still be talking to it.
        """
        self.is_over = True
        if self.watchdog is not None and not self.report.is_forked:
            self.watchdog.stop()
            if self.watchdog.heartbeat.store_lost is None:
                self.report.depart()
        if PROCESS.report is self.report:
            PROCESS.report = None


_runtime: Runtime | None = None


def get_runtime(report: FailureReport | None = None) -> Runtime:
    """Return the runtime of the current default process group.

    Args:
        report: of its ranks, where the group has just been made and they have one already.

    Raises:
        ValueError: no process group is initialized (torch's own error).

    Ranks: local.

    State: ends the runtime of the group before, and its watchdog, if the group has changed.

    Example:
        >>> get_runtime()
        Traceback (most recent call last):
        ValueError: Default process group has not been initialized, please make sure to call
        init_process_group.
    """
    global _runtime  # noqa: PLW0603 -- shadows torch's own global, the default process group
    if _runtime is None or dist.group.WORLD is None or _runtime.group() is not dist.group.WORLD:
        begun = Runtime(report)
        if _runtime is not None:
            _runtime.end()
        _runtime = begun
        POSITION.join_group()
    return _runtime


def control_group() -> dist.ProcessGroup | None:
    """Return the gloo group for small CPU tensors, separate from the group for gradients.

    Its timeout is the initial timeout of the default group: ``distributed_timeout_minutes``, or the
    value given by the code that started the group. Shortening the default group's timeout later
    does not change it.

    Returns:
        The group, or None where no process group is initialised.

    Ranks: collective on the first call, local afterwards.
    """
    if not is_distributed_initialized():
        return None
    return get_runtime().own_group(*CONTROL)
