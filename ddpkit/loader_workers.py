"""What the worker processes of a loader need: to be deaf to signals meant for their rank, and to end with it.

A launcher and a terminal signal whole groups of processes. A worker that dies of SIGTERM takes the batches with it that
its rank needs to come to the end of a step; so it hears none of the signals that its rank acts on. Python's garbage
collector leaves alone what a worker has inherited: going through all of it would copy the rank's memory page by page,
and could destroy objects that wait for threads which a forked process does not have.

A worker is deaf from its first moment because signals are blocked in the thread that starts it, whether by a fork, by
``spawn``, or through a forkserver. That server is one for loaders alone: what it has blocked it hands down to all that
it forks, and a script's own processes shall hear signals.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

PR_SET_PDEATHSIG = 1
DUMP_SECONDS = 0.1
MOST_ASKED = 8
NAP_SECONDS = 0.001
DEEPEST_CALL = 12  # from a loader to the fork
FIRST_AT_EXIT = 100  # of the hooks of multiprocessing, of which its own have 15 at most
_LOADER_FILE = "torch/utils/data/dataloader.py"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_NOT_THE_USERS = (os.path.dirname(os.__file__), "site-packages", os.path.dirname(__file__), "<")  # noqa: PTH120


class _Here:
    """What this module knows about its own process."""

    mask: Any = None  # of signals, of the thread in which a loader is forking
    by_main_thread = False  # whether that is the main thread
    is_worker = False
    stacks: Any = None  # a file without a name, into which workers write where they are
    server: Any = None  # the forkserver for loaders
    torchs_loop: Any = None  # what a worker runs, while ours is in its place
    process = 0  # at whose end its workers are killed


def deaf_signals() -> set[signal.Signals]:
    """Return the signals that a rank acts on, and its loaders' workers do not.

    Ranks: local.

    Example:
        >>> signal.SIGTERM in deaf_signals()
        True
    """
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    return {signal.Signals[name] for name in names if hasattr(signal, name)}


def watch_loader_workers() -> None:
    """See to it that workers of loaders that are forked from now on are deaf to signals and end with this process.

    Ranks: local.

    State: ``os.register_at_fork`` hooks, and hooks at the end of the process, once per process.

    Example:
        >>> watch_loader_workers()
    """
    if not hasattr(os, "register_at_fork"):
        return
    if _Here.stacks is None:
        _Here.stacks = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process lives
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
    if _Here.process != os.getpid():  # one that was forked has inherited the former hooks, and not the latter
        _Here.process = os.getpid()
        at_exit(kill_workers)  # Python would wait for them, after a SIGTERM that they do not hear


def at_exit(call: Callable[[], object]) -> None:
    """Have something done when this process ends, and before ``multiprocessing`` waits for its children.

    A process that ``multiprocessing`` has forked ends without ``atexit``; one that it has spawned waits for its
    children before that.

    Args:
        call: must bear to be called twice.

    Ranks: local.

    Source: ``multiprocessing.process.BaseProcess._bootstrap`` and ``multiprocessing.util._exit_function``.

    Example:
        >>> at_exit(kill_workers)
    """
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, call, exitpriority=FIRST_AT_EXIT)


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Return a context in which a loader may start workers that are not forked from this process.

    Ranks: local.

    State: functions of ``multiprocessing`` and torch, put back at the end; they do for other threads what they did.

    Example:
        >>> with starting_workers():
        ...     workers_would_start_here = True
    """
    torchs = sys.modules.get("torch.utils.data._utils.worker")
    if torchs is None or not hasattr(signal, "pthread_sigmask") or _Here.torchs_loop is not None:
        yield
        return
    watch_loader_workers()
    before = util.spawnv_passfds, forkserver.connect_to_new_process, torchs._worker_loop  # noqa: SLF001 -- as below
    owner, spawn, connect = threading.get_ident(), before[0], before[1]

    def spawn_deaf(*arguments: Any) -> Any:
        return _deafly(spawn, *arguments) if threading.get_ident() == owner else spawn(*arguments)

    def connect_to_ours(fds: Any) -> Any:
        return _server().connect_to_new_process(fds) if threading.get_ident() == owner else connect(fds)

    _Here.torchs_loop = before[2]
    util.spawnv_passfds, forkserver.connect_to_new_process = spawn_deaf, connect_to_ours  # type: ignore[assignment]
    torchs._worker_loop = functools.partial(_work, _stacks_path())  # type: ignore[attr-defined]  # noqa: SLF001 -- its target
    try:
        yield
    finally:
        util.spawnv_passfds, forkserver.connect_to_new_process = before[:2]
        torchs._worker_loop, _Here.torchs_loop = before[2], None  # type: ignore[attr-defined]  # noqa: SLF001


