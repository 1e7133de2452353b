"""The schedule of learning rates that a run makes of the Brain's ``scheduler_class``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.optim import make_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.training import RunContext, RunLength, TrainStep


class RecipeSchedule:
    """Makes the schedule once the recipe has its optimizer, and checks that it is there.

    Args:
        context: of the run.
        train_step: which steps it.
        policy: whose checkpoints have it.

    Ranks: local; alike on every rank.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        policy: CheckpointPolicy,
    ) -> None:
        self._context = context
        self._train_step = train_step
        self._policy = policy

    def make(
        self,
        scheduler_class: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        length: RunLength,
    ) -> None:
        """Make the scheduler of ``scheduler_class``, which steps and checkpoints then have.

        Args:
            scheduler_class: as the Brain was given it.
            optimizer: whose rates it sets.
            length: of this call of ``fit``.

        Raises:
            ConfigError: the class cannot be used.
        """
        every = self._context.options.scheduler_every
        steps = length.total_steps if every == "step" else length.epochs
        before = self._train_step.schedule
        self._train_step.schedule = make_schedule(scheduler_class, optimizer, every, steps)
        self._policy.add_schedule(self._train_step.schedule, before)

    def require(self, *, validates: bool) -> None:
        """Check, when the optimizers are made, that the schedule that was asked for can step.

        Args:
            validates: whether ``fit`` was given data for a validation.

        Raises:
            ConfigError: it is missing, or follows a valid loss and nothing is validated.
        """
        schedule = self._train_step.schedule
        if self._context.scheduler_class is not None and schedule is None:
            raise ConfigError(
                "scheduler_class was given, and nothing has made a schedule of it: "
                f"{self._context.recipe.name} overrides init_optimizers or gives no opt_class. "
                "Call super().init_optimizers(), or leave scheduler_class out."
            )
        if schedule is not None and schedule.follows_loss and not validates:
            raise ConfigError(
                "ReduceLROnPlateau follows the valid loss, and fit was given no valid_set."
            )
