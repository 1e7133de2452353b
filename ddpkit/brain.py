"""The Brain: hooks for a recipe, and the order of a run. The work is done by the parts of
:mod:`ddpkit.run`.
"""

from __future__ import annotations

import math
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit import optim
from ddpkit.base import POSITION, mark_as_loader, mark_as_saver, register_checkpoint_hooks, unwrap
from ddpkit.control import failure_notice, usage_errors
from ddpkit.data import has_own_file, inner_loader
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size
from ddpkit.errors import ConfigError
from ddpkit.logger import format_order_of_magnitude, get_logger
from ddpkit.options import IN_FIT, MADE, WRAPPED
from ddpkit.parts import PartEvents, parts_of
from ddpkit.precision import Precision
from ddpkit.run import (
    RUN,
    EvaluationSets,
    NotMade,
    PredictionPath,
    Run,
    StageLoaders,
    adapt_class,
    are_parts_made,
    given_batch_size,
    given_or_of_class,
    hparams_of_slice,
    is_step_limit_reached,
    run_epochs,
    warn_of_misspelt_hooks,
)
from ddpkit.run_opts import RunOptions, option_attributes
from ddpkit.strategies import (
    NO_CONTEXT,
    choose_strategy,
    is_on_meta,
    take_device,
)
from ddpkit.train_logger import join_loggers
from ddpkit.training import (
    Accumulation,
    KeptAverage,
    Progress,
    Recipe,
    RunContext,
    TrainStep,
    checkpoint_blocks,
    compile_modules,
    count_epochs,
    gather_results,
    one_number,
    require_module_keys,
    sum_and_count,
)
from ddpkit.types import FitResult, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from ddpkit.ema import WeightAverage
    from ddpkit.options import OptionTypes as _Typed
    from ddpkit.parts import Part
else:
    _Typed = object

__all__ = ["Brain", "run_of"]

logger = get_logger(__name__)


def run_of(brain: Brain) -> Run:
    """Return the parts that a Brain holds, for tests.

    Ranks: local.

    Example:
        >>> run_of(Brain(run_opts={"device": "cpu"})).context.strategy.name
        'one device'
    """
    run: Run = vars(brain)[RUN]
    return run


def _check_parity(brain: Brain, train_set: Any, loader_kwargs: Mapping[str, Any]) -> None:
    """Compare the gradients of several processes with those of this one, and end it; without the
    option, do nothing.
    """
    if brain.run_opts.check_parity is None:
        return
    from ddpkit.parity import check_parity  # nothing else needs it

    check_parity(brain, run_of(brain), train_set, loader_kwargs)


def _steps_of_profile(options: RunOptions) -> int | None:
    return options.profile_warmup + options.profile_steps if options.profile_training else None


