"""The workers of a rank's loaders: how they start, which signals they ignore, and how they end.

A launcher and a terminal signal whole groups of processes. A worker that dies of SIGTERM loses
batches that its rank needs to finish a step; so it ignores the signals that its rank handles. It
inherits them blocked from the thread that starts it, and then its ``worker_init_fn`` installs
handlers that do nothing: unlike a blocked signal, a handler is not inherited by the programs that a
worker starts.

Python's garbage collector leaves alone what a worker has inherited: going through all of it would
copy the rank's memory page by page, and could destroy objects that wait for threads which a forked
process does not have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, ClassVar

from ddpkit.compat import kill_when_terminated, own_forkserver
from ddpkit.control.exit_hooks import at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


DUMP_SECONDS = 0.1  # for a worker to write where it is
MOST_SHOWN = 8
NAP_SECONDS = 0.001
POLL_SECONDS = 0.5


class _Here:
    """What this module knows about its own process."""

    process = 0  # at whose end its workers are killed
    is_worker = False
    workers: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # that it has started


def ignored_signals() -> set[signal.Signals]:
    """Return the signals that a rank acts on, and its loaders' workers do not.

    Example:
        >>> signal.SIGTERM in ignored_signals()
        True
    """
    return {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def start_loading(
    loader: Any,
    begin: Callable[[], Iterator[Any]] | None = None,
) -> Iterator[Any]:
    """Begin to iterate a loader. Its workers, if it starts any, ignore signals and end with this
    process.

    Args:
        loader: a ``DataLoader``; or any iterable, whose workers, and programs that they start,
            ignore signals.
        begin: what to call instead of ``iter(loader)``.

    Returns:
        The iterator.

    Example:
        >>> next(start_loading(["a batch"]))
        'a batch'
    """
    begin = begin or functools.partial(iter, loader)
    workers = getattr(loader, "num_workers", None)
    init = getattr(loader, "worker_init_fn", None)
    if workers == 0:
        return begin()
    if _Here.process != os.getpid():
        _Here.process = os.getpid()
        # before multiprocessing sends them a SIGTERM, which they do not hear, and waits for ever
        at_exit(kill_workers)
    with _ignoring_signals(getattr(loader, "multiprocessing_context", None)):
        others = set(multiprocessing.active_children())
        if workers is not None:
            loader.worker_init_fn = functools.partial(_start_worker, init)
        try:
            return begin()
        finally:
            if workers is not None:
                loader.worker_init_fn = init
            for worker in set(multiprocessing.active_children()) - others:
                _Here.workers.add(worker)
                kill_when_terminated(worker)


@contextlib.contextmanager
def _ignoring_signals(context: Any) -> Iterator[None]:
    """Block the signals in this thread while workers are started; another thread handles them, or
    this one later.

    The nap lets C++ threads (of a process group, of autograd) finish that are about to enter
    Python: a fork at that moment would leave the worker a lock that is never released.
    """
    methods = multiprocessing.get_all_start_methods()
    method = (context or multiprocessing).get_start_method(allow_none=True) or methods[0]
    if method != "fork":
        resource_tracker.ensure_running()  # its start unblocks SIGINT and SIGTERM
    with own_forkserver() if method == "forkserver" else contextlib.nullcontext():
        time.sleep(NAP_SECONDS)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored_signals() | _dump_signal())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Make this process a worker of its rank, then call the user's ``worker_init_fn``."""
    if not _Here.is_worker:  # else this loader is inside of another one
        _Here.is_worker = True
        gc.freeze()
        for ignored in ignored_signals():
            signal.signal(ignored, lambda *_: None)
        os.register_at_fork(after_in_child=_restore_signals)
        for number in _dump_signal():
            faulthandler.register(number, file=2, all_threads=False, chain=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored_signals() | _dump_signal())
        rank = (multiprocessing.parent_process(), os.getppid())
        threading.Thread(
            target=_end_with,
            args=rank,
            name="ddpkit-worker",
            daemon=True,
        ).start()
    if init is not None:
        init(worker)


def _end_with(rank: Any, parent: int) -> None:
    """End this worker when its rank has ended. A forkserver stays as long as its processes; a fork
    shares pipes.
    """
    while rank.is_alive() and os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _restore_signals() -> None:
    """Restore default signal handling in a process that a worker forks."""
    for number in ignored_signals():
        signal.signal(number, signal.SIG_DFL)


def _dump_signal() -> set[int]:
    """Return the signal that makes a worker write its stack; none outside of Linux."""
    return set() if sys.platform != "linux" else {int(signal.SIGRTMIN) + 5}


def _own_workers() -> list[Any]:
    if _Here.process != os.getpid():  # of the process that has forked this one
        return []
    return [child for child in multiprocessing.active_children() if child in _Here.workers]


def show_workers() -> None:
    """Make this process's loader workers write their stacks to stderr; wait briefly for them."""
    for number in _dump_signal():
        for worker in _own_workers()[:MOST_SHOWN]:
            # stderr may be closed, or the worker have ended meanwhile
            with contextlib.suppress(OSError):
                os.write(2, f"\nA worker of the loader (pid {worker.pid}) is here:\n".encode())
                os.kill(worker.pid, number)
            time.sleep(DUMP_SECONDS)


def kill_workers() -> None:
    """End the workers that are still there when their rank ends, whatever they are doing."""
    workers = [child for child in _own_workers() if child.daemon]
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler would raise: a worker has died
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
