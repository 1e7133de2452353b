"""Rank number, position in the run and failure report of this process, shared with the other ranks.

Which rank this process is: by torch's process group, else by the launcher's variables alone. That imports no torch and
raises nothing, so messages can name the rank whatever is wrong. What the variables mean in full, and whether they
contradict each other, is said by :mod:`ddpkit.launch.launchers`.

Each rank reports its position about once a second; a hang or failure prints them as a table.

A rank that fails takes the others with it: their next collective ends in "Connection closed by peer", which says
nothing. So the rank that fails says so in the store of the group, and the others turn the lost connection into a
:class:`~ddpkit.errors.RankFailedError` that names the rank and the reason.

Source: fields and states of processes as in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from torch.distributed import Store

T = TypeVar("T")

# Where a rank that waits for others is, and not itself at fault: files of torch, and of this package.
_WAITING_FILES = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
_WAITING_OWN = {"late_ranks.py", "mailbox.py", "distributed.py", "gathering.py", "time_outs.py"}
_PACKAGE = PurePath(__file__).parents[1]  # a folder above it may have the same name: that of a clone
# Where Python reads a number from a GPU. With NCCL, whose collectives return at once, that is where a rank waits.
_DEVICE_READS = (
    *(
        (_PACKAGE / name).as_posix()
        for name in (
            "optim.py",
            "metrics.py",
            "distributed.py",
            "syncbn.py",
            "comm/tree_sum.py",
            "strategies/ddp.py",
            "strategies/gradient_average.py",
        )
    ),
    "torch/nn/modules/_functions.py", "torch/amp/grad_scaler.py", "torch/cuda/__init__.py", "torch/cuda/streams.py",
)  # fmt: skip
_LOADER_FILE = "torch/utils/data/dataloader.py"
AT_LOADER = ", waiting for its loader"
_NOT_THE_USERS = (f"{PurePath(os.__file__).parent}{os.sep}", f"{_PACKAGE}{os.sep}", "<")
# Frames of a rank of an elastic agent that has finished and waits for the other ranks: inner and outer.
_WAITING_FOR_AGENT = ("multiprocessing/synchronize.py", "torch/distributed/elastic/multiprocessing/api.py")

DEAD_STATES = "ZXx"

# Slurm numbers the batch script, the external step and the interactive step from the top of 32 bits downward.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


class MpiLauncher(NamedTuple):
    """The variables of an MPI launcher, and what messages say about it.

    Of several names for the place on the node the first that is set counts.

    Attributes:
        rank: the variable with the rank.
        world_size: the variable with the number of processes.
        local_rank: the variables with the number of this process on its node.
        local_world_size: the variables with the number of processes on this node.
        shared: variables that together are the same on all ranks of a run, and differ in another run; without any,
            ``MASTER_PORT`` has to be given.

    Ranks: local.
    """

    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    shared: tuple[str, ...]


#: A new MPI launcher is one row here, if it tells each process how many run on its node. The order counts: jsrun sets
#: what Open MPI sets.
MPI_LAUNCHERS = {
    "jsm": MpiLauncher(
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("LSB_JOBID", "PMIX_NAMESPACE"),
    ),
    "openmpi": MpiLauncher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    "pmi": MpiLauncher(
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PMI_JOBID", "PALS_APID"),
    ),
}


def is_distributed_initialized() -> bool:
    """Return whether a default process group exists, made by ddpkit or by other code.

    Ranks: local.

    Example:
        >>> is_distributed_initialized()
        False
    """
    group = sys.modules.get("torch.distributed")
    return group is not None and bool(group.is_available() and group.is_initialized())


def get_rank() -> int | None:
    """Return this process's rank: from the process group, else from the launcher's environment, else None.

    Ranks: local.

    Example:
        >>> get_rank() is None
        True
    """
    return int(sys.modules["torch.distributed"].get_rank()) if is_distributed_initialized() else rank_if_known()


def get_world_size() -> int:
    """Return the number of processes that train together; 1 where no process group is initialised.

    Ranks: local.

    Example:
        >>> get_world_size()
        1
    """
    return int(sys.modules["torch.distributed"].get_world_size()) if is_distributed_initialized() else 1


def rank_if_known(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that the environment tells, and never raise.

    Args:
        environ: the environment; None reads ``os.environ``.

    Returns:
        The rank, or None where no launcher has started several processes.

    Ranks: local.

    Example:
        >>> rank_if_known({"RANK": "2"}), rank_if_known({}), rank_if_known({"LOCAL_RANK": "1"})
        (2, None, None)
    """
    environ = os.environ if environ is None else environ
    if environ.get("RANK", "").isdecimal():
        return int(environ["RANK"])
    names = [one.rank for one in MPI_LAUNCHERS.values() if size(environ, one.world_size) > 1]
    if in_slurm_step(environ):
        names.append("SLURM_PROCID")
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Say whether this process is one of several tasks of one ``srun``.

    Ranks: local.

    Example:
        >>> in_slurm_step({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})  # the batch script itself
        False
    """
    step = environ.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_SLURM_STEP
    return is_step and "SLURM_PROCID" in environ and size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") > 1


def size(environ: Mapping[str, str], *names: str) -> int:
    """Read the first of some variables that holds a number; 0 where none does.

    Args:
        environ: the environment.
        names: the variables, the best first.

    Ranks: local.

    Example:
        >>> size({"SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        4
    """
    found = (environ[name] for name in names if environ.get(name, "").isdecimal())
    return int(next(found, "0"))


def this_place() -> tuple[str, str, str]:
    """Return where a process number means one process.

    Returns:
        Host, boot, and namespace of processes; the last two are empty where they cannot be known.

    Ranks: local.

    Example:
        >>> len(this_place())
        3
    """
    boot_id = namespace = ""
    with contextlib.suppress(OSError):
        if Path("/proc/self").readlink() == Path(str(os.getpid())):  # else /proc shows another namespace
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
    return socket.gethostname(), boot_id, namespace


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state, a letter, and its start in clock ticks since boot; ``("", 0)`` if unknown.

    Args:
        pid: its number.

    Ranks: local.

    Example:
        >>> state_and_start(os.getpid())[0] in "RSD" or "no /proc"
        True
    """
    words = _stat(Path(f"/proc/{pid}/stat"))
    return (words[0], int(words[19])) if words else ("", 0)


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def has_ended(pid: int, started: int) -> bool:
    """Say whether a process is known to have ended.

    Args:
        pid: its number, which may be another's by now.
        started: its start, of :func:`state_and_start`.

    Ranks: local.

    Example:
        >>> has_ended(os.getpid(), state_and_start(os.getpid())[1])
        False
    """
    if not started:  # no /proc, or that of another namespace: nothing is known
        return False
    state, its_start = state_and_start(pid)
    if its_start != started or state not in DEAD_STATES:
        return its_start != started
    # A killed process shows as a zombie while a thread of it still ends a write.
    threads = (_stat(task / "stat") for task in Path(f"/proc/{pid}/task").glob("*"))
    return all(words[0] in DEAD_STATES for words in threads if words)


# --------------------------------------------------------------------------------------- where ranks stand


@contextlib.contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside a ``with`` block; restore them afterwards.

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


@dataclass(eq=False)
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


@dataclass(eq=False)
class Position:
    """The position of this process in a run, read from the counters of the loop.

    Attributes:
        progress: of the Brain whose ``fit`` or ``evaluate`` is running; None outside.
        sessions: calls of ``fit`` and ``evaluate`` since the process group was made: equal on all its ranks.
        session: number of the running call, the innermost if nested; 0 outside.
        unlimited_calls: running calls without a time limit: work of the main process alone, and waiting for it.
        moves_seen: number of times this rank, without steps of its own, saw progress on other ranks.
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
        made = vars(progress).get("optimizer_step")  # not there while a step is open: only the main thread looks at it
        return (*calls, id(progress), stage_of(progress), progress.epoch, progress.step, made)

    def has_no_limit(self) -> bool:
        """Say whether time does not count: outside of ``fit`` and ``evaluate``, and where :meth:`no_limit` says so."""
        return self.progress is None or bool(self.unlimited_calls)

    def join_group(self) -> None:
        """Reset the counters when the process group is made, so that they agree on all ranks."""
        self.sessions = self.session = int(self.progress is not None)

    def inside(self, progress: Any, call: str = "") -> contextlib.AbstractContextManager[None]:
        """Return a context that is a call of ``fit`` or ``evaluate``."""
        self.sessions += 1
        here = threading.get_ident()
        return temporarily(self, progress=progress, session=self.sessions, main_thread=here, call=call, part="")

    def stage_begins(self) -> None:
        """Note that a stage says from now on where this process is."""
        self.call = ""

    def at(self, part: str) -> contextlib._GeneratorContextManager[None]:
        """Return a context for a part of what comes before the first stage, such as ``"recovering a checkpoint"``."""
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
        return self._look()[0].endswith(AT_LOADER)

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
    """Return the name of the stage that a :class:`~ddpkit.training.progress.Progress` is in, or nothing.

    Ranks: local.

    Example:
        >>> from ddpkit.training import Progress
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
    if frame is None:
        return "nowhere", False
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    depth = next((number for number, one in enumerate(stack) if not is_library(one.filename)), 0)
    own, inner = line_of(stack[depth : depth + 1]), line_of(stack[:1])  # the innermost stands first here
    where = f"{own}, which is in {inner}" if depth else inner
    if any(_LOADER_FILE in one.filename for one in stack[:12]):
        return f"{where}{AT_LOADER}", False
    return where, any(_is_waiting(PurePath(one.filename)) for one in stack[: min(3, depth)])


def is_library(file: str) -> bool:
    """Say whether a file of code belongs to Python, to an installed package, or to this one.

    Ranks: local.

    Example:
        >>> is_library(os.__file__), is_library("/home/me/data.py")
        (True, False)
    """
    return "site-packages" in file or file.startswith(_NOT_THE_USERS)


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost traceback line in user code; without one, the innermost line.

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
    frame = user_frame(frames)
    return f"{PurePath(frame.filename).name}:{frame.lineno} in {frame.name}"


def user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost of some lines that is user code; without one, the innermost line.

    Args:
        frames: of a traceback, the innermost last; at least one.

    Ranks: local.

    Example:
        >>> user_frame([traceback.FrameSummary("/home/me/train.py", 12, "forward", lookup_line=False)]).lineno
        12
    """
    return next((one for one in reversed(frames) if not is_library(one.filename)), frames[-1])


def _is_waiting(path: PurePath) -> bool:
    is_own = path.name in _WAITING_OWN and _PACKAGE in path.parents
    return is_own or any(part in path.as_posix() for part in _WAITING_FILES)


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
    waiting: dict[tuple[str, str], list[RankStatus]] = {}
    for one in ranks:
        place = one.place() or "outside of fit and evaluate"
        if one.rank in silent:
            guilty.append(f"{one.name()}: silent for {silent[one.rank]:.0f} s, last {place}")
        elif one.waits:
            waiting.setdefault((place, one.where), []).append(one)
        else:
            guilty.append(f"{one.name()}: {place}, for {one.seconds:.0f} s{one.where and f' at {one.where}'}")
    for (place, where), members in waiting.items():
        seconds, numbers = max(one.seconds for one in members), spans(one.rank for one in members)
        guilty.append(f"rank {numbers}: {place}, for {seconds:.0f} s waiting for other ranks at {where}")
    return "\n".join(guilty)


def spans(numbers: Iterable[int]) -> str:
    """Write numbers in few words.

    Ranks: local.

    Example:
        >>> spans([7, 0, 1, 2, 3])
        '0-3, 7'
    """
    pairs = enumerate(sorted(numbers))  # in a run of numbers each is as far from its place
    runs = [[number for _, number in run] for _, run in itertools.groupby(pairs, lambda pair: pair[1] - pair[0])]
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in runs)


# ------------------------------------------------------------------------------------ who failed first, and why

NAP_SECONDS = 0.02
LONGEST_REASON = 4000
LONGEST_TRACE = 20_000
HOOK_LINE = "_ddpkit_hook_line"  # attribute of an exception: the line of the recipe that it is about
WAITED = "_ddpkit_waited"  # attribute of an exception that names the ranks that a collective has waited for in vain
PLACE = "_ddpkit_place"  # attribute of an exception: where in the run it has left fit or evaluate

# How torch raises in a rank what was raised in a worker of its loader.
OF_WORKER = re.compile(r"Caught \w+ in (?P<worker>\w+ worker process \d+)\.\nOriginal (?P<trace>.*)", re.DOTALL)

# How gloo, NCCL and torch's store say that the other side has gone.
LOST_CONNECTION = re.compile(
    "Connection (closed by|reset by|refused|timed out|was likely closed)|No route to host|is unreachable|Broken pipe|"
    "Socket closed|remote process exiting|failed to recv"
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
        output: of :func:`output_identity`: where its process writes.
        words: all of the one line, where another rank than this is the cause; else empty.

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
    output: str = ""
    words: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_final: bool) -> Reason:
        """Describe an exception of this process."""
        here = POSITION.own_status(rank, 0.0, look=False)
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        place = here.place() or str(vars(error).get(PLACE, ""))
        text, line = text_and_line(error)
        output = output_identity()
        words = str(error) if WAITED in vars(error) else ""
        return cls(rank, text, here.host, here.pid, place, trace, here.session, is_final, line, output, words)

    def who(self) -> str:
        """Return ``"rank 1 (node7, pid 4711)"``."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.host else f"rank {self.rank}"

    def summary(self) -> str:
        """Return one line."""
        if self.words:
            return self.words
        if not self.trace:
            return f"{self.who()} {self.text}"
        return self.told("failed first")

    def told(self, how: str) -> str:
        """Return one line with other words than "failed first"."""
        return f"{self.who()} {how}{self.where() and f', {self.where()}'}: {self.text}"

    def where(self) -> str:
        """Return ``"in TRAIN of epoch 3 at step 1204, at train.py:12 in compute_forward"``, or what is known of it."""
        return ", ".join(words for words in (self.place, self.line and f"at {self.line}") if words)


def output_identity() -> str:
    """Return what is equal for processes that write their errors to one terminal, pipe or file; empty if unknown.

    Ranks: local.

    Example:
        >>> output_identity() == output_identity()
        True
    """
    try:
        status = os.fstat(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or no file: as in a notebook
        return ""
    return "/".join(map(str, (*this_place(), status.st_dev, status.st_ino)))


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
        return text, line_of(frames_of(error))
    last = of_worker["trace"].rstrip().splitlines()[-1]
    return f"{last} (in {of_worker['worker']})", line_of(frames_of(error))


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the lines that lead to an exception, those of its cause last; or the one line that it is about.

    Ranks: local.

    Example:
        >>> frames_of(ValueError("never raised"))
        []
    """
    if HOOK_LINE in vars(error):
        return [vars(error)[HOOK_LINE]]
    of_worker = OF_WORKER.search(str(error))
    if of_worker is not None:
        found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', of_worker["trace"])
        return [traceback.FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in found]
    causes = [one.__traceback__ for one in (error, error.__cause__) if one is not None]
    return [frame for trace in causes for frame in traceback.extract_tb(trace)]


class FailureReport:
    """Failures and normal exits of the ranks of a process group, kept in its store.

    Args:
        store: of the process group.
        rank: this process.
        world_size: number of processes.

    Attributes:
        store_is_lost: whether the store has gone with the process that held it. It is not asked again: torch logs each
            attempt to reach it at length.
        lost_by: what torch then said, in a line.
        process: the rank's own; one that it forks inherits the report, and must not use it.
        awaited: the rank that this one waits for, outside of collectives; None: none.
        find_reason: looks for the rank behind a lost connection, if none has reported itself; may wait a little. Is
            given the rank at its other end, or None where that is not known.
        await_silence: waits briefly until other threads of this process have ended their calls of the store.
        limits: of collectives: by milliseconds the option that has set it.

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
        """Return the first failure of another rank, in this call of ``fit`` or ``evaluate`` or final; or None."""

        def find(store: Store) -> Reason | None:
            for session in (None, POSITION.session):
                key = _reason_key(session)
                if session != 0 and store.check([key]):  # 0: outside of any, where a failure counts only for good
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
        return self._asked(lambda store: store.get(key).decode() if store.check([key]) else None, otherwise=None)

    def has_notes(self, names: Sequence[str]) -> bool:
        """Say whether there is a text under each of some names; yes where the store is gone: no wait must go on."""
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
    log: Callable[[BaseException], object] | None = None  # writes an uncaught exception into the experiment's log
    note_end: Callable[[str], object] | None = None  # writes why another thread ends it into the run's log
    failed: BaseException | None = None  # the uncaught exception that ends it
    left = False  # whether an exception has left its last call of fit or evaluate


PROCESS = _Process()


def is_second_hand(error: BaseException) -> bool:
    """Return whether an exception only reports another rank's failure.

    Ranks: local.

    Example:
        >>> is_second_hand(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:9"))
        True
        >>> is_second_hand(RuntimeError("shapes do not fit"))
        False
    """
    is_lost = isinstance(error, (RuntimeError, ConnectionError)) and LOST_CONNECTION.search(str(error)) is not None
    return (isinstance(error, RankFailedError) and WAITED not in vars(error)) or is_lost


def explained(error: BaseException, lost: int | None = None) -> BaseException:
    """Turn a lost connection into the failure of the lost rank; return other errors unchanged.

    Args:
        error: the exception on this rank.
        lost: the rank at the other end of the connection, where that is known.

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
    known = None if report is None else failure_behind(report, lambda: report.find_reason(lost))
    if known is not None:
        return known
    news = RankFailedError(
        "the connection to another rank or to the store was lost, and no rank has left a reason: a process has ended "
        "early, or was killed (out of memory? a signal?). Look at the output and the exit codes of the other processes."
    )
    news.__cause__ = error
    return news


def failure_behind(report: FailureReport, find: Callable[[], Reason | None]) -> RankFailedError | None:
    """Return the failure of another rank, or that it has come to its end; None where no rank is known to be the cause.

    Args:
        report: of the process group.
        find: looks for a rank that has told nothing, if no rank has; may wait a little.

    Ranks: local; asks the process group's store.

    Example:
        >>> from torch.distributed import HashStore
        >>> report = FailureReport(HashStore(), rank=0, world_size=3)
        >>> failure_behind(report, lambda: None) is None
        True
        >>> report.depart(2)
        >>> str(failure_behind(report, lambda: None))
        'rank 2 came to the end of its script or function, while this one still waits for it: ...'
    """
    reason = report.first_failure()
    departed = [] if reason is not None else report.departed()
    if reason is None and not departed:
        reason = find()
    if reason is not None:
        return RankFailedError(reason.summary())
    if not departed:
        return None
    return RankFailedError(
        f"rank {', '.join(map(str, departed))} came to the end of its script or function, while this one still "
        "waits for it: they took different paths. Do all ranks run the same epochs and collectives?"
    )
