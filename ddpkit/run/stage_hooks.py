"""The hooks of a recipe that a stage calls."""

from __future__ import annotations

from typing import Any, Protocol

from ddpkit.training import LoopHooks, StepHooks
from ddpkit.types import Stage


class StageHooks(LoopHooks, StepHooks, Protocol):
    """The hooks of a recipe that a stage calls; metrics are looked for in its attributes and in
    those of ``hparams``.

    Ranks: all.
    """

    hparams: Any

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Begin a stage."""

    def on_stage_end(
        self,
        stage: Stage,
        stage_loss: float,
        epoch: int | None = None,
    ) -> None:
        """End a stage."""

    def on_set_end(
        self,
        stage: Stage,
        stage_loss: float,
        epoch: int | None = None,
    ) -> None:
        """End a set that does not decide."""

    def predict_batch(self, batch: Any) -> Any:
        """Return the outputs of a batch."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients."""

    def optimizers_step(self) -> None:
        """Step the optimizers."""
