"""What a stage reads: this rank's loader, how many batches, samples and epochs it gives, and what each batch weighs.

``batch_size`` counts per process, as recipes expect, so more processes make a larger step. ``global_batch_size`` counts
the samples of one optimizer step over all processes, so that the number of processes changes nothing;
``micro_batch_size`` says how many of them fit on a process at once, and the accumulation follows.

Streams have unknown lengths, so each rank announces the size of its next batch one or two batches ahead. All ranks end
together; a rank without batches repeats one with weight 0 (another rank's, if it has read that too, else its own last).
Every sample weighs the same there, too.

Whether all ranks read the same data is compared before, and batches move to the device one ahead, if that is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base import POSITION, temporarily
from ddpkit.comm import require_agreement
from ddpkit.control import start_loading
from ddpkit.data import (
    FEW_ITEMS,
    MOST_ITEMS,
    DealtBatchSampler,
    PlannedBatchSampler,
    StreamLoader,
    StreamShard,
    guess_batch_size,
    layers,
    one_by_one,
    require_alike,
    require_dataset,
    selection_facts,
)
from ddpkit.dataloader import (
    LoopedLoader,
    SaveableDataLoader,
    Sharding,
    deal_batches,
    default_seed,
    is_batches,
    plan_of,
    reshard,
    shard,
    spread_samples,
)
from ddpkit.distributed import get_world_size
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import SimpleNamespace

    from ddpkit.run_opts import RunOptions
    from ddpkit.step_times import NamedRanges
    from ddpkit.strategies import Strategy
    from ddpkit.training.window import Window

logger = get_logger(__name__)


# ----------------------------------------------------------------------------------------- which loader, of what sizes


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
            f"which needs {needed} batches per step on {world_size} rank(s). Leave one of the three out."
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
        self._options, self.hparams, self._strategy = options, hparams, strategy
        self._divides_evaluation = False
        self._accumulation: tuple[int, int] | None = None  # what a recipe asked for, and what that came to

    def micro_batches(self) -> int:
        """Return how many batches each process works on per optimizer step.

        Raises:
            ConfigError: sizes that contradict each other.
        """
        options, shards = self._options, self._strategy.shards
        if self._accumulation is not None and self._accumulation[1] == options.grad_accumulation_factor:
            options.derive("grad_accumulation_factor", self._accumulation[0])  # `fit` has written the result there
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
        is_read_again = stage is not Stage.TEST or bool(loader_kwargs)
        has_own_indices = any(loader_kwargs.get(name) is not None for name in ("sampler", "batch_sampler"))
        require_dataset(dataset, is_read_again=is_read_again, has_own_indices=has_own_indices)
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
        if hasattr(self.hparams, "sorting") and not given and not is_ordered:
            return {**loader_kwargs, "shuffle": self.hparams.sorting == "random"}
        return loader_kwargs

    def _sharding(self, stage: Stage) -> Sharding:
        options, virtual_ranks = self._options, self._strategy.virtual_ranks
        if stage is Stage.TRAIN:
            size, factor = options.global_batch_size, options.grad_accumulation_factor // self._strategy.shards
            micro = 1 if size is None else factor
            return Sharding.of_this_rank(global_batch_size=size, micro_batches=micro, virtual_ranks=virtual_ranks)
        if options.shard_evaluation or self._divides_evaluation:
            return Sharding.of_this_rank(keep_step=False, virtual_ranks=virtual_ranks, may_drop=False)
        return Sharding(seed=default_seed(), may_drop=False)


@dataclass(frozen=True, eq=False)
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
            f"--global_batch_size={self.alone} trains as one process does"
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
            "drop_last=True leaves the rest out: use a smaller batch_size, fewer (virtual) ranks, or drop_last=False."
        )


@dataclass(frozen=True, eq=False)
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
    def of(
        cls, length: int | None, factor: int, epochs: int | None, options: RunOptions, *, ahead: int = 0
    ) -> RunLength:
        """Work it out.

        Args:
            length: batches of the training loader; None where that is not known.
            factor: batches per optimizer step.
            epochs: as :func:`count_epochs` returned them.
            options: ``debug``, ``debug_batches`` and ``optimizer_step_limit`` count.
            ahead: steps that a resumed run has made beyond those that the present batches would have made.
        """
        limit = options.optimizer_step_limit
        if length is not None and options.debug:
            length = min(length, options.debug_batches)
        steps = None if length is None else -(-length // factor)
        whole = None if steps is None or epochs is None else steps * epochs + ahead
        total = limit if whole is None else min(whole, limit or whole)
        if steps and total is not None:
            epochs = -(-(total - ahead) // steps)
        return cls(epochs, steps, total)


def count_epochs(epoch_counter: Any, options: RunOptions) -> int | None:
    """Return how many epochs an epoch counter yields from its first one on.

    Args:
        epoch_counter: one with a ``limit``, such as :class:`~ddpkit.epoch_loop.EpochCounter`, or with a length.
        options: ``debug`` and ``debug_epochs`` count.

    Returns:
        The number, an upper bound if the counter may stop early; None if unknown, as of a generator.

    Raises:
        ConfigError: it cannot be iterated, as a number of epochs.

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
    if not hasattr(epoch_counter, "__iter__") and not hasattr(epoch_counter, "__getitem__"):
        given = f"fit: the epoch_counter is {epoch_counter!r}"
        raise ConfigError(f"{given}, which yields no epochs: give EpochCounter(limit=N) or range(1, N + 1).")
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


