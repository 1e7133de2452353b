"""Starting the processes of a run on this machine without a launcher: ``spawn`` and ``--nproc``.

Both do what torchrun would: a store, one process per rank with the same variables, and an end of all when one fails.
:func:`run_script` starts the running script again, once per rank; :func:`spawn` calls a function in each, and hands
back what it returned.

A notebook's functions exist in its process only, so they reach other processes by ``fork`` alone. That is safe before
CUDA is touched and while no other thread is working; otherwise :func:`spawn` refuses, and says what to do.

Source: what must not be forked, https://docs.pytorch.org/docs/stable/notes/multiprocessing.html .
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ddpkit.control.failure import PLAIN, explained, is_second_hand
from ddpkit.device import accelerator_kind, count_devices
from ddpkit.errors import ConfigError, LaunchError, RankFailedError
from ddpkit.launch.launchers import find_launch
from ddpkit.launch.process_monitor import Child, Ending, Supervisor, cores, end_with_parent, rank_environment
from ddpkit.launch.variables import LOOPBACK, describe_environment, given_port
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

T = TypeVar("T")

logger = get_logger(__name__)

POLL_SECONDS = 0.05
LINGER_SECONDS = 60.0
STORE_SECONDS = 60.0
NOT_SCRIPTS = ("", "-")  # what Python puts into sys.argv[0] where it reads code from a person or a pipe

# Threads of notebooks, consoles and debuggers: they wait for messages, and hold nothing that a rank would need.
_HARMLESS_THREADS = ("ipykernel", "IPython", "tornado", "zmq", "jupyter", "tqdm", "debugpy", "pydevd", "_pydev")

# Run by a Python of its own that then becomes the script: a function between fork and exec is not safe among threads.
_BEGIN = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Message(NamedTuple):
    """What a rank says at its end: a pickled value, or a failure."""

    value: bytes | None
    error: str = ""
    trace: str = ""
    second_hand: bool = False


# ------------------------------------------------------------------------------------------- how many


def count_processes(asked: int | str, device: str | None = None) -> int:
    """Find out how many processes are meant.

    Args:
        asked: a number, ``"gpu"`` (one per GPU), ``"cpu"`` (one per core) or ``"auto"`` (one per GPU, else per core).
        device: the device that was asked for, if any; ``"cpu"`` makes GPUs not count.

    Returns:
        The number, at least 1.

    Raises:
        ConfigError: it is no such number or word, there is no GPU, or fewer than processes.

    Ranks: local.

    Example:
        >>> count_processes("2", "cpu"), count_processes(3, "cpu")
        (2, 3)
        >>> count_processes("0")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc='0' is no number of processes...
    """
    kind = "cpu" if device is not None and device.split(":")[0] == "cpu" else _kind_without_context()
    gpus = 0 if kind == "cpu" else count_devices(kind)
    word = str(asked).strip().lower()
    if word == "gpu" and not gpus:
        raise ConfigError("nproc='gpu', but no GPU was found or asked for. Give a number, such as --nproc=2, or cpu.")
    if word in {"gpu", "cpu", "auto"}:
        return gpus if word != "cpu" and gpus else cores()
    if isinstance(asked, bool) or not word.isdecimal() or int(word) == 0:
        raise ConfigError(
            f"nproc={asked!r} is no number of processes. Give a number from 1 on, gpu (one per GPU), cpu (one per "
            "core) or auto (one per GPU, or per core without any)."
        )
    number = int(word)
    if gpus and number > gpus:
        raise ConfigError(
            f"nproc={asked!r}, but there are {gpus} GPUs, and each process needs one of its own. "
            f"Give --nproc={gpus} or less, or run on the CPU with --device=cpu."
        )
    if not gpus and number > cores():
        logger.warning("%d processes share %d processor cores: they will wait for each other.", number, cores())
    return number


def _kind_without_context() -> str:
    """Look for accelerators in the way that lets processes be forked afterwards."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return accelerator_kind()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _require_no_launcher(what: str) -> None:
    info = find_launch()
    if info.is_distributed:
        raise LaunchError(
            f"{what} starts the processes itself, but {info.launcher} has started this one already, as rank "
            f"{info.rank} of {info.world_size}.\n{describe_environment(os.environ)}\n"
            f"Use one of the two: leave {what} out, or start the script with python alone."
        )


