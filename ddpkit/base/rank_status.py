"""Rank status: each rank reports its position about once a second; a hang or failure prints them as a table."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from traceback import FrameSummary
    from types import FrameType

# Where a rank that waits for others is, and not itself at fault: file of torch or of this package, function.
_WAITING_FILES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
_WAITING_OWN = {"mailbox.py", "distributed.py", "gathering.py"}
# Where Python reads a number from a GPU. With NCCL, whose collectives return at once, that is where a rank waits.
_DEVICE_READS = (
    "ddpkit/optim.py", "ddpkit/metrics.py", "ddpkit/distributed.py", "ddpkit/syncbn.py",
    "torch/nn/modules/_functions.py", "torch/amp/grad_scaler.py", "torch/cuda/__init__.py", "torch/cuda/streams.py",
)  # fmt: skip
_LOADER_FILE = "torch/utils/data/dataloader.py"
AT_LOADER = "waiting for its loader"
MOST_SPANS = 16
_NOT_THE_USERS = (str(PurePath(os.__file__).parent), str(PurePath(__file__).parents[1]), "<")
# Frames of a rank of an elastic agent that has finished and waits for the other ranks: inner and outer.
_WAITING_FOR_AGENT = ("multiprocessing/synchronize.py", "torch/distributed/elastic/multiprocessing/api.py")


@contextlib.contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Return a context in which some attributes of an object have other values; afterwards they have those of before.

    Args:
        owner: the object, or a class.
        **attributes: the values by name; the attributes exist.

    Ranks: local.

    Example:
        >>> status = RankStatus()
        >>> with temporarily(status, step=3):
        ...     status.step
        3
        >>> status.step
        0
    """
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@dataclass
class RankStatus:
    """Where one rank is.

    Attributes:
        rank: its number.
        host: name of its machine.
        pid: its process.
        stage: such as ``"TRAIN"``; empty outside of any.
        epoch: from 1.
        step: batches of the stage so far.
        seconds: since it has begun a batch.
        where: file, line and function, once the batch takes long; else empty.
        waits: whether that is a place where ranks wait for each other.
        started: when its process was started, in clock ticks since boot; 0: unknown.
        session: which call of ``fit`` or ``evaluate`` it is in, from 1; 0: outside.
        inside: whether it is in one now.
        beats: how many heartbeats it has sent.
        doing: what that call does before its first stage, such as ``"fit, before the first stage"``; empty otherwise.
        ends: whether it is about to end itself, at the limit of time without a step.
        machine: where its process number counts: one machine, or one container on it.

    Ranks: local.

    Example:
        >>> RankStatus.read(RankStatus(rank=1, host="a", pid=7).to_json()).pid
        7
    """

    rank: int = 0
    host: str = ""
    pid: int = 0
    stage: str = ""
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    where: str = ""
    waits: bool = False
    started: int = 0
    session: int = 0
    inside: bool = False
    beats: int = 0
    doing: str = ""
    ends: bool = False
    machine: str = ""

    def to_json(self) -> str:
        """Return a text that :meth:`read` understands."""
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str | bytes) -> RankStatus:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def name(self) -> str:
        """Return ``"rank 2 (host, pid 4711)"``."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.host else f"rank {self.rank}"

    def place(self) -> str:
        """Return ``"in TRAIN of epoch 3 at step 1204"``, what comes before the first stage, or nothing outside."""
        if self.doing:
            return f"in {self.doing}"
        if not self.stage:
            return ""
        epoch = f" of epoch {self.epoch}" if self.epoch else ""
        # Around an evaluation no step is the current one.
        return f"in {self.stage}{epoch}" + (f" at step {self.step}" if self.step or self.stage == "TRAIN" else "")


@dataclass
class Position:
    """The position of this process in a run, read from the counters of the loop.

    Attributes:
        progress: of the Brain whose ``fit`` or ``evaluate`` is running; None outside.
        sessions: calls of ``fit`` and ``evaluate`` since the process group was made: equal on all its ranks.
        session: number of the running call, the innermost if nested; 0 outside.
        excused: running calls without a time limit: work of the main process alone, and waiting for it.
        moves: how often a rank without steps of its own has learnt that others make steps.
        call: the running call, such as ``"fit"``, until its first stage begins; then empty.
        part: what of it is done, where that has a name.
        waits_for_device: whether a rank that reads a number from its GPU may wait there for other ranks: with NCCL.
        main_thread: whose stack is looked at.

    Ranks: local.

    Example:
        >>> Position().mark()
        (0, 0, 0)
    """

    progress: Any = None
    sessions: int = 0
    session: int = 0
    excused: int = 0
    moves: int = 0
    call: str = ""
    part: str = ""
    waits_for_device: bool = False
    main_thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)

    def mark(self) -> tuple[Any, ...]:
        """Return what changes with every batch, stage and session."""
        progress = self.progress
        calls = (self.sessions, self.session, self.moves)
        if progress is None:
            return calls
        return (*calls, id(progress), stage_of(progress), progress.epoch, progress.step, progress.optimizer_step)

    def has_no_limit(self) -> bool:
        """Say whether time does not count: outside of ``fit`` and ``evaluate``, and where :meth:`no_limit` says so."""
        return self.progress is None or bool(self.excused)

    def join_group(self) -> None:
        """Count anew: what a process did by itself, before its group was made, the other ranks have not done."""
        self.sessions = self.session = int(self.progress is not None)

    def inside(self, progress: Any, call: str = "") -> contextlib.AbstractContextManager[None]:
        """Return a context that is a call of ``fit`` or ``evaluate``."""
        self.sessions += 1
        here = threading.get_ident()
        return temporarily(self, progress=progress, session=self.sessions, main_thread=here, call=call, part="")

    def stage_begins(self) -> None:
        """Note that a stage says from now on where this process is."""
        self.call = ""

    @contextlib.contextmanager
    def at(self, part: str) -> Iterator[None]:
        """Return a context for a part of what comes before the first stage, such as ``"recovering a checkpoint"``."""
        with temporarily(self, part=part):
            yield

    @contextlib.contextmanager
    def no_limit(self) -> Iterator[None]:
        """Return a context in which time does not count."""
        self.excused += 1
        try:
            yield
        finally:
            self.excused -= 1

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.main_thread)

    def has_returned(self) -> bool:
        """Say whether the function that an elastic agent has started has returned: its process waits for the others."""
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
        return self._look()[0].startswith(AT_LOADER)

    def _look(self) -> tuple[str, bool]:
        frame = self._frame()
        where, waits = look_at(frame)
        file = "" if frame is None else PurePath(frame.f_code.co_filename).as_posix()
        return where, waits or (self.waits_for_device and file.endswith(_DEVICE_READS))

    def own_status(self, rank: int, seconds: float, *, look: bool) -> RankStatus:
        """Describe where this process is.

        Args:
            rank: its number.
            seconds: since it has moved.
            look: look at the stack of the main thread, too: fills ``where`` and ``waits``.
        """
        progress = self.progress
        pid, session = os.getpid(), self.session
        found = RankStatus(rank, host_name(), pid, seconds=round(seconds, 1), session=session)
        if progress is not None:
            found.inside = True
            if self.call:
                found.doing = f"{self.call}, before the first stage{self.part and f': {self.part}'}"
            found.stage, found.epoch, found.step = stage_of(progress), int(progress.epoch or 0), progress.step
        if look:
            found.where, found.waits = self._look()
        return found


POSITION = Position()


def stage_of(progress: Any) -> str:
    """Return the name of the stage that a :class:`~ddpkit.training.loop.Progress` is in, or nothing.

    Ranks: local.

    Example:
        >>> from ddpkit.training.loop import Progress
        >>> stage_of(Progress())
        ''
    """
    seen = getattr(progress, "seen", None)
    return "" if seen is None else str(seen.stage.name)


def host_name() -> str:
    """Return the name of this machine.

    Ranks: local.

    Example:
        >>> host_name() == socket.gethostname()
        True
    """
    return socket.gethostname()


def look_at(frame: FrameType | None) -> tuple[str, bool]:
    """Say where a thread is, and whether it waits for other ranks there.

    Args:
        frame: the innermost.

    Returns:
        The innermost line of the user's own code, and the call it is in.

    Ranks: local.

    Example:
        >>> look_at(sys._getframe())[1]
        False
    """
    lines: list[tuple[str, str, int, str]] = []
    while frame is not None:
        code = frame.f_code
        lines.append((code.co_filename, PurePath(code.co_filename).name, frame.f_lineno, code.co_name))
        frame = frame.f_back
    if not lines:
        return "nowhere", False
    depth = next((number for number, line in enumerate(lines) if not is_library(line[0])), None)
    waits = any(_is_waiting(file, name) for file, name, _, _ in lines[: min(3, depth or 0)])
    own = None if depth is None else lines[depth]
    inner = lines[0]
    where = f"{inner[1]}:{inner[2]} in {inner[3]}"
    if own is not None and own is not inner:
        where = f"{own[1]}:{own[2]} in {own[3]}, which is in {inner[1]}:{inner[2]} {inner[3]}"
    if any(_LOADER_FILE in file for file, _, _, _ in lines[:12]):
        return f"{AT_LOADER} at {where}", False
    return where, waits


def is_library(file: str) -> bool:
    """Say whether a file of code belongs to Python, to an installed package, or to this one.

    Ranks: local.

    Example:
        >>> is_library(os.__file__), is_library("/home/me/data.py")
        (True, False)
    """
    return "site-packages" in file or file.startswith(_NOT_THE_USERS)


def line_of(frames: Sequence[FrameSummary]) -> str:
    """Return the innermost line of the user's own code in a traceback, or at all.

    Args:
        frames: of a traceback, the innermost last.

    Returns:
        Such as ``"train.py:12 in compute_forward"``; empty without frames.

    Ranks: local.

    Example:
        >>> import traceback
        >>> line_of([traceback.FrameSummary("/home/me/train.py", 12, "forward", lookup_line=False)])
        'train.py:12 in forward'
    """
    if not frames:
        return ""
    frame = next((one for one in reversed(frames) if not is_library(one.filename)), frames[-1])
    return f"{PurePath(frame.filename).name}:{frame.lineno} in {frame.name}"


def _is_waiting(file: str, name: str) -> bool:
    path = PurePath(file).as_posix()
    return any(part in path for part in _WAITING_FILES) or (name in _WAITING_OWN and "ddpkit" in path)


def table(ranks: Iterable[RankStatus], silent: dict[int, float] | None = None) -> str:
    """Format the positions of the ranks as a table. Ranks that only wait for others come last.

    Args:
        ranks: their reports.
        silent: for ranks without heartbeats: seconds since the last one.

    Returns:
        A line per rank; of many that wait at the same place only one.

    Ranks: local.

    Example:
        >>> stuck = RankStatus(2, "a", 7, "TRAIN", 1, 30, 31.0, "data.py:12 in __getitem__")
        >>> waiting = [RankStatus(n, "a", n + 5, "TRAIN", 1, 30, 30.0, "train.py:3", True) for n in range(2)]
        >>> print(table([*waiting, stuck]))
        rank 2 (a, pid 7): in TRAIN of epoch 1 at step 30, for 31 s at data.py:12 in __getitem__
        rank 0-1: in TRAIN of epoch 1 at step 30, for 30 s waiting for other ranks at train.py:3
    """
    silent = silent or {}
    guilty: list[str] = []
    waiting: dict[str, list[tuple[int, float]]] = {}
    for one in ranks:
        since = max(one.seconds, 0.0)
        if one.rank in silent:
            guilty.append(f"{one.name()}: silent for {silent[one.rank]:.0f} s, last {one.place() or 'outside of fit'}")
        elif one.waits:
            words = f"{one.place() or 'before the first stage'}, for {{}} s waiting for other ranks at {one.where}"
            waiting.setdefault(words, []).append((one.rank, since))
        else:
            at = f" {one.where if one.where.startswith(AT_LOADER) else 'at ' + one.where}" if one.where else ""
            guilty.append(f"{one.name()}: {one.place() or 'outside of fit and evaluate'}, for {since:.0f} s{at}")
    for words, members in waiting.items():
        numbers = spans(rank for rank, _ in members)
        guilty.append(f"rank {numbers}: {words.format(round(max(seconds for _, seconds in members)))}")
    return "\n".join(guilty)


def spans(numbers: Iterable[int]) -> str:
    """Write numbers in few words; of very many scattered ones the first.

    Ranks: local.

    Example:
        >>> spans([7, 0, 1, 2, 3])
        '0-3, 7'
    """
    pairs = enumerate(sorted(numbers))  # in a run of numbers each is as far from its place
    runs = [[number for _, number in run] for _, run in itertools.groupby(pairs, lambda pair: pair[1] - pair[0])]
    shown = ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in runs[:MOST_SPANS])
    return shown if len(runs) <= MOST_SPANS else f"{shown} ..."
