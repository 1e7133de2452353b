"""A thread that sends values to something that may be slow, or away for a while."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from ddpkit.base import do_nothing
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = get_logger(__name__)

T = TypeVar("T")

#: The receiver, the name of a value, and why it does not take it.
LEFT_OUT = (
    "%s refuses the value %r: %s: %s. It is left out; metrics.jsonl, in the experiment's folder, "
    "has it."
)

AT_ONCE = 500  # values that are handed over in one call
MOST_WAITING = 100_000  # values; the oldest give way
LONGEST_PAUSE = 30.0  # seconds between two tries
TRIES = 4  # of a batch, before its values are tried one by one
MOST_DOUBTFUL = 10  # values in a row that fail one by one, before the receiver is taken to be away


class BatchSender:
    """Hands values over in a thread of its own, in their order, so that the training never waits.

    What fails is tried again, with longer and longer pauses, and a warning says so once. A value
    that the receiver refuses is named in a warning, and left out. So is a value that fails again
    and again while others get through.

    Args:
        what: receives the values, in words.
        send: called with a list of values.
        first_pause: seconds before the second try.
        refuses: says of an exception whether the receiver will never take such values.
        name: of a value, in warnings.

    Attributes:
        dropped: values that gave way to newer ones.
        refused: values that were left out.

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
        refuses: Callable[[Exception], bool] = lambda _: False,
        name: Callable[[Any], str] = str,
    ) -> None:
        self.dropped = 0
        self.refused = 0
        self._what = what
        self._send = send
        self._pause = first_pause
        self._refuses = refuses
        self._name = name
        self._waiting: deque[Any] = deque()
        self._batch: list[Any] = []  # taken off the list, and not handed over yet
        self._news = threading.Condition()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._doubtful: list[tuple[Any, Exception]] = []
        self._has_warned = False
        self._said: set[str] = set()

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
            How many values have not been handed over, without those that were refused.
        """
        with self._news:
            self._is_ending = True
            self._news.notify()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self.dropped + len(self._waiting) + len(self._batch)

    def _run(self) -> None:
        pause = self._pause
        failures = 0
        while self._next_batch():
            error = self._try(self._batch)
            if error is None:
                self._batch = []
            elif self._refuses(error) or failures >= TRIES or self._is_ending:
                error = self._sift(error)
            if error is None:
                pause = self._pause
                failures = 0
                continue
            failures += 1
            self._warn(error)
            with self._news:
                if self._is_ending:
                    return
                self._news.wait_for(lambda: self._is_ending, timeout=pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _next_batch(self) -> bool:
        """Wait for values, and take some off the list; say whether there are any."""
        with self._news:
            while not self._waiting and not self._batch and not self._is_ending:
                self._news.wait()
            while self._waiting and len(self._batch) < AT_ONCE:
                self._batch.append(self._waiting.popleft())
        return bool(self._batch)

    def _try(self, values: list[Any]) -> Exception | None:
        """Hand values over; return the error if that fails."""
        try:
            self._send(values)
        except Exception as error:  # noqa: BLE001 -- returned: a client may raise anything
            return error
        return None

    def _sift(self, error: Exception) -> Exception | None:
        """Hand over what the receiver takes of a batch that has failed, and leave the others out.

        Args:
            error: of the batch.

        Returns:
            None; or the last error, if the receiver seems to take nothing: what is not handed over
            stays in the batch.
        """
        if not self._refuses(error):
            # the first, the middle and the last: does any get through?
            some = sorted({0, len(self._batch) // 2, len(self._batch) - 1})
            taken = [number for number in some if self._try([self._batch[number]]) is None]
            if not taken:
                return error
            self._batch = [v for number, v in enumerate(self._batch) if number not in taken]
        self._doubtful = []
        self._sift_half(self._batch)
        self._batch = [value for value, _ in self._doubtful]
        return self._doubtful[-1][1] if self._doubtful else None

    def _sift_half(self, values: list[Any]) -> None:
        """Hand over values that have failed together, by halves.

        A value that fails alone is left out if it is refused, or if others get through after it:
        until then the receiver may be away.
        """
        for part in (values[: len(values) // 2], values[len(values) // 2 :]):
            if not part:
                continue
            if len(self._doubtful) >= MOST_DOUBTFUL:
                error = self._doubtful[-1][1]
                self._doubtful += [(value, error) for value in part]
                continue
            found = self._try(part)
            if found is None:
                for value, error in self._doubtful:
                    self._leave_out(value, error)
                self._doubtful = []
            elif len(part) > 1:
                self._sift_half(part)
            elif self._refuses(found):
                self._leave_out(part[0], found)
            else:
                self._doubtful.append((part[0], found))

    def _leave_out(self, value: Any, error: Exception) -> None:
        self.refused += 1
        name = self._name(value)
        if name not in self._said:
            self._said.add(name)
            logger.warning(LEFT_OUT, self._what, name, type(error).__name__, error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:  # the words of an error may be others each time
            self._has_warned = True
            logger.warning(
                "%s does not take values: %s: %s. Training goes on, and it is tried again.",
                self._what,
                type(error).__name__,
                error,
            )


class ReadyThread:
    """A thread that is started now, and makes one call later: at the end of a process Python 3.12
    starts no thread any more.

    Args:
        name: of the thread.

    Ranks: local.

    Example:
        >>> thread = ReadyThread("says it later")
        >>> thread.start(lambda: print("now"))
        >>> thread.join(5.0)
        now
    """

    def __init__(self, name: str) -> None:
        self._call: Callable[[], None] = do_nothing
        self._begins = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], None]) -> None:
        """Have the call made, and return at once."""
        self._call = call
        self._begins.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of the call, so many seconds at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        self._begins.wait()
        self._call()


def within(
    seconds: float,
    function: Callable[[], T],
    thread: ReadyThread | None = None,
) -> T:
    """Call a function in a thread, and wait for its value no longer than some seconds.

    Args:
        seconds: to wait at most; the thread is left to itself then.
        function: what it raises is raised here.
        thread: to call it in; None: a new one.

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

    started = time.monotonic()
    thread = thread or ReadyThread("ddpkit opens a tracker")
    thread.start(call)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no answer in {time.monotonic() - started:.0f} seconds")
    return found[0]