def _host_store() -> dist.TCPStore:
    """Keep the store that the ranks meet at, as torchrun's agent does: at a free port, or at the user's."""
    port = given_port(os.environ)
    try:
        limit = timedelta(seconds=STORE_SECONDS)
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise LaunchError(
            f"the store of the run cannot be kept at port {port} of MASTER_PORT: {error}. Unset MASTER_PORT: a free "
            "port is found then."
        ) from error


# ------------------------------------------------------------------------------------------ the script


def run_script(asked: int | str, device: str | None = None) -> NoReturn:
    """Start the running script again as every rank of a run, wait, and end with the exit code of the run.

    The processes get the command line of this one, and torchrun's variables. Signals are passed on to each.

    Args:
        asked: as in :func:`count_processes`.
        device: the device that was asked for, if any.

    Raises:
        SystemExit: at the end; with 0, or the code of the first rank that failed (128 + n after signal n).
        ConfigError: the number makes no sense, or there is no script that could be started again.
        LaunchError: a launcher has started this process already.

    Ranks: local; the process that becomes the parent of the ranks.

    Example:
        >>> run_script("many")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc='many' is no number of processes...
    """
    number = count_processes(asked, device)
    _require_no_launcher("--nproc")
    if sys.argv[0] in NOT_SCRIPTS:
        raise ConfigError(
            "--nproc starts the running script again, and there is none: this is an interactive Python, or code from a "
            "pipe. Call ddpkit.spawn(function, nprocs), or put the code into a file."
        )
    store = _host_store()
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        running: list[subprocess.Popen[bytes]] = []
        errors = [Path(folder, f"{rank}.json") for rank in range(number)]
        try:
            for rank in range(number):
                environment = rank_environment(rank, number, port=int(store.port))
                running.append(_start_script({**environment, "TORCHELASTIC_ERROR_FILE": str(errors[rank])}))
            children = [Child(rank, process.pid, process.poll) for rank, process in enumerate(running)]
            supervisor = Supervisor(children, lambda: time.sleep(POLL_SECONDS))
            failure = supervisor.run()
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if failure is not None:
            _tell(failure, number, errors[failure.rank], supervisor.forwarded)
    raise SystemExit(0 if failure is None else failure.code)


