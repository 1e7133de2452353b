"""The parts that a Brain holds, made once and wired to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.optim import LrScaling
from ddpkit.run.preflight import Preflight
from ddpkit.run.save_and_stop import CheckpointPolicy, StopControl
from ddpkit.run.stage_runner import StageRunner
from ddpkit.training import LoaderFactory, RunLength

if TYPE_CHECKING:
    from types import SimpleNamespace

    from ddpkit.training import TrainStep


class Run:
    """What stands behind a Brain: the parts of a run, made once and wired to each other.

    Args:
        train_step: one optimizer step; has the recipe, the options, the modules, the strategy and the progress.
        hparams: of the recipe.
        checkpointer: or None.

    Attributes:
        train_step: as given.
        recipe: what its class overrides.
        strategy: how modules are wrapped and gradients averaged.
        policy: when to save, what to recover.
        stop: why and when to stop; failure notice and limits of time.
        preflight: compares the ranks, shows the start-up block.
        stages: runs a stage.
        loaders: makes loaders.
        epochs: of this call of ``fit``; None where that is not known.
        length: of this call of ``fit``.
        lr_scaling: what learning rates are multiplied by.
        is_wrapped: whether modules are compiled and wrapped.
        is_prepared: whether optimizers are made, too.

    Raises:
        ConfigError: an option cannot work.

    Ranks: local; alike on every rank.
    """

    def __init__(self, train_step: TrainStep, hparams: SimpleNamespace, checkpointer: Any) -> None:
        self.train_step, self.recipe, self.strategy = train_step, train_step.recipe, train_step.strategy
        options, progress = train_step.options, train_step.progress
        self.policy = CheckpointPolicy(checkpointer, train_step)
        self.stop = StopControl(options, hparams, progress, self.policy)
        self.preflight = Preflight(train_step, self.policy)
        self.stages = StageRunner(train_step, self.policy, self.stop)
        self.loaders = LoaderFactory(options, hparams, self.strategy)
        self.epochs: int | None = 1
        self.length = RunLength()
        self.is_wrapped = False
        self.lr_scaling = LrScaling()
        self.is_prepared = False

    def replace(self, name: str, value: Any) -> None:
        """Replace modules, hparams or options in all parts, after a recipe has assigned others.

        Args:
            name: ``"modules"``, ``"hparams"`` or ``"options"``, as the parts call it.
            value: what a recipe has put in its place.
        """
        own = (self.train_step, self.policy, self.loaders, self.stop, self.preflight, self.stages)
        for part in (*own, self.policy.run_state, self.policy.rank_state):
            for attribute in {name, f"_{name}"} & vars(part).keys():
                setattr(part, attribute, value)
