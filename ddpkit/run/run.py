"""The parts that a Brain holds, made once and wired to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.control import usage_errors
from ddpkit.distributed import run_on_main
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.options import PREPARED, RUN_OPTIONS
from ddpkit.parts import own_parts
from ddpkit.reporting import TimeLeft
from ddpkit.run.checkpoint_policy import CheckpointPolicy
from ddpkit.run.early_end import EarlyEnd
from ddpkit.run.epoch_numbers import last_epoch
from ddpkit.run.fit_counters import FitCounters
from ddpkit.run.initial_weights import InitialWeights
from ddpkit.run.preflight import Preflight
from ddpkit.run.recipe_schedule import RecipeSchedule
from ddpkit.run.run_record import RunRecord
from ddpkit.run.stage_runner import StageRunner
from ddpkit.run.step_plan import StepPlan, sizes_in_run
from ddpkit.run.stop_control import StopControl
from ddpkit.run.total_steps import note_epoch
from ddpkit.run.validations import Validations
from ddpkit.run_opts import RunOptions
from ddpkit.strategies import check_strategy
from ddpkit.train_logger import join_loggers
from ddpkit.training import (
    LoaderFactory,
    RunLength,
    check_train_data,
    length_of,
    require_module_keys,
)
from ddpkit.types import FitResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.run.choose_start import Start
    from ddpkit.training import BatchSizes, RunContext, TrainStep


logger = get_logger(__name__)

NO_OPTION = (
    "self.%s = %r does not set the option of this name, which is %r. Set self.run_opts[%r] before "
    "fit. If the attribute is your own, all is well."
)

#: Options that are read at ``run_opts`` only: an attribute of the name is a recipe's own.
RUN_OPTS_ONLY = {name: row for name, row in RUN_OPTIONS.items() if not row.is_attribute}


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
        initial_weights: what ``init_from`` gives a new run.
        stop: why and when to stop; failure notice and limits of time.
        preflight: compares the ranks, shows the start-up block.
        record: writes the begin and the end of each call of ``fit`` into the run's log.
        stages: runs a stage.
        loaders: makes loaders.
        schedule: makes the schedule of learning rates that the Brain was given.
        validations: when this call of ``fit`` validates.
        early_end: whether this call of ``fit`` is to end after the present epoch.
        counters: which epoch counter the calls of ``fit`` count with.
        epochs: of this call of ``fit``; None where that is not known.
        length: of this call of ``fit``.
        is_wrapped: whether modules are compiled and wrapped.
        is_prepared: whether optimizers are made, too.

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
        self.initial_weights = InitialWeights(context, self.policy)
        self.stop = StopControl(context, self.policy)
        self.preflight = Preflight(context, train_step, self.policy)
        self.record = RunRecord(context, self.policy, self.preflight)
        self.early_end = EarlyEnd()
        self.validations = Validations(context, self.early_end)
        self.stages = StageRunner(context, train_step, self.policy, self.stop, self.validations)
        self.loaders = LoaderFactory(context)
        self.schedule = RecipeSchedule(context, train_step, self.policy)
        self.counters = FitCounters()
        self.epochs: int | None = 1
        self.length = RunLength()
        self.is_wrapped = False
        self.is_prepared = False
        self._prepared: dict[str, torch.optim.Optimizer] = {}
        self.stages.prepare_new_optimizers = self._prepare_new_optimizers

    @contextlib.contextmanager
    def hearing(self, brain: Any) -> Iterator[None]:
        """Return a context for a call of ``fit``, in whose steps the parts hear their events: those
        of the recipe, then those that options ask for.

        Args:
            brain: of the recipe.
        """
        parts = self.context.parts
        step = self.train_step
        self.early_end.begin()
        with parts.with_own(own_parts(self.context, step)), parts.around_fit(brain):
            step.on_gradients = parts.bound("on_gradients", brain)
            step.step_counted = parts.bound("on_step_counted", brain)
            step.after_window = parts.bound("after_step", brain)
            try:
                yield
            finally:
                step.on_gradients = step.step_counted = step.after_window = None
                self.validations.end_fit()

    def ask_to_end(self, reason: str) -> None:
        """End the training after the present epoch.

        Args:
            reason: in words.

        Raises:
            ConfigError: no training runs.
        """
        if not self.context.progress.is_fitting:
            raise ConfigError(
                "stop_training was called outside of fit, and there is no training to stop. Call "
                "it in a hook or a part."
            )
        self.early_end.ask(reason)

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
                check_strategy(options, has_own_fit_batch=context.recipe.has_own_fit_batch)
                require_module_keys(context.modules, options)

    def plan_steps(
        self,
        train: Any,
        valid: Any,
        epoch_counter: Any,
    ) -> BatchSizes:
        """Compare the data of the ranks; from its length follow batches and steps.

        Args:
            train: the training loader.
            valid: those of the validation, or None.
            epoch_counter: of this call of ``fit``.

        Raises:
            ConfigError: the data cannot be divided.
            DataError: the data cannot feed the run.
            RankMismatchError: the ranks have other data.
        """
        options = self.context.options
        strategy = self.context.strategy
        self.preflight.compare_data(
            train=train, **({"valid": None} if valid is None else valid.by_stage("valid"))
        )
        self.stages.passes.require(train)
        length = length_of(train)
        shards = strategy.division().each
        check_train_data(train, length)
        length = length and length // shards
        factor = self.context.accumulation.factor // shards
        sizes = sizes_in_run(train, self.context)
        state = self.policy.run_state
        state.step_plan = StepPlan.of(sizes, train)
        ahead = note_epoch(state, length, factor, epoch_counter)
        self.length = found = RunLength.of(length, factor, self.epochs, options, ahead=ahead)
        self.context.rate_factor.forget()
        self.stages.time_left = TimeLeft(
            last_epoch(epoch_counter, found),
            validates=valid is not None,
        )
        return sizes

    def fit_result(self, reason: str) -> FitResult:
        """Return what ``fit`` returns.

        Args:
            reason: why it ends.
        """
        progress = self.context.progress.resolved
        losses = (progress.train_loss, progress.valid_loss)
        newest = self.policy.newest()
        logged = (
            run_on_main(
                lambda: {name: dict(values) for name, values in progress.logged.values.items()}
            )
            or {}
        )
        return FitResult(
            reason,
            progress.epochs,
            progress.optimizer_step,
            *losses,
            newest,
            logged,
        )

    def require_no_training(self, call: str, *, recovers: bool) -> None:
        """Refuse what recovers a checkpoint over the weights of a training, or would end a pass of
        it.

        Args:
            call: what is called, ``"evaluate"`` or ``"predict"``.
            recovers: whether it would recover a checkpoint.

        Raises:
            ConfigError: a training runs.
        """
        progress = self.context.progress
        if progress.is_fitting and (
            progress.is_in_pass or (recovers and self.policy.checkpointer is not None)
        ):
            raise ConfigError(
                f"{call} was called inside fit: it would recover a checkpoint over the weights "
                "that are being trained, or end the pass that is running. Call it after fit, or "
                "give fit a valid_set."
            )

    def choose_start(self) -> Start | None:
        """Choose, once for all ranks, the checkpoint that this call of ``fit`` starts from.

        Returns:
            The start; None without a checkpointer.
        """
        self.initial_weights.find_before_move()
        return self.policy.choose_start()

    def keep_steps(
        self,
        start: Start | None,
        train_set: Any,
        loader_kwargs: Mapping[str, Any],
    ) -> None:
        """Keep what an optimizer step is made of when a checkpoint is resumed, as far as this run
        can.

        Args:
            start: of this call of ``fit``.
            train_set: as it was given to ``fit``.
            loader_kwargs: of its loader.

        Raises:
            ConfigError: so many processes cannot take such steps.
        """
        before = None if start is None else start.step_plan
        if before is not None and before.per_process is not None:
            self.stages.passes.begin_with(before.per_process)
        keeps_batches = self.loaders.counts_batches(train_set, loader_kwargs)
        self.policy.keep_global_batch(before, keeps_batches=keeps_batches)

    def start_parts(self, brain: Any) -> None:
        """Tell the parts that the training is about to begin; what fails on one rank ends all.

        Args:
            brain: of the recipe.
        """
        parts = self.context.parts
        if parts.hears("on_fit_start"):
            self.preflight.on_all_ranks(parts.tell, "on_fit_start", brain)

    def start_rows(self) -> dict[str, str]:
        """Return rows on weights and settings that are not the checkpoint's."""
        return {
            "init_from": self.initial_weights.row,
            "new": self.policy.run_state.new_settings.row,
        }

    def recover_for_evaluation(self, max_key: str | None, min_key: str | None) -> None:
        """Load the checkpoint to evaluate; warn where there is none.

        Args:
            max_key: the checkpoint with the highest value of this key.
            min_key: the checkpoint with the lowest; without either, the newest.

        Raises:
            CheckpointUsageError: there are checkpoints, and none has the key.
            ConfigError: ``evaluate_ema``, and the checkpoint has no average.
        """
        found = self.policy.recover_for_evaluation(max_key, min_key)
        if found is None:
            self._warn_of_first_weights()
        else:
            self.train_step.average.require_in(found)

    def _warn_of_first_weights(self) -> None:
        """Warn that what is evaluated is neither trained, nor of a checkpoint or of
        ``init_from``.
        """
        trains = self.context.opt_class is not None and self.train_step.optimizers is None
        if trains and not self.initial_weights.row:
            logger.warning(
                "No checkpoint to evaluate, and nothing was trained: the weights are the initial "
                "ones."
            )

    def tell_of_options(self, attributes: Mapping[str, Any]) -> None:
        """Warn of attributes of a recipe that look like values for options, and set none.

        Args:
            attributes: of the Brain.
        """
        options = self.context.options
        for name in RUN_OPTS_ONLY.keys() & attributes.keys():
            value = attributes[name]
            with contextlib.suppress(ConfigError):  # no value of the option
                if RUN_OPTS_ONLY[name].coerce(value, "") != options[name]:
                    logger.warning_once(NO_OPTION, name, value, options[name], name)

    def check_prepared(self, brain: Any, *, validates: bool) -> None:
        """Check what ``on_fit_start`` has made; after its first call, compare optimizers.

        Args:
            brain: of the recipe.
            validates: whether ``fit`` was given data for a validation.

        Raises:
            ConfigError: the schedule is missing, or follows a valid loss and nothing is validated.
        """
        self.prepare_optimizers()
        self.schedule.require(validates=validates)
        if not self.is_prepared:
            self.is_prepared = True
            self.context.options.reach(PREPARED)
            self.preflight.compare_optimizers()
            self.train_step.watch_first_step(brain)

    def prepare_optimizers(self) -> None:
        """Have the strategy prepare the optimizers that the recipe has now."""
        self._prepared = dict(self.train_step.named_optimizers())
        self.context.strategy.prepare_optimizers(self.context.modules, self._prepared)

    def _prepare_new_optimizers(self, brain: Any) -> None:
        """Prepare optimizers that a recipe has put in the place of others since ``fit`` began."""
        named = self.train_step.named_optimizers()
        if any(optimizer is not self._prepared.get(name) for name, optimizer in named.items()):
            self.prepare_optimizers()
            self.hook_optimizers(brain, {})

    def hook_optimizers(self, brain: Any, attributes: Mapping[str, Any]) -> None:
        """Tell the parts of the optimizers; drop casts of weights after their steps, if that is to
        be.

        Args:
            brain: of the recipe.
            attributes: of the Brain; optimizers among them are followed, too.
        """
        named = self.train_step.named_optimizers()
        known = {id(optimizer) for optimizer in named.values()}
        others = {
            name: value
            for name, value in attributes.items()
            if isinstance(value, torch.optim.Optimizer) and id(value) not in known
        }
        optimizers = {**named, **others}
        self.context.rate_factor.take_over(optimizers.values())
        self.context.parts.tell("on_optimizers_made", brain, optimizers)
        self.train_step.drop_casts_after_steps(optimizers)

    def set_counter(self, name: str, value: Any) -> None:
        """Set a counter of the progress, once the pending step is in it."""
        setattr(self.context.progress.resolved, name, value)

    def replace_maker(self, name: str, maker: Any) -> None:
        """Make optimizers, or their scheduler, in another way.

        Args:
            name: ``"opt_class"`` or ``"scheduler_class"``.
            maker: the new one.

        Raises:
            ConfigError: they are made already.
        """
        if self.is_prepared and maker is not getattr(self.context, name):
            raise ConfigError(
                f"{name} was assigned after fit has made the optimizers of it. Assign it before "
                "the first call of fit; or assign optimizers_dict and step a scheduler of your "
                "own."
            )
        setattr(self.context, name, maker)

    def replace_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Scale gradients of fp16 with another scaler from now on, which checkpoints hold."""
        self.train_step.scaler = scaler
        self.policy.register_scaler()

    def replace_average(self, average: Any) -> None:
        """Keep another average of the weights from now on, which checkpoints hold."""
        self.train_step.average.replace(average)
        self.policy.register_average()

    def replace_modules(self, modules: Any) -> None:
        """Train and evaluate other modules from now on.

        Args:
            modules: by name; moved to the device. A ``torch.nn.ModuleDict`` stays the same object.

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
        moved = context.strategy.place(modules, context.device)
        context.modules = modules if isinstance(modules, nn.ModuleDict) else moved
        if not context.progress.is_fitting:
            self.train_step.watch_anew()

    def replace_hparams(self, hparams: Any) -> None:
        """Read other hyperparameters from now on.

        Args:
            hparams: a namespace, or a mapping.
        """
        values = hparams if isinstance(hparams, Mapping) else vars(hparams)
        joined = join_loggers(values)
        if isinstance(hparams, Mapping):
            hparams = SimpleNamespace(**joined)
        elif "train_logger" in joined:
            hparams.train_logger = joined["train_logger"]
        self.context.hparams = hparams

    def replace_options(self, options: Any) -> None:
        """Take other options over, as far as they can still be changed; all parts read the same
        object.

        Args:
            options: a :class:`~ddpkit.run_opts.RunOptions`, or a mapping.

        Raises:
            ConfigError: an option has another value, and was read for good.
        """
        hparams = vars(self.context.hparams)
        given = RunOptions.from_dictionary(options).resolved(hparams)
        self.context.options.take(given)
