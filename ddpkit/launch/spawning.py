"""Starting the processes of a run on this machine without a launcher: ``spawn`` and ``--nproc``.

Both do what torchrun would: a store, one process per rank with the same variables, and an end of all when one fails.
:func:`run_script` starts the running script again, once per rank; :func:`spawn` calls a function in each, and
returns the results.

The new processes import the function that :func:`spawn` is given, so it must stand in a file: a notebook's is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from ddpkit.base import explained, is_second_hand
from ddpkit.control import PLAIN
from ddpkit.device import accelerator_kind, count_devices
from ddpkit.errors import ConfigError, LaunchError, RankFailedError
from ddpkit.launch.launchers import find_launch
from ddpkit.launch.process_monitor import Ending, Supervisor, cores, end_with_parent, rank_environment
from ddpkit.launch.variables import LOOPBACK, SPAWNED_BY, describe_environment, given_port
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

T = TypeVar("T")

logger = get_logger(__name__)

STORE_SECONDS = 60.0
NOT_SCRIPTS = ("", "-")  # what Python puts into sys.argv[0] where it reads code from a person or a pipe

# Run by a Python of its own that then becomes the script: a function between fork and exec is not safe among threads.
_BEGIN = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Failure(NamedTuple):
    """What a rank of :func:`spawn` leaves instead of a value."""

    rank: int
    when: float
    error: str
    trace: str
    is_second_hand: bool


# ------------------------------------------------------------------------------------------- how many


def count_processes(asked: int | str, device: str | None = None) -> int:
    """Find out how many processes are meant.

    Args:
        asked: a number, ``"gpu"`` (one per GPU), ``"cpu"`` (one per core) or ``"auto"`` (one per GPU, else per core).
        device: the device that was asked for, if any; ``"cpu"`` makes GPUs not count.

    Returns:
        The number, at least 1.

    Raises:
        ConfigError: not such a number or word, or fewer GPUs than processes.

    Ranks: local.

    Example:
        >>> count_processes("2", "cpu"), count_processes(3, "cpu")
        (2, 3)
        >>> count_processes("0")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc must be >= 1, got '0'...
    """
    kind = "cpu" if device is not None and device.split(":")[0] == "cpu" else accelerator_kind()
    gpus = 0 if kind == "cpu" else count_devices(kind)
    word = str(asked).strip().lower()
    if word == "gpu" and not gpus:
        raise ConfigError("nproc='gpu', but no GPU was found or asked for. Give a number, such as --nproc=2, or cpu.")
    if word in {"gpu", "cpu", "auto"}:
        return gpus if word != "cpu" and gpus else cores()
    if isinstance(asked, bool) or not word.isdecimal() or int(word) == 0:
        words = "gpu (one per GPU), cpu (one per core) or auto (gpu if there is one, else cpu)"
        raise ConfigError(f"nproc must be >= 1, got {asked!r}. Give a number of processes, {words}.")
    number = int(word)
    if gpus and number > gpus:
        text = f"nproc={asked!r}, but there are {gpus} GPUs, and each process needs one of its own."
        raise ConfigError(f"{text} Give --nproc={gpus} or less, or --device=cpu.")
    if not gpus and number > cores():
        logger.warning("%d processes share %d processor cores: they will wait for each other.", number, cores())
    return number


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
    port, limit = given_port(os.environ), timedelta(seconds=STORE_SECONDS)
    try:
        listener = socket.create_server((LOOPBACK, port))  # torch's own would listen to other machines too
    except OSError as error:
        text = f"the store of the run cannot be kept at port {port} of MASTER_PORT: {error}."
        raise LaunchError(f"{text} Unset MASTER_PORT: a free port is found then.") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )


# ------------------------------------------------------------------------------------------ the script


def run_script(asked: int | str, device: str | None = None) -> NoReturn:
    """Start the running script again as every rank of a run, wait, and end with the exit code of the run.

    The processes get the command line of this one, and torchrun's variables. Signals are passed on to each.

    Args:
        asked: as in :func:`count_processes`.
        device: the device that was asked for, if any.

    Raises:
        SystemExit: at the end; with 0, or the code of the first rank that failed (128 + n after signal n).
        ConfigError: the number makes no sense, or the running script cannot be started again.
        LaunchError: a launcher has started this process already.

    Ranks: local; the process that becomes the parent of the ranks.

    Example:
        >>> run_script("many")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc must be >= 1, got 'many'...
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
                environment = rank_environment(rank, number, int(store.port))
                running.append(_start_script({**environment, "TORCHELASTIC_ERROR_FILE": str(errors[rank])}))
            supervisor = Supervisor([(process.pid, process.poll) for process in running])
            failure = supervisor.run()
        finally:
            for process in running:
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
        reason, is_plain = message["message"], message["extraInfo"]["plain"]
    text = f"Rank {failure.rank} of {number} (process {failure.pid}) {failure.words}{reason and f': {reason}'}"
    if is_plain:
        sys.stderr.write(f"{reason}\n")
    elif failure.code - 128 in forwarded:
        logger.info("%s", text)
    else:
        logger.error("%s. It was the first; the others were ended.", text)


# ---------------------------------------------------------------------------------------- the function


