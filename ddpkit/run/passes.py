"""How often a training pass works on its batches: once, or again if a step was too large for the
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Passes:
    """Makes each training pass once. A subclass may leave a pass, and go on with what is left.

    Ranks: collective; every rank has the same kind.

    Example:
        >>> Passes().run(lambda: 0.5, loader=[])
        0.5
    """

    def require(self, loader: Any) -> None:
        """Refuse a training whose passes cannot be made so.

        Args:
            loader: of the training.

        Raises:
            ConfigError: the run uses something that does not go with it.
        """

    def begin_with(self, size: int) -> None:
        """Begin a call of ``fit`` with the samples at a time that a checkpoint's run had found.

        Args:
            size: on each process, at most.
        """

    def begin(self, *owners: Any) -> None:
        """Note, before a pass, in whose metrics it counts.

        Args:
            *owners: objects with metrics among their attributes.
        """

    def run(self, one_pass: Callable[[], float], loader: Any) -> float:
        """Make a pass.

        Args:
            one_pass: goes on where the progress says, with batches of :meth:`feed`.
            loader: of this rank.

        Returns:
            What ``one_pass`` returns.
        """
        return one_pass()

    def ready(self, otherwise: Callable[[], object]) -> Callable[[], object]:
        """Return what is to be called when a pass has its loader's iterator.

        Args:
            otherwise: the result in a first attempt.
        """
        return otherwise

    def feed(self, feed: Any) -> Any:
        """Return the feed of a pass, which may tell when a step begins.

        Args:
            feed: of this rank.
        """
        return feed
