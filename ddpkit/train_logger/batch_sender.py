"""A thread that hands values over to what may be slow, or away for a while."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = get_logger(__name__)

T = TypeVar("T")

AT_ONCE = 500  # values that are handed over in one call
MOST_WAITING = 100_000  # values; the oldest give way
LONGEST_PAUSE = 30.0  # seconds between two tries


class BatchSender:
    """Hands values over in a thread of its own, in their order, so that the training never waits.

    What fails is tried again, with longer and longer pauses. A warning says so once.

    Args:
        what: receives the values, in words.
        send: called with a list of values.
        first_pause: seconds before the second try.

    Attributes:
        dropped: values that gave way to newer ones.

    Ranks: local.

    Example:
        >>> got = []
        >>> sender = BatchSender("a list", got.extend)
        >>> sender.add([1, 2])
        >>> sender.close(seconds=5), got
        (0, [1, 2])
    """

    def __init__(
        self,
        what: str,
        send: Callable[[list[Any]], None],
        first_pause: float = 1.0,
    ) -> None:
        self.dropped = 0
        self._what = what
        self._send = send
        self._pause = first_pause
        self._waiting: deque[Any] = deque()
        self._news = threading.Condition()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def add(self, values: Iterable[Any]) -> None:
        """Add values, and return at once."""
        with self._news:
            self._waiting.extend(values)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            if self._thread is None:
                name = f"ddpkit to {self._what}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._news.notify()

    def close(self, seconds: float) -> int:
        """Hand over what is left, as far as the time allows; the thread ends.

        Args:
            seconds: to wait at most.

        Returns:
            How many values have not been handed over.
        """
        with self._news:
            self._is_ending = True
            self._news.notify()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self.dropped + len(self._waiting)

    def _run(self) -> None:
        pause = self._pause
        while True:
            with self._news:
                while not self._waiting and not self._is_ending:
                    self._news.wait()
                batch = [self._waiting[n] for n in range(min(AT_ONCE, len(self._waiting)))]
            if not batch:
                return
            error = self._try(batch)
            if error is None:
                pause = self._pause
                continue
            logger.warning_once(
                "%s does not take values: %s: %s. Training goes on, and it is tried again.",
                self._what,
                type(error).__name__,
                error,
            )
            with self._news:
                if self._is_ending:
                    return
                self._news.wait_for(lambda: self._is_ending, timeout=pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, batch: list[Any]) -> Exception | None:
        """Hand values over, and take them off the list; return the error if that fails."""
        before = self.dropped
        try:
            self._send(batch)
        except Exception as error:  # noqa: BLE001 -- returned: a client may raise anything
            return error
        with self._news:
            # some of the batch may have given way to newer values in the meantime
            for _ in range(len(batch) - (self.dropped - before)):
                self._waiting.popleft()
        return None


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function in a thread, and wait for its value no longer than some seconds.

    Args:
        seconds: to wait at most; the thread is left to itself then.
        function: what it raises is raised here.

    Raises:
        TimeoutError: there is no answer by then.

    Ranks: local.

    Example:
        >>> within(5.0, lambda: 3)
        3
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 -- raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="ddpkit opens a tracker", daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no answer in {time.monotonic() - started:.0f} seconds")
    return found[0]
