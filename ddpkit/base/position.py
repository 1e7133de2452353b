"""The position of this process in a run: what its rank reports, read from the counters of the
loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.base.attributes import temporarily
from ddpkit.base.processes import host_name
from ddpkit.base.rank_status import RankStatus
from ddpkit.base.waiting_frames import AT_LOADER, look_at, reads_number

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


# Frames of a rank of an elastic agent that has finished and waits for the other ranks: inner and
# outer.
_WAITING_FOR_AGENT = (
    "multiprocessing/synchronize.py",
    "torch/distributed/elastic/multiprocessing/api.py",
)


@dataclass(eq=False)
class Position:
    """The position of this process in a run, read from the counters of the loop.

    Attributes:
        progress: of the Brain whose ``fit`` or ``evaluate`` is running; None outside.
        sessions: calls of ``fit`` and ``evaluate`` since the process group was made: equal on all
            its ranks.
        session: number of the running call, the innermost if nested; 0 outside.
        unlimited_calls: running calls without a time limit: work of the main process alone, and
            waiting for it.
        moves_seen: number of times this rank, without steps of its own, saw progress on other
            ranks.
        call: the running call, such as ``"fit"``, until its first stage begins; then empty.
        part: what of it is done, where that has a name.
        waits_for_device: whether a rank that reads a number from its GPU may wait there for other
            ranks: with NCCL.
        main_thread: whose stack is looked at.

    Example:
        >>> Position().mark()
        (0, 0, 0)
    """

    progress: Any = None
    sessions: int = 0
    session: int = 0
    unlimited_calls: int = 0
    moves_seen: int = 0
    call: str = ""
    part: str = ""
    waits_for_device: bool = False
    main_thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)

    def mark(self) -> tuple[Any, ...]:
        """Return what changes with every batch, stage and session."""
        progress = self.progress
        calls = (self.sessions, self.session, self.moves_seen)
        if progress is None:
            return calls
        return (
            *calls,
            id(progress),
            stage_of(progress),
            progress.epoch,
            progress.step,
            progress.optimizer_step,
        )

    def has_no_limit(self) -> bool:
        """Say whether time does not count: outside of ``fit`` and ``evaluate``, and where
        :meth:`no_limit` says so.
        """
        return self.progress is None or bool(self.unlimited_calls)

    def join_group(self) -> None:
        """Reset the counters when the process group is made, so that they agree on all ranks."""
        self.sessions = self.session = int(self.progress is not None)

    def inside(self, progress: Any, call: str = "") -> contextlib.AbstractContextManager[None]:
        """Return a context that is a call of ``fit`` or ``evaluate``."""
        self.sessions += 1
        here = threading.get_ident()
        return temporarily(
            self,
            progress=progress,
            session=self.sessions,
            main_thread=here,
            call=call,
            part="",
        )

    def stage_begins(self) -> None:
        """Note that a stage says from now on where this process is."""
        self.call = ""

    def at(self, part: str) -> contextlib._GeneratorContextManager[None]:
        """Return a context for a part of what comes before the first stage, such as
        ``"recovering a checkpoint"``.
        """
        return temporarily(self, part=part)

    @contextlib.contextmanager
    def no_limit(self) -> Iterator[None]:
        """Return a context in which time does not count; threads may be in one each."""
        self.unlimited_calls += 1
        try:
            yield
        finally:
            self.unlimited_calls -= 1

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.main_thread)

    def has_returned(self) -> bool:
        """Say whether the function that an elastic agent has started has returned: its process
        waits for the others.
        """
        frame = self._frame()
        while frame is not None and not frame.f_code.co_filename.endswith(_WAITING_FOR_AGENT[1]):
            if not frame.f_code.co_filename.endswith(_WAITING_FOR_AGENT[0]):
                return False
            frame = frame.f_back
        return frame is not None

    def is_waiting(self) -> bool:
        """Say whether the process waits for other ranks."""
        return self._look()[1]

    def is_at_loader(self) -> bool:
        """Say whether the process waits for a loader."""
        return self._look()[0].endswith(AT_LOADER)

    def _look(self) -> tuple[str, bool]:
        frame = self._frame()
        where, waits = look_at(frame)
        is_reading = self.waits_for_device and frame is not None and reads_number(frame)
        return where, waits or is_reading

    def own_status(
        self,
        rank: int,
        seconds: float,
        *,
        look: bool,
    ) -> RankStatus:
        """Describe where this process is.

        Args:
            rank: its number.
            seconds: since it has moved.
            look: look at the stack of the main thread, too: fills ``where`` and ``waits``.
        """
        progress = self.progress
        pid = os.getpid()
        session = self.session
        found = RankStatus(
            rank,
            host_name(),
            pid,
            seconds=round(seconds, 1),
            session=session,
        )
        if progress is not None:
            found.inside = True
            if self.call:
                found.doing = f"{self.call}, before the first stage{self.part and f': {self.part}'}"
            found.stage, found.epoch, found.step = (
                stage_of(progress),
                int(progress.epoch or 0),
                progress.step,
            )
        if look:
            found.where, found.waits = self._look()
        return found


POSITION = Position()


def stage_of(progress: Any) -> str:
    """Return the name of the stage that a :class:`~ddpkit.training.progress.Progress` is in, or
    nothing.

    Example:
        >>> from ddpkit.training import Progress
        >>> stage_of(Progress())
        ''
    """
    batches = getattr(progress, "stage_batches", None)
    return "" if batches is None else str(batches.stage.name)
