"""Signals that ask a run to stop, or to save: heard at any time, acted on where all ranks agree to.

A handler only sets a number. What follows of it is decided at the next sync (see :mod:`ddpkit.control`), on all ranks
alike, whichever of them were signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

from ddpkit.base.rank import rank_if_known
from ddpkit.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REPEAT_SECONDS = 1.0  # a launcher and a scheduler may both pass on the same signal
_ENDING = ("SIGINT", "SIGTERM")


class _Listeners:
    """What arrives even while the main thread cannot run its handlers, and who hears."""

    pipe = -1
    first = 0.0
    number = 0
    before: ClassVar[dict[signal.Signals, Any]] = {}  # the handlers in whose place ours is
    active: ClassVar[list[SignalListener]] = []  # the innermost context last
    is_registered = False


def _forget() -> None:
    """Let signals do to a process that was forked what they would have done to this one without ddpkit."""
    if _Listeners.pipe >= 0:
        _Listeners.pipe = -1
        signal.set_wakeup_fd(-1)
    _put_back(_Listeners.before)
    _Listeners.before = {}
    _Listeners.active.clear()


def _put_back(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def asked_twice() -> int:
    """Return the number of a signal that has asked for the end of this process twice; 0: none has.

    Ranks: local; for a thread beside the main one.

    Example:
        >>> asked_twice()
        0
    """
    if _Listeners.pipe < 0:
        return 0
    with contextlib.suppress(OSError):
        for number in os.read(_Listeners.pipe, 512):
            now = time.monotonic()
            if number not in {known for known in _Listeners.before if known.name in _ENDING}:
                continue
            if not _Listeners.first:
                _Listeners.first = now
            elif now - _Listeners.first > REPEAT_SECONDS:
                _Listeners.number = number
    return _Listeners.number


@contextlib.contextmanager
def _writing_to_pipe() -> Iterator[None]:
    """Have the arrival of signals written into a pipe, unless the script has that done for itself."""
    if _Listeners.pipe >= 0:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    _Listeners.pipe, _Listeners.first, _Listeners.number = reader, 0.0, 0
    try:
        yield
    finally:
        number = asked_twice()  # while the main thread was where it runs no handler: two signals are one to it
        _Listeners.pipe = -1
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
        if number:
            _end_by(number)


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
        raise ConfigError(f"{name!r} is not a signal that a process can handle. Give names such as SIGTERM or SIGUSR1.")
    return found


class SignalListener:
    """Hears signals that ask this process to stop, or to save.

    Args:
        stopping: names of the signals that ask for an end, with a checkpoint.
        saving: names of the signals that ask only for a checkpoint.

    Attributes:
        stop_signal: the number of the signal that has asked for an end; 0: none has.
        save_wanted: whether a checkpoint has been asked for and not been made since.

    Ranks: local.

    Example:
        >>> signals = SignalListener()
        >>> with signals.listening():
        ...     signal.raise_signal(signal.SIGUSR2)
        >>> signals.save_wanted
        True
    """

    def __init__(
        self, stopping: Iterable[str] = ("SIGTERM", "SIGINT", "SIGUSR1"), saving: Iterable[str] = ("SIGUSR2",)
    ) -> None:
        self.stopping = [signal_named(name) for name in stopping]
        self.saving = [signal_named(name) for name in saving]
        both = set(self.stopping) & set(self.saving)
        if both:
            raise ConfigError(
                f"stop_signals and save_signals both name {', '.join(sorted(one.name for one in both))}: a signal "
                "either ends the run or only saves. Name it in one of them."
            )
        self.stop_signal = 0
        self.save_wanted = False
        self.since = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which the signals are heard, unless the script has its own use for one.

        Ranks: local; outside of the main thread, where Python allows no handlers, it does nothing.

        State: the handlers, restored at the end. After a stop they stay until the process exits, because launchers then
        send signals to the remaining processes. An unhandled signal is raised again at the end. Enclosing contexts
        receive the signals too.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _Listeners.active.append(self)  # before the handlers: what none in it hears is lost
        added, stopped = self._listen(), False
        _Listeners.before.update(added)
        try:
            with _writing_to_pipe():
                yield
        except RunStopped:
            stopped = True
            raise
        finally:
            if not stopped:
                _put_back(added)
                _Listeners.active.remove(self)
                _Listeners.before = {number: one for number, one in _Listeners.before.items() if number not in added}
            came = self.stop_signal
            if _Listeners.active and self not in _Listeners.active:  # the outer ones have heard what this has not used
                self.stop_signal, self.save_wanted = 0, False
        if came in added:
            self.stop_signal = 0
            signal.raise_signal(came)  # after the last sync: the default handler, as without ddpkit

    def _listen(self) -> dict[signal.Signals, Any]:
        """Replace the default handlers, and return them."""
        added: dict[signal.Signals, Any] = {}
        for number in (*self.stopping, *self.saving):
            if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
                added[number] = signal.signal(number, _hear)
        if not _Listeners.is_registered:
            _Listeners.is_registered = True
            os.register_at_fork(after_in_child=_forget)
        return added

    def note(self, number: int) -> bool:
        """Note a signal; say whether it is the first that asks for an end."""
        if number in self.saving:
            self.save_wanted = True
        if number not in self.stopping or self.stop_signal:
            return False
        self.stop_signal, self.since = number, time.monotonic()
        return True


def _hear(number: int, _frame: Any) -> None:
    asked = [one for one in _Listeners.active if one.stop_signal and number in one.stopping]
    name = signal.Signals(number).name
    is_first = [one.note(number) for one in _Listeners.active]  # each has a use of its own for it
    if any(is_first):
        _say(f"{name}: stopping at the end of a step. Once more ends the process at once.")
    elif asked and name in _ENDING and time.monotonic() - asked[-1].since > REPEAT_SECONDS:
        for one in asked:
            one.stop_signal = 0  # in a notebook there is a next call
        _end_by(number)


def _end_by(number: int) -> None:
    """End this process as the signal does that has come twice."""
    if hasattr(sys, "ps1"):  # a notebook, which shall not die
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _say(line: str) -> None:
    """Write a line on stderr, from the main process only; nothing else is safe to use inside of a handler."""
    if not rank_if_known():
        with contextlib.suppress(OSError):
            os.write(2, f"\n{line}\n".encode())
