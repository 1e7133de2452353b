"""Signals: what a rank hears, what all ranks do about it, and what the workers of its loaders
ignore.

A handler only sets a number. What follows of it is decided at the next sync, on all ranks alike,
whichever of them were signalled. What the ranks must agree on is agreed on about once a second, not
once a step: every ``k`` steps, with ``k`` itself agreed on at the previous sync, the ranks add up a
few numbers in one small all-reduce on a group of their own (gloo, on the CPU). All of them act on
the same sums at the same step.

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

import atexit
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ddpkit.base import rank_if_known
from ddpkit.compat import kill_when_terminated, own_forkserver
from ddpkit.errors import ConfigError, RankFailedError, RunStopped

if TYPE_CHECKING:
    from collections.abc import Iterable

# for a process that has lost another rank to say so, once it is asked to end
FINAL_REPORT_SECONDS = 2.0
REPEAT_SECONDS = 1.0  # a launcher and a scheduler may both pass on the same signal
_ENDING = ("SIGINT", "SIGTERM")

TIME_LIMIT = "time limit"
#: What can ask a run to stop; if several do at once, the first of these counts on all ranks.
CAUSES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", TIME_LIMIT)
INTERVAL_SECONDS = 1.0
# times: the distance of syncs that an epoch may begin with, against that of the epoch before
MOST_SHORTER = 4

DUMP_SECONDS = 0.1  # for a worker to write where it is
MOST_SHOWN = 8
NAP_SECONDS = 0.001
POLL_SECONDS = 0.5
FIRST_AT_EXIT = 100  # priority of a multiprocessing exit hook; its own have at most 15


class _Listeners:
    """Who hears signals in this process, and what looks after its second one."""

    # where Python writes the number of each signal that arrives; its other end is read by a thread
    pipe = -1
    asked_at = 0.0  # when a signal has asked for the end; 0: none has
    was_stopped = False  # whether a call has ended by a stop; who hears in it stays active
    before: ClassVar[dict[signal.Signals, Any]] = {}  # the handlers in whose place ours is
    active: ClassVar[list[SignalListener]] = []  # the innermost context last


def _forget() -> None:
    """Restore the original signal handlers in a forked child."""
    if _Listeners.pipe >= 0:
        _Listeners.pipe = -1
        signal.set_wakeup_fd(-1)
    _put_back(_Listeners.before)
    _Listeners.before = {}
    _Listeners.active.clear()


def _put_back(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _watch_second_signal() -> None:
    """Have a thread learn of signals: a main thread that is busy in C, as in a collective, runs no
    handlers.

    It learns of none where the script has their arrival written elsewhere, as asyncio does.
    """
    if _Listeners.pipe < 0:
        reader, _Listeners.pipe = os.pipe()
        os.set_blocking(_Listeners.pipe, False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(
            target=_end_at_second,
            args=(reader,),
            name="ddpkit-signals",
            daemon=True,
        ).start()
    before = signal.set_wakeup_fd(_Listeners.pipe, warn_on_full_buffer=False)
    if before not in {-1, _Listeners.pipe}:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _end_at_second(reader: int) -> None:
    """End this process when it is asked to a second time."""
    while True:
        number = os.read(reader, 1)[0]
        if _is_second(number):
            _say(f"{signal.Signals(number).name} again: ended at once, without a checkpoint.")
            os._exit(128 + number)


def _is_second(number: int) -> bool:
    """Return whether this is a second stop signal: handled by ddpkit, more than REPEAT_SECONDS
    after the first.
    """
    is_heard = number in _Listeners.before and any(
        number in one.stopping for one in _Listeners.active
    )
    if not is_heard or signal.Signals(number).name not in _ENDING:
        return False
    now = time.monotonic()
    _Listeners.asked_at = _Listeners.asked_at or now
    return now - _Listeners.asked_at > REPEAT_SECONDS


def signal_named(name: str) -> signal.Signals:
    """Return the signal of a name, with or without ``SIG``, in any case.

    Raises:
        ConfigError: there is none, or no process can catch it.

    Ranks: local.

    Example:
        >>> signal_named("usr1").name
        'SIGUSR1'
    """
    full = name.strip().upper()
    full = full if full.startswith("SIG") else f"SIG{full}"
    found = getattr(signal, full, None)
    if not isinstance(found, signal.Signals) or full in {"SIGKILL", "SIGSTOP", "SIGCHLD"}:
        raise ConfigError(
            f"{name!r} is not a signal that a process can handle. Give names such as SIGTERM or "
            "SIGUSR1."
        )
    return found


class SignalListener:
    """Hears signals that ask this process to stop, or to save.

    Args:
        stopping: names of the signals that ask for an end, with a checkpoint.
        saving: names of the signals that ask only for a checkpoint.

    Attributes:
        stop_signal: the number of the signal that has asked for an end; 0: none has.
        save_wanted: whether a checkpoint has been asked for and not been made since.

    Raises:
        ConfigError: a name is unknown, or in both lists, or of a signal that is not made for it.

    Ranks: local.

    Example:
        >>> signals = SignalListener()
        >>> with signals.listening():
        ...     signal.raise_signal(signal.SIGUSR2)
        >>> signals.save_wanted
        True
    """

    def __init__(
        self,
        stopping: Iterable[str] = ("SIGTERM", "SIGINT", "SIGUSR1"),
        saving: Iterable[str] = ("SIGUSR2",),
    ) -> None:
        self.stopping = [signal_named(name) for name in stopping]
        self.saving = [signal_named(name) for name in saving]
        both = set(self.stopping) & set(self.saving)
        if both:
            raise ConfigError(
                "stop_signals and save_signals both name "
                f"{', '.join(sorted(one.name for one in both))}: a signal either ends the run or "
                "only saves. Name it in one of them."
            )
        unlike = [one.name for one in self.stopping if one.name not in CAUSES]
        if unlike:
            possible = ", ".join(CAUSES[:-1])
            raise ConfigError(
                f"stop_signals names {unlike}. A run can be stopped by {possible}; choose from "
                "these."
            )
        self.stop_signal = 0
        self.save_wanted = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which the signals are heard, unless the script has its own use for
        one.

        Ranks: local; outside of the main thread, where Python allows no handlers, and in a notebook
        it does nothing.

        State: the handlers, restored at the end. After a stop they stay until the process exits,
        because launchers then send signals to the remaining processes. An unhandled signal is
        raised again at the end. Enclosing contexts receive the signals too.
        ``signal.set_wakeup_fd``, and the thread that reads there, stay: see
        ``_watch_second_signal``.
        """
        if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
            yield
            return
        # else this call is inside of another one
        if not _Listeners.active or _Listeners.was_stopped:
            _Listeners.asked_at = 0.0
            _Listeners.was_stopped = False
        _Listeners.active.append(self)  # before the handlers: what none in it hears is lost
        _watch_second_signal()
        added = self._listen()
        stopped = False
        _Listeners.before.update(added)
        try:
            yield
        except RunStopped:
            stopped = _Listeners.was_stopped = True
            raise
        except RankFailedError:
            # launchers end the other processes at once: first this one says which rank it was
            added |= dict.fromkeys({signal.SIGTERM} & added.keys(), _end_soon)
            raise
        finally:
            if not stopped:
                _put_back(added)
                _Listeners.active = [one for one in _Listeners.active if one is not self]
                _Listeners.before = {
                    number: one for number, one in _Listeners.before.items() if number not in added
                }
            came = self.stop_signal
            # the outer ones have heard what this has not used
            if _Listeners.active and self not in _Listeners.active:
                self.stop_signal = 0
                self.save_wanted = False
        if came in added:
            self.stop_signal = 0
            signal.raise_signal(came)  # after the last sync: the default handler, as without ddpkit

    def _listen(self) -> dict[signal.Signals, Any]:
        """Replace the default handlers, and return them."""
        added: dict[signal.Signals, Any] = {}
        for number in (*self.stopping, *self.saving):
            if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler, _end_soon}:
                added[number] = signal.signal(number, _hear)
        return added

    def note(self, number: int) -> bool:
        """Note a signal; say whether it is the first that asks for an end."""
        if number in self.saving:
            self.save_wanted = True
        if number not in self.stopping or self.stop_signal:
            return False
        self.stop_signal = number
        return True


