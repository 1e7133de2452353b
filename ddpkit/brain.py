"""The Brain: hooks for a recipe, and the wiring that runs them. The work is done elsewhere."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.comm import agreement
from ddpkit.control.failure import failure_notice, usage_errors
from ddpkit.control.rank_status import POSITION
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size, is_distributed_initialized
from ddpkit.ema import require_average, weight_average
from ddpkit.errors import RunStopped
from ddpkit.logger import format_order_of_magnitude, get_logger
from ddpkit.metrics import LossMeter
from ddpkit.precision import Precision
from ddpkit.profiler import prepare_profiler
from ddpkit.run.results import Results
from ddpkit.run.resuming import Pace
from ddpkit.run_opts import RunOptions
from ddpkit.training.batch_sizes import BatchSizes, batch_sizes, count_epochs
from ddpkit.training.compilation import compile_modules, require_module_keys
from ddpkit.training.loop import Progress
from ddpkit.training.lr_scaling import LrScaling, require_reference
from ddpkit.training.stages import length_of, run_evaluation, run_training
from ddpkit.training.strategy import make_strategy, modules_on_device, take_device, unwrap
from ddpkit.types import FitResult, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

logger = get_logger(__name__)


class Brain(Results):
    """The training loop of a recipe: subclass it, say what a batch computes, call :meth:`fit` and :meth:`evaluate`.

    In the order of a run::

        fit:       make_dataloader (TRAIN, VALID), on_fit_start, and for every epoch:
                     on_stage_start(TRAIN), for every batch:
                       fit_batch: on_fit_batch_start, compute_forward, compute_objectives, optimizers_step,
                                  on_fit_batch_end
                     on_stage_end(TRAIN)
                     on_stage_start(VALID), evaluate_batch for every batch, on_stage_end(VALID)
        evaluate:  make_dataloader (TEST), on_evaluate_start, on_stage_start(TEST), evaluate_batch for every batch,
                   on_stage_end(TEST)
        predict:   make_dataloader (TEST), on_evaluate_start, predict_batch for every batch

    Every hook is called on every rank. What a recipe may override for one batch is in :mod:`ddpkit.run.hooks`,
    ``make_dataloader`` in :mod:`ddpkit.run.loaders`, ``gather`` and ``predict`` in :mod:`ddpkit.run.results`. How the
    ranks are compared before either begins is in :mod:`ddpkit.run.beginning`.

    Args:
        modules: name -> ``torch.nn.Module``; each is moved to the device, and wrapped when training starts.
        opt_class: called with the trainable parameters, returns an optimizer.
        hparams: whatever the YAML holds; reachable as ``self.hparams.name``. Run options in it count as defaults.
        run_opts: a :class:`~ddpkit.run_opts.RunOptions` or a dict; wins over ``hparams``.
        checkpointer: a :class:`~ddpkit.checkpoints.Checkpointer`; the Brain adds itself, its optimizers and the
            scheduler of ``scheduler_class`` to it.
        scheduler_class: called with the optimizer and the total number of optimizer steps (of epochs, with
            ``scheduler_every=epoch``; None where that is not known), returns a scheduler. A function is called with
            both; a class with the optimizer, and with the number if it has a parameter ``total_steps`` or ``T_max``
            (:func:`~ddpkit.optim.make_schedule`). It is made once, with the optimizer, and the Brain steps it.

    Attributes:
        modules: ``torch.nn.ModuleDict``; under a wrapper, the module's own attributes can still be reached.
        hparams: namespace; empty where none were given.
        device: of this rank, such as ``"cuda:1"``.
        optimizers_dict: name -> optimizer, once :meth:`init_optimizers` has run.
        step: batches of the current stage so far; counts from 1 while a batch is worked on.
        optimizer_step: updates since the run began.
        steps_per_epoch: optimizer steps of an epoch on this number of processes, with accumulation; known before
            :meth:`init_optimizers`. None where the length of the data is not known, as of a stream.
        total_steps: optimizer steps of this call of :meth:`fit`, from the first epoch that its counter counts, those
            before a restart included; at most ``optimizer_step_limit``. None where the epochs, or their steps, are not
            known and there is no limit. Fewer are made where steps are skipped or a counter stops early.
        nonfinite_count: steps of this epoch that were skipped because a gradient was not finite.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.
        ema: the average of the weights, a :class:`~ddpkit.ema.WeightAverage`, or None without ``ema_decay``.

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
        >>> line = Line({"net": nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.5), run_opts=opts)
        >>> line.fit(range(1, 51), data, train_loader_kwargs={"batch_size": 4}).optimizer_steps
        100
        >>> line.evaluate(data, test_loader_kwargs={"batch_size": 8}) < 0.1
        True
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: RunOptions | Mapping[str, Any] | None = None,
        checkpointer: Any = None,
        scheduler_class: Callable[..., Any] | None = None,
    ) -> None:
        self.opt_class = opt_class
        self.scheduler_class = scheduler_class
        self.checkpointer = checkpointer
        self.optimizers_dict: dict[str, torch.optim.Optimizer] | None = None
        self.hparams = SimpleNamespace(**(hparams or {}))
        self.run_opts = RunOptions.from_dictionary(run_opts or {}).resolved(hparams)
        ddp_init_group(self.run_opts)
        self.rank = get_rank() or 0
        self._strategy = make_strategy(
            self.device,
            distributed_launch=is_distributed_initialized(),  # also where the group is the user's own
            data_parallel=self.data_parallel_backend,
            find_unused_parameters=self.find_unused_parameters,
            decides_late=type(self).fit_batch is not Brain.fit_batch,
        )
        take_device(self.device)
        self.modules = modules_on_device(modules or {}, self.device)
        self.ema = weight_average(self.modules, self.ema_decay, evaluate=self.evaluate_ema)
        with usage_errors():
            numbers = Precision(self.precision, self.eval_precision, self.device)
            require_module_keys(self.modules, self.run_opts)
            require_reference(self.run_opts)
            self._prepare_ending()
        self.training_ctx, self.evaluation_ctx = numbers.training_ctx, numbers.evaluation_ctx
        self.scaler = numbers.scaler
        self.progress = Progress()
        self.avg_train_loss = 0.0
        self.train_sampler: Any = None
        self.profiler: Any = None
        self.tot_prof_steps = self.profile_warmup + self.profile_steps if self.profile_training else None
        self._fitting = self._ready = False
        if checkpointer is not None:
            self._register_with(checkpointer)
        self.print_trainable_parameters()

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """The modules without any wrapper."""
        return nn.ModuleDict({name: unwrap(module) for name, module in self.modules.items()})

    def on_fit_start(self) -> None:
        """Compile, wrap, make optimizers, recover the newest checkpoint: once, however often ``fit`` is called."""
        if self._ready:
            return
        self._compile()
        self._wrap_distributed()
        self.init_optimizers()
        if self.checkpointer is not None:
            self._before_recovery()
            self.checkpointer.recover_if_possible()

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Recover this run's best checkpoint by a key of its meta, or its newest.

        Checkpoints of another run in the same folder do not count. In a process that does not train, the run is the one
        that has saved last, and a path given as the option ``resume`` is evaluated whatever the keys say.

        Args:
            max_key: the checkpoint with the highest value of this key.
            min_key: the checkpoint with the lowest.
        """
        found = None
        if self.checkpointer is not None:
            found = self._recover_for_evaluation(max_key, min_key)
        if found is not None and self.evaluate_ema:
            require_average(found)
        if found is None and self.optimizers_dict is None and self.opt_class is not None:
            logger.warning(
                "There is no checkpoint to evaluate, and nothing was trained: the weights are the initial ones."
            )

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

        It may be called several times. When a script that was stopped in a later call is started again, the earlier
        ones return at once, and the run goes on in that call.

        Args:
            epoch_counter: yields epoch numbers from 1, such as :class:`~ddpkit.epoch_loop.EpochCounter`.
            train_set: dataset, or ready-made loader, which is divided over the ranks like a dataset.
            valid_set: likewise, or None.
            progressbar: None asks the option ``noprogressbar``.
            train_loader_kwargs: for :meth:`make_dataloader`; not changed.
            valid_loader_kwargs: likewise.

        Returns:
            The last losses, the epochs and optimizer steps, why it ended, and where the best and the newest checkpoint
            are; the same on every rank.

        Raises:
            DataError: the data cannot feed the run.
            RankMismatchError: the ranks are not about to run the same training.
            NonFiniteLossError: too many steps of an epoch were not finite.
            ParityError: with the option ``check_parity``, nothing is trained, and a difference was found.
            RunStopped: a signal or the time limit has asked for the end.
        """
        self._compare_ranks("fit")
        self._epochs_of_call = count_epochs(epoch_counter, self.run_opts)
        if self.check_parity is not None:
            from ddpkit.parity import check_parity

            check_parity(self, train_set, train_loader_kwargs or {})
            return FitResult("check_parity", optimizer_steps=self.optimizer_step)
        if self.test_only:
            logger.info("test_only is set: fit does nothing.")
            return FitResult("test_only", optimizer_steps=self.optimizer_step)
        # The notice once more, innermost: the others learn of a failure before anything is brought to safety here.
        with self._attended("fit"), self._fit_session(), self._saving_session(epoch_counter), failure_notice():
            self._take_marker_away()
            if not self._ready:
                self._keep_global_batch(train_set, train_loader_kwargs or {})
            self.grad_accumulation_factor = self._accumulate_over(get_world_size())
            train_set, valid_set = agreement.together(
                lambda: (
                    self._loader(train_set, Stage.TRAIN, train_loader_kwargs or {}),
                    self._loader(valid_set, Stage.VALID, {"ckpt_prefix": None, **(valid_loader_kwargs or {})}),
                )
            )
            sizes = self._require_agreement(train_set, valid_set)
            with POSITION.at("on_fit_start"), self._choosing_start():
                self.on_fit_start()
            self._take_up()
            self._take_flags(self.raw_modules)
            self._scale_learning_rates()
            self._start_once(validates=valid_set is not None)
            if self._is_done_before(train_set):
                return self._fit_result("done_before")
            self._tell_not_taken()
            self._report_training(sizes, valid_set)
            reason = self._run_epochs(epoch_counter, train_set, valid_set, self._bar_enabled(progressbar))
            return self._fit_result(reason)

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> float:
        """Recover a checkpoint and evaluate it on a test set.

        Args:
            test_set: dataset or loader.
            max_key: take the checkpoint with the highest value of this key.
            min_key: take the checkpoint with the lowest; without either, the newest.
            progressbar: None asks the option ``noprogressbar``.
            test_loader_kwargs: for :meth:`make_dataloader`; not changed.

        Returns:
            The mean loss over the whole set, the same on every rank; NaN with the option ``check_parity``, which
            evaluates nothing.

        Raises:
            ConfigError: called inside ``fit`` of the same Brain, where it would recover other weights, unless
                ``on_evaluate_start`` is overridden.
        """
        if type(self).on_evaluate_start is Brain.on_evaluate_start:
            self._require_no_training("evaluate")
        self._compare_ranks("evaluate")
        if self.check_parity is not None:
            logger.announce("check_parity=%d: nothing was trained, and nothing is evaluated.", self.check_parity)
            return math.nan
        with self._attended("evaluate"):
            loader = agreement.together(
                lambda: self._loader(test_set, Stage.TEST, {"ckpt_prefix": None, **(test_loader_kwargs or {})})
            )
            self._compare_data(test=loader)
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self._report_evaluation(loader)
            return self._evaluation_stage(loader, Stage.TEST, None, self._bar_enabled(progressbar))

    def print_trainable_parameters(self) -> None:
        """Log how many parameters there are, and how many of them are trained."""
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad)
        logger.info(
            "%s: %s of %s parameters are trained, on %s (%s, %d process(es)).",
            type(self).__name__,
            format_order_of_magnitude(trained),
            format_order_of_magnitude(total),
            self.device,
            self._strategy.name,
            get_world_size(),
        )

    # ------------------------------------------------------------------ wiring

    def _require_agreement(self, train_set: Any, valid_set: Any) -> BatchSizes:
        self._compare_data(train=train_set, valid=valid_set)
        length, world_size = length_of(train_set), get_world_size()
        agreement.check_train_data(train_set, length)
        self._take_length(length, self.grad_accumulation_factor)
        sizes = batch_sizes(train_set, length, self.grad_accumulation_factor, world_size)
        self._pace = Pace.of(sizes, train_set)
        self._lr_scaling = LrScaling.of(self.run_opts, train_set, world_size)
        return sizes

    def _start_once(self, *, validates: bool) -> None:
        """Check what ``on_fit_start`` has made; after its first call, compare optimizers."""
        self._require_schedule(validates=validates)
        if self._ready:
            return
        self._ready = True
        agreement.require_agreement(agreement.optimizer_facts(self.optimizers_dict or {}))

    def _compile(self) -> None:
        compile_modules(self.modules, self.run_opts)

    def _wrap_distributed(self) -> None:
        self._strategy.wrap(self.modules)

    def _bar_enabled(self, progressbar: bool | None) -> bool:
        return not self.noprogressbar if progressbar is None else progressbar

    def _run_epochs(self, epoch_counter: Iterable[int], train_set: Any, valid_set: Any, enable: bool) -> str:
        """Train and validate in every epoch; return why it ends, a ``FitResult.reason``."""
        if self._step_limit_reached() and not self.step:
            logger.info("optimizer_step_limit=%s has been reached before: fit is done.", self.optimizer_step_limit)
            return "optimizer_step_limit"
        for epoch in epoch_counter:
            self._fit_train(train_set, epoch, enable)
            self._fit_valid(valid_set, epoch, enable)
            self._end_epoch()
            if self.debug and 0 < self.debug_epochs <= epoch:
                return "debug"
            if self._step_limit_reached():
                return "optimizer_step_limit"
        if self.optimizer_step and not self.progress.epochs:
            return "done_before"
        return "early_stop" if getattr(epoch_counter, "should_stop", False) is True else "epochs"

    def _step_limit_reached(self) -> bool:
        limit = self.optimizer_step_limit
        return limit is not None and self.optimizer_step >= limit

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self._begin_epoch(epoch)
        self.on_stage_start(Stage.TRAIN, epoch)
        self._strategy.follow(self.modules)
        if self.ema is not None:
            self.ema.follow()
        self.modules.train()
        self.zero_grad()
        if not self.step:
            self.nonfinite_count = 0
        self.avg_train_loss = self.progress.train_loss = run_training(self, train_set, epoch, enable_bar=enable)
        self.zero_grad(set_to_none=True)
        if self._schedule is not None:
            self._schedule.after_stage(Stage.TRAIN, self.avg_train_loss, self.optimizer_step)
        with self._no_failure_saved():
            self.on_stage_end(Stage.TRAIN, self.avg_train_loss, epoch)
        self.avg_train_loss = 0.0
        self.step = 0
        self.progress.meter = LossMeter()

    def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
        if valid_set is not None:
            self._evaluation_stage(valid_set, Stage.VALID, epoch, enable)

    def _evaluation_stage(self, loader: Any, stage: Stage, epoch: int | None, enable: bool) -> float:
        self.on_stage_start(stage, epoch)
        self.modules.eval()
        self.step = 0
        try:
            with self._evaluated_weights(stage):
                loss = run_evaluation(self, loader, stage, epoch, enable_bar=enable)
        except RunStopped as stopped:
            self._stop_in_evaluation(stopped)
            raise
        if stage is Stage.VALID:
            self.step, self.progress.valid_loss = 0, loss
            if self._schedule is not None:
                self._schedule.after_stage(stage, loss, self.optimizer_step)
        with torch.no_grad(), self._no_failure_saved():
            self.on_stage_end(stage, loss, epoch)
        self.step = 0
        self.progress.meter = LossMeter()
        return loss

    @contextlib.contextmanager
    def _fit_session(self) -> Iterator[None]:
        """Mark the time in which a recovered checkpoint sets the loop's position; run the profiler if asked."""
        self._fitting = True
        self.progress.restart()
        try:
            if self.profile_training:
                folder = getattr(self.hparams, "output_folder", "results")
                self.profiler = prepare_profiler(self.profile_warmup, self.profile_steps, folder)
            with self.profiler or contextlib.nullcontext():
                yield
            if self.profiler is not None and self.profiler.step_num < self.profile_warmup:
                logger.warning(
                    "profile_training: training ended in the profiler's warm-up, so nothing was recorded. Train for "
                    "longer than --profile_warmup=%d batches, or give fewer.", self.profile_warmup,
                )  # fmt: skip
        finally:
            self._fitting = False
            self.profiler = None