# ------------------------------------------------------------------------------- what a pass takes its batches from


class Counts(Protocol):
    """Tells how many samples a batch has, here and over all ranks.

    Ranks: local.
    """

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch, where every batch counts the same."""

    def parts(self, batch: int) -> float:
        """Return the sum of all ranks' parts of a batch."""


@dataclass(eq=False)
class Feed:
    """What a pass of training takes its batches from.

    Attributes:
        loader: yields this rank's micro-batches.
        length: their number, the same on every rank.
        counts: samples of each batch; None when they are not known, and every batch weighs the same.
        factor: micro-batches per optimizer step.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        left_out: how many of those the loader yields again, to be left out.
        ready: called once, after the batches left out have been read and before the next one is.
        weighting: ``"samples"``: every sample counts the same; ``"batches"``: every batch of all ranks together does.

    Ranks: local.

    Example:
        >>> from ddpkit.training import Window
        >>> window = Window()
        >>> feed = Feed(loader="abc", length=3, factor=2)
        >>> [(batch, window.closes, window.scale) for batch in feed.batches(window)]
        [('a', False, 0.5), ('b', True, 0.5), ('c', True, 1.0)]
    """

    loader: Iterable[Any]
    length: int
    counts: Counts | None = None
    factor: int = 1
    world_size: int = 1
    start: int = 0
    weighting: str = "samples"
    left_out: int = 0
    ready: Callable[[], object] = bool  # does nothing

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it."""
        length = self.length
        total, done = 1.0, self.start
        window.correction, window.count, window.weight = 1.0, 1, 1.0
        source = itertools.islice(start_loading(self.loader), max(length - self.start, 0) + self.left_out)
        for _ in range(self.left_out):
            next(source, None)
        self.ready()
        counts, by_samples = self.counts, self.weighting == "samples"
        whole = (counts.total if by_samples else counts.parts) if counts is not None else lambda _: self.world_size
        for number, batch in enumerate(source, self.start):
            place = number % self.factor
            if place == 0 or number == self.start:
                window.begin()
                after = number - place + self.factor
                is_one = after == number + 1
                total = whole(number) if is_one else sum(map(whole, range(number, min(after, length))))
            if counts is not None:
                window.count = window.weight = counts.count(number)
                if not by_samples:
                    window.weight = counts.part(number)
            window.loss_scale = window.weight * self.world_size / total
            window.closes = place == self.factor - 1 or number == length - 1
            done = number + 1
            yield batch
        if done < length:
            raise DataError(
                f"the training loader ended after {done} of {length} batches: its length must be the number of batches "
                "that it yields, on every process."
            )


@dataclass(eq=False)
class FeedThrough:
    """A feed whose batches pass through something that follows the steps.

    Attributes:
        inner: yields this rank's micro-batches.
        batches: yields what ``inner.batches`` does, for a window.

    Ranks: as the inner feed.

    Example:
        >>> from ddpkit.training import Window
        >>> feed = Feed(loader="abc", length=3)
        >>> list(FeedThrough(feed, lambda window: map(str.upper, feed.batches(window))).batches(Window()))
        ['A', 'B', 'C']
    """

    inner: Feed | StreamFeed
    batches: Callable[[Window], Iterator[Any]]

    @property
    def length(self) -> int | None:
        """The number of micro-batches of this rank in an epoch, or None."""
        return self.inner.length

    @property
    def factor(self) -> int:
        """The number of micro-batches in an optimizer step."""
        return self.inner.factor


# --------------------------------------------------------------------------- a stream, of unknown length


def _alone(numbers: list[float]) -> Callable[[], list[float]]:
    return lambda: numbers


def _nothing(**_: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(eq=False)
class StreamFeed:
    """Batches of a training pass over a stream, whose length is unknown.

    The weights of a window's later batches are not known when the first one is worked on. So each is weighed as if the
    window were full and all its batches had as many samples as the first; the error is corrected at its end.
    For equal batches there is nothing to correct, to the last bit.

    The sums are started before a batch is worked on, and waited for after it. They need a group of processes that
    gradients do not travel on.

    Attributes:
        loader: yields this rank's micro-batches, however many.
        factor: micro-batches per optimizer step.
        weighting: ``"samples"``: every sample counts the same; ``"batches"``: every batch of all ranks together does.
        whole: what a full step weighs, where gradients are summed over the ranks; 0: they are averaged.
        whole_batches: whether the data yields whole batches; with ``"batches"`` every rank's batch then counts one.
        world_size: number of ranks.
        start: micro-batches of this epoch done before.
        left_out: how many of those the loader yields again; they are skipped.
        ready: called once, after the batches left out have been read, and as many ahead as this feed always reads.
        start_sum: starts to add up a few numbers over the ranks, and returns what waits for the sums.
        size_of: counts the samples of a batch; None for another rank's batch, which does not count here.
        uneven: makes a context for a batch that does not count on all ranks, from whether it does on this one.
        length: None: unknown.
        repeated: samples of this rank's batches that were repeated to keep step, so far.

    Ranks: collective; every rank must have a first batch.

    Example:
        >>> from ddpkit.training import Window
        >>> window = Window()
        >>> feed = StreamFeed(iter(["abc", "def", "g"]), factor=2)
        >>> [(batch, window.closes, window.scale, window.correction) for batch in feed.batches(window)]
        [('abc', False, 0.5, 1.0), ('def', True, 0.5, 1.0), ('g', True, 0.5, 2.0)]
    """

    loader: Iterable[Any]
    factor: int = 1
    weighting: str = "samples"
    world_size: int = 1
    start: int = 0
    whole: float = 0.0
    whole_batches: bool = False
    start_sum: Callable[[list[float]], Callable[[], list[float]]] = _alone
    size_of: Callable[[Any], int | None] = guess_batch_size
    uneven: Callable[..., AbstractContextManager[None]] = _nothing
    length: int | None = None
    left_out: int = 0
    ready: Callable[[], object] = bool  # does nothing
    repeated: int = 0

    def batches(self, window: Window) -> Iterator[Any]:
        """Yield the batches, each after setting ``window`` for it.

        Raises:
            DataError: the stream has no first batch for every rank. On all ranks.
        """
        turns = self._read(one_by_one(start_loading(self.loader)))
        ahead = deque([next(turns)])
        self._require_batches(ahead[0])
        while len(ahead) < min(self.factor, 2):  # as many as at the moment of a save
            ahead.append(next(turns))
        self.ready()
        place, done, whole = self.start % self.factor, 0.0, 0.0
        window.correction = 1.0
        while ahead[0].told().ranks:
            turn = ahead.popleft()
            while len(ahead) < min(self.factor, 2):
                ahead.append(next(turns))
            if place == 0:
                window.begin()
            place += 1
            window.count = turn.count
            self.repeated += turn.repeated
            window.weight, total = self._weigh(turn)
            whole = whole or self.whole or self.factor * total
            done += total
            window.loss_scale = window.weight * (1 if self.whole else self.world_size) / whole if whole else 0.0
            window.closes = place == self.factor or not ahead[0].told().ranks
            window.correction = whole / done if window.closes and done else 1.0
            if window.closes:
                place, done, whole = 0, 0.0, 0.0
            with self.uneven(counts=turn.count > 0) if turn.told().ranks < self.world_size else _nothing():
                yield turn.batch

    def _read(self, batches: Iterator[Any]) -> Iterator[_Turn]:
        """Read the batches, the last one again and again after the end; start telling the other ranks of each."""
        last, able, last_size = None, 0.0, 0
        for done in itertools.islice(batches, self.left_out):  # the last of which may have to be repeated
            last, able, last_size = done, 1.0, guess_batch_size(done)
        while True:
            size = None
            for batch in itertools.islice(batches, 1):
                last, able, size = batch, 1.0, self.size_of(batch)
                last_size = guess_batch_size(batch) if size is None else size  # None: another rank's
            present, count = int(size is not None), size or 0
            repeated = 0 if present else last_size
            sums = self.start_sum([float(present), float(count), able])
            yield _Turn(last, present, count, repeated, functools.cache(lambda sums=sums: _Told(*sums())))

    def _weigh(self, turn: _Turn) -> tuple[float, float]:
        """Return the weight of a batch on this rank, and on all ranks."""
        ranks, samples, _ = turn.told()
        if self.weighting == "samples":
            return turn.count, samples
        if self.whole_batches:
            return turn.present, ranks
        return (turn.count / samples, 1.0) if samples else (0.0, 0.0)

    def _require_batches(self, first: _Turn) -> None:
        if first.told().able < self.world_size:
            raise DataError(
                f"the stream gives a first batch to {first.told().able:.0f} of {self.world_size} rank(s) only: it is "
                "empty, or has too few items for this many processes and this batch size, or yields nothing when it is "
                "iterated again. Look at the stream, start fewer processes, or use a smaller batch_size."
            )


class _Told(NamedTuple):
    """Sums over all ranks for one batch."""

    ranks: float  # number of ranks with a batch that is not repeated
    samples: float  # of all ranks
    able: float  # number of ranks with a batch, repeated or not


@dataclass(eq=False)
class _Turn:
    """One batch of every rank."""

    batch: Any
    present: int
    count: int
    repeated: int  # samples, of a batch that is repeated
    told: Callable[[], _Told]  # waits for the other ranks once


# ------------------------------------------------------------------------------------------- the batches of a loader


def counts_of(loader: Any) -> Counts | None:
    """Return the plan or loader that counts the samples of each batch, or None.

    Ranks: local.

    Example:
        >>> counts_of([1, 2]) is None
        True
    """
    return loader if isinstance(loader, LoopedLoader) and loader.has_counts else plan_of(loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None for a stream, whose length is not reliable.

    Ranks: local.

    Example:
        >>> length_of([1, 2]), length_of(iter([]))
        (2, None)
    """
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


