"""Objects that observe a call of ``fit`` and change none of its numbers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager


class Observer:
    """Looks on. A subclass says what it wants to see; here nothing does.

    Attributes:
        recording: what it records in this call of ``fit``, in words, if the operations of other
            observers would be seen in it; empty: nothing.

    Ranks: local, in the passes of all ranks.

    Example:
        >>> Observer().batches([1, 2], left_out=0)
        [1, 2]
    """

    recording = ""

    def session(self) -> AbstractContextManager[object]:
        """Return a context for a call of ``fit``."""
        return contextlib.nullcontext()

    def batches(self, batches: Iterable[Any], left_out: int) -> Iterable[Any]:
        """Return the batches of a pass.

        Args:
            batches: as the loader yields them.
            left_out: how many of them a resume only skips.
        """
        return batches

    def feed(self, feed: Any, others: Sequence[str]) -> Any:
        """Return the feed of a pass.

        Args:
            feed: whose batches the loop trains on; the timer of steps sees them before.
            others: what other observers record in this call.
        """
        return feed

    def during_pass(self) -> AbstractContextManager[object]:
        """Return a context for the steps of a pass."""
        return contextlib.nullcontext()

    def end_batch(self) -> None:
        """See nothing more of the present batch: another stage begins."""


class Observers:
    """All that look on, in an order: who comes later sees what those before have added.

    Args:
        observers: of the run.

    Ranks: as an observer.

    Example:
        >>> Observers(Observer(), Observer()).feed("a feed")
        'a feed'
    """

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Return a context for a call of ``fit``."""
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.session())
            yield

    def batches(self, batches: Iterable[Any], left_out: int) -> Iterable[Any]:
        """Return the batches of a pass; see :meth:`Observer.batches`.

        Args:
            batches: as the loader yields them.
            left_out: how many of them a resume only skips.
        """
        for observer in self._all:
            batches = observer.batches(batches, left_out)
        return batches

    def feed(self, feed: Any) -> Any:
        """Return the feed of a pass; see :meth:`Observer.feed`.

        Args:
            feed: whose batches the loop trains on.
        """
        for observer in self._all:
            others = [
                other.recording for other in self._all if other is not observer and other.recording
            ]
            feed = observer.feed(feed, others)
        return feed

    @contextlib.contextmanager
    def during_pass(self) -> Iterator[None]:
        """Return a context for the steps of a pass."""
        with contextlib.ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.during_pass())
            yield

    def end_batch(self) -> None:
        """See nothing more of the present batch: another stage begins."""
        for observer in self._all:
            observer.end_batch()