def _hear(number: int, _frame: Any) -> None:
    is_first = [one.note(number) for one in _Listeners.active]  # each has a use of its own for it
    if any(is_first):
        name = signal.Signals(number).name
        again = f" A second {name} ends the process at once." if name in _ENDING else ""
        _say(f"{name}: stopping at the end of a step.{again}")


def _end_soon(number: int, _frame: Any) -> None:
    last = threading.Timer(FINAL_REPORT_SECONDS, os._exit, [128 + number])
    last.daemon = True
    last.start()


def _say(line: str) -> None:
    """Write a line on stderr, from the main process only; nothing else is safe to use inside of a
    handler.
    """
    if not rank_if_known():
        with contextlib.suppress(OSError):
            os.write(2, f"\n{line}\n".encode())


# ----------------------------------------------------------------------------------------- the sync


@dataclass(frozen=True)
class SyncReport:
    """What all ranks learnt at a sync; every number is the same on every rank.

    Attributes:
        step: the step of the sync, within the epoch.
        loss: weighted mean over all ranks since the epoch began; NaN before the first finite one.
        samples: samples seen by all ranks since the epoch began, with those whose loss was not
            finite.
        main_seconds: the main process's answer to how long ago it last saved an intra-epoch
            checkpoint.
        save_wanted: whether some rank has been asked for a checkpoint, by a signal.
        stop: what has asked some rank to stop, one of :data:`CAUSES`; empty: nothing has.

    Ranks: local.

    Example:
        >>> SyncReport(step=4, loss=0.5, samples=32, main_seconds=1.0).loss
        0.5
    """

    step: int
    loss: float
    samples: int
    main_seconds: float
    save_wanted: bool = False
    stop: str = ""