@register_checkpoint_hooks
@option_attributes
class Brain(_Typed):
    """The training loop of a recipe: subclass it, say what a batch computes, call :meth:`fit` and
    :meth:`evaluate`.

    In the order of a run::

        fit:       make_dataloader (TRAIN, VALID), on_fit_start, and for every epoch:
                     modules.train(), on_stage_start(TRAIN), for every batch:
                       fit_batch: on_fit_batch_start, compute_forward, compute_objectives, optimizers_step,
                                  on_fit_batch_end
                     on_stage_end(TRAIN)
                     modules.eval(), on_stage_start(VALID), evaluate_batch for every batch, on_stage_end(VALID)
        evaluate:  make_dataloader (TEST), on_evaluate_start, on_stage_start(TEST), evaluate_batch for every batch,
                   on_stage_end(TEST)
        predict:   make_dataloader (TEST), on_evaluate_start, predict_batch for every batch

    Every hook is called on every rank. What a recipe does not override is done by the parts of
    :mod:`ddpkit.run`.

    Args:
        modules: name -> ``torch.nn.Module``; each is moved to the device, and wrapped when training
            starts.
        opt_class: called with all parameters, frozen ones too, which may be unfrozen later; returns
            an optimizer. (With ``remove_vector_weight_decay``, called with two groups of the
            trainable ones.) It may stand in the recipe's class instead, as an attribute
            ``opt_class``; what is given here wins.
        hparams: whatever the YAML holds; reachable as ``self.hparams.name``. Run options in it
            count as defaults.
        run_opts: a :class:`~ddpkit.run_opts.RunOptions` or a dict; wins over ``hparams``.
        checkpointer: a :class:`~ddpkit.checkpoints.Checkpointer`; the Brain adds itself, its
            optimizers and the scheduler of ``scheduler_class`` to it.
        scheduler_class: called with the optimizer and the total number of optimizer steps (of
            epochs, with ``scheduler_every=epoch``; None where that is not known), returns a
            scheduler. A function is called with both; a class with the optimizer, and with the
            number if it has a parameter ``total_steps`` or ``T_max``
            (:func:`~ddpkit.optim.make_schedule`). It is made once, with the optimizer, and the
            Brain steps it. It may stand in the recipe's class instead, too.
        parts: features in objects of their own (:class:`~ddpkit.parts.Part`), which hear events in
            this order; those of the key ``parts`` in ``hparams`` come before them.

    Attributes:
        modules: ``torch.nn.ModuleDict``; under a wrapper, the module's own attributes can still be
            reached.
        hparams: namespace; empty where none were given.
        device: of this rank, such as ``"cuda:1"``.
        device_type: its kind alone, such as ``"cuda"``.
        optimizers_dict: name -> optimizer, once :meth:`init_optimizers` has run.
        step: batches of the current stage so far; counts from 1 while a batch is worked on.
        optimizer_step: updates since the run began: windows in which an optimizer has stepped. The
            steps of several optimizers in one window, or of one optimizer several times, count
            once.
        steps_per_epoch: optimizer steps of an epoch on this number of processes, with accumulation;
            known before :meth:`init_optimizers`. None where the length of the data is not known, as
            of a stream.
        total_steps: optimizer steps of this call of :meth:`fit`, from the first epoch that its
            counter counts, those before a restart included; at most ``optimizer_step_limit``. None
            where the epochs, or their steps, are not known and no limit is set. Fewer are made
            where steps are skipped or a counter stops early.
        train_sampler: the sampler of the training batches, once a training loader has been made.
        lr_scale: the factor of ``lr_scaling`` on the learning rates of each step; known once
            ``fit`` has begun.
        nonfinite_count: steps of this epoch that were skipped because a gradient was not finite.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.
        ema: the average of the weights, a :class:`~ddpkit.ema.WeightAverage`, or None without
            ``ema_decay``.

    Raises:
        ConfigError: options or modules that cannot work.
        LaunchError: the launcher's environment contradicts itself, or two ranks have one GPU.

    Ranks: collective; every rank makes the same Brain.

    Example:
        >>> class Line(Brain):
        ...     def compute_forward(self, batch, stage):
        ...         return self.modules.net(batch[0])
        ...     def compute_objectives(self, predictions, batch, stage):
        ...         return torch.nn.functional.mse_loss(predictions, batch[1])
        >>> data = [(torch.tensor([x / 8]), torch.tensor([x / 4])) for x in range(8)]
        >>> opts = {"device": "cpu", "noprogressbar": True}
        >>> line = Line(
        ...     {"net": nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.5), run_opts=opts
        ... )
        >>> line.fit(range(1, 51), data, train_loader_kwargs={"batch_size": 4}).optimizer_steps
        100
        >>> line.evaluate(data, test_loader_kwargs={"batch_size": 8}) < 0.1
        True
    """  # noqa: E501

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: RunOptions | Mapping[str, Any] | None = None,
        checkpointer: Any = None,
        scheduler_class: Callable[..., Any] | None = None,
        parts: Iterable[Part] | None = None,
    ) -> None:
        joined_hparams = join_loggers(hparams or {})
        options = RunOptions.from_dictionary(run_opts or {}).resolved(hparams)
        with usage_errors():
            heard = PartEvents(parts_of(hparams, parts))
        ddp_init_group(options)
        self.rank = get_rank() or 0
        device = str(options.device)
        own = type(self)
        recipe = Recipe(
            own.__name__,
            has_own_fit_batch=own.fit_batch is not Brain.fit_batch,
            freezes=own.freeze_optimizers is not Brain.freeze_optimizers,
            begins_batches=own.on_fit_batch_start is not Brain.on_fit_batch_start,
        )
        accumulation = Accumulation(options)
        strategy = choose_strategy(
            options,
            accumulation,
            has_own_fit_batch=recipe.has_own_fit_batch,
        )
        take_device(device)
        self.device_type = torch.device(device).type
        context = RunContext(
            recipe,
            options,
            accumulation,
            strategy.place(modules or {}, device),
            SimpleNamespace(**hparams_of_slice(joined_hparams)),
            strategy,
            opt_class=given_or_of_class(opt_class, own, "opt_class"),
            scheduler_class=given_or_of_class(scheduler_class, own, "scheduler_class"),
            parts=heard,
        )
        if strategy.has_same_bits():
            context.progress.round_nothing()
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        self.train_sampler: Any = None
        self.tot_prof_steps = _steps_of_profile(options)
        average = KeptAverage.of_run(context)
        with usage_errors():
            precision = Precision(options.precision, options.eval_precision, device)
            require_module_keys(context.modules, options)
            step = TrainStep(context, precision.scaler, average)
            self.__run = Run(context, step, checkpointer)
        self.training_ctx = precision.training_ctx
        self.evaluation_ctx = precision.evaluation_ctx
        self.__run.policy.register(self)
        options.reach(MADE)
        self.print_trainable_parameters()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        adapt_class(cls, Brain)

    __run: Run = NotMade()  # type: ignore[assignment]

    def __set_modules(self, modules: Any) -> None:
        if are_parts_made(self, "modules", modules):
            self.__run.replace_modules(modules)

    def __set_progress(self, progress: Any) -> None:
        if are_parts_made(self, "progress", progress) and progress is not self.progress:
            raise AttributeError(
                f"self.progress = {progress!r}: the Brain counts its steps there, and goes on with "
                "its own. Choose another name for the attribute."
            )

    def __set_counter(self, name: str, value: Any) -> None:
        if are_parts_made(self, name, value):
            self.__run.set_counter(name, value)

    def __set_step(self, step: int) -> None:
        self.__set_counter("step", step)

    # These are read in each batch, by a recipe or by the loop: a getter in Python costs a call.
    modules: nn.ModuleDict = property(  # type: ignore[assignment]
        operator.attrgetter(f"{RUN}.context.modules"),
        __set_modules,
        doc="What is trained and evaluated, by name.",
    )
    progress: Progress = property(  # type: ignore[assignment]
        operator.attrgetter(f"{RUN}.context.progress"),
        __set_progress,
        doc="How far the run has come.",
    )
    step: int = property(  # type: ignore[assignment]
        operator.attrgetter(f"{RUN}.context.progress.step"),
        __set_step,
        doc="Batches of the current stage so far.",
    )

    @property
    def hparams(self) -> SimpleNamespace:
        """What the YAML holds."""
        return self.__run.context.hparams

    @hparams.setter
    def hparams(self, hparams: Any) -> None:
        if are_parts_made(self, "hparams", hparams):
            self.__run.replace_hparams(hparams)

    @property
    def run_opts(self) -> RunOptions:
        """The options, as they were given; all parts read this one object."""
        return self.__run.context.options

    @run_opts.setter
    def run_opts(self, run_opts: Any) -> None:
        if are_parts_made(self, "run_opts", run_opts):
            self.__run.replace_options(run_opts)

    @property
    def opt_class(self) -> Callable[[Iterable[Any]], torch.optim.Optimizer] | None:
        """What makes the optimizer, or None."""
        return self.__run.context.opt_class

    @opt_class.setter
    def opt_class(self, opt_class: Any) -> None:
        if are_parts_made(self, "opt_class", opt_class):
            self.__run.replace_maker("opt_class", opt_class)

    @property
    def scheduler_class(self) -> Callable[..., Any] | None:
        """What makes the scheduler, or None."""
        return self.__run.context.scheduler_class

    @scheduler_class.setter
    def scheduler_class(self, scheduler_class: Any) -> None:
        if are_parts_made(self, "scheduler_class", scheduler_class):
            self.__run.replace_maker("scheduler_class", scheduler_class)

    @property
    def optimizer_step(self) -> int:
        """Optimizer updates since the run began."""
        return self.__run.context.progress.resolved.optimizer_step

    @optimizer_step.setter
    def optimizer_step(self, optimizer_step: int) -> None:
        self.__set_counter("optimizer_step", optimizer_step)

    @property
    def nonfinite_count(self) -> int:
        """Skipped steps of this epoch."""
        return self.__run.context.progress.resolved.nonfinite

    @nonfinite_count.setter
    def nonfinite_count(self, nonfinite_count: int) -> None:
        self.__set_counter("nonfinite", nonfinite_count)

    @property
    def avg_train_loss(self) -> float:
        """Mean training loss of the epoch so far."""
        return self.__run.context.progress.avg_train_loss

    @avg_train_loss.setter
    def avg_train_loss(self, avg_train_loss: float) -> None:
        self.__set_counter("avg_train_loss", avg_train_loss)

    @property
    def checkpointer(self) -> Any:
        """The checkpointer, or None."""
        return self.__run.policy.checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        if are_parts_made(self, "checkpointer", checkpointer):
            self.__run.policy.replace_checkpointer(checkpointer, self)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of fp16 gradients; disabled with another precision."""
        return self.__run.train_step.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        if are_parts_made(self, "scaler", scaler):
            self.__run.replace_scaler(scaler)

    @property
    def ema(self) -> WeightAverage | None:
        """The average of the weights, or None without ``ema_decay`` or ``AveragedWeights``."""
        return self.__run.train_step.average.weights

    @ema.setter
    def ema(self, ema: WeightAverage | None) -> None:
        if are_parts_made(self, "ema", ema):
            self.__run.replace_average(ema)

    @property
    def optimizers_dict(self) -> dict[str, torch.optim.Optimizer] | None:
        """Name -> optimizer, once :meth:`init_optimizers` has run."""
        return self.__run.train_step.optimizers

    @optimizers_dict.setter
    def optimizers_dict(self, optimizers: dict[str, torch.optim.Optimizer] | None) -> None:
        if are_parts_made(self, "optimizers_dict", optimizers):
            self.__run.train_step.optimizers = optimizers

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of ``opt_class``, or a recipe's single one."""
        optimizer = self.__run.train_step.optimizer
        if optimizer is None:
            raise AttributeError(
                f"{type(self).__name__} has no optimizer: init_optimizers makes it when fit begins"
            )
        return optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if are_parts_made(self, "optimizer", optimizer):
            self.__run.train_step.optimizer = optimizer

    @property
    def profiler(self) -> Any:
        """Of this call of ``fit``, with ``profile_training``; else None."""
        return self.__run.stages.observers.profile.profiler

    @profiler.setter
    def profiler(self, profiler: Any) -> None:
        if are_parts_made(self, "profiler", profiler):
            self.__run.stages.observers.profile.profiler = profiler

    # What is in use of the options of these names: the options stay as they were given.

    @property
    def grad_accumulation_factor(self) -> int:
        """Batches of each process per optimizer step."""
        return self.__run.context.accumulation.factor

    @grad_accumulation_factor.setter
    def grad_accumulation_factor(self, factor: int) -> None:
        if factor != self.grad_accumulation_factor:
            self.run_opts["grad_accumulation_factor"] = factor

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step over all processes, or None."""
        return self.__run.context.accumulation.global_batch_size

    @global_batch_size.setter
    def global_batch_size(self, size: int | None) -> None:
        if size != self.global_batch_size:
            self.run_opts["global_batch_size"] = size

    @property
    def micro_batch_size(self) -> int | None:
        """Most samples at a time on a process, or None."""
        return self.__run.context.accumulation.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int | None) -> None:
        if size != self.micro_batch_size:
            self.run_opts["micro_batch_size"] = size

    @property
    def lr_scale(self) -> float:
        """What ``lr_scaling`` multiplies learning rates by in each step."""
        return self.__run.context.rate_factor.value

    @property
    def logged(self) -> dict[str, float]:
        """The means of what was logged with :meth:`log` in the present stage, by name; in
        ``on_stage_end``, and empty before. Equal on every rank, but for what is logged there.
        """
        return self.progress.logged.of_stage()

    @property
    def set_name(self) -> str | None:
        """The name of the set that is evaluated; None where it has none, and in training."""
        return self.progress.set_name or None

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """The modules without any wrapper."""
        return nn.ModuleDict({name: unwrap(module) for name, module in self.modules.items()})

    # ------------------------------------------------------------------ hooks of a recipe

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Compute predictions from a batch. Must be overridden; may return anything.

        Args:
            batch: as the loader yields it; move it to ``self.device``.
            stage: TRAIN, VALID or TEST.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_forward(self, batch, stage)"
        )

    def compute_objectives(
        self,
        predictions: Any,
        batch: Any,
        stage: Stage,
    ) -> Any:
        """Compute the loss. Must be overridden.

        Args:
            predictions: what :meth:`compute_forward` returned.
            batch: as the loader yields it.
            stage: TRAIN, VALID or TEST.

        Returns:
            The mean over the batch's samples, shape ``()``. Or ``(loss_sum, count)``, where the
            loss is a mean over something else, such as tokens or frames: a sum of shape ``()``, and
            how many it is over (a number, or a tensor of shape ``()``; 0 where a batch has none).
            All that an optimizer step counts then weighs the same.

            None skips a batch, as one without samples; in training it goes with such pairs only.
        """
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} must define compute_objectives(self, predictions, batch, stage)"
        )

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Called before a stage, on all ranks; ``epoch`` is None for TEST.

        The modules are in the mode of the stage already, training or evaluation. A part that is set
        to another mode here, such as ``self.modules.backbone.eval()``, keeps it for the stage.
        """

    def on_stage_end(
        self,
        stage: Stage,
        stage_loss: float,
        epoch: int | None = None,
    ) -> None:
        """Called after a stage, on all ranks, with the mean loss over all ranks' samples."""

    def on_set_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Called in a validation on several sets after each set but the first, in the place of
        :meth:`on_stage_end`, which comes after all of them for the first one.
        """

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Called before the forward pass of every training batch."""

    def on_fit_batch_end(
        self,
        batch: Any,
        outputs: Any,
        loss: torch.Tensor,
        should_step: bool,
    ) -> None:
        """Called after every training batch, and after the step where there is one; ``loss`` is
        still attached.
        """

    def freeze_optimizers(
        self,
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that step now; default: all."""
        return optimizers

    def fit_batch(self, batch: Any) -> Any:
        """Train on one micro-batch: forward, loss, backward, and a step at the end of its window.

        Args:
            batch: as the loader yields it.

        Returns:
            The mean loss of the batch, detached, shape ``()``; on its device, so that nobody waits
            for it. Where :meth:`compute_objectives` returns ``(loss_sum, count)``, these two.
        """
        train_step = self.__run.train_step
        should_step = self.should_step
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            if loss is None or train_step.skipped_batches.is_open:
                loss = train_step.settle_loss(loss)
            train_step.backward(loss)
        result, loss = train_step.record_loss(loss)
        if should_step:
            self.optimizers_step()
        train_step.end_batch()
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return result

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Evaluate one batch; called without gradients.

        Args:
            batch: as the loader yields it.
            stage: VALID or TEST.

        Returns:
            The mean loss of the batch, shape ``()``; or ``(loss_sum, count)``.
        """
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        if loss is None:
            return self.__run.train_step.skipped_batches.skip()
        name = type(self).__name__
        return sum_and_count(loss, name) if loss.__class__ is tuple else one_number(loss, name)

    def predict_batch(self, batch: Any) -> Any:
        """Compute the outputs of a batch for :meth:`predict`; called without gradients. Override it
        at will.

        Args:
            batch: as the loader yields it.

        Returns:
            Outputs with one row per sample of the batch: a tensor or an array with that first
            dimension, a list of that length, or a tuple or a dict of such.
        """
        return self.compute_forward(batch, Stage.TEST)

    def init_optimizers(self) -> None:
        """Make the optimizer and its scheduler.

        Override it for several: fill ``optimizers_dict`` and tell the checkpointer.
        ``self.steps_per_epoch`` and ``self.total_steps`` are known here. The Brain steps the
        scheduler that ``scheduler_class`` makes; a recipe steps its own schedulers itself.

        Raises:
            ConfigError: ``opt_class`` or ``scheduler_class`` cannot be used.
        """
        if self.opt_class is None:
            logger.info("No opt_class: nothing is optimized unless init_optimizers is overridden.")
            return
        split_vectors = self.run_opts.remove_vector_weight_decay
        self.optimizer = optim.make_optimizer(
            self.opt_class,
            self.modules,
            split_vectors=split_vectors,
        )
        self.optimizers_dict = {"opt_class": self.optimizer}
        self.__run.policy.add("optimizer", self.optimizer)
        if self.scheduler_class is not None:
            run = self.__run
            run.schedule.make(self.scheduler_class, self.optimizer, run.length)

    def on_fit_start(self) -> None:
        """Compile, wrap, make optimizers, recover the newest checkpoint: once, however often
        ``fit`` is called.
        """
        if self.__run.is_prepared:
            return
        self.__prepare_modules()
        self.init_optimizers()
        self.__run.prepare_optimizers()
        self.__run.policy.recover(self.modules)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Recover the best checkpoint by a key of its meta, or the newest.

        In a process that does not train, a path given as the option ``resume`` is evaluated
        whatever the keys say.

        Args:
            max_key: the checkpoint with the highest value of this key.
            min_key: the checkpoint with the lowest. A key that none of them has is an error.
        """
        self.__run.initial_weights.begin_evaluation()
        if is_on_meta(self.modules):
            self.__prepare_modules()
        self.__run.recover_for_evaluation(max_key, min_key)

    def make_dataloader(
        self,
        dataset: Any,
        stage: Stage,
        ckpt_prefix: str | None = "dataloader-",
        **loader_kwargs: Any,
    ) -> Any:
        """Make the loader that gives this rank its part of a dataset.

        Args:
            dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields
                batches.
            stage: TRAIN is divided over the ranks; VALID and TEST only with ``shard_evaluation``.
            ckpt_prefix: the loader is saved under this and the stage's name; None: not at all.
            loader_kwargs: as for ``torch.utils.data.DataLoader`` (``batch_size`` counts per
                process), and ``looped_nominal_epoch``. On a GPU ``pin_memory`` is on unless it is
                given: without it, a batch that is moved with ``non_blocking=True`` is waited for.
        """
        loader = self.__run.loaders.make(dataset, stage, loader_kwargs)
        if stage is Stage.TRAIN:
            inner = inner_loader(loader)
            self.train_sampler = getattr(inner, "batch_sampler", None)
        if ckpt_prefix is not None and has_own_file(loader):
            self.__run.policy.add(ckpt_prefix + stage.name, loader)
        return loader

    # ------------------------------------------------------------------ for a fit_batch of your own

    should_step: bool = property(  # type: ignore[assignment]
        operator.attrgetter(f"{RUN}.train_step.should_step"),
        doc="Whether the current micro-batch closes its accumulation window, after which the "
        "optimizers step. The same on every rank, also in a short last window.",
    )

    def backward(
        self,
        loss: Any,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Back-propagate a loss of the current micro-batch. For a ``fit_batch`` of your own.

        The loss is weighed against the other micro-batches of its window, on all ranks, and scaled
        for fp16. The ranks communicate in the micro-batch that closes the window. The gradients of
        several losses add up.

        Args:
            loss: the mean over the batch's samples, shape ``()``; or ``(loss_sum, count)``, as
                :meth:`compute_objectives` returns it, which :meth:`optimizers_step` divides.
            retain_graph: keep the graph for another loss that shares a part of it.

        Raises:
            BatchError: the loss is not a tensor of one number, or does not depend on any parameter;
                or it cannot be added to what was passed before.

        Ranks: collective under DDP where :attr:`should_step` is true; all ranks call it equally
        often.
        """
        self.__run.train_step.backward(loss, retain_graph=retain_graph)

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks.

        It must be around the forward pass, too. An exception leaves everything as it was before.

        Args:
            use: False returns a context that does nothing.
        """
        return self.__run.train_step.no_sync() if use else NO_CONTEXT

    def optimizers_step(self) -> None:
        """Clip all gradients together, step the optimizers, drop the gradients; or skip, on all
        ranks alike.

        A :meth:`fit_batch` of your own may call it several times in a window. They count as one
        step, and the average of the weights and the schedule follow once, when ``fit_batch`` has
        returned.

        An override finds the gradients as the step uses them: averaged over the ranks, divided by
        the count of ``(loss_sum, count)`` and by the scale of fp16. It may clip or change them,
        then calls ``super().optimizers_step()``.

        Raises:
            NonFiniteLossError: more than ``nonfinite_patience`` steps of this epoch were not
                finite.
        """
        self.__run.train_step.step_optimizers(self)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients of the optimizers that are not frozen, or drop them."""
        optim.zero_gradients(
            self.__run.train_step.optimizers_to_step(self),
            set_to_none=set_to_none,
        )

    def check_loss_isfinite(self, loss: torch.Tensor) -> None:
        """Warn on this rank if a loss is not finite; waits for the device. For recipes that
        override ``fit_batch``.

        The step itself is skipped on all ranks by :meth:`optimizers_step`, which also counts and
        gives up.
        """
        if not torch.isfinite(loss).all():
            logger.warning(
                "The loss of step %d is %s on rank %d.",
                self.step,
                loss.tolist(),
                self.rank,
                main_process_only=False,
            )

    def check_gradients(self) -> None:
        """Drop every parameter's gradient that is not finite, with a warning (option
        ``skip_nonfinite_grads``).
        """
        for name in optim.drop_nonfinite(self.modules):
            logger.warning(
                "The gradient of %s is not finite and is left out of step %d.",
                name,
                self.step,
            )

    def update_average(self, loss: torch.Tensor | float, avg_loss: float) -> float:
        """Take one loss into a running mean over ``step`` batches; one that is not finite changes
        nothing.

        Args:
            loss: of the current batch.
            avg_loss: mean of the batches before.

        Returns:
            The new mean.
        """
        value = float(loss)
        return (
            avg_loss + (value - avg_loss) / max(self.step, 1) if math.isfinite(value) else avg_loss
        )

    def log(
        self,
        name: str,
        value: Any,
        count: Any = None,
        *,
        per_step: bool = False,
    ) -> None:
        """Log a value in any hook of a stage: the epoch's mean over all batches and ranks is
        reported.

        The mean is added to what ``log_stats`` is given for this stage, and stands in
        ``metrics.jsonl`` and in ``logged`` of what :meth:`fit` returns. Ranks need not call it
        equally often. A tensor is read at the end of the stage, not now. Values that are not finite
        are left out of the mean, with a warning.

        In ``on_stage_end`` the means are already made: a value logged there is reported as it is,
        from the main process. Log only values there that are equal on every rank, such as a score
        of gathered results.

        Args:
            name: of the value.
            value: a number or a tensor of one element: the mean over the batch's samples, which is
                weighed as the loss is. With ``count``, a sum.
            count: how many things the sum is over, such as tokens: a number or a tensor of one
                element.
            per_step: in training, also write the mean since the last time about once a second.

        Raises:
            BatchError: no single number; or a name that is used in two ways in one kind of stage.

        Ranks: local, where ranks meet at the end of the stage anyway.

        Example:
            >>> class Constant(Brain):
            ...     def compute_forward(self, batch, stage):
            ...         return self.modules.net(batch)
            ...     def compute_objectives(self, predictions, batch, stage):
            ...         self.log("mean", batch.mean())
            ...         self.log("large", (batch > 2).sum(), count=batch.numel())
            ...         return predictions.square().mean()
            >>> opts = {"device": "cpu", "noprogressbar": True}
            >>> brain = Constant({"net": nn.Linear(1, 1)}, torch.optim.SGD, run_opts=opts)
            >>> data = [torch.tensor([float(x)]) for x in range(5)]
            >>> brain.fit([1], data, train_loader_kwargs={"batch_size": 2}).logged
            {'train': {'large': 0.4, 'mean': 2.0}}
        """
        window = self.progress.window
        # nothing of a batch that is repeated to keep step
        weight = window.weight if window.count else 0.0
        self.progress.logged.add(
            name,
            value,
            count,
            weight,
            per_step=per_step,
            step=self.progress.step,
        )

    def stop_training(self, reason: str = "") -> None:
        """End this call of :meth:`fit` after the present epoch and its validation.

        ``fit`` then returns with the reason ``"early_stop"``. All ranks end if one has called this.
        No checkpoint holds it: a script that is started again trains on, unless it asks again, as
        :class:`~ddpkit.parts.EarlyStopping` does in ``on_fit_start``.

        Args:
            reason: in words, for the log.

        Raises:
            ConfigError: called outside of ``fit``.

        Ranks: local.
        """
        self.__run.ask_to_end(reason)

    # ------------------------------------------------------------------ whole runs

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] | None = None,
        valid_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> FitResult:
        """Train, and validate after every epoch.

        It may be called several times. When a script that was stopped in a later call is started
        again, the earlier ones return at once, and the run goes on in that call.

        Args:
            epoch_counter: yields epoch numbers from 1, such as
                :class:`~ddpkit.epoch_loop.EpochCounter`.
            train_set: dataset, or ready-made loader, which is divided over the ranks like a
                dataset.
            valid_set: likewise, or None; or several by name, ``{"clean": a, "noisy": b}``. The
                first one decides; values of others are called ``noisy/loss`` and so on.
            progressbar: None asks the option ``noprogressbar``.
            train_loader_kwargs: for :meth:`make_dataloader`; not changed.
            valid_loader_kwargs: likewise, of each set.

        Returns:
            The last losses, the epochs and optimizer steps, why it ended, and where the newest
            checkpoint is; the same on every rank.

        Raises:
            DataError: the data cannot feed the run.
            RankMismatchError: the ranks are not about to run the same training.
            NonFiniteLossError: too many steps of an epoch were not finite.
            ParityError: with the option ``check_parity``, a difference was found.
            SystemExit: with that option, none was found. Nothing is trained in either case.
            RunStopped: a signal or the time limit has asked for the end.
        """
        run = self.__run
        warn_of_misspelt_hooks(type(self), Brain)
        run.tell_of_options(vars(self))
        self.tot_prof_steps = _steps_of_profile(self.run_opts)
        run.check_options()
        with usage_errors():
            run.context.parts.tell("check", self)
        train_kwargs = train_loader_kwargs or {}
        valid_kwargs = valid_loader_kwargs or {}
        run.preflight.compare_ranks("fit", type(self))
        run.stages.note_logger(self)
        run.epochs = count_epochs(epoch_counter, self.run_opts)
        _check_parity(self, train_set, train_kwargs)  # ends this process, if it is asked for
        if self.run_opts.test_only:
            logger.info("test_only is set: fit does nothing.")
            return FitResult("test_only", optimizer_steps=self.optimizer_step)
        # a save after it is still of that call
        if is_step_limit_reached(run.context) and self.progress.is_cut_short:
            logger.info(
                "optimizer_step_limit=%s has ended an earlier call of fit.",
                self.run_opts.optimizer_step_limit,
            )
            newest = run.policy.newest()
            return FitResult(
                "optimizer_step_limit",
                optimizer_steps=self.optimizer_step,
                newest_checkpoint=newest,
            )
        # failure_notice again, innermost: the others learn of a failure before policy.session
        # saves.
        held = self.run_opts.held(IN_FIT)
        with (
            held,
            run.stop.guarded("fit"),
            run.hearing(self),
            run.stages.session(),
            run.policy.session(),
            failure_notice(),
        ):
            start = run.choose_start()
            run.counters.begin(epoch_counter)
            run.keep_steps(start, train_set, train_kwargs)
            run.stop.remove_note()
            train, valid = self.__fit_loaders(train_set, valid_set, train_kwargs, valid_kwargs)
            sizes = run.plan_steps(train, valid, epoch_counter)
            run.validations.begin_fit(
                self, self._fit_valid, valid, enable=self.__bar_enabled(progressbar)
            )
            self.steps_per_epoch = run.length.steps_per_epoch
            self.total_steps = run.length.total_steps
            run.context.parts.tell("on_sizes_known", self, sizes)
            run.initial_weights.begin(start)
            with POSITION.at("on_fit_start"), run.policy.starting(start):
                self.on_fit_start()
            run.policy.load_deferred()
            run.policy.run_state.restore_trained_flags(self.raw_modules)
            run.tell_of_options(vars(self))
            run.hook_optimizers(self, vars(self))
            run.check_prepared(self, validates=valid is not None)
            if run.policy.is_done_before(train):
                return run.fit_result("done_before")
            run.preflight.check_what_is_saved(self.hparams)
            run.start_parts(self)
            run.preflight.report_training(
                sizes,
                run.length,
                given_batch_size(train_set, train_kwargs),
                valid,
                (self.training_ctx, self.evaluation_ctx),
                {**run.start_rows(), **run.context.parts.rows(self)},
            )
            run.record.begin(sizes, run.length)
            reason = run_epochs(
                run.context,
                run.early_end,
                epoch_counter,
                lambda epoch: self.__train_and_validate(train, epoch, progressbar),
                validates=valid is not None,
            )
            result = run.fit_result(reason)
            run.context.parts.tell("on_fit_end", self, result)
            run.record.end(result)
            return result

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Recover a checkpoint and evaluate it on a test set, or on several.

        Args:
            test_set: dataset or loader; or several by name, as for :meth:`fit`. The hooks then come
                for each.
            max_key: take the checkpoint with the highest value of this key.
            min_key: take the checkpoint with the lowest; without either, the newest.
            progressbar: None asks the option ``noprogressbar``.
            test_loader_kwargs: for :meth:`make_dataloader`; not changed.

        Returns:
            The mean loss over the whole set, the same on every rank. Of several sets a dict of it
            by name.

        Raises:
            CheckpointUsageError: there are checkpoints, and none has the key.
            ConfigError: called inside ``fit`` of the same Brain, where it would recover other
                weights, unless ``on_evaluate_start`` is overridden; or in a training batch.
        """
        run = self.__run
        run.require_no_training(
            "evaluate",
            recovers=type(self).on_evaluate_start is Brain.on_evaluate_start,
        )
        warn_of_misspelt_hooks(type(self), Brain)
        run.tell_of_options(vars(self))
        with usage_errors():
            run.context.parts.tell("check", self)
        run.preflight.compare_ranks("evaluate", type(self))
        run.stages.note_logger(self)
        with run.stop.guarded("evaluate"):
            sets = self.__test_sets(test_set, test_loader_kwargs)
            run.preflight.compare_data(**sets.by_stage("test"))
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            contexts = self.training_ctx, self.evaluation_ctx
            run.preflight.report_evaluation(sets, contexts, run.initial_weights.row)
            return run.stages.test(self, sets, enable_bar=self.__bar_enabled(progressbar))

    def predict(
        self,
        data: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        loader_kwargs: Mapping[str, Any] | None = None,
        output: str | Path | None = None,
    ) -> list[Any]:
        """Recover a checkpoint, run the model over a dataset, and return the output for every
        sample.

        The set is divided over all ranks, whatever ``shard_evaluation`` says. The hooks
        ``on_stage_start`` and ``on_stage_end`` are not called, for lack of a loss;
        :meth:`predict_batch` is. With ``debug`` only ``debug_batches`` batches are run. Every batch
        is a step: ``hang_timeout`` is for a single one, and asked to stop, all ranks end within
        about a second and a batch.

        Args:
            data: dataset or loader.
            max_key: take the checkpoint with the highest value of this key.
            min_key: take the checkpoint with the lowest; without either, the newest.
            progressbar: None asks the option ``noprogressbar``.
            loader_kwargs: for :meth:`make_dataloader`; not changed.
            output: a file to write to batch by batch, so that no process holds all outputs: a path
                that ends in ``.jsonl`` or ``.parquet``, in which rows stand in dataset order, each
                with its sample's index. With a ``*`` in its name each rank has a file of its own.
                Earlier files of the name are replaced once the new ones are complete.

        Returns:
            One output per sample, in dataset order, on every rank, with tensors on the CPU. With
            ``batch_size=None``, where the dataset makes whole batches, one output per item. Of a
            stream, in the order of :meth:`gather`. With ``output``, the paths of the files.

        Raises:
            BatchError: the output of a batch cannot be split into one output per sample.
            CheckpointUsageError: there are checkpoints, and none has the key.
            ConfigError: called inside ``fit`` of a Brain with a checkpointer, where it would
                recover other weights; or in a training batch.
            RunStopped: a signal or the time limit has asked for the end.

        Ranks: collective.
        """
        run = self.__run
        with run.stop.guarded("predict"):
            run.require_no_training("predict", recovers=True)
            with usage_errors():
                run.context.parts.tell("check", self)
                target = None if output is None else PredictionPath(output)
            with run.loaders.dividing_evaluation():
                loader = run.preflight.on_all_ranks(
                    StageLoaders(run.loaders, self.make_dataloader).of,
                    data,
                    Stage.TEST,
                    {"ckpt_prefix": None, **(loader_kwargs or {})},
                )
            run.preflight.compare_data(predict=loader)
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            bar = self.__bar_enabled(progressbar)
            return run.stages.predict(self, loader, self.evaluation_ctx, target, enable_bar=bar)

    def gather(self, results: Any) -> Any:
        """Give every rank the results of the last stage, every sample's once, in dataset order.

        A recipe collects a result for each sample, batch by batch, on its rank, and gathers the
        results in ``on_stage_end`` or after :meth:`~ddpkit.brain.Brain.evaluate`. They are sorted
        by the samples' indices in the dataset, whatever the sampler or shuffling, so the order does
        not depend on the number of ranks.

        A sample that a sampler has drawn twice comes twice, in the order in which the batches came.
        Where the sampler's indices are not numbers, results come in the order of the batches. A
        stream's results come in its own order if ddpkit divides it item by item, else (shards, a
        stream that divides itself, an opaque loader of batches) rank by rank; then completeness
        cannot be checked. After a resume in the middle of an epoch the results are only of the
        batches since. A sample repeated to keep step, which has weight 0 in training, is left out;
        the recipe may have done so itself.

        Args:
            results: one entry per sample this rank has seen, in the order it saw them: a list of
                anything that pickles (strings, dicts, tensors of any length), or a tensor or an
                array with that first dimension. Or one entry per batch: a list of tensors, arrays
                or lists with as many rows as their batch has samples; where both fit, the entries
                are taken for samples (with one sample per batch on every rank). Or a dict or a
                tuple of such.

        Returns:
            The same form, one entry per sample of all ranks, tensors on the CPU. What was one
            tensor on every rank is one tensor, or a list if the other dimensions differ.

        Raises:
            ConfigError: the stage still runs, the results have another form, or the samples seen
                are unknown.
            DataError: not one entry per sample. On every rank.
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where the stage's data was divided (training; evaluation with
        ``shard_evaluation``), else local. Call it on every rank. Every rank then holds the results
        of all.
        """
        if self.progress.stage_batches is None:
            raise ConfigError(
                "gather was called before any stage has run: call it in on_stage_end, or after "
                "evaluate."
            )
        return gather_results(self.progress.stage_batches, results)

    def print_trainable_parameters(self) -> None:
        """Log how many parameters there are, and how many of them are trained."""
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(
            parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad
        )
        counts = f"{format_order_of_magnitude(trained)} of {format_order_of_magnitude(total)}"
        where = (
            f"on {self.device} ({self.__run.context.strategy.name}, {get_world_size()} process(es))"
        )
        logger.info("%s: %s parameters are trained, %s.", type(self).__name__, counts, where)

    # ------------------------------------------------------------------ the steps of fit

    def __fit_loaders(
        self,
        train_set: Any,
        valid_set: Any,
        train_kwargs: Mapping[str, Any],
        valid_kwargs: Mapping[str, Any],
    ) -> tuple[Any, Any]:
        """Make the loaders, once it is known how many batches an optimizer step takes."""
        run = self.__run
        context = run.context
        context.accumulation.choose_factor(context.strategy.division())
        if run.loaders.divides_in_place(train_set):
            run.policy.add("dataloader-TRAIN", train_set)
        loaders = StageLoaders(run.loaders, self.make_dataloader)
        return run.preflight.on_all_ranks(
            lambda: (
                loaders.of(train_set, Stage.TRAIN, train_kwargs),
                None
                if valid_set is None
                else loaders.of_evaluation("valid_set", valid_set, Stage.VALID, valid_kwargs),
            )
        )

    def __test_sets(self, test_set: Any, loader_kwargs: Mapping[str, Any] | None) -> EvaluationSets:
        loaders = StageLoaders(self.__run.loaders, self.make_dataloader)
        return self.__run.preflight.on_all_ranks(
            loaders.of_evaluation, "test_set", test_set, Stage.TEST, loader_kwargs or {}
        )

    def __prepare_modules(self) -> None:
        if not self.__run.is_wrapped:
            self._compile()
            self._wrap_distributed()
            self.__run.initial_weights.load_if_due()
            self.__run.is_wrapped = True
            self.run_opts.reach(WRAPPED)

    def _compile(self) -> None:
        options = self.run_opts
        if options.activation_checkpointing:
            checkpoint_blocks(self.modules, options)
        if options.compile or options.compile_module_keys or options.compile_blocks:
            compile_modules(self.modules, options)

    def _wrap_distributed(self) -> None:
        self.modules.zero_grad()  # what was computed before, perhaps on one rank, is of no step
        self.__run.context.strategy.wrap(self.modules)

    def __train_and_validate(
        self,
        train: Any,
        epoch: int,
        progressbar: bool | None,
    ) -> None:
        self._fit_train(train, epoch, self.__bar_enabled(progressbar))
        self.__run.validations.after_epoch(epoch)

    def _fit_train(
        self,
        train_set: Any,
        epoch: int,
        enable: bool,
    ) -> None:
        self.__run.stages.train_or_measure(self, train_set, epoch, enable_bar=enable)

    def _fit_valid(
        self,
        valid_set: Any,
        epoch: int,
        enable: bool,
    ) -> None:
        if valid_set is not None:
            self.__run.stages.evaluate(self, valid_set, Stage.VALID, epoch, enable_bar=enable)

    def __bar_enabled(self, progressbar: bool | None) -> bool:
        if progressbar not in (True, False, None):
            raise ConfigError(
                f"progressbar must be True, False or None, got {progressbar!r}. Give "
                "train_loader_kwargs and such by name."
            )
        return not self.run_opts.noprogressbar if progressbar is None else progressbar

    @mark_as_saver
    def _save(self, path: str | Path) -> None:
        self.__run.policy.run_state.save(Path(path))

    @mark_as_loader
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        self.__run.policy.run_state.load(Path(path), end_of_epoch=end_of_epoch)