def spawn(function: Callable[..., T], nprocs: int | str = "auto", *args: Any) -> list[T]:
    """Call a function in several new processes of this machine, each a rank, and return its results by rank.

    In the function the variables of a launcher are set: a ``Brain``, or ``ddp_init_group``, starts the process group.

    Args:
        function: what each rank calls: of the top level of a file that can be imported, or of the script, with the
            call of ``spawn`` under ``if __name__ == "__main__":``.
        nprocs: how many; a number, or as in :func:`count_processes`.
        args: positional arguments of the function.

    Returns:
        The return values, by rank. They must pickle.

    Raises:
        RankFailedError: a rank raised, was killed or ended early; with the traceback of the first. All others are
            ended: by SIGTERM, and thirty seconds later by SIGKILL.
        ConfigError: the number makes no sense, or the function cannot be imported by other processes.
        LaunchError: this process is a rank already.
        KeyboardInterrupt: after Ctrl-C, when all have ended.

    Ranks: local; the process that becomes the parent of the ranks.

    State: while it waits, signals are passed on to the ranks.

    Example:
        >>> spawn(os.getenv, 2, "RANK")  # starts two processes, which takes some seconds  # doctest: +SKIP
        ['0', '1']
        >>> spawn(os.getenv, 0, "RANK")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: nproc must be >= 1, got 0...
    """
    if SPAWNED_BY in os.environ:
        raise LaunchError(
            "spawn was called in a rank that ddpkit has started, perhaps while that was reading your script. "
            'Put the call under `if __name__ == "__main__":`.'
        )
    _require_no_launcher("ddpkit.spawn")
    number = count_processes(nprocs)
    _require_importable(function, args)
    store = _host_store()
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        files = [Path(folder, str(rank)) for rank in range(number)]
        try:
            for rank in range(number):
                target_args = (files[rank], function, args)
                processes.append(_start_process(target_args, rank_environment(rank, number, int(store.port))))
            pids = [process.pid or 0 for process in processes]
            polls = [functools.partial(getattr, process, "exitcode") for process in processes]
            supervisor = Supervisor(list(zip(pids, polls, strict=True)), lambda: all(map(Path.exists, files)))
            failure = supervisor.run()
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
        contents = {rank: file.read_bytes() for rank, file in enumerate(files) if file.exists()}
    for number_of_signal in supervisor.forwarded:  # the folder is gone: one of them may end this process
        if number_of_signal in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}:
            signal.raise_signal(number_of_signal)
    return _values(contents, pids, failure)


def _values(contents: Mapping[int, bytes], pids: Sequence[int], failure: Ending | None) -> list[Any]:
    """Return what all ranks returned, or raise the failure of the first that failed by itself."""
    results: dict[int, Any] = {rank: pickle.loads(one) for rank, one in contents.items()}  # noqa: S301 -- own ranks
    failures = [one for one in results.values() if isinstance(one, _Failure)]
    first = min(failures, key=lambda one: (one.is_second_hand, one.when), default=None)
    silent = [rank for rank in range(len(pids)) if rank not in results]
    if silent and (first is None or first.is_second_hand):
        is_known = failure is not None and failure.rank in silent
        rank, words = (failure.rank, failure.words) if failure is not None and is_known else (silent[0], "ended")
        raise RankFailedError(
            f"rank {rank} of {len(pids)} (process {pids[rank]}) {words} before the function returned. Nothing was "
            "raised there: look at its output (out of memory? a signal?)."
        )
    if first is not None:
        trace = f"\n--- traceback of rank {first.rank} ---\n{first.trace.rstrip()}"
        raise RankFailedError(f"rank {first.rank} of {len(pids)} failed: {first.error}{trace}")
    if failure is not None:
        logger.warning("Rank %d %s after it had returned its value.", failure.rank, failure.words)
    return [results[rank] for rank in range(len(pids))]


def _start_process(target_args: tuple[Any, ...], environment: Mapping[str, str]) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    process: BaseProcess = context.Process(target=_run_rank, args=target_args, name=f"rank{environment['RANK']}")
    with _environment(environment):  # what its imports read, before it runs ours
        process.start()
    return process


def _run_rank(result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Be a rank: call the function, leave what became of it in a file, and end as a script would."""
    end_with_parent(int(os.environ[SPAWNED_BY]))
    with contextlib.suppress(OSError):
        os.setsid()
    sys.excepthook = _say_nothing
    has_failed = False
    try:
        content = pickle.dumps(function(*args))
    except BaseException as error:  # noqa: BLE001 -- the parent raises it
        has_failed = not isinstance(error, SystemExit) or error.code not in {None, 0}
        content = pickle.dumps(_failure(error) if has_failed else None)
    part = result.with_suffix(".part")
    part.write_bytes(content)
    part.replace(result)
    if has_failed:
        raise SystemExit(1)


def _failure(error: BaseException) -> _Failure:
    """Tell the other ranks of an exception, and put it into words for the parent."""
    when, trace = time.time(), "".join(traceback.format_exception(error))
    news = explained(error)
    vars(error).pop(PLAIN, None)  # the parent raises it
    sys.excepthook(type(error), error, error.__traceback__)  # by ddp_init_group: what tells the others
    words = "".join(traceback.format_exception_only(type(news), news)).strip()
    return _Failure(int(os.environ["RANK"]), when, words, trace, is_second_hand(news))


def _say_nothing(*_what: object) -> None:
    """Stand in for the hook that prints a traceback: the parent raises it."""


def _require_importable(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a function that new processes cannot have: they import it."""
    name, advice = getattr(function, "__qualname__", function), "Put it at the top level of a file, and import it"
    try:
        sent = bytes(ForkingPickler.dumps((function, args)))
    except Exception as error:
        text = f"{name} or its arguments cannot be sent to other processes ({type(error).__name__}: {error})"
        raise ConfigError(f"{text}. {advice} from there.") from error
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_missing = b"__main__" in sent if file is None else not Path(file).is_file()  # a pipe is called <stdin>
    if is_missing and getattr(main, "__spec__", None) is None:
        text = f"{name} is called in a notebook, an interactive Python or a pipe, which other processes cannot import"
        raise ConfigError(f"{text}. {advice} from there (%%writefile my_training.py in a notebook).")
