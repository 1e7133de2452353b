"""Signals: what a rank hears, and what a second signal does.

A handler only sets a number. What follows of it is decided at the next sync, on all ranks alike,
whichever of them were signalled: :mod:`ddpkit.control.periodic_sync`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

from ddpkit.base import rank_if_known
from ddpkit.errors import ConfigError, RankFailedError, RunStopped
from ddpkit.launch import is_notebook_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# for a process that has lost another rank to say so, once it is asked to end
FINAL_REPORT_SECONDS = 2.0
REPEAT_SECONDS = 1.0  # a launcher and a scheduler may both pass on the same signal
# has the handlers of torch's launcher; forked ranks inherit them
LAUNCHER = "torch.distributed.elastic.multiprocessing.api"
_ENDING = ("SIGINT", "SIGTERM")
TIME_LIMIT = "time limit"
#: What can ask a run to stop; if several do at once, the first of these counts on all ranks.
CAUSES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", TIME_LIMIT)


class _Listeners:
    """The listeners to signals of this process, and the thread that waits for a second signal."""

    # where Python writes the number of each signal that arrives; its other end is read by a thread
    pipe = -1
    asked_at = 0.0  # when a signal has asked for the end; 0: none has
    was_stopped = False  # whether a call has ended by a stop; its listener stays active
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
        number in listener.stopping for listener in _Listeners.active
    )
    if not is_heard or signal.Signals(number).name not in _ENDING:
        return False
    now = time.monotonic()
    _Listeners.asked_at = _Listeners.asked_at or now
    return now - _Listeners.asked_at > REPEAT_SECONDS


def signal_named(name: str) -> signal.Signals:
    """Return the signal of a name, with or without ``SIG``, in any case.

    Raises:
        ConfigError: there is no such signal, or no process can catch it.

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
                f"{', '.join(sorted(member.name for member in both))}: a signal either ends "
                "the run or only saves. Name it in one of them."
            )
        unlike = [member.name for member in self.stopping if member.name not in CAUSES]
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
        if threading.current_thread() is not threading.main_thread() or _is_interactive():
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
                _Listeners.active = [
                    listener for listener in _Listeners.active if listener is not self
                ]
                _Listeners.before = {
                    number: handler
                    for number, handler in _Listeners.before.items()
                    if number not in added
                }
            came = self.stop_signal
            # outer listeners have heard the signal that this one has not used
            if _Listeners.active and self not in _Listeners.active:
                self.stop_signal = 0
                self.save_wanted = False
        if came in added:
            self.stop_signal = 0
            signal.raise_signal(came)  # after the last sync: the default handler, as without ddpkit

    def _listen(self) -> dict[signal.Signals, Any]:
        """Replace the default handlers, and those of a launcher, and return them."""
        added: dict[signal.Signals, Any] = {}
        default = {signal.SIG_DFL, signal.default_int_handler, _end_soon}
        for number in (*self.stopping, *self.saving):
            handler = signal.getsignal(number)
            if handler in default or _is_launchers(handler):
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


def _is_interactive() -> bool:
    """Say whether a person types in what this process runs. A rank that ``notebook_launch`` has
    forked from such a process runs one function, and ends.
    """
    return hasattr(sys, "ps1") and not is_notebook_rank()


def _is_launchers(handler: Any) -> bool:
    """Say whether a handler is that of torch's launcher, which has forked this process."""
    return (
        multiprocessing.parent_process() is not None
        and getattr(handler, "__module__", "") == LAUNCHER
    )


def _hear(number: int, _frame: Any) -> None:
    is_first = [
        listener.note(number) for listener in _Listeners.active
    ]  # each has a use of its own for it
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
