"""What the learning rates of a run are multiplied by."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of optimizers whose steps are scaled: two Brains may have the same one, and the one that trains
# has the factor.
factors: weakref.WeakKeyDictionary[Optimizer, RateFactor] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class RateFactor:
    """What learning rates are multiplied by in each step of a call of ``fit``.

    Attributes:
        value: 1 until a part says otherwise.
        follows_batch: whether it follows from the samples of a step.

    Ranks: local; alike on every rank.

    Example:
        >>> factor = RateFactor(2.0, follows_batch=True)
        >>> factor.forget(); factor
        RateFactor(value=1.0, follows_batch=False)
    """

    value: float = 1.0
    follows_batch: bool = False

    def take_over(self, optimizers: Iterable[Any]) -> None:
        """Be the factor of optimizers that have had that of another Brain.

        Args:
            optimizers: those that no factor is for step as they are.
        """
        for optimizer in optimizers:
            if optimizer in factors:
                factors[optimizer] = self

    def forget(self) -> None:
        """Be 1 again: another call of ``fit`` begins."""
        self.value = 1.0
        self.follows_batch = False