def _deafly(spawn: Callable[..., Any], *arguments: Any) -> Any:
    """Start a process that inherits blocked signals. What comes to this one meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_signals())
    try:
        return spawn(*arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _server() -> Any:
    """Return the forkserver for loaders, which imports beforehand what the script wants its own to."""
    if _Here.server is None:
        _Here.server = forkserver.ForkServer()
    scripts: Any = forkserver._forkserver  # noqa: SLF001 -- there is no other way to ask it
    _Here.server.set_forkserver_preload(list(scripts._preload_modules))  # noqa: SLF001
    return _Here.server


def _stacks_path() -> str:
    return "" if sys.platform != "linux" else f"/proc/{os.getpid()}/fd/{_Here.stacks.fileno()}"


def _work(stacks: str, *arguments: Any) -> None:
    """Be a worker: what a forked one has become at the fork, another one becomes here."""
    if not _Here.is_worker:
        _become_worker(stacks)
    loop = _Here.torchs_loop  # a forked worker has that from its rank
    if loop is None:
        from torch.utils.data._utils.worker import _worker_loop as loop
    loop(*arguments)


def _become_worker(stacks: str) -> None:
    _Here.is_worker = True
    os.register_at_fork(after_in_child=_in_child)
    _hear_nothing_after_torch()
    number = _dump_signal()
    if number is not None:
        with contextlib.suppress(OSError):
            _Here.stacks = Path(stacks).open("ab")  # noqa: SIM115 -- as long as the process lives
        faulthandler.register(number, file=_Here.stacks or sys.stderr, all_threads=False, chain=False)
    rank = multiprocessing.parent_process()
    if rank is not None:
        threading.Thread(target=_end_with, args=(rank,), name="ddpkit-worker", daemon=True).start()


def _end_with(rank: Any) -> None:
    """End this worker when its rank has ended: through a forkserver it is not the one that the system would tell."""
    rank.join()
    os._exit(1)


def _before_fork() -> None:
    """Block the signals if it is a loader that forks: what comes now is delivered to this process afterwards.

    The nap lets threads of C++ (of a process group, of autograd) come to an end that are about to enter Python. One
    that is caught in the middle would leave the worker a lock that is never released.
    """
    if _Here.is_worker:  # whose stack begins with that of the loader
        return
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 -- documented
    depth = 0
    while frame is not None and depth < DEEPEST_CALL:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename.endswith(_LOADER_FILE):
            time.sleep(NAP_SECONDS)
            _Here.by_main_thread = threading.current_thread() is threading.main_thread()
            _Here.mask = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_signals())
            return
        frame, depth = frame.f_back, depth + 1


def _in_parent() -> None:
    mask, _Here.mask = _Here.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    _Here.server = None  # is its parent's
    if _Here.mask is None:
        if _Here.is_worker:  # a process that a worker forks for itself is to be ended as any other
            _Here.is_worker = False
            for deaf in deaf_signals():
                signal.signal(deaf, signal.SIG_DFL)
        return
    _Here.mask, _Here.is_worker = None, True
    gc.freeze()
    _hear_nothing_after_torch()
    number = _dump_signal()
    if number is not None:
        faulthandler.register(number, file=_Here.stacks, all_threads=False, chain=False)
    if sys.platform == "linux" and _Here.by_main_thread:  # it is the end of the forking thread that counts
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _hear_nothing_after_torch() -> None:
    """Have this worker, when torch has set its handlers, put one that does nothing in the place of blocked signals.

    A program that the worker starts would inherit that they are blocked, and could not be ended; but not a handler.
    """
    handling = sys.modules["torch.utils.data._utils.signal_handling"]
    set_torchs = handling._set_worker_signal_handlers  # noqa: SLF001 -- called by torch's worker at its start

    def set_handlers() -> None:
        set_torchs()
        for number in deaf_signals():
            signal.signal(number, _do_nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, deaf_signals())

    handling._set_worker_signal_handlers = set_handlers  # type: ignore[attr-defined]  # noqa: SLF001 -- in this worker


def _do_nothing(*_signal_and_frame: Any) -> None:
    pass


def _dump_signal() -> int | None:
    return None if sys.platform != "linux" else int(signal.SIGRTMIN) + 5


def where_workers_are() -> list[str]:
    """Ask the workers of this process's loaders where they are.

    Returns:
        For each worker ``"worker (pid 12): data.py:30 in __getitem__"``: the innermost line that is not of a library.
        Workers that do not answer are left out.

    Ranks: local.

    Example:
        >>> isinstance(where_workers_are(), list)
        True
    """
    number = _dump_signal()
    if number is None or _Here.stacks is None:
        return []
    answers: list[str] = []
    asked = [child for child in multiprocessing.active_children() if _listens(child.pid, number)]
    for child in asked[:MOST_ASKED]:
        stacks = Path(f"/proc/self/fd/{_Here.stacks.fileno()}")
        start = stacks.stat().st_size
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            os.kill(child.pid or 0, number)
            time.sleep(DUMP_SECONDS)
            with stacks.open(errors="replace") as file:
                file.seek(start)
                answers.append(f"worker (pid {child.pid}): {innermost(file.read())}")
    if len(asked) > MOST_ASKED:
        answers.append(f"{len(asked) - MOST_ASKED} more workers")
    return answers


def innermost(stack: str) -> str:
    r"""Return the innermost line of the user's code, or at all, in a stack as ``faulthandler`` writes it.

    Ranks: local.

    Example:
        >>> innermost('Stack (most recent call first):\n  File "/home/me/data.py", line 30 in __getitem__')
        'data.py:30 in __getitem__'
    """
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    own = [frame for frame in frames if not is_library(frame["file"])] or frames
    if not own:
        return "does not answer"
    return f"{Path(own[0]['file']).name}:{own[0]['line']} in {own[0]['name']}"


def is_library(file: str) -> bool:
    """Say whether a file of code belongs to Python, to an installed package, or to this one.

    Ranks: local.

    Example:
        >>> is_library(os.__file__), is_library("/home/me/data.py")
        (True, False)
    """
    return any(part in file if part == "site-packages" else file.startswith(part) for part in _NOT_THE_USERS)


def _listens(pid: int | None, number: int) -> bool:
    """Say whether a process has a handler for a signal: without one it would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def kill_workers() -> None:
    """End the workers that are still there when their rank ends, whatever they are doing.

    Ranks: local.

    Example:
        >>> kill_workers()
    """
    children, number = multiprocessing.active_children(), _dump_signal()
    workers = [
        child
        for child in children
        if child.daemon and (_is_deaf(child.pid) or (number is not None and _listens(child.pid, number)))
    ]
    if workers and threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise: a worker has died
    for worker in workers:
        worker.kill()


def _is_deaf(pid: int | None) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", status, re.MULTILINE)
    return blocked is not None and bool(int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1)
