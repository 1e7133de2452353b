"""What the learning rates of a run are multiplied by."""

from __future__ import annotations

from dataclasses import dataclass


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

    def forget(self) -> None:
        """Be 1 again: another call of ``fit`` begins."""
        self.value = 1.0
        self.follows_batch = False
