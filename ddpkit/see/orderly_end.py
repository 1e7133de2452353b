"""Ends the commands in order: no process that they have started is left, and no file."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_SIGNALS = ("SIGTERM", "SIGHUP")  # of a scheduler, and of a terminal that is closed


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Return a context in which a signal that ends this process lets it tidy up first, as Ctrl-C
    does.

    State: handlers of signals, until the end of the context. A signal that is ignored stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers here
        yield
        return
    before: dict[int, Any] = {}

    def end(number: int, _: Any) -> NoReturn:
        for signum in before:  # a second one must not interrupt the tidying up
            signal.signal(signum, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_children(children: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """End processes that have not ended by themselves.

    Args:
        children: started by this process.
        grace_seconds: in which they may tidy up; then they are killed.
    """
    end = time.monotonic() + grace_seconds
    for child in children:
        if child.poll() is None:
            child.terminate()
    try:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
    finally:  # also where Ctrl-C comes once more
        for child in children:
            child.kill()
            child.wait()
