"""How long a call of ``fit`` trains: epochs, and optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from ddpkit.run_opts import RunOptions


@dataclass(frozen=True, eq=False)
class RunLength:
    """How long a call of ``fit`` trains, from its first epoch on, as far as that is known
    beforehand.

    Attributes:
        epochs: of the call; an upper bound where a counter may stop early.
        steps_per_epoch: optimizer steps.
        total_steps: optimizer steps, at most ``optimizer_step_limit``.

    Ranks: local; equal on all ranks.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @classmethod
    def of(
        cls,
        length: int | None,
        factor: int,
        epochs: int | None,
        options: RunOptions,
        *,
        ahead: int = 0,
    ) -> RunLength:
        """Work it out.

        Args:
            length: batches of the training loader; None where that is not known.
            factor: batches per optimizer step.
            epochs: as :func:`count_epochs` returned them.
            options: ``debug``, ``debug_batches`` and ``optimizer_step_limit`` count.
            ahead: steps that a resumed run has made beyond those that the present batches would
                have made.
        """
        limit = options.optimizer_step_limit
        if length is not None and options.debug:
            length = min(length, options.debug_batches)
        steps = None if length is None else -(-length // factor)
        whole = None if steps is None or epochs is None else steps * epochs + ahead
        total = limit if whole is None else min(whole, limit or whole)
        if steps and total is not None:
            epochs = -(-(total - ahead) // steps)
        return cls(epochs, steps, total)


def count_epochs(epoch_counter: Any, options: RunOptions) -> int | None:
    """Return how many epochs an epoch counter yields from its first one on.

    Args:
        epoch_counter: has a ``limit``, such as :class:`~ddpkit.epoch_loop.EpochCounter`, or
            with a length.
        options: ``debug`` and ``debug_epochs`` count.

    Returns:
        The number, an upper bound if the counter may stop early; None if unknown, as of a
        generator.

    Raises:
        ConfigError: it cannot be iterated, as a number of epochs.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.epoch_loop import EpochCounter
        >>> from ddpkit.run_opts import RunOptions
        >>> options = RunOptions(debug=True, debug_epochs=2)
        >>> [
        ...     count_epochs(each, RunOptions())
        ...     for each in (EpochCounter(5), range(10, 15), iter([1]))
        ... ]
        [5, 5, None]
        >>> [count_epochs(each, options) for each in (EpochCounter(5), range(5), range(10, 15))]
        [2, 3, 1]
    """
    if not hasattr(epoch_counter, "__iter__") and not hasattr(epoch_counter, "__getitem__"):
        given = f"fit: the epoch_counter is {epoch_counter!r}"
        raise ConfigError(
            f"{given}, which yields no epochs: give EpochCounter(limit=N) or range(1, N + 1)."
        )
    number = getattr(epoch_counter, "limit", None)
    if not isinstance(number, int):
        try:
            number = len(epoch_counter)
        except TypeError:
            number = None
    last = options.debug_epochs if options.debug else 0
    if last <= 0:
        return number
    if isinstance(epoch_counter, Sequence):
        return next(
            (count for count, epoch in enumerate(epoch_counter, 1) if epoch >= last),
            number,
        )
    return last if number is None else min(number, last)
