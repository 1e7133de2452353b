"""The parts that a Brain holds, made once and wired to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.run.auto_micro_batch import AutoMicroBatch
from ddpkit.run.checkpoint_policy import CheckpointPolicy
from ddpkit.run.guard import RunGuard
from ddpkit.run.loader_factory import LoaderFactory
from ddpkit.run.preflight import Preflight
from ddpkit.run.rank_state import RankState
from ddpkit.run.stage_runner import StageRunner
from ddpkit.run.state import RunState
from ddpkit.run.stop_control import StopControl
from ddpkit.training import LrScaling, RunLength, TrainStep

if TYPE_CHECKING:
    from types import SimpleNamespace

    import torch
    from torch import nn

    from ddpkit.ema import WeightAverage
    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies import Strategy
    from ddpkit.training import Progress, Recipe


class Run:
    """What stands behind a Brain: the parts of a run, made once and wired to each other.

    Args:
        recipe: what its class overrides.
        options: of the run.
        hparams: of the recipe.
        modules: on their device.
        checkpointer: or None.
        strategy: how modules are wrapped and gradients averaged.
        scaler: of fp16 gradients; may be disabled.
        progress: of the run.
        ema: average of the weights, or None.

    Attributes:
        train_step: one optimizer step.
        policy: when to save, what to recover.
        stop: why and when to stop.
        guard: failure notice and limits of time.
        preflight: compares the ranks, shows the start-up block.
        stages: runs a stage.
        loaders: makes loaders.
        epochs: of this call of ``fit``; None where that is not known.
        length: of this call of ``fit``.
        lr_scaling: what learning rates are multiplied by.
        is_prepared: whether modules are wrapped and optimizers made.

    Raises:
        ConfigError: an option cannot work.

    Ranks: local; alike on every rank.
    """

    def __init__(  # noqa: PLR0913 -- all that the parts are made of
        self,
        recipe: Recipe,
        options: RunOptions,
        hparams: SimpleNamespace,
        modules: nn.ModuleDict,
        checkpointer: Any,
        *,
        strategy: Strategy,
        scaler: torch.amp.GradScaler,
        progress: Progress,
        ema: WeightAverage | None,
    ) -> None:
        self.recipe, self.strategy = recipe, strategy
        self.train_step = TrainStep(recipe, modules, strategy, options, progress, scaler, ema)
        rank_state = RankState(progress, strategy, modules, saves=checkpointer is not None)
        run_state = RunState(options, progress, modules, self.train_step, rank_state)
        parts = options, progress, self.train_step, run_state, rank_state
        self.policy = CheckpointPolicy(checkpointer, *parts, has_own_fit_batch=recipe.has_own_fit_batch)
        self.stop = StopControl(options, hparams, progress, self.policy)
        self.guard = RunGuard(options, progress, self.stop.signals)
        self.preflight = Preflight(options, progress, self.train_step, self.policy)
        owners = self.policy, self.stop, self.guard, self.preflight, AutoMicroBatch(recipe, self.train_step, run_state)
        self.stages = StageRunner(options, progress, modules, self.train_step, rank_state, *owners)
        self.loaders = LoaderFactory(options, hparams, strategy)
        self.epochs: int | None = 1
        self.length = RunLength()
        self.lr_scaling = LrScaling()
        self.is_prepared = False

    def replace(self, name: str, value: Any) -> None:
        """Give the parts something else in the place of what they were made of.

        Args:
            name: ``"modules"``, ``"hparams"`` or ``"options"``, as the parts call it.
            value: what a recipe has put in its place.
        """
        own = (self.train_step, self.policy, self.loaders, self.stop, self.guard, self.preflight, self.stages)
        for part in (*own, self.policy.run_state, self.policy.rank_state):
            for attribute in {name, f"_{name}"} & vars(part).keys():
                setattr(part, attribute, value)
