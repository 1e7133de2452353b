"""Ranks that are forked from this process: how they start, and how all of them end.

A function of a notebook is in no file that a new process could import. A forked process has it, and
all data that was loaded before, without a copy.

The fork is made in a thread of its own. The forked process goes on as that thread, which has never
computed: OpenMP keeps its worker threads for each thread that has used it, and in a process that is
forked by such a thread it waits for them without end (GNU's, which torch brings along). In this way
a rank may compute with several threads though a cell before has done so.

Source: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378 .
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import PROCESS, dying_with_parent
from ddpkit.errors import LaunchError, RunStopped
from ddpkit.launch.child_processes import without_launch
from ddpkit.launch.own_ranks import rank_variables
from ddpkit.launch.rank_ends import RankEnd, error_of, read_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkProcess
    from types import TracebackType

    from ddpkit.launch.rank_output import RankOutput

POLL_SECONDS = 0.05
FOLLOW_SECONDS = 3.0  # in which the others learn of a rank's failure, and end by themselves
GRACE_SECONDS = 30.0  # for a save that has begun, as torchrun gives it
VALUE = "value.pt"


@dataclass(frozen=True)
class ForkedCall:
    """What each rank runs.

    Args:
        function: to be called.
        args: for it.
        number: of ranks.
        port: of the store at which they meet.
        threads: that each may compute with.
        folder: where they leave how they have ended, and rank 0 what the function returned.
        variables: for the environment of all.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    number: int
    port: int
    threads: int
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)


def fork(target: Callable[..., object], *args: Any) -> ForkProcess:
    """Run a function in a forked process.

    Args:
        target: the function.
        *args: for it.

    Returns:
        The process, which has started.
    """
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    with warnings.catch_warnings():
        # from Python 3.12 on: other threads may hold locks. In a notebook there always are some.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


class ForkedRanks:
    """The processes of a call.

    Args:
        call: what they run.
        output: what they write.
    """

    def __init__(self, call: ForkedCall, output: RankOutput) -> None:
        self.call = call
        self.output = output
        self.processes: list[ForkProcess] = []
        self._asked: set[int] = set()  # to end, by this process
        self._started: Future[None] = Future()
        self._is_over = threading.Event()
        self._starter = threading.Thread(target=self._start, name="ddpkit-forks", daemon=True)

    def run(self) -> None:
        """Start the ranks, and wait until all have ended.

        Raises:
            RankFailedError: one has failed.
            RunStopped: the run was asked to stop, as by its time limit.
            KeyboardInterrupt: this process was interrupted. The ranks were, too.

        State: no rank is left, also after an exception.
        """
        try:
            self._starter.start()
            self._started.result()
            self._wait()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._end()
        codes = [
            0 if rank in self._asked else process.exitcode or 0
            for rank, process in enumerate(self.processes)
        ]
        ends = [
            end
            for end in read_ends(self.call.folder, self.call.number)
            if not (end.cause and end.rank in self._asked)  # this process has stopped it
        ]
        if ends or any(codes):
            raise error_of(ends, codes)

    # ------------------------------------------------------------------------------ in the thread

    def _start(self) -> None:
        """Fork all ranks, and stay: a rank ends with the thread that has forked it."""
        try:
            for rank in range(self.call.number):
                if self._is_over.is_set():
                    break
                self.processes.append(fork(run_rank, self.call, rank, self.output, os.getpid()))
        except BaseException as error:  # noqa: BLE001 -- raised where the result is asked for
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
        self._is_over.wait()

    # ------------------------------------------------------------------------------ in the cell

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def _wait(self) -> None:
        """Wait for all ranks; when one has failed, see to it that the others end."""
        while self._alive() and not any(process.exitcode for process in self.processes):
            self.output.show(POLL_SECONDS)
        self._await_end(FOLLOW_SECONDS)
        self._signal(signal.SIGTERM)
        self._await_end(GRACE_SECONDS)

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._alive() and time.monotonic() < end:
            self.output.show(POLL_SECONDS)

    def _interrupt(self) -> None:
        """Have the ranks stop as after Ctrl-C: in ``fit`` with a checkpoint."""
        self._signal(signal.SIGINT)
        self._await_end(GRACE_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._alive():
            self._asked.add(rank)
            _send(self.processes[rank], number)

    def _end(self) -> None:
        """End what is left; show what the ranks have written last."""
        self._is_over.set()
        if self._starter.ident is not None:
            self._starter.join()
        for rank in self._alive():
            self._asked.add(rank)
            _send(self.processes[rank], signal.SIGKILL)
        for process in self.processes:
            process.join()
        self.output.show_rest()


def _send(process: ForkProcess, number: signal.Signals) -> None:
    """Send a signal to a rank; to be killed, with all that it has started."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)  # it has made a session of its own
        else:
            os.kill(process.pid, number)


# --------------------------------------------------------------------------------- in a forked rank


def run_rank(call: ForkedCall, rank: int, output: RankOutput, parent: int) -> None:
    """Be a rank: call the function, and end this process.

    Args:
        call: what to run.
        rank: of this process.
        output: where to write.
        parent: the process that has forked this one.

    Ranks: each; in a process that was forked for it.

    State: all of this process.
    """
    _begin(call, rank, output, parent)
    try:
        value = call.function(*call.args)
        if rank == 0:
            _keep(value, call.folder / VALUE)
    except BaseException as error:  # noqa: BLE001 -- the process that has forked this one raises it
        raise SystemExit(_tell(call, rank, error)) from None


def _begin(call: ForkedCall, rank: int, output: RankOutput, parent: int) -> None:
    """Make a rank of this process, as a launcher would have started it."""
    os.setsid()  # a notebook interrupts the whole group of its kernel, which ends the ranks itself
    die = dying_with_parent(signal.SIGKILL)
    if die is not None:
        die()
    if os.getppid() != parent:  # it has ended meanwhile
        raise SystemExit(1)
    output.write_here()
    signal.set_wakeup_fd(-1)  # the kernel's event loop waits at it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.excepthook = _show_if_later
    variables = {**without_launch(os.environ), **call.variables}
    variables.setdefault("OMP_NUM_THREADS", str(call.threads))  # for programs that it starts
    os.environ.clear()
    os.environ.update(variables | rank_variables(rank, call.number, call.port))
    torch.set_num_threads(call.threads)


def _keep(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except Exception as error:
        kind = type(value).__name__
        raise LaunchError(
            f"the function has ended, but what it returned on rank 0 ({kind}) cannot be sent to "
            f"the process that called notebook_launch ({type(error).__name__}: {error}). Return "
            "numbers, tensors or a state_dict, or save a file and return its path."
        ) from error


def _tell(call: ForkedCall, rank: int, error: BaseException) -> int:
    """Tell of the end of this rank; return its exit code."""
    if isinstance(error, SystemExit) and error.code in {None, 0}:
        return 0
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the line of this file
    end = RankEnd.of(rank, error)
    if not isinstance(error, KeyboardInterrupt):
        end.write(call.folder)
    if not (end.is_second_hand or isinstance(error, (KeyboardInterrupt, RunStopped))):
        # which tells the other ranks, and writes into the run's log
        sys.excepthook(type(error), error, error.__traceback__)
    return end.code


def _show_if_later(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print the traceback of a rank that fails after another: that of the first the cell shows."""
    report = PROCESS.report
    if report is not None and not report.is_forked and report.first_failure() is not None:
        sys.__excepthook__(kind, error, trace)
