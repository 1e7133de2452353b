"""From the options and a recipe's data: this rank's loader, the samples of a batch and of a step, what follows them.

``batch_size`` counts per process, as recipes expect, so more processes make a larger step. ``global_batch_size`` counts
the samples of one optimizer step over all processes, so that the number of processes changes nothing;
``micro_batch_size`` says how many of them fit on a process at once, and the accumulation follows.

Learning-rate scaling: a batch ``k`` times as large makes ``k`` times fewer steps per epoch. So the learning rate is
multiplied by ``k`` (linear) or by its square root (sqrt, as the noise of a gradient shrinks): the samples of a step
against those that the rate was set for. The factor is applied only during each step: parameter groups, schedulers and
checkpoints keep the recipe's rates. So every schedule is the unscaled schedule times the factor, and a run can be
resumed with another batch size.

Source: linear, Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677); square root, Krizhevsky, "One
weird trick for parallelizing convolutional neural networks", 2014 (arXiv:1404.5997).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base import POSITION, temporarily
from ddpkit.data import DealtBatchSampler, PlannedBatchSampler, StreamShard
from ddpkit.dataloader import LoopedLoader, Sharding, deal_batches, default_seed, is_batches, plan_of, reshard, shard
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.training.feed import move_ahead
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import SimpleNamespace

    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies import Strategy

logger = get_logger(__name__)

# Of optimizers whose steps are scaled: two Brains may have the same one, and the one that trains scales it.
_scalings: weakref.WeakKeyDictionary[Optimizer, LrScaling] = weakref.WeakKeyDictionary()
# Of optimizers inside of a step, or after one that failed: the recipe's rates.
_own_rates: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


def micro_batches(options: RunOptions, world_size: int) -> int:
    """Return how many batches each process works on per optimizer step.

    Args:
        options: ``grad_accumulation_factor``; or ``global_batch_size`` and ``micro_batch_size``, from which it follows.
        world_size: number of ranks.

    Raises:
        ConfigError: ``micro_batch_size`` without ``global_batch_size``, or contradicted by
            ``grad_accumulation_factor``.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> micro_batches(RunOptions(global_batch_size=100, micro_batch_size=16), world_size=2)
        4
    """
    given, micro, whole = options.grad_accumulation_factor, options.micro_batch_size, options.global_batch_size
    if micro is None:
        return given
    if whole is None:
        raise ConfigError(
            f"micro_batch_size={micro} divides a global batch, and global_batch_size is not given. Give "
            "global_batch_size (samples per optimizer step over all processes), or use batch_size and "
            "grad_accumulation_factor."
        )
    needed = -(-whole // (micro * world_size))
    if given not in {1, needed}:
        raise ConfigError(
            f"grad_accumulation_factor={given} contradicts global_batch_size={whole} with micro_batch_size={micro}, "
            f"which needs {needed} batches per step on {world_size} process(es). Leave one of the three out."
        )
    return needed


class LoaderFactory:
    """Makes the loader that gives this rank its part of a dataset, for a stage.

    Args:
        options: of the run.
        hparams: of the recipe; ``sorting`` in it decides about shuffling.
        strategy: says over how many ranks data is divided.

    Ranks: local; alike on every rank.

    Example:
        >>> from types import SimpleNamespace
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.strategies import Strategy
        >>> factory = LoaderFactory(RunOptions(device="cpu"), SimpleNamespace(), Strategy())
        >>> len(factory.make(range(10), Stage.TRAIN, {"batch_size": 4}))
        3
    """

    def __init__(self, options: RunOptions, hparams: SimpleNamespace, strategy: Strategy) -> None:
        self._options, self._hparams, self._strategy = options, hparams, strategy
        self._divides_evaluation = False
        self._accumulation: tuple[int, int] | None = None  # what a recipe asked for, and what that came to

    def micro_batches(self) -> int:
        """Return how many batches each process works on per optimizer step.

        Raises:
            ConfigError: sizes that contradict each other.
        """
        options, shards = self._options, self._strategy.shards
        if self._accumulation is not None and self._accumulation[1] == options.grad_accumulation_factor:
            options.grad_accumulation_factor = self._accumulation[0]  # `fit` has written the result into the option
        asked, found = options.grad_accumulation_factor, micro_batches(options, get_world_size() * shards) * shards
        self._accumulation = (asked, found)
        return found

    def make(self, dataset: Any, stage: Stage, loader_kwargs: dict[str, Any]) -> Any:
        """Make the loader of a dataset.

        Args:
            dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields batches.
            stage: TRAIN is divided over the ranks; VALID and TEST only with ``shard_evaluation``.
            loader_kwargs: as for :meth:`ddpkit.brain.Brain.make_dataloader`; may be changed.
        """
        looped = loader_kwargs.pop("looped_nominal_epoch", None)
        if str(self._options.device).startswith("cuda") and (loader_kwargs or not is_batches(dataset)):
            loader_kwargs.setdefault("pin_memory", True)
        if stage is Stage.TRAIN:
            loader_kwargs = self._by_sorting(dataset, loader_kwargs)
        loader: Any = shard(dataset, self._sharding(stage), **loader_kwargs)
        if looped is not None:
            self._require_fixed_length(stage)
            loader = LoopedLoader(loader, looped)
        return self._moved_ahead(loader)

    @contextlib.contextmanager
    def named(self, stage: Stage) -> Iterator[None]:
        """Return a context in which a loader is made: an error of the data names the stage."""
        try:
            with POSITION.at(f"making the loader of {stage.name}"):
                yield
        except DataError as error:
            raise DataError(f"{stage.name}: {error}") from error

    def adapt(self, loader: DataLoader[Any] | LoopedLoader, stage: Stage) -> Any:
        """Divide a ready-made loader over the ranks.

        Args:
            loader: as it was given to ``fit`` or ``evaluate``.
            stage: of the data.

        Raises:
            DataError: the loader cannot be divided.
        """
        if isinstance(loader, LoopedLoader):
            self._require_fixed_length(stage)
            adapt = reshard if isinstance(loader.loader, DataLoader) else deal_batches
            loader.loader = adapt(loader.loader, self._sharding(stage))
            return self._moved_ahead(loader)
        planned = reshard(loader, self._sharding(stage))
        if planned is not loader and not getattr(planned, "of_batches", False):
            logger.info("%s: the ready-made loader is planned anew, with its dataset, order and sizes.", stage.name)
        return self._moved_ahead(planned)

    def _moved_ahead(self, loader: Any) -> Any:
        """Return a loader, which with the option ``prefetch_to_device`` moves its batches to the GPU."""
        if self._options.prefetch_to_device:
            move_ahead(loader, str(self._options.device))
        return loader

    def dividing_evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which VALID and TEST are divided over the ranks, whatever the option says."""
        return temporarily(self, _divides_evaluation=True)

    def _require_fixed_length(self, stage: Stage) -> None:
        """Refuse nominal epochs whose batches are another part of a step on another number of processes."""
        size, strategy = self._options.micro_batch_size, self._strategy
        if strategy.same_bits and (stage is Stage.TRAIN or self._options.shard_evaluation):
            raise ConfigError(
                f"nominal epochs (looped_nominal_epoch, LoopedLoader) do not work with {strategy.name}: they count "
                "batches of a process. Leave one of them out."
            )
        if stage is Stage.TRAIN and size is not None:
            raise ConfigError(
                f"micro_batch_size={size} lets the batches per step depend on the number of processes, and nominal "
                "epochs (looped_nominal_epoch, LoopedLoader) count batches: give grad_accumulation_factor instead."
            )

    def _by_sorting(self, dataset: Any, loader_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let ``hparams.sorting`` decide about shuffling where a recipe has it."""
        given = {"sampler", "batch_sampler"} & {key for key, value in loader_kwargs.items() if value is not None}
        is_ordered = isinstance(dataset, IterableDataset) or is_batches(dataset)
        if hasattr(self._hparams, "sorting") and not given and not is_ordered:
            return {**loader_kwargs, "shuffle": self._hparams.sorting == "random"}
        return loader_kwargs

    def _sharding(self, stage: Stage) -> Sharding:
        options, virtual_ranks = self._options, self._strategy.virtual_ranks
        if stage is Stage.TRAIN:
            size, factor = options.global_batch_size, options.grad_accumulation_factor // self._strategy.shards
            micro = 1 if size is None else factor
            return Sharding.of_this_rank(global_batch_size=size, micro_batches=micro, virtual_ranks=virtual_ranks)
        if options.shard_evaluation or self._divides_evaluation:
            return Sharding.of_this_rank(keep_step=False, virtual_ranks=virtual_ranks)
        return Sharding(seed=default_seed())


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes that follow from a training loader and the options.

    Attributes:
        world_size: number of ranks; of virtual ranks, where there are such.
        per_process: samples of a full batch of one process: the smallest and the largest; None where a recipe's batch
            sampler or a stream decides.
        factor: batches of each process per optimizer step.
        per_step: samples of a full optimizer step over all ranks; None where it is not known.
        steps: optimizer steps per epoch; None where it is not known.
        samples: samples per epoch over all ranks; None where it is not known.
        alone: samples of a full optimizer step of one process with the same ``batch_size``; None where
            ``global_batch_size`` cannot be used, because others make the batches.
        virtual_on: number of processes that virtual ranks are divided over; None: the ranks are not virtual.

    Ranks: local; equal on all ranks.

    Example:
        >>> print(BatchSizes(2, (32, 32), 2, 128, 15, 1797))
        2 processes x batch 32 x accumulation 2 = 128 samples per optimizer step; 15 steps, 1797 samples per epoch
    """

    world_size: int
    per_process: tuple[int, int] | None
    factor: int
    per_step: int | None
    steps: int | None
    samples: int | None
    alone: int | None = None
    virtual_on: int | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        number = self.virtual_on or self.world_size
        processes = f"{number} process{'' if number == 1 else 'es'}"
        if self.virtual_on is not None:
            processes = f"{_number_of(self.world_size, 'virtual rank')} on {processes}"
        smallest, largest = self.per_process or (None, None)
        size = str(largest) if smallest == largest else f"{smallest} to {largest}"
        batch = "batches of changing size" if self.per_process is None else f"batch {size}"
        line = f"{processes} x {batch} x accumulation {self.factor}"
        if self.per_step is not None:
            line += f" = {_number_of(self.per_step, 'sample')} per optimizer step"
        steps = "an unknown number of steps" if self.steps is None else _number_of(self.steps, "step")
        samples = "" if self.samples is None else f", {_number_of(self.samples, 'sample')}"
        return f"{line}; {steps}{samples} per epoch"

    def advice(self) -> str:
        """Say how several processes train as one does, where ``batch_size`` was given; nothing for one process."""
        if self.world_size == 1 or self.alone is None or self.virtual_on is not None:
            return ""
        return (
            f"{_number_of(self.per_step or 0, 'sample')}; one process has {self.alone}: "
            f"--global_batch_size={self.alone} keeps the training the same"
        )


def _number_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def check_train_data(loader: Any, batches: int | None) -> None:
    """Refuse training data that makes no step.

    Args:
        loader: the training loader.
        batches: its number of batches, where it is known.

    Raises:
        DataError: no rank has a batch.

    Ranks: local; alike on every rank.

    Example:
        >>> check_train_data([1], 1)
    """
    plan = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    if plan is not None and 0 < plan.num_samples < plan.world_size:
        words = "The training set has %d sample(s) for %d ranks: a rank without a sample repeats one with weight 0."
        logger.warning(words, plan.num_samples, plan.world_size)
    if batches == 0:
        raise DataError(
            "the training loader yields no batch. Either the set is empty, or it does not fill one global batch and "
            "drop_last=True leaves the rest out: use a smaller batch_size, fewer processes, or drop_last=False."
        )


@dataclass(frozen=True)
class RunLength:
    """How long a call of ``fit`` trains, from its first epoch on, as far as that is known beforehand.

    Attributes:
        epochs: of the call; an upper bound where a counter may stop early.
        steps_per_epoch: optimizer steps.
        total_steps: optimizer steps, at most ``optimizer_step_limit``.

    Ranks: local; equal on all ranks.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @classmethod
    def of(cls, length: int | None, factor: int, epochs: int | None, options: RunOptions) -> RunLength:
        """Work it out.

        Args:
            length: batches of the training loader; None where that is not known.
            factor: batches per optimizer step.
            epochs: as :func:`count_epochs` returned them.
            options: ``debug``, ``debug_batches`` and ``optimizer_step_limit`` count.
        """
        limit = options.optimizer_step_limit
        if length is not None and options.debug:
            length = min(length, options.debug_batches)
        steps = None if length is None else -(-length // factor)
        total = limit if steps is None or epochs is None else min(steps * epochs, limit or steps * epochs)
        if steps and total is not None:
            epochs = -(-total // steps)
        return cls(epochs, steps, total)


def count_epochs(epoch_counter: Any, options: RunOptions) -> int | None:
    """Return how many epochs an epoch counter yields from its first one on.

    Args:
        epoch_counter: one with a ``limit``, such as :class:`~ddpkit.epoch_loop.EpochCounter`, or with a length.
        options: ``debug`` and ``debug_epochs`` count.

    Returns:
        The number, an upper bound if the counter may stop early; None if unknown, as of a generator.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.epoch_loop import EpochCounter
        >>> from ddpkit.run_opts import RunOptions
        >>> options = RunOptions(debug=True, debug_epochs=2)
        >>> [count_epochs(each, RunOptions()) for each in (EpochCounter(5), range(10, 15), iter([1]))]
        [5, 5, None]
        >>> [count_epochs(each, options) for each in (EpochCounter(5), range(5), range(10, 15))]
        [2, 3, 1]
    """
    number = getattr(epoch_counter, "limit", None)
    if not isinstance(number, int):
        try:
            number = len(epoch_counter)
        except TypeError:
            number = None
    last = options.debug_epochs if options.debug else 0
    if last <= 0:
        return number
    if isinstance(epoch_counter, Sequence):
        return next((count for count, epoch in enumerate(epoch_counter, 1) if epoch >= last), number)
    return last if number is None else min(number, last)


def batch_sizes(
    loader: Any, length: int | None, factor: int, world_size: int, virtual_ranks: int | None = None
) -> BatchSizes:
    """Compute the batch sizes from a training loader and an accumulation factor.

    Args:
        loader: of this rank.
        length: its number of batches, if that is known.
        factor: batches per optimizer step.
        world_size: number of ranks.
        virtual_ranks: as in :class:`~ddpkit.dataloader.Sharding`.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> loader = shard(range(10), Sharding(world_size=2), batch_size=2)
        >>> str(batch_sizes(loader, len(loader), 1, 2))
        '2 processes x batch 2 x accumulation 1 = 4 samples per optimizer step; 3 steps, 10 samples per epoch'
    """
    steps, on = None if length is None else -(-length // factor), world_size if virtual_ranks else None
    world_size, inner = virtual_ranks or world_size, loader.loader if isinstance(loader, LoopedLoader) else loader
    per_process, per_step = _sizes(inner, factor, world_size)
    planned, samples = plan_of(inner), None
    is_divided = isinstance(planned, PlannedBatchSampler) or isinstance(getattr(inner, "dataset", None), StreamShard)
    alone = per_step // world_size if is_divided and per_step is not None else None
    if inner is loader and getattr(inner, "batch_sampler", None) is not None:  # else not a whole pass, or of batches
        if isinstance(planned, PlannedBatchSampler):
            samples = planned.plan.used_samples
        elif isinstance(planned, DealtBatchSampler):
            samples = sum(planned.total(batch) for batch in range(len(planned)))
    return BatchSizes(world_size, per_process, factor, per_step, steps, samples, alone, on)


def _sizes(loader: Any, factor: int, world_size: int) -> tuple[tuple[int, int] | None, int | None]:
    """Return the smallest and largest full batch of one process, and a full optimizer step of all, in samples."""
    planned, batches = plan_of(loader), getattr(loader, "batch_sampler", None)
    dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if isinstance(planned, PlannedBatchSampler):
        plan = planned.plan
        if batches is None:  # the dataset yields whole batches of unknown size
            return None, None
        smallest = plan.global_batch_size // plan.micro_batches // world_size
        return (smallest, plan.batch_size), plan.global_batch_size * factor // plan.micro_batches
    if isinstance(dataset, StreamShard) and size is not None:
        block = dataset.block_size
        return (block // world_size, -(-block // world_size)), block * factor
    givers = (loader, batches, getattr(planned, "batch_sampler", None))
    sizes: list[Any] = [getattr(one, "batch_size", None) for one in givers]
    known = [one for one in sizes if isinstance(one, int) and one > 0]
    return ((known[0], known[0]), known[0] * world_size * factor) if known else (None, None)


# ---------------------------------------------------------------------------------------- learning-rate scaling


class LrScaling:
    """Multiplies the learning rates of optimizers while they step.

    Attributes:
        factor: on the learning rates.
        reason: in words.

    Ranks: local; alike on every rank.

    Example:
        >>> import torch
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.training import BatchSizes
        >>> weight = torch.nn.Parameter(torch.zeros(1)); weight.grad = torch.ones(1)
        >>> scaling, sgd = LrScaling(), torch.optim.SGD([weight], lr=0.5)
        >>> options = RunOptions(lr_scaling="linear", reference_batch_size=8)
        >>> scaling.choose(options, BatchSizes(1, (16, 16), factor=1, per_step=16, steps=7, samples=99))
        >>> scaling.follow({"sgd": sgd}); sgd.step()
        >>> weight.item(), sgd.param_groups[0]["lr"]
        (-1.0, 0.5)
    """

    def __init__(self) -> None:
        self.factor, self.reason = 1.0, "lr_scaling=none"

    def choose(self, options: RunOptions, sizes: BatchSizes) -> None:
        """Find the factor for a call of ``fit``.

        Args:
            options: ``lr_scaling`` and ``reference_batch_size`` count.
            sizes: of the training.

        Raises:
            ConfigError: the reference batch size is missing, or the samples per step are unknown.
        """
        rule, reference = options.lr_scaling, options.reference_batch_size
        if rule == "none":
            return
        if reference is None:
            raise ConfigError(
                f"lr_scaling={rule} needs reference_batch_size: the samples of an optimizer step, over all processes, "
                "that the learning rates are meant for. Give --reference_batch_size=N, or --lr_scaling=none."
            )
        if sizes.per_step is None:
            raise ConfigError(
                f"lr_scaling={rule} needs a step of known size, and the batches of the training come from a batch "
                "sampler without batch_size, or whole out of the dataset. Use --lr_scaling=none, or give batch_size."
            )
        ratio = sizes.per_step / reference
        self.factor = ratio if rule == "linear" else math.sqrt(ratio)
        processes = sizes.virtual_on or sizes.world_size
        shown = f"{sizes.per_step} samples per step ({processes} process(es), accumulation {sizes.factor})"
        self.reason = f"lr_scaling={rule}, {shown}, reference_batch_size={reference}: x {self.factor:.6g}"

    def follow(self, optimizers: Mapping[str, Any]) -> None:
        """Scale the steps of optimizers from now on, and say so in one line.

        Args:
            optimizers: by name.

        Raises:
            ConfigError: one of them is not torch's, and has no hooks around its step.
        """
        lines = []
        for name, optimizer in optimizers.items():
            is_known = optimizer in _scalings
            if self.factor == 1.0 and not is_known:
                continue
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"lr_scaling cannot scale {name}, a {type(optimizer).__name__}: it is not a torch.optim.Optimizer. "
                    "Use --lr_scaling=none and set its learning rate for this run."
                )
            before = [float(group["lr"]) for group in optimizer.param_groups]
            lines.append(f"{name} {_shown(before)} -> {_shown([rate * self.factor for rate in before])}")
            _scalings[optimizer] = self
            if not is_known:
                optimizer.register_step_pre_hook(_scale)
                optimizer.register_step_post_hook(_restore)
        if lines:
            logger.announce("Learning rates (%s): %s.", self.reason, "; ".join(lines))


def _scale(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    for group, rate in zip(groups, _own_rates.setdefault(optimizer, [one["lr"] for one in groups]), strict=True):
        group["lr"] = rate * _scalings[optimizer].factor


def _restore(optimizer: Optimizer, *_: Any) -> None:
    for group, rate in zip(optimizer.param_groups, _own_rates.pop(optimizer), strict=True):
        group["lr"] = rate


def _shown(rates: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in rates))
