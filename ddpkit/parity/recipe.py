"""What a parity check needs of a Brain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ddpkit.training import StepHooks

if TYPE_CHECKING:
    from types import SimpleNamespace

    import torch
    from torch import nn

    from ddpkit.run_opts import RunOptions
    from ddpkit.training import Progress
    from ddpkit.types import Stage


class CheckedBrain(StepHooks, Protocol):
    """A :class:`~ddpkit.brain.Brain` whose gradients are compared.

    A protocol, so that a check can be read and typed without the Brain, which loads it.

    Ranks: as the Brain.
    """

    modules: nn.ModuleDict
    hparams: SimpleNamespace
    run_opts: RunOptions
    progress: Progress
    optimizer_step: int
    checkpointer: Any
    rank: int
    device: str
    hang_timeout: float
    steps_per_epoch: int | None
    total_steps: int | None
    scaler: torch.amp.GradScaler
    training_ctx: Any

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """The modules without any wrapper."""

    def make_dataloader(
        self,
        dataset: Any,
        stage: Stage,
        **loader_kwargs: Any,
    ) -> Any:
        """Make the loader that gives this rank its part of a dataset."""

    def on_fit_start(self) -> None:
        """Compile, wrap, make optimizers."""

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Do what the recipe does before a stage."""

    def fit_batch(self, batch: Any) -> Any:
        """Train on one micro-batch."""

    def optimizers_step(self) -> None:
        """Step the optimizers."""