def _start_script(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    again = [sys.executable, *sys.orig_argv[1:]]
    begin = [sys.executable, "-I", "-S", "-c", _BEGIN, str(os.getpid())]
    # In a session of its own Ctrl-C reaches it once, from here, and not from the terminal as well.
    return subprocess.Popen([*begin, *again], env={**os.environ, **environment}, start_new_session=True)


def _tell(failure: Ending, number: int, report: Path, forwarded: Sequence[int]) -> None:
    """Say which rank failed first, with the reason that it has left."""
    reason, is_plain = "", False
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(report.read_text(encoding="utf-8"))["message"]
        reason, is_plain = f": {message['message']}", message["extraInfo"]["plain"]
    text = f"Rank {failure.rank} of {number} (process {failure.pid}) {failure.words}{reason}"
    if is_plain:
        sys.stderr.write(f"{reason.removeprefix(': ')}\n")
    elif failure.code - 128 in forwarded:
        logger.info("%s", text)
    else:
        logger.error("%s. It was the first; the others were ended.", text)


# ---------------------------------------------------------------------------------------- the function


def spawn(
    function: Callable[..., T], nprocs: int | str = "auto", *args: Any, start_method: str | None = None
) -> list[T]:
    """Call a function in several new processes of this machine, each a rank, and return what it returned.

    In the function the variables of a launcher are set: a ``Brain``, or ``ddp_init_group``, starts the process group.

    Args:
        function: what each rank calls. From a notebook any function works that is called before CUDA is used; from
            a script one of its top level, with the call of ``spawn`` under ``if __name__ == "__main__":``.
        nprocs: how many; a number, or as in :func:`count_processes`.
        args: positional arguments of the function.
        start_method: ``"spawn"`` or ``"fork"``; None takes spawn where the function can be sent to another process,
            and fork where it is safe.

    Returns:
        The return values, by rank. They must pickle.

    Raises:
        RankFailedError: a rank raised, was killed or ended early; with the traceback of the first. All others are
            ended: by SIGTERM, and thirty seconds later by SIGKILL.
        ConfigError: the number makes no sense, or the function can be neither sent nor forked.
        LaunchError: this process is a rank already.
        KeyboardInterrupt: after Ctrl-C, when all have ended.

    Ranks: local; the process that becomes the parent of the ranks.

    State: while it waits, signals are passed on to the ranks.

    Example:
        >>> spawn(os.getenv, 2, "RANK")  # starts two processes, which takes some seconds  # doctest: +SKIP
        ['0', '1']
        >>> spawn(os.getenv, 0, "RANK")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc=0 is no number of processes...
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "spawn was called while a process that it has started was reading your script. "
            'Put the call under `if __name__ == "__main__":`.'
        )
    _require_no_launcher("ddpkit.spawn")
    number = count_processes(nprocs)
    context = multiprocessing.get_context(_start_method(function, args, start_method))
    ranks = _Ranks()
    try:
        with _quiet_fork():
            for rank in range(number):
                ranks.start(context, function, args, rank_environment(rank, number))
        store = _host_store()
        for connection in ranks.connections:
            with contextlib.suppress(OSError):  # it has ended: the supervisor will say so
                connection.send(int(store.port))
        supervisor = Supervisor(ranks.children(), ranks.pause)
        failure = supervisor.run()
        ranks.pause()
    finally:
        ranks.close()
    for number_of_signal in supervisor.forwarded:
        if number_of_signal in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}:
            signal.raise_signal(number_of_signal)
    return ranks.values(failure)


class _Ranks:
    """The processes of one call of :func:`spawn`, and what they have said."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pids: list[int] = []
        self._kill_at = float("inf")
        self.connections: list[Connection] = []
        self.messages: dict[int, _Message] = {}

    def start(
        self, context: Any, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]
    ) -> None:
        ours, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        inherited = [*self.connections, ours] if forked else []
        target_args = (theirs, function, args, environment, os.getpid(), inherited, forked)
        process = context.Process(target=_be_rank, args=target_args, name=f"rank{environment['RANK']}")
        saved = dict(os.environ)
        os.environ.update(environment)  # what its imports read, before it runs anything of ours
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        theirs.close()
        self.processes.append(process)
        self.pids.append(process.pid or 0)
        self.connections.append(ours)

    def children(self) -> list[Child]:
        return [
            Child(rank, self.pids[rank], functools.partial(_exit_code, one)) for rank, one in enumerate(self.processes)
        ]

    def pause(self) -> None:
        """Wait until a rank says something or ends, for a moment at most; a long message needs somebody who reads."""
        silent = {c: rank for rank, c in enumerate(self.connections) if not c.closed}
        sentinels = [one.sentinel for one in self.processes if one.exitcode is None]
        for ready in wait([*silent, *sentinels], timeout=POLL_SECONDS):
            if ready in silent:
                try:
                    self.messages.setdefault(silent[ready], ready.recv())
                except (EOFError, OSError):
                    ready.close()
        if len(self.messages) == len(self.pids):
            self._kill_at = min(self._kill_at, time.monotonic() + LINGER_SECONDS)
        if time.monotonic() > self._kill_at:
            for process in self.processes:
                process.kill()

    def values(self, failure: Ending | None) -> list[Any]:
        """Return what all ranks returned, or raise the failure of the first that failed by itself."""
        number = len(self.pids)
        if len(self.messages) == number and all(said.value is not None for said in self.messages.values()):
            if failure is not None:
                logger.warning("Rank %d %s after it had returned its value.", failure.rank, failure.words)
            return [pickle.loads(self.messages[rank].value or b"") for rank in range(number)]  # noqa: S301 -- own ranks
        own = [rank for rank, said in self.messages.items() if said.value is None and not said.second_hand]
        silent = sorted({*range(number)} - {*self.messages})
        first = own[0] if own else failure.rank if failure is not None else silent[0]
        said = self.messages.get(first)
        if said is not None and said.value is None:
            trace = f"\n--- traceback of rank {first} ---\n{said.trace.rstrip()}" if said.trace else ""
            raise RankFailedError(f"rank {first} of {number} failed: {said.error}{trace}")
        words = failure.words if failure is not None and failure.rank == first else "ended"
        raise RankFailedError(
            f"rank {first} of {number} (process {self.pids[first]}) {words} before the function returned. Nothing was "
            "raised there: look at its output (out of memory? a signal?)."
        )

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()


def _exit_code(process: BaseProcess) -> int | None:
    return process.exitcode