def size_of(loader: Any) -> Callable[[Any], int | None]:
    """Return a function that counts the samples of the batch just read; it gives None for another rank's batch.

    Ranks: local.
    """
    return loader.size_of if isinstance(loader, StreamLoader) else guess_batch_size


def counting(loader: Any) -> Callable[[int, Any], int]:
    """Return a function that counts a batch's samples: from the plan, otherwise from the loader or the batch.

    Ranks: local.
    """
    counts = counts_of(loader)
    if counts is None:
        size = size_of(loader)
        return lambda _, batch: size(batch) or 0
    return lambda number, _: counts.count(number)


def require_same_draw(loader: Any) -> None:
    """Make sure that a user's sampler or a stream's shuffle is the same on all ranks, where each takes its part.

    Raises:
        RankMismatchError: it is not. On every rank.

    Ranks: collective.
    """
    plan, inner = plan_of(loader), loader.loader if isinstance(loader, LoopedLoader) else loader
    facts = plan.drawn_words() if plan is not None and plan.world_size > 1 else {}
    if isinstance(inner, StreamLoader):
        facts = inner.drawn_words()
    if facts:
        require_agreement(facts)


def selected_facts(name: str, loader: Any) -> dict[str, str]:
    """Describe which samples a planned loader's dataset selects, and a sampler where its draw is divided.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Returns:
        One entry per selection; none for a loader that a recipe has divided by itself.

    Ranks: local.

    Example:
        >>> selected_facts("train", [1, 2])
        {}
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    plan = plan_of(inner)
    if plan is None:
        return {}
    facts = selection_facts(name, inner.dataset)
    if plan.world_size > 1 and not isinstance(plan.source, int):
        for sampler in layers(plan.source):
            facts |= selection_facts(name, sampler)
    return facts


def compare_samples(name: str, loader: Any) -> None:
    """Make sure that all ranks hold the same dataset, where each is given its part of it: by a few samples.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Raises:
        RankMismatchError: they do not. On every rank.

    Ranks: collective.

    Example:
        >>> compare_samples("train", [1, 2])
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    plan = plan_of(inner)
    if plan is None or plan.world_size == 1:
        return

    def read_again() -> Any:
        found = spread_samples(inner, MOST_ITEMS, readings=2)
        return None if found is None else found[1]

    require_alike(
        spread_samples(inner, FEW_ITEMS) or spread_samples(inner, 1),  # one of the few may be broken
        read_again,
        f"{name}: the ranks do not hold the same data, and each would be given one part in {plan.world_size} of it: "
        f"the samples of {type(inner.dataset).__name__} differ, and most would be lost in silence. Let every rank load "
        "all files, in the same order (sort a list of files), and seed what is random, such as a split. If each rank "
        "shall keep files of its own, give a DataLoader of them with `loader.is_sharded = True`",
        f"some samples of {name}",
    )