class Requests(NamedTuple):
    """What a rank sends at a sync besides its losses.

    Attributes:
        main_seconds: seconds since the last intra-epoch checkpoint; only the main process's value
            counts.
        save: whether a checkpoint was requested on this rank.
        stop: the cause of a stop request, one of :data:`CAUSES`; empty: none.

    Ranks: local.

    Example:
        >>> Requests(save=True).stop
        ''
    """

    main_seconds: float = 0.0
    save: bool = False
    stop: str = ""


class PeriodicSync:
    """Decides at which steps the ranks sync, and syncs them.

    Args:
        add_up: sums a list of floats over the ranks, such as
            :func:`ddpkit.distributed.sum_over_ranks`.
        world_size: number of ranks.
        is_main: whether this is the main process.
        interval: seconds between syncs, about.

    Ranks: collective; every rank must ask at the same steps, and does, because ``due`` is agreed
    on.

    Example:
        >>> sync = PeriodicSync(add_up=list, world_size=1, is_main=True)
        >>> sync.start(step=0); sync.due
        1
        >>> sync(step=1, loss_sum=3.0, count=2, samples=2, requests=Requests()).loss
        1.5
    """

    def __init__(
        self,
        add_up: Callable[[list[float]], list[float]],
        world_size: int,
        *,
        is_main: bool,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self.add_up = add_up
        self.world_size = world_size
        self.is_main = is_main
        self.interval = interval
        self.due = 1
        self.steps_per_interval = 1  # as all ranks have found together at the last sync
        self._last_step = 0
        self._last_time = 0.0
        self._steps_apart = self._known = 1

    def start(self, step: int) -> None:
        """Begin an epoch, or go on with one, after ``step`` steps.

        The first step also waits for the loader, and a few come before the next sync. Only where
        they were quick are the syncs soon as far apart as in the epoch before.
        """
        self._last_step = step
        self._last_time = time.monotonic()
        self.due = step + 1
        self._known = self._steps_apart
        self._steps_apart = 1

    def __call__(
        self,
        step: int,
        loss_sum: float,
        count: float,
        samples: int,
        requests: Requests,
    ) -> SyncReport:
        """Exchange these numbers with the other ranks and fix the step of the next sync.

        Args:
            step: the current step, equal on all ranks.
            loss_sum: this rank's sum of losses since the epoch began.
            count: what that sum counts on this rank.
            samples: this rank's number of samples since the epoch began.
            requests: what this rank tells beyond that.

        Returns:
            What all ranks learnt.
        """
        now = time.monotonic()
        per_step = (now - self._last_time) / max(step - self._last_step, 1)
        main_seconds = requests.main_seconds if self.is_main else 0.0
        stops = [float(cause == requests.stop) for cause in CAUSES]
        total_loss, total, seen, seconds, main, wanted_by, *stopped_by = self.add_up(
            [
                loss_sum,
                count,
                samples,
                per_step,
                main_seconds,
                float(requests.save),
                *stops,
            ]
        )
        stop = next((cause for cause, ranks in zip(CAUSES, stopped_by, strict=True) if ranks), "")
        wanted = int(self.interval * self.world_size / max(seconds, 1e-9))
        # one step tells little
        known = 0 if self._steps_apart == 1 else self._known // MOST_SHORTER
        self._steps_apart = max(1, min(wanted, max(2 * self._steps_apart, known)))
        self.steps_per_interval = max(1, wanted)
        self.due = step + self._steps_apart
        self._last_step = step
        self._last_time = time.monotonic()
        mean = total_loss / total if total else float("nan")
        return SyncReport(
            step,
            mean,
            int(seen),
            main_seconds=main,
            save_wanted=wanted_by > 0,
            stop=stop,
        )


# -------------------------------------------------------------------------- the workers of a loader


class _Here:
    """What this module knows about its own process."""

    process = 0  # at whose end its workers are killed
    is_worker = False
    workers: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # that it has started


def ignored_signals() -> set[signal.Signals]:
    """Return the signals that a rank acts on, and its loaders' workers do not.

    Ranks: local.

    Example:
        >>> signal.SIGTERM in ignored_signals()
        True
    """
    return {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def at_exit(call: Callable[[], object]) -> None:
    """Register a function to run at exit, before ``multiprocessing`` waits for its children.

    A process that ``multiprocessing`` has forked ends without ``atexit``; one that it has spawned
    waits for its children before that.

    Args:
        call: must be idempotent; it may be called twice.

    Ranks: local.

    Source: ``multiprocessing.process.BaseProcess._bootstrap`` and
    ``multiprocessing.util._exit_function``.

    Example:
        >>> at_exit(kill_workers)
    """
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, call, exitpriority=FIRST_AT_EXIT)


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

    Ranks: local.

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
        for one in ignored_signals():
            signal.signal(one, lambda *_: None)
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
    """Make this process's loader workers write their stacks to stderr; wait briefly for them.

    Ranks: local.

    Example:
        >>> show_workers()
    """
    for number in _dump_signal():
        for worker in _own_workers()[:MOST_SHOWN]:
            # stderr may be closed, or the worker have ended meanwhile
            with contextlib.suppress(OSError):
                os.write(2, f"\nA worker of the loader (pid {worker.pid}) is here:\n".encode())
                os.kill(worker.pid, number)
            time.sleep(DUMP_SECONDS)


def kill_workers() -> None:
    """End the workers that are still there when their rank ends, whatever they are doing.

    Ranks: local.

    Example:
        >>> kill_workers()
    """
    workers = [child for child in _own_workers() if child.daemon]
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler would raise: a worker has died
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