def _be_rank(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    parent: int,
    inherited: Sequence[Connection],
    forked: bool,
) -> None:
    """Be a rank: call the function, say what became of it, and end as a script would."""
    end_with_parent(parent)
    with contextlib.suppress(OSError):
        os.setsid()
    for other in inherited:
        other.close()
    os.environ.update(environment)
    if forked:
        atexit._clear()  # noqa: SLF001 -- what the parent wants to do at its end; a fork is not asked otherwise
        torch.set_num_threads(1)  # the threads of its pool are not here, and would be waited for
    sys.excepthook = _say_nothing
    failed = True
    try:
        os.environ["MASTER_PORT"] = str(connection.recv())
        message = _Message(pickle.dumps(function(*args)))
        failed = False
    except SystemExit as error:
        failed = error.code not in {None, 0}
        message = _failure(error) if failed else _Message(pickle.dumps(None))
    except BaseException as error:  # noqa: BLE001 -- the parent raises it
        message = _failure(error)
    with contextlib.suppress(OSError):  # the parent does not want to know any more
        connection.send(message)
    if forked:
        atexit._run_exitfuncs()  # noqa: SLF001 -- multiprocessing ends a fork without them
    if failed:
        raise SystemExit(1)


def _failure(error: BaseException) -> _Message:
    """Tell the other ranks of an exception, and put it into words for the parent."""
    trace = "".join(traceback.format_exception(error))
    news = explained(error)
    vars(error).pop(PLAIN, None)  # the parent raises it
    sys.excepthook(type(error), error, error.__traceback__)  # by ddp_init_group: what tells the others
    words = "".join(traceback.format_exception_only(type(news), news)).strip()
    return _Message(None, words, trace, is_second_hand(news))


def _say_nothing(*_what: object) -> None:
    """Stand in for the hook that prints a traceback: the parent raises it."""


# ----------------------------------------------------------------------------------- sent, or forked


def _start_method(function: Callable[..., Any], args: tuple[Any, ...], asked: str | None) -> str:
    """Choose how the processes begin."""
    if asked is not None and asked not in {"spawn", "fork"}:
        raise ConfigError(f"start_method={asked!r} is neither 'spawn' nor 'fork'. Leave it out to have it chosen.")
    unsendable = "" if asked == "fork" else _why_not_sent(function, args)
    if asked == "spawn" and unsendable:
        raise ConfigError(f"start_method='spawn', but {unsendable}. Put the function into a module, and import it.")
    if not unsendable and asked != "fork":
        return "spawn"
    unsafe = _why_not_forked()
    if unsafe:
        because = (
            f"{unsendable}; and this process cannot be forked, for " if unsendable else "it cannot be forked, for "
        )
        raise ConfigError(
            f"{_name(function)} cannot be started in other processes: {because}{unsafe}. Put it into a module "
            "(%%writefile my_training.py) and import it from there; or restart the notebook, and call spawn before "
            "anything uses a GPU or starts threads."
        )
    return "fork"


def _why_not_sent(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Say why a function cannot be sent to a new process, or nothing."""
    try:
        sent = bytes(ForkingPickler.dumps((function, args)))
    except Exception as error:  # noqa: BLE001 -- objects may raise anything when they are pickled
        return f"{_name(function)} or its arguments do not pickle ({type(error).__name__}: {error})"
    main = sys.modules["__main__"]
    file = None if getattr(main, "__spec__", None) is not None else getattr(main, "__file__", None)
    if file is not None and not Path(file).is_file():  # Python calls it <stdin>, and looks for it in each process
        return f"the running code comes from {file!r}, which other processes cannot read"
    is_script = file is not None or getattr(main, "__spec__", None) is not None
    if b"__main__" in sent and not is_script:
        return (
            f"{_name(function)} is defined in a notebook or an interactive Python, which other processes cannot import"
        )
    return ""


def _why_not_forked() -> str:
    """Say why a copy of this process would not work, or nothing."""
    if sys.platform != "linux":
        return f"that is not safe on {sys.platform}"
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            return f"{kind.upper()} is in use here already, and cannot be used in a copy of this process"
    if dist.is_available() and dist.is_initialized():
        return "a process group is running in it"
    busy = [thread.name for thread in threading.enumerate() if not _is_harmless(thread)]
    if busy:
        return f"other threads are working in it ({', '.join(busy)}), and what they hold would stay held in the copy"
    return ""


def _is_harmless(thread: threading.Thread) -> bool:
    if thread is threading.current_thread() or thread is threading.main_thread():
        return True
    work = getattr(thread, "_target", None)
    homes = (type(thread).__module__, getattr(work, "__module__", None) or "")
    if (
        "ddpkit.checkpointing.run_lock" in homes
    ):  # renews the lock of the experiment's folder, which stays with this process
        return True
    return any(home.split(".")[0].startswith(_HARMLESS_THREADS) for home in homes)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Keep Python from warning of threads (3.12 on): they have been looked at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