def compared(loader: Any, stage: Stage) -> Iterable[Any]:
    """Return an iterable over a loader's batches that compares the ranks' data after the first batch.

    Args:
        loader: of this rank.
        stage: for the message.

    Returns:
        The loader itself, unless it is a stream or a loader of batches that every rank reads whole.

    Ranks: local; to take the first batch is then collective.

    Example:
        >>> compared([1, 2], Stage.TEST)
        [1, 2]
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    if isinstance(inner, StreamLoader) and inner.is_dealt:
        return PassedThrough(loader, functools.partial(_checked, inner, stage))
    batches: Iterable[Any] = loader
    return batches


class PassedThrough:
    """A loader whose batches pass through a generator, each time it is iterated.

    Args:
        loader: started when the iteration begins, not with the first batch.
        through: takes the iterator, yields batches.

    Ranks: local.

    Example:
        >>> list(PassedThrough("ab", lambda batches: map(str.upper, batches)))
        ['A', 'B']
    """

    num_workers = 0  # of its own: without it every pass would be prepared for a fork

    def __init__(self, loader: Iterable[Any], through: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self.loader, self.through = loader, through

    def __iter__(self) -> Iterator[Any]:
        return self.through(start_loading(self.loader))


def first_of(loader: Iterable[Any], number: int | None) -> PassedThrough:
    """Return the first batches of a loader; all where no number is given.

    Ranks: local.
    """
    return PassedThrough(loader, lambda batches: itertools.islice(batches, number))


def _checked(inner: StreamLoader, stage: Stage, batches: Iterator[Any]) -> Iterator[Any]:
    first = list(itertools.islice(batches, 1))
    kind, items = ("loader", "batches") if inner.of_batches else ("dataset", "items")
    require_alike(
        inner.first,
        lambda: None,
        f"{stage.name}: the ranks do not read the same {items}, and each would keep one in {get_world_size()} of "
        f"{type(inner.whole).__name__}: samples would be lost in silence. If it divides itself over the ranks, set "
        f"`is_sharded = True` on the {kind}. If it is random, seed it: draw from Python's, numpy's or torch's global "
        "generator, which are seeded alike on all ranks while it is read. If it lists files, sort them",
        f"the first {items} of {stage.name}",
    )
    yield from first
    yield from batches


def profiled(profiler: Any, ranges: NamedRanges, left_out: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Tell the profiler after each batch that a step is over, except batches that a resume only skips.

    Args:
        profiler: has ``step``.
        ranges: marks the phases in the profiler's trace.
        left_out: batches that are skipped.
        batches: of this rank.

    Ranks: local.
    """
    ranges.start(profiler)
    for number, batch in enumerate(batches):
        yield batch
        if number >= left_out:
            ranges.step(profiler)


