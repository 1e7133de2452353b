"""The parts that a Brain holds, made once and wired to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.control import usage_errors
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.optim import LrScaling
from ddpkit.options import RUN_OPTIONS
from ddpkit.run.checkpoint_policy import CheckpointPolicy
from ddpkit.run.fit_counters import FitCounters
from ddpkit.run.preflight import Preflight
from ddpkit.run.run_record import RunRecord
from ddpkit.run.stage_runner import StageRunner
from ddpkit.run.stop_control import StopControl
from ddpkit.run_opts import RunOptions
from ddpkit.strategies import check_strategy, modules_on_device
from ddpkit.train_logger import join_loggers
from ddpkit.training import LoaderFactory, RunLength, require_module_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.training import RunContext, TrainStep


logger = get_logger(__name__)

NO_OPTION = (
    "self.%s = %r does not set the option of this name, which is %r. Set self.run_opts[%r] before "
    "fit. If the attribute is your own, all is well."
)

#: Options that are read at ``run_opts`` only: an attribute of the name is a recipe's own.
APART = {name: row for name, row in RUN_OPTIONS.items() if not row.is_attribute}
#: Attributes of a Brain of which the parts are told when a recipe assigns them.
FOLLOWED = frozenset({"modules", "hparams", "run_opts", "opt_class", "scheduler_class", *APART})


class Run:
    """What stands behind a Brain: the parts of a run, made once and wired to each other.

    Args:
        context: what the parts share.
        train_step: one optimizer step.
        checkpointer: or None.

    Attributes:
        context: as given.
        train_step: as given.
        policy: when to save, what to recover.
        stop: why and when to stop; failure notice and limits of time.
        preflight: compares the ranks, shows the start-up block.
        record: writes the begin and the end of each call of ``fit`` into the run's log.
        stages: runs a stage.
        loaders: makes loaders.
        counters: which epoch counter the calls of ``fit`` count with.
        epochs: of this call of ``fit``; None where that is not known.
        length: of this call of ``fit``.
        lr_scaling: what learning rates are multiplied by.
        is_wrapped: whether modules are compiled and wrapped.
        is_prepared: whether optimizers are made, too.
        replacing: what replaces a part that a recipe assigns, by its name; is given the new one and
            the Brain.

    Raises:
        ConfigError: an option cannot work.

    Ranks: local; alike on every rank.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        checkpointer: Any,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.policy = CheckpointPolicy(context, train_step, checkpointer)
        self.stop = StopControl(context, self.policy)
        self.preflight = Preflight(context, train_step, self.policy)
        self.record = RunRecord(context, self.policy, self.preflight)
        self.stages = StageRunner(context, train_step, self.policy, self.stop)
        self.loaders = LoaderFactory(context)
        self.counters = FitCounters()
        self.epochs: int | None = 1
        self.length = RunLength()
        self.is_wrapped = False
        self.lr_scaling = LrScaling()
        self.is_prepared = False
        self.replacing: dict[str, Callable[[Any, Any], None]] = {
            "checkpointer": self.policy.replace_checkpointer,
            "scaler": self._replace_scaler,
            "ema": self._replace_average,
        }

    def check_options(self) -> None:
        """Check, when ``fit`` begins, what a recipe may have assigned since the Brain was made.

        Raises:
            ConfigError: options that do not go together, or name what is not there.
        """
        context = self.context
        options = context.options
        with usage_errors():
            options.check()
            if not self.is_wrapped:
                check_strategy(options, decides_late=context.recipe.has_own_fit_batch)
                require_module_keys(context.modules, options)

    def assigned(
        self,
        name: str,
        before: Any,
        value: Any,
    ) -> Any:
        """Have all parts follow an attribute that a recipe assigns.

        Args:
            name: one of :data:`FOLLOWED`.
            before: its value so far.
            value: the new one.

        Returns:
            What the Brain has under that name now.

        Raises:
            ConfigError: the run cannot follow any more.
        """
        if name == "modules":
            return self.replace_modules(value)
        if name == "hparams":
            return self.replace_hparams(value)
        if name == "run_opts":
            return self.replace_options(value)
        if name in APART:
            self._tell_of_option(name, value)
        elif self.is_prepared and value is not before:
            raise ConfigError(
                f"{name} was assigned after fit has made the optimizers of it. Assign it before "
                "the first call of fit; or assign optimizers_dict and step a scheduler of your "
                "own."
            )
        return value

    def _tell_of_option(self, name: str, value: Any) -> None:
        """Warn, if an attribute of a recipe looks like a value for the option of its name."""
        now = self.context.options[name]
        with contextlib.suppress(ConfigError):
            if APART[name].coerce(value, "") != now:
                logger.warning_once(NO_OPTION, name, value, now, name)

    def follow_optimizers(self, attributes: Mapping[str, Any]) -> None:
        """Scale the steps of optimizers, and drop casts of weights after them, if that is to be.

        Args:
            attributes: of the Brain; optimizers among them are followed, too.
        """
        named = self.train_step.named_optimizers()
        known = {id(one) for one in named.values()}
        others = {
            name: one
            for name, one in attributes.items()
            if isinstance(one, torch.optim.Optimizer) and id(one) not in known
        }
        self.lr_scaling.follow({**named, **others})
        self.train_step.drop_casts_after_steps({**named, **others})

    def _replace_scaler(self, scaler: Any, _: Any) -> None:
        self.train_step.scaler = scaler
        self.policy.register_scaler()

    def _replace_average(self, ema: Any, _: Any) -> None:
        # of the modules of now it is an average of whatever the run trains; else of a teacher
        if ema is not None and ema.modules is self.context.modules:
            ema.follow_modules_of(self.context)
        self.train_step.ema = ema
        self.policy.register_average()

    def replace_modules(self, modules: Any) -> nn.ModuleDict:
        """Train and evaluate other modules from now on.

        Args:
            modules: by name; moved to the device.

        Returns:
            What the Brain has as ``modules``: the same object, if it is a ``torch.nn.ModuleDict``.

        Raises:
            ConfigError: a training pass is running, whose gradients are averaged as it began; or no
                modules are given.
        """
        context = self.context
        if context.progress.is_in_pass:
            raise ConfigError(
                "modules was assigned in a training batch, and the pass goes on with those that "
                "it began with. Assign it in on_stage_start, or before fit."
            )
        moved = modules_on_device(
            modules,
            context.device,
            keeps_meta=context.strategy.divides,
        )
        context.modules = modules if isinstance(modules, nn.ModuleDict) else moved
        if not context.progress.is_fitting:
            self.train_step.watch_anew()
        return context.modules

    def replace_hparams(self, hparams: Any) -> SimpleNamespace:
        """Read other hyperparameters from now on.

        Args:
            hparams: a namespace, or a mapping.

        Returns:
            What the Brain has as ``hparams``.
        """
        values = hparams if isinstance(hparams, Mapping) else vars(hparams)
        joined = join_loggers(values)
        if isinstance(hparams, Mapping):
            hparams = SimpleNamespace(**joined)
        elif "train_logger" in joined:
            hparams.train_logger = joined["train_logger"]
        self.context.hparams = hparams
        return self.context.hparams

    def replace_options(self, options: Any) -> RunOptions:
        """Take other options over, as far as they can still be changed; all parts read the same
        object.

        Args:
            options: a :class:`~ddpkit.run_opts.RunOptions`, or a mapping.

        Returns:
            What the Brain has as ``run_opts``, the object that it had before.

        Raises:
            ConfigError: an option has another value, and was read for good.
        """
        own = self.context.options
        hparams = vars(self.context.hparams)
        own.take(RunOptions.from_dictionary(options).resolved(hparams))
        return own
