"""Failures and normal exits of the ranks, kept in the store of their process group."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from ddpkit.base.failure_reason import Reason
from ddpkit.base.position import POSITION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

T = TypeVar("T")

NAP_SECONDS = 0.02


class FailureReport:
    """Failures and normal exits of the ranks of a process group, kept in its store.

    Args:
        store: of the process group.
        rank: this process.
        world_size: number of processes.

    Attributes:
        store_is_lost: whether the store has gone with the process that held it. It is not asked
            again: torch logs each attempt to reach it at length.
        lost_by: what torch then said, in a line.
        process: the rank's own; one that it forks inherits the report, and must not use it.
        awaited: the rank that this one waits for, outside of collectives; None: none.
        find_reason: looks for the rank behind a lost connection, if none has reported itself; may
            wait a little. Is given the rank at its other end, or None where that is not known.
        await_silence: waits briefly until other threads of this process have ended their calls of
            the store.
        limits: of collectives: by milliseconds the option that has set it.

    Ranks: local; only :meth:`await_departures` waits for others.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> FailureReport(store, rank=1, world_size=2).tell(
        ...     Reason.of(1, ValueError("boom"), is_final=True)
        ... )
        True
        >>> FailureReport(store, rank=0, world_size=2).first_failure()
        Reason(rank=1, text='ValueError: boom', ...)
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.store_is_lost = False
        self.lost_by = ""
        self.process = os.getpid()
        self.awaited: int | None = None
        self.find_reason: Callable[[int | None], Reason | None] = lambda _: None
        self.await_silence: Callable[[], None] = lambda: None
        self.limits: dict[int, str] = {}

    @property
    def is_forked(self) -> bool:
        """Say whether this process is not the rank, but was forked from it."""
        return self.process != os.getpid()

    def tell(self, reason: Reason) -> bool:
        """Record a failure as the first, unless there is one already; return whether it was
        recorded.

        A failure that is not final may be caught by the script: it counts only for ranks in the
        same call of ``fit``.
        """
        key = _reason_key(None if reason.is_final else reason.session)

        def note(store: Store) -> bool:
            is_first = store.add(f"{key}/count", 1) == 1
            if is_first:
                store.set(key, json.dumps(asdict(reason)))
            return is_first

        return self._asked(note, otherwise=False)

    def first_failure(self) -> Reason | None:
        """Return the first failure of another rank, in this call of ``fit`` or ``evaluate`` or
        final; or None.
        """

        def find(store: Store) -> Reason | None:
            for session in (None, POSITION.session):
                key = _reason_key(session)
                # 0: outside of any, where a failure counts only for good
                if session != 0 and store.check([key]):
                    reason = Reason(**json.loads(store.get(key)))
                    if reason.rank != self.rank:
                        return reason
            return None

        return self._asked(find, otherwise=None)

    def note(self, name: str, value: str) -> None:
        """Keep a text for the other ranks."""
        self._asked(lambda store: store.set(f"ddpkit/note/{name}", value), otherwise=None)

    def noted(self, name: str) -> str | None:
        """Return the text that a rank has kept under a name, or None where there is none yet."""
        key = f"ddpkit/note/{name}"
        return self._asked(
            lambda store: store.get(key).decode() if store.check([key]) else None,
            otherwise=None,
        )

    def forget(self, name: str) -> None:
        """Take the text out that a rank has kept under a name."""
        self._asked(lambda store: store.delete_key(f"ddpkit/note/{name}"), otherwise=False)

    def has_notes(self, names: Sequence[str]) -> bool:
        """Say whether there is a text under each of some names; yes where the store is gone: no
        wait must go on.
        """
        keys = [f"ddpkit/note/{name}" for name in names]
        return self._asked(lambda store: bool(store.check(keys)), otherwise=True)

    def is_first_to(self, what: str) -> bool:
        """Say whether this rank is the first of all that asks this."""
        return self._asked(lambda store: store.add(f"ddpkit/first/{what}", 1) == 1, otherwise=False)

    def depart(self, rank: int | None = None) -> None:
        """Mark this rank as departed, or another one that cannot do so itself."""
        key = _departed_key(self.rank if rank is None else rank)
        self._asked(lambda store: store.set(key, "1"), otherwise=None)

    def has_departed(self, rank: int) -> bool:
        """Return whether a rank has departed; raise if the store is gone."""
        return bool(self.store.check([_departed_key(rank)]))

    def departed(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Return those of some ranks from which nothing more will come; None: of all others."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        asked = others if ranks is None else ranks
        return self._asked(
            lambda _: [rank for rank in asked if self.has_departed(rank)],
            otherwise=[],
        )

    def await_departures(self, seconds: float) -> None:
        """Wait, for so long at most, until every rank has departed."""
        end = time.monotonic() + seconds
        keys = [_departed_key(rank) for rank in range(self.world_size)]
        while time.monotonic() < end and not self._asked(
            lambda store: store.check(keys),
            otherwise=True,
        ):
            time.sleep(NAP_SECONDS)

    def _asked(
        self,
        ask: Callable[[Store], T],
        *,
        otherwise: T,
    ) -> T:
        if not self.store_is_lost:
            try:
                return ask(self.store)
            except RuntimeError as error:
                self.store_is_lost = True
                self.lost_by = (str(error).splitlines() or [""])[0][:200]
        return otherwise


def _reason_key(session: int | None) -> str:
    return f"ddpkit/failure/{'final' if session is None else session}"


def _departed_key(rank: int) -> str:
    return f"ddpkit/departed/{rank}"


class _Process:
    """What this process knows of its own end."""

    report: FailureReport | None = None  # of its process group
    # writes an uncaught exception into the experiment's log
    log: Callable[[BaseException], object] | None = None
    # writes why another thread ends it into the run's log
    note_end: Callable[[str], object] | None = None
    # tell others of the end where another thread ends it, without exit hooks
    at_hard_end: list[Callable[[], object]]
    failed: BaseException | None = None  # the uncaught exception that ends it
    is_stopped = False  # whether a signal or the time limit has ended its last call of fit
    left = False  # whether an exception has left its last call of fit or evaluate

    def __init__(self) -> None:
        self.at_hard_end = []


PROCESS = _Process()
