"""The samplers that recipes name, each an order that is a function of its seed and the epoch.

They work in any loader, and so outside of ddpkit as well. Given to ``Brain.fit`` as ``sampler`` or
``batch_sampler`` they are dealt out to the ranks, so that nothing has to be divided by the recipe.

An order follows from a *hash* of seed and epoch. With their sum, as in other libraries, epoch 2 of
seed 10 would equal epoch 1 of seed 11; so the orders differ from other libraries' orders for the
same seed. The default seed comes from :func:`ddpkit.seed.seed_everything`, or is a constant without
such a call. The epoch counts from 0 until a call of ``set_epoch``, which every loader of ddpkit
makes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.base import get_rank, get_world_size
from ddpkit.data import CHUNK, Order, require_positive, set_epoch_inside
from ddpkit.errors import BucketingError, ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.seed import global_seed, mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "BalancingDataSampler",
    "ConcatDatasetBatchSampler",
    "DistributedSamplerWrapper",
    "DynamicBatchSampler",
    "ReproducibleRandomSampler",
    "ReproducibleWeightedRandomSampler",
]

logger = get_logger(__name__)


class _OfEpoch(Sampler[int]):
    """What makes the draws of a sampler of torch's a function of a seed and the epoch; comes before
    it as a base.
    """

    def _start(self, seed: int, epoch: int) -> None:
        self.seed, self.epoch, self.generator = seed, epoch, torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose draws the next iteration makes."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(mix_key(self.seed, self.epoch) >> 1)
        return super().__iter__()


class ReproducibleRandomSampler(_OfEpoch, RandomSampler):
    """A ``RandomSampler`` whose order is a function of the seed and the epoch.

    Without replacement nothing is stored: the order is computed a few thousand positions at a time,
    and with the experiment's seed it equals ``shuffle=True``.

    Args:
        data_source: has a length, which may change between epochs.
        seed: of the order; None: the experiment's seed.
        epoch: to begin with.
        replacement: as for ``torch.utils.data.RandomSampler``.
        num_samples: likewise.

    Ranks: local; alike on every rank.

    Example:
        >>> sampler = ReproducibleRandomSampler(range(100), seed=3)
        >>> first = list(sampler)
        >>> sampler.set_epoch(1)
        >>> sorted(first) == list(range(100)), first == list(sampler)
        (True, False)
    """

    def __init__(
        self,
        data_source: Any,
        seed: int | None = None,
        epoch: int = 0,
        *,
        replacement: bool = False,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples)
        self._start(_seed_or(563375142, seed), epoch)

    def __iter__(self) -> Iterator[int]:
        return super().__iter__() if self.replacement else self._ordered()

    def _ordered(self) -> Iterator[int]:
        size = len(self.data_source)
        left = self.num_samples
        # more samples than the dataset has: the whole set again, in another order
        for number in itertools.count():
            order = Order(
                size,
                mix_key(self.seed, number) if number else self.seed,
                self.epoch,
            )
            for start in range(0, min(size, left), CHUNK):
                yield from order.indices(start, min(start + CHUNK, size, left))
            left -= size
            if left <= 0:
                return


class ReproducibleWeightedRandomSampler(_OfEpoch, WeightedRandomSampler):
    """A ``WeightedRandomSampler`` whose draws are a function of the seed and the epoch.

    Args:
        weights: one number per sample, not negative, shape ``(samples,)``; they need not add up to
            one.
        num_samples: draws per epoch.
        replacement: whether a sample may be drawn more than once.
        seed: of the draws; None: the experiment's seed.
        epoch: to begin with.

    Ranks: local; alike on every rank.

    Example:
        >>> sampler = ReproducibleWeightedRandomSampler(
        ...     [1.0, 0.0, 1.0], 4, replacement=True, seed=3
        ... )
        >>> 1 in list(sampler), list(sampler) == list(sampler)
        (False, True)
    """

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int,
        replacement: bool = True,
        seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        super().__init__(weights, num_samples, replacement)
        self._start(_seed_or(129491412, seed), epoch)


class ConcatDatasetBatchSampler(Sampler[list[int]]):
    """Makes batches of a fixed number of samples from each part of a ``ConcatDataset``.

    An epoch ends with the part that is used up first.

    Args:
        samplers: one per part, in the order of the parts. Each yields indices of its own part,
            from 0. The length of a part is the length of the sampler's ``data_source`` or
            ``weights`` if present, else of the sampler.
        batch_sizes: samples of each part in a batch.
        epoch: to begin with.

    Attributes:
        offsets: where each part begins in the concatenated dataset.
        batch_size: samples of a batch.

    Raises:
        ConfigError: arguments that are not lists, of different lengths, or sizes below 1.

    Ranks: local; alike on every rank.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> parts = [SequentialSampler(range(3)), SequentialSampler(range(9))]
        >>> list(ConcatDatasetBatchSampler(parts, [1, 2]))
        [[0, 3, 4], [1, 5, 6], [2, 7, 8]]
    """

    def __init__(
        self,
        samplers: Sequence[Any],
        batch_sizes: Sequence[int],
        epoch: int = 0,
    ) -> None:
        are_lists = isinstance(samplers, (list, tuple)) and isinstance(batch_sizes, (list, tuple))
        if not are_lists or not 0 < len(samplers) == len(batch_sizes):
            raise ConfigError(
                f"samplers={samplers!r} and batch_sizes={batch_sizes!r} must be lists of the same "
                "length: one of both for each part of the dataset."
            )
        for size in batch_sizes:
            require_positive("batch_sizes", size, "each part needs at least one sample per batch")
        self.samplers = samplers
        self.batch_sizes = batch_sizes
        drawn_from = [
            getattr(sampler, "data_source", getattr(sampler, "weights", sampler))
            for sampler in samplers
        ]
        self.offsets = [0, *itertools.accumulate(map(len, drawn_from[:-1]))]
        self.set_epoch(epoch)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return sum(self.batch_sizes)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers which epoch comes."""
        self.epoch = epoch
        for sampler in self.samplers:
            set_epoch_inside(sampler, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        iterators = [iter(sampler) for sampler in self.samplers]
        while True:
            batch: list[int] = []
            for offset, size, iterator in zip(
                self.offsets,
                self.batch_sizes,
                iterators,
                strict=True,
            ):
                drawn = [offset + index for index in itertools.islice(iterator, size)]
                if len(drawn) < size:
                    return
                batch += drawn
            yield batch

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return min(
            len(sampler) // size
            for sampler, size in zip(self.samplers, self.batch_sizes, strict=True)
        )


class DynamicBatchSampler(Sampler[list[int]]):
    """Makes batches of samples of similar length: many short ones, or a few long ones.

    Samples of similar length share a bucket, and a bucket's batches have as many samples as fit
    into ``max_batch_length`` at the bucket's upper boundary. Which samples meet in a batch changes
    with the epoch, how many batches there are does not.

    Args:
        dataset: to sample from.
        max_batch_length: how long the samples of a batch may be together, with their padding; in
            the unit of the lengths. A sample that is longer is a batch by itself.
        num_buckets: number of buckets, whose boundaries are then the quantiles of a log-normal
            distribution, the last at ``max_batch_length``.
        length_func: returns the length of a sample, given the dataset's entry for it
            (``dataset.data[id]``), which costs no loading; None: its ``"duration"``.
        shuffle: whether samples are put together anew in every epoch.
        batch_ordering: ``"random"``, or ``"ascending"`` or ``"descending"`` by the longest sample
            of a batch.
        max_batch_ex: samples of a batch, at most.
        bucket_boundaries: upper boundaries of the buckets, ascending, in the unit of the lengths;
            instead of ``num_buckets``. Samples above the last are batches by themselves.
        lengths_list: the length of every sample; needed for a dataset without ``data`` and
            ``data_ids``.
        seed: of the shuffling; None: the experiment's seed.
        epoch: to begin with.
        drop_last: leave out the samples that do not fill a batch of their bucket.
        verbose: log the contents of every bucket.

    Raises:
        BucketingError: neither ``num_buckets`` nor ``bucket_boundaries``, or no way to know the
            lengths.
        ConfigError: arguments that cannot work.
        DataError: no sample, or a length that is negative or no number.

    Ranks: local; alike on every rank.

    Source: the log-normal quantiles are ``exp(ndtri(k / (num_buckets + 1)))``, as in
    ``scipy.stats.lognorm`` with ``s=1``.

    Example:
        >>> lengths = [1, 9, 2, 8, 10, 2]
        >>> sampler = DynamicBatchSampler(
        ...     lengths,
        ...     20,
        ...     bucket_boundaries=[2, 10],
        ...     lengths_list=lengths,
        ...     shuffle=False,
        ...     batch_ordering="ascending",
        ... )
        >>> list(sampler)
        [[0, 2, 5], [1, 3], [4]]
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- the contract's arguments
        self,
        dataset: Any,
        max_batch_length: float,
        num_buckets: int | None = None,
        length_func: Callable[[Any], float] | None = None,
        shuffle: bool = True,
        batch_ordering: str = "random",
        max_batch_ex: int | None = None,
        bucket_boundaries: Sequence[float] = (),
        lengths_list: Sequence[float] | None = None,
        seed: int | None = None,
        epoch: int = 0,
        drop_last: bool = False,
        verbose: bool = False,
    ) -> None:
        if not max_batch_length > 0 or math.isinf(max_batch_length):
            raise ConfigError(
                f"max_batch_length={max_batch_length!r} is not a positive number: no sample fits."
            )
        if batch_ordering not in {"random", "ascending", "descending"}:
            raise ConfigError(
                f"batch_ordering={batch_ordering!r} is not known. Use random, ascending or "
                "descending."
            )
        if max_batch_ex is not None:
            require_positive("max_batch_ex", max_batch_ex, "it limits the samples of a batch")
        self._lengths = _sample_lengths(dataset, length_func, lengths_list)
        self._bucket_boundaries = _upper_boundaries(
            max_batch_length,
            num_buckets,
            bucket_boundaries,
        )
        limit = math.inf if max_batch_ex is None else max_batch_ex
        fitting = [
            int(min(limit, max(1.0, max_batch_length / boundary)))
            for boundary in self._bucket_boundaries.tolist()
        ]
        # the last is of what is longer than all buckets
        self._bucket_lens = np.array([*fitting, 1])
        self._bucket_of = np.searchsorted(self._bucket_boundaries, self._lengths)
        self._in_bucket = np.bincount(self._bucket_of, minlength=len(self._bucket_lens))
        self._shuffle_ex = shuffle
        self._batch_ordering = batch_ordering
        self._drop_last = drop_last
        self.seed = _seed_or(42, seed)
        self.epoch = epoch
        self._made: tuple[int, list[list[int]]] | None = None
        if verbose:
            self._report()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration gives."""
        self.epoch = epoch

    def get_durations(self, batch: Sequence[int]) -> list[float]:
        """Return the lengths of some samples, given their indices."""
        durations: list[float] = self._lengths[list(batch)].tolist()
        return durations

    def __len__(self) -> int:
        """Return the number of batches, which does not depend on their order."""
        rounded = 0 if self._drop_last else self._bucket_lens - 1
        return int(((self._in_bucket + rounded) // self._bucket_lens).sum())

    def __iter__(self) -> Iterator[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self._make())
        return iter(self._made[1])

    def _make(self) -> list[list[int]]:
        """Put the batches of this epoch together."""
        number = len(self._lengths)
        samples = Order(
            number,
            self.seed,
            self.epoch,
            shuffle=self._shuffle_ex,
        ).at(np.arange(number))
        batches: list[list[int]] = []
        for bucket, size in enumerate(self._bucket_lens.tolist()):
            members = samples[self._bucket_of[samples] == bucket].tolist()
            end = len(members) // size * size if self._drop_last else len(members)
            batches += [members[begin : begin + size] for begin in range(0, end, size)]
        longest = np.array([self._lengths[batch].max() for batch in batches])
        return [batches[place] for place in self._order(longest).tolist()]

    def _order(self, longest: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return which batch comes when, from the longest length of each."""
        if self._batch_ordering == "random":
            return Order(
                len(longest),
                mix_key(self.seed, 1),
                self.epoch,
            ).at(np.arange(len(longest)))
        return np.argsort(
            longest if self._batch_ordering == "ascending" else -longest,
            kind="stable",
        )

    def _report(self) -> None:
        low = 0.0
        highs = [*self._bucket_boundaries.tolist(), math.inf]
        for high, size, held in zip(highs, self._bucket_lens, self._in_bucket, strict=True):
            logger.info(
                "Lengths from %.2f to %.2f: %d samples, %d in a batch.",
                low,
                high,
                held,
                size,
            )
            low = high


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Gives one rank its share of what a sampler or a batch sampler yields, as
    ``DistributedSampler`` does.

    As there, every rank gets the same number: without ``drop_last`` some indices are given out
    twice. **Given the inner sampler itself, ddpkit's loaders divide it without repeating
    anything**; a wrapped one counts as divided already.

    Args:
        sampler: yields indices, or lists of them; its length may change between epochs. If it is
            random and has no seed of its own, it is drawn alike on every rank.
        num_replicas: number of ranks; None: the run's world size.
        rank: this rank; None: the rank of the process.
        shuffle: whether the sampler's indices are reordered.
        seed: of the reordering; None: the experiment's seed.
        drop_last: leave out the remainder instead of repeating.

    Ranks: local. All ranks must give the same arguments but ``rank``.

    Example:
        >>> batches = [[0, 1], [2], [3, 4], [5]]
        >>> [list(DistributedSamplerWrapper(batches, 2, rank, shuffle=False)) for rank in range(2)]
        [[[0, 1], [3, 4]], [[2], [5]]]
    """

    def __init__(
        self,
        sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        unknown: Any = ()  # the length is set per epoch
        super().__init__(
            unknown,
            get_world_size() if num_replicas is None else num_replicas,
            (get_rank() or 0) if rank is None else rank,
            shuffle,
            _seed_or(0, seed),
            drop_last,
        )
        self.dataset = self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Tell this sampler and the inner one which epoch comes."""
        super().set_epoch(epoch)
        set_epoch_inside(self.sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        given = getattr(self.sampler, "generator", None)
        with own_randomness(
            mix_key(self.seed, self.epoch, 0xD157),
            [given] if isinstance(given, torch.Generator) else [],
        ):
            drawn = list(self.sampler)
        self._divide(len(drawn))
        order = Order(
            len(drawn),
            self.seed,
            self.epoch,
            shuffle=self.shuffle,
        )
        positions = np.arange(self.rank, self.total_size, self.num_replicas) % max(len(drawn), 1)
        return iter([drawn[index] for index in order.at(positions).tolist()])

    def __len__(self) -> int:
        """Return how many indices, or batches, this rank gets in this epoch."""
        self._divide(len(self.sampler))
        return self.num_samples

    def _divide(self, length: int) -> None:
        whole, rest = divmod(length, self.num_replicas)
        self.num_samples = whole + (1 if rest and not self.drop_last else 0)
        self.total_size = self.num_samples * self.num_replicas


class BalancingDataSampler(ReproducibleWeightedRandomSampler):
    """Draws every class of a dataset equally often, on average.

    Args:
        dataset: its items are dicts. Of one with ``output_keys_as``, as SpeechBrain's, ``key``
            alone is computed; the items of any other are loaded.
        key: of an item: its class.
        num_samples: draws per epoch; None: as many as the dataset has.
        replacement: whether a sample may be drawn more than once.
        seed: of the draws; None: the experiment's seed.
        epoch: to begin with.

    Ranks: local; alike on every rank.

    Example:
        >>> data = [{"label": "a"}] * 9 + [{"label": "b"}]
        >>> drawn = list(BalancingDataSampler(data, "label", num_samples=1000, seed=1))
        >>> 400 < drawn.count(9) < 600
        True
    """

    def __init__(
        self,
        dataset: Any,
        key: str,
        num_samples: int | None = None,
        replacement: bool = True,
        seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        self.dataset = dataset
        self.key = key
        of_key_alone = (
            dataset.output_keys_as([key])
            if hasattr(dataset, "output_keys_as")
            else contextlib.nullcontext()
        )
        with of_key_alone:
            classes = [dataset[index][key] for index in range(len(dataset))]
        counts = Counter(classes)
        weights = [1.0 / counts[class_] for class_ in classes]
        super().__init__(
            weights,
            num_samples or len(classes),
            replacement,
            seed,
            epoch,
        )


def _seed_or(default: int, seed: int | None) -> int:
    if seed is None:
        seed = global_seed()
    return default if seed is None else int(seed)


# ------------------------------------------------------------------------------ lengths and buckets


def _sample_lengths(
    dataset: Any,
    length_func: Callable[[Any], float] | None,
    lengths_list: Sequence[float] | None,
) -> NDArray[np.float64]:
    """Return the length of every sample of a dataset, without loading any."""
    if lengths_list is None:
        if not (hasattr(dataset, "data") and hasattr(dataset, "data_ids")):
            raise BucketingError(
                "DynamicBatchSampler cannot know how long the samples of "
                f"{type(dataset).__name__} are: length_func is asked about entries of a dataset "
                "with data and data_ids. Give lengths_list, one length per sample."
            )
        length_func = length_func or operator.itemgetter("duration")
        lengths_list = [length_func(dataset.data[data_id]) for data_id in dataset.data_ids]
    elif hasattr(dataset, "__len__") and len(dataset) != len(lengths_list):
        raise ConfigError(
            f"lengths_list has {len(lengths_list)} entries for the {len(dataset)} samples of "
            f"{type(dataset).__name__}. Give one length per sample, in the order of the dataset."
        )
    lengths = np.asarray(lengths_list, dtype=np.float64)
    is_length = (lengths >= 0) & (lengths < math.inf)
    if lengths.ndim != 1 or not lengths.size or not is_length.all():
        raise DataError(
            "DynamicBatchSampler: the lengths must be numbers, 0 or more, one for each of some "
            "samples."
        )
    return lengths


def _upper_boundaries(
    max_batch_length: float,
    num_buckets: int | None,
    bucket_boundaries: Sequence[float],
) -> NDArray[np.float64]:
    """Return the upper boundaries of the buckets, ascending: those given, or quantiles that end at
    the maximum.
    """
    if len(bucket_boundaries):
        boundaries = np.asarray(bucket_boundaries, dtype=np.float64)
        rises = (np.diff(boundaries) > 0).all()
        if not (rises and boundaries[0] > 0 and boundaries[-1] < math.inf):
            raise ConfigError(
                f"bucket_boundaries={list(bucket_boundaries)} must be lengths above 0, each "
                "greater than the one before. Samples of no length belong to the first bucket."
            )
        return boundaries
    if num_buckets is None:
        raise BucketingError(
            "DynamicBatchSampler was given neither num_buckets nor bucket_boundaries. Give one of "
            "them: more buckets mean less padding, and less chance in what meets in a batch."
        )
    require_positive("num_buckets", num_buckets, "at least one bucket is needed")
    levels = torch.arange(1, num_buckets + 1, dtype=torch.float64) / (num_buckets + 1)
    quantiles = torch.special.ndtri(levels).exp().numpy()
    scaled: NDArray[np.float64] = quantiles * (max_batch_length / quantiles[-1])
    scaled[-1] = max_batch_length
    return scaled
