"""The Brain: hooks for a recipe, and the wiring that runs them. The work is done elsewhere."""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from ddpkit import agreement, optim
from ddpkit.checkpoint_hooks import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.compilation import compile_modules
from ddpkit.dataloader import LoopedLoader, SaveableDataLoader, Sharding, default_seed, reshard, shard
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size, run_on_main, sum_over_ranks
from ddpkit.errors import NonFiniteLossError
from ddpkit.failure import failure_notice
from ddpkit.launchers import find_launch
from ddpkit.logger import format_order_of_magnitude, get_logger
from ddpkit.loop import Progress, backward, one_number
from ddpkit.metrics import LossMeter
from ddpkit.precision import Precision
from ddpkit.profiler import prepare_profiler
from ddpkit.run_opts import OptionAttributes, RunOptions
from ddpkit.seed import seed_rank_streams
from ddpkit.stages import length_of, run_evaluation, run_training
from ddpkit.strategy import NOTHING, make_strategy, modules_on_device, unwrap
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

logger = get_logger(__name__)

INTRA_EPOCH_KEY = "brain_intra_epoch_ckpt"


def _of_progress(name: str, doc: str) -> property:
    """Make a property that reads and writes an attribute of the Brain's progress."""

    def read(self: Brain) -> Any:
        return getattr(self.progress, name)

    def write(self: Brain, value: Any) -> None:
        setattr(self.progress, name, value)

    return property(read, write, doc=doc)


