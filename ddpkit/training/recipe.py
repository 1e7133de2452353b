"""What the loops and the optimizer step know of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpkit.training.progress import Progress
from ddpkit.types import Stage

if TYPE_CHECKING:
    pass


class LoopHooks(Protocol):
    """The hooks of a recipe that a loop calls.

    Ranks: as the loops.
    """

    progress: Progress

    def fit_batch(self, batch: Any) -> Any:
        """Train on one micro-batch and return its mean loss, or a loss sum and its count,
        detached.
        """

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Evaluate one batch and return its mean loss, or a loss sum and its count."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the class of a recipe says of itself.

    Attributes:
        name: of the class, for messages.
        has_own_fit_batch: whether it overrides ``fit_batch``.
        freezes: whether it overrides ``freeze_optimizers``.
        begins_batches: whether it overrides ``on_fit_batch_start``.

    Ranks: local; equal on all ranks.
    """

    name: str
    has_own_fit_batch: bool = False
    freezes: bool = False
    begins_batches: bool = False


class StepHooks(Protocol):
    """The hooks of a recipe that have a say in an optimizer step.

    Ranks: all.
    """

    def freeze_optimizers(
        self,
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that step."""

    def check_gradients(self) -> None:
        """Drop gradients that are not finite."""