def cuda_graph_steps(batches: Iterator[Any]) -> Iterator[Any]:
    """Tell torch before each batch that a step begins, in which CUDA graphs may overwrite the outputs of the last one.

    Untold, each call of a compiled module is a step of its own, and one module could not use the output of another.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
    """
    for batch in batches:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        yield batch


# ----------------------------------------------------------------------------------- moved to the device


def move_ahead(loader: Any, device: str) -> None:
    """Move a loader's batches to a device one batch ahead of the current one.

    Args:
        loader: of this rank. A stream, a loader of another kind, or one without workers is left as it is, with a
            warning: there, to read a batch earlier would change which random numbers it is made with.
        device: such as ``"cuda:1"``.

    Ranks: local.

    Example:
        >>> loader = SaveableDataLoader(range(4), batch_size=2, num_workers=1)
        >>> move_ahead(loader, "cpu")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    is_stream = isinstance(getattr(inner, "dataset", None), IterableDataset)
    if not isinstance(inner, SaveableDataLoader) or is_stream or not inner.num_workers:
        logger.warning_once(
            "prefetch_to_device needs a dataset with a length and num_workers >= 1: the batches of a %s%s are moved "
            "when they are used.", type(inner).__name__, "" if is_stream else " without workers",
        )  # fmt: skip
        return
    inner.passed_through = functools.partial(moved_ahead, device=torch.device(device))


def moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches on a device, each of which has begun to move before the one before it is yielded.

    No memory of a batch is overwritten that a step still reads: before it allocates, the copying stream waits for what
    the step's stream was given so far. ``Tensor.record_stream`` would do for tensors only, and not for objects of which
    nobody knows the tensors.

    Args:
        batches: read one ahead.
        device: where they go; on a GPU without waiting for it.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams

    Example:
        >>> next(moved_ahead(iter([{"x": torch.ones(1)}]), torch.device("cpu")))
        {'x': tensor([1.])}
    """
    side = _copying_stream(device) if device.type == "cuda" else None
    ahead: tuple[Any, Any] | None = None
    for batch in batches:
        coming = _begin(batch, device, side)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = coming
    if ahead is not None:
        yield _arrived(*ahead, device)


@functools.cache  # a stream has memory of its own: a new one each epoch would hold more and more of it
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _begin(batch: Any, device: torch.device, side: torch.cuda.Stream | None) -> tuple[Any, Any]:
    """Begin to move a batch; return it, and the event of its arrival."""
    if side is None:
        return _moved(batch, device), None
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return _moved(batch, device), side.record_event()


def _arrived(batch: Any, event: torch.cuda.Event | None, device: torch.device) -> Any:
    """Return a batch; what the current stream is given from now on waits for it."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return batch


def _moved(value: Any, device: torch.device) -> Any:
    """Move whatever has a method ``to``, inside of mappings and sequences too; what has none stays as it is."""
    if hasattr(value, "to"):
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # an object that takes nothing but the device
            return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: _moved(one, device) for key, one in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return moved
        alike = copy.copy(value)  # of the recipe's class, as the loader gives it
        alike.update(moved)
        return alike
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(one, device) for one in value))
    return type(value)(_moved(one, device) for one in value) if type(value) in (list, tuple) else value