@register_checkpoint_hooks
class Brain(OptionAttributes):
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

    Every hook is called on every rank.

    Args:
        modules: name -> ``torch.nn.Module``; each is moved to the device, and wrapped when training starts.
        opt_class: called with the trainable parameters, returns an optimizer.
        hparams: whatever the YAML holds; reachable as ``self.hparams.name``. Run options in it count as defaults.
        run_opts: a :class:`~ddpkit.run_opts.RunOptions` or a dict; wins over ``hparams``.
        checkpointer: a :class:`~ddpkit.checkpoints.Checkpointer`; the Brain adds itself and its optimizers to it.

    Attributes:
        modules: ``torch.nn.ModuleDict``; under a wrapper, the module's own attributes can still be reached.
        hparams: namespace; empty where none were given.
        device: of this rank, such as ``"cuda:1"``.
        optimizers_dict: name -> optimizer, once :meth:`init_optimizers` has run.
        step: batches of the current stage so far; counts from 1 while a batch is worked on.
        optimizer_step: updates since the run began.
        nonfinite_count: steps of this epoch that were skipped because a gradient was not finite.
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.

    Raises:
        ConfigError: options or modules that cannot work.
        LaunchError: the launcher's environment contradicts itself.

    Ranks: collective; every rank makes the same Brain.

    Example:
        >>> class Line(Brain):
        ...     def compute_forward(self, batch, stage):
        ...         return self.modules.net(batch[0])
        ...     def compute_objectives(self, predictions, batch, stage):
        ...         return torch.nn.functional.mse_loss(predictions, batch[1])
        >>> data = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
        >>> opts = {"device": "cpu", "noprogressbar": True}
        >>> line = Line({"net": nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.05), run_opts=opts)
        >>> line.fit(range(1, 51), data, train_loader_kwargs={"batch_size": 4})
        >>> line.evaluate(data, test_loader_kwargs={"batch_size": 8}) < 0.1
        True
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: RunOptions | Mapping[str, Any] | None = None,
        checkpointer: Any = None,
    ) -> None:
        self.opt_class = opt_class
        self.checkpointer = checkpointer
        self.optimizers_dict: dict[str, torch.optim.Optimizer] | None = None
        self.hparams = SimpleNamespace(**(hparams or {}))
        self.run_opts = RunOptions.from_dictionary(run_opts or {}).resolved(hparams)
        ddp_init_group(self.run_opts)
        self.rank = get_rank() or 0
        self.strategy = make_strategy(
            self.device,
            distributed_launch=find_launch().is_distributed,
            data_parallel=self.data_parallel_backend,
            find_unused_parameters=self.find_unused_parameters,
        )
        self.modules = modules_on_device(modules or {}, self.device)
        numbers = Precision(self.precision, self.eval_precision, self.device)
        self.training_ctx, self.evaluation_ctx = numbers.training_ctx, numbers.evaluation_ctx
        self.scaler = numbers.scaler
        self.progress = Progress()
        self.avg_train_loss = 0.0
        self.train_sampler: Any = None
        self.profiler: Any = None
        self.tot_prof_steps = self.profile_warmup + self.profile_steps if self.profile_training else None
        self._fitting = self._ready = False
        self._saved_sums = [0.0, 0.0]
        if checkpointer is not None:
            self._register_with(checkpointer)
        self.print_trainable_parameters()

    # ------------------------------------------------------------------ what a recipe reads and writes

    step = _of_progress("step", "Batches of the current stage so far.")
    optimizer_step = _of_progress("optimizer_step", "Optimizer updates since the run began.")
    nonfinite_count = _of_progress("nonfinite", "Skipped steps of this epoch.")

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """The modules without any wrapper."""
        return nn.ModuleDict({name: unwrap(module) for name, module in self.modules.items()})

    # ------------------------------------------------------------------ hooks

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Compute predictions from a batch. Must be overridden; may return anything.

        Args:
            batch: as the loader yields it; move it to ``self.device``.
            stage: TRAIN, VALID or TEST.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_forward(self, batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> torch.Tensor:
        """Compute the loss. Must be overridden.

        Args:
            predictions: what :meth:`compute_forward` returned.
            batch: as the loader yields it.
            stage: TRAIN, VALID or TEST.

        Returns:
            The mean over the batch, shape ``()``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define compute_objectives(self, predictions, batch, stage)"
        )

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Called before a stage, on all ranks; ``epoch`` is None for TEST."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Called after a stage, on all ranks, with the mean loss over all ranks' samples."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Called before the forward pass of every training batch."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
        """Called after every training batch, and after the step where there is one; ``loss`` is still attached."""

    def on_fit_start(self) -> None:
        """Compile, wrap, make optimizers, recover the newest checkpoint: once, however often ``fit`` is called."""
        if self._ready:
            return
        self._compile()
        self._wrap_distributed()
        self.init_optimizers()
        if self.checkpointer is not None:
            self.checkpointer.recover_if_possible()

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Recover the best checkpoint by a key of its meta, or the newest.

        Args:
            max_key: the checkpoint with the highest value of this key.
            min_key: the checkpoint with the lowest.
        """
        if self.checkpointer is not None:
            self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)

    def freeze_optimizers(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
        """Return those of the optimizers that shall step now; all by default."""
        return optimizers

    def init_optimizers(self) -> None:
        """Make the optimizer. Override it for several: fill ``optimizers_dict`` and tell the checkpointer."""
        if self.opt_class is None:
            logger.info("No opt_class: nothing is optimized unless init_optimizers is overridden.")
            return
        self.optimizer = optim.make_optimizer(
            self.opt_class, self.modules, split_vectors=self.remove_vector_weight_decay
        )
        self.optimizers_dict = {"opt_class": self.optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer", self.optimizer)

    # ------------------------------------------------------------------ one batch

    def fit_batch(self, batch: Any) -> torch.Tensor | float:
        """Train on one micro-batch: forward, loss, backward, and a step at the end of its window.

        Args:
            batch: as the loader yields it.

        Returns:
            The mean loss of the batch, detached, shape ``()``; on its device, so that nobody waits for it.
        """
        window = self.progress.window
        should_step = window.closes
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            backward(loss, window.scale, self.scaler, self)
        if should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return loss.detach()

    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor | float:
        """Evaluate one batch; called without gradients.

        Args:
            batch: as the loader yields it.
            stage: VALID or TEST.

        Returns:
            The mean loss of the batch, shape ``()``.
        """
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        return one_number(loss, self)

    def optimizers_step(self) -> None:
        """Clip all gradients together, step the optimizers, drop the gradients; or skip, on all ranks alike.

        Raises:
            NonFiniteLossError: more than ``nonfinite_patience`` steps of this epoch were not finite.
        """
        window = self.progress.window
        multiplier, window.multiplier, window.deferred = window.multiplier, 1.0, 0
        optimizers = self._active_optimizers()
        if not optimizers:
            return
        self.strategy.finish_gradients()
        if self.skip_nonfinite_grads and not self.scaler.is_enabled():
            self.check_gradients()
        scaler = self.scaler if self.scaler.is_enabled() else None
        result = optim.take_step(optimizers, self.max_grad_norm, scaler, multiplier)
        if result.stepped:
            self.progress.optimizer_step += 1
        elif scaler is None:
            self._count_skipped(result.norm)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients of the optimizers that are not frozen, or drop them."""
        optim.zero_gradients(self._active_optimizers(), set_to_none=set_to_none)

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Return a context in which gradients are accumulated without being averaged over ranks.

        It must be around the forward pass, too. An exception leaves everything as it was before.

        Args:
            use: False returns a context that does nothing.
        """
        if not use:
            return NOTHING
        self.progress.window.deferred += 1
        return self.strategy.no_sync()

    def check_loss_isfinite(self, loss: torch.Tensor) -> None:
        """Warn on this rank if a loss is not finite; waits for the device. For recipes that override ``fit_batch``.

        The step itself is skipped on all ranks by :meth:`optimizers_step`, which also counts and gives up.
        """
        if not torch.isfinite(loss).all():
            logger.warning(
                "The loss of step %d is %s on rank %d.", self.step, loss.detach(), self.rank, main_process_only=False
            )

    def check_gradients(self) -> None:
        """Drop every parameter's gradient that is not finite, with a warning (option ``skip_nonfinite_grads``)."""
        for name, parameter in self.modules.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                logger.warning("The gradient of %s is not finite and is left out of step %d.", name, self.step)
                parameter.grad = None

    def update_average(self, loss: torch.Tensor | float, avg_loss: float) -> float:
        """Take one loss into a running mean over ``step`` batches; one that is not finite changes nothing.

        Args:
            loss: of the current batch.
            avg_loss: mean of the batches before.

        Returns:
            The new mean.
        """
        value = float(loss)
        return avg_loss + (value - avg_loss) / max(self.step, 1) if math.isfinite(value) else avg_loss

    # ------------------------------------------------------------------ whole runs

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Any:
        """Make the loader that gives this rank its part of a dataset.

        Args:
            dataset: map-style or iterable.
            stage: TRAIN is divided over the ranks; VALID and TEST only with ``shard_evaluation``.
            ckpt_prefix: the loader is saved under this and the stage's name; None: not at all.
            loader_kwargs: as for ``torch.utils.data.DataLoader`` (``batch_size`` counts per process), and
                ``looped_nominal_epoch``.
        """
        looped = loader_kwargs.pop("looped_nominal_epoch", None)
        if stage is Stage.TRAIN:
            loader_kwargs = self._train_loader_specifics(dataset, loader_kwargs)
        loader: Any = shard(dataset, self._sharding(stage), **loader_kwargs)
        if stage is Stage.TRAIN:
            self.train_sampler = loader.batch_sampler
        if looped is not None:
            loader = LoopedLoader(loader, looped)
        saveable = isinstance(loader, (SaveableDataLoader, LoopedLoader))
        if self.checkpointer is not None and ckpt_prefix is not None and saveable:
            self.checkpointer.add_recoverable(ckpt_prefix + stage.name, loader)
        return loader

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] | None = None,
        valid_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Train, and validate after every epoch.

        Args:
            epoch_counter: yields epoch numbers from 1, such as :class:`~ddpkit.epoch_loop.EpochCounter`.
            train_set: dataset, or ready-made loader, which is divided over the ranks like a dataset.
            valid_set: likewise, or None.
            progressbar: None asks the option ``noprogressbar``.
            train_loader_kwargs: for :meth:`make_dataloader`; not changed.
            valid_loader_kwargs: likewise.

        Raises:
            DataError: the data cannot feed the run.
            RankMismatchError: the ranks are not about to run the same training.
            NonFiniteLossError: too many steps of an epoch were not finite.
        """
        if self.test_only:
            logger.info("test_only is set: fit does nothing.")
            return
        with failure_notice(), self._fit_session():
            train_set, valid_set = agreement.together(
                lambda: (
                    self._loader(train_set, Stage.TRAIN, train_loader_kwargs or {}),
                    self._loader(valid_set, Stage.VALID, {"ckpt_prefix": None, **(valid_loader_kwargs or {})}),
                )
            )
            self._require_agreement(train_set, valid_set)
            self.on_fit_start()
            self._start_once()
            enable = self._bar_enabled(progressbar)
            for epoch in epoch_counter:
                self._fit_train(train_set, epoch, enable)
                self._fit_valid(valid_set, epoch, enable)
                if self._is_done(epoch):
                    break

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
            The mean loss over the whole set, the same on every rank.
        """
        with failure_notice():
            loader = agreement.together(
                lambda: self._loader(test_set, Stage.TEST, {"ckpt_prefix": None, **(test_loader_kwargs or {})})
            )
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
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
            self.strategy.name,
            get_world_size(),
        )

    # ------------------------------------------------------------------ wiring

    def _train_loader_specifics(self, dataset: Any, loader_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let ``hparams.sorting`` decide about shuffling where a recipe has it."""
        del dataset
        given = {"sampler", "batch_sampler"} & {key for key, value in loader_kwargs.items() if value is not None}
        if hasattr(self.hparams, "sorting") and not given:
            return {**loader_kwargs, "shuffle": self.hparams.sorting == "random"}
        return loader_kwargs

    def _sharding(self, stage: Stage) -> Sharding:
        if stage is Stage.TRAIN or self.shard_evaluation:
            keep_step = stage is Stage.TRAIN
            return Sharding(self.rank, get_world_size(), keep_step=keep_step, seed=default_seed())
        return Sharding(seed=default_seed())

    def _loader(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Any:
        if data is None:
            return None
        if isinstance(data, LoopedLoader):
            if isinstance(data.loader, DataLoader):
                data.loader = reshard(data.loader, self._sharding(stage))
            return data
        if isinstance(data, DataLoader):
            loader = reshard(data, self._sharding(stage))
            logger.info("%s: the ready-made loader is planned anew, with its dataset, order and sizes.", stage.name)
            return loader
        return self.make_dataloader(data, stage=stage, **loader_kwargs)

    def _require_agreement(self, train_set: Any, valid_set: Any) -> None:
        facts = agreement.option_facts(self.run_opts) | agreement.model_facts(self.modules)
        for name, loader in (("train", train_set), ("valid", valid_set)):
            facts |= agreement.data_facts(name, loader, length_of(loader), sharded=name == "train")
        agreement.require_agreement(facts)
        agreement.check_train_data(train_set, length_of(train_set), get_world_size())

    def _start_once(self) -> None:
        """Do what follows the first ``on_fit_start``: compare optimizers, part the ranks' random streams."""
        if self._ready:
            return
        self._ready = True
        agreement.require_agreement(agreement.optimizer_facts(self.optimizers_dict or {}))
        if get_world_size() > 1:
            seed_rank_streams()
            if not self.shard_evaluation:
                logger.info("Every rank evaluates the whole set. --shard_evaluation divides it over the ranks.")

    def _compile(self) -> None:
        compile_modules(self.modules, self.run_opts)

    def _wrap_distributed(self) -> None:
        self.strategy.wrap(self.modules)

    def _bar_enabled(self, progressbar: bool | None) -> bool:
        return not self.noprogressbar if progressbar is None else progressbar

    def _is_done(self, epoch: int) -> bool:
        if self.debug and epoch == self.debug_epochs:
            return True
        limit = self.optimizer_step_limit
        return limit is not None and self.optimizer_step >= limit

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self.progress.epoch = epoch
        self.on_stage_start(Stage.TRAIN, epoch)
        self.modules.train()
        self.zero_grad()
        self.nonfinite_count = 0
        self.avg_train_loss = run_training(self, train_set, epoch, enable_bar=enable)
        self.zero_grad(set_to_none=True)
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
        loss = run_evaluation(self, loader, stage, epoch, enable_bar=enable)
        if stage is Stage.VALID:
            self.step = 0
        with torch.no_grad():
            self.on_stage_end(stage, loss, epoch)
        self.step = 0
        self.progress.meter = LossMeter()
        return loss

    def _active_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        single = getattr(self, "optimizer", None)
        return [] if single is None else [single]

    def flush_window(self) -> None:
        """Step on gradients that an overridden ``fit_batch`` accumulated in a window that the epoch's end cut short."""
        deferred = self.progress.window.deferred
        if deferred and optim.gradients(self._active_optimizers()):
            self.progress.window.multiplier = self.grad_accumulation_factor / deferred
            self.optimizers_step()
        self.progress.window.deferred = 0

    def _count_skipped(self, norm: float) -> None:
        progress = self.progress
        progress.nonfinite += 1
        where = f"epoch {progress.epoch}, batch {progress.step}, after optimizer step {progress.optimizer_step}"
        if progress.nonfinite > self.nonfinite_patience:
            raise NonFiniteLossError(
                f"{progress.nonfinite} steps of epoch {progress.epoch} had gradients that are not finite (norm={norm}; "
                f"the last in {where}), and nonfinite_patience={self.nonfinite_patience}. All were skipped, so the "
                "weights are still those before. Lower the learning rate, clip harder (--max_grad_norm), look at the "
                "data, or raise --nonfinite_patience."
            )
        logger.warning("The gradients are not finite (norm=%s); step skipped on all ranks: %s.", norm, where)

    # ------------------------------------------------------------------ checkpoints

    def _register_with(self, checkpointer: Any) -> None:
        if self.debug and not self.debug_persistently and hasattr(checkpointer, "checkpoints_dir"):
            checkpointer.checkpoints_dir = Path(run_on_main(tempfile.mkdtemp, kwargs={"prefix": "ddpkit-debug-"}) or "")
        checkpointer.add_recoverable("brain", self)
        if self.scaler.is_enabled():
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)

    @contextlib.contextmanager
    def _fit_session(self) -> Iterator[None]:
        """Mark the time in which a recovered checkpoint sets the loop's position; run the profiler if asked."""
        self._fitting = True
        try:
            if self.profile_training:
                folder = Path(getattr(self.hparams, "output_folder", "results"), "profiler_logs")
                self.profiler = prepare_profiler(self.profile_warmup, self.profile_steps, str(folder))
            with self.profiler or contextlib.nullcontext():
                yield
        finally:
            self._fitting = False
            self.profiler = None

    def _should_save_intra_epoch_ckpt(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Decide from numbers that all ranks agree on whether to save in the middle of an epoch."""
        minutes, steps = self.ckpt_interval_minutes, self.ckpt_interval_steps
        return 0 < minutes * 60 <= seconds_since_ckpt or 0 < steps <= steps_since_ckpt

    def save_intra_epoch(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was."""
        due = self._should_save_intra_epoch_ckpt(seconds_since_ckpt, steps_since_ckpt)
        if due:
            self._save_intra_epoch_ckpt()
        return due

    def _save_intra_epoch_ckpt(self) -> None:
        """Save in the middle of an epoch; only the newest such checkpoint is kept."""
        if self.checkpointer is None:
            return
        self._saved_sums = sum_over_ranks(list(self.progress.meter.sums()[:2]))
        self.checkpointer.save_and_keep_only(
            end_of_epoch=False,
            num_to_keep=1,
            ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta,
            meta={INTRA_EPOCH_KEY: True},
        )

    @mark_as_saver
    def _save(self, path: Path) -> None:
        loss_sum, samples = self._saved_sums if self._fitting else (0.0, 0.0)
        state = {
            "step": self.step,
            "avg_train_loss": float(self.avg_train_loss),
            "optimizer_step": self.optimizer_step,
            "loss_sum": loss_sum,
            "samples": samples,
        }
        Path(path).write_text(yaml.safe_dump(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: Path, end_of_epoch: bool) -> None:
        if not self._fitting:
            return
        state = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        self.optimizer_step = state.get("optimizer_step", state["step"])
        if end_of_epoch:
            return
        self.step = state["step"]
        self.avg_train_loss = state["avg_train_loss"]
        if self.rank == 0:
            samples = state.get("samples", self.step)
            self.progress.meter.restore(state.get("loss_sum", self.avg_train_loss * samples), samples)
