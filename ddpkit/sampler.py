"""The samplers that recipes name, each an order that is a function of its seed and the epoch.

They work in any loader, and so outside of ddpkit as well. Given to ``Brain.fit`` as ``sampler`` or ``batch_sampler``
they are dealt out to the ranks, so that nothing has to be divided by the recipe.

An order follows from a *hash* of seed and epoch. With their sum, as in other libraries, epoch 2 of seed 10 would equal
epoch 1 of seed 11; so the orders differ from other libraries' orders for the same seed. The default seed comes from
:func:`ddpkit.seed.seed_everything`, or is a constant without such a call. The epoch counts from 0 until a call of
``set_epoch``, which every loader of ddpkit makes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.base import get_rank, get_world_size
from ddpkit.data import Order, set_epoch_inside
from ddpkit.errors import BucketingError, ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.seed import global_seed, mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

logger = get_logger(__name__)

CHUNK = 8192
_MOST_SHOWN = 5


class ReproducibleRandomSampler(RandomSampler):
    """A ``RandomSampler`` whose order is a function of the seed and the epoch.

    Without replacement nothing is stored: the order is computed a few thousand positions at a time, and with the
    experiment's seed it equals ``shuffle=True``.

    Args:
        data_source: has a length, which may change between epochs.
        seed: of the order; None: the experiment's seed.
        epoch: to begin with.
        replacement: as for ``torch.utils.data.RandomSampler``.
        num_samples: likewise.

    Raises:
        DataError: there is nothing to draw from.

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
        if not len(data_source):
            raise DataError(f"{type(self).__name__}: data_source is empty. Check the paths and filters that made it.")
        super().__init__(data_source, replacement, num_samples)
        self.seed = _seed_or(563375142, seed)
        self.epoch = epoch
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.replacement:
            self.generator.manual_seed(mix_key(self.seed, self.epoch) >> 1)
            return super().__iter__()
        return self._ordered()

    def _ordered(self) -> Iterator[int]:
        size, left = len(self.data_source), self.num_samples
        for number in itertools.count():  # more samples than the dataset has: the whole set again, in another order
            order = Order(size, mix_key(self.seed, number) if number else self.seed, self.epoch)
            for start in range(0, min(size, left), CHUNK):
                yield from order.indices(start, min(start + CHUNK, size, left))
            left -= size
            if left <= 0:
                return


class ReproducibleWeightedRandomSampler(WeightedRandomSampler):
    """A ``WeightedRandomSampler`` whose draws are a function of the seed and the epoch.

    Args:
        weights: one number per sample, not negative, shape ``(samples,)``; they need not add up to one.
        num_samples: draws per epoch.
        replacement: whether a sample may be drawn more than once.
        seed: of the draws; None: the experiment's seed.
        epoch: to begin with.

    Raises:
        ConfigError: without replacement fewer than ``num_samples`` weights are not 0.

    Ranks: local; alike on every rank.

    Example:
        >>> sampler = ReproducibleWeightedRandomSampler([1.0, 0.0, 1.0], 4, replacement=True, seed=3)
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
        possible = int(torch.count_nonzero(self.weights))
        if not replacement and possible < num_samples:  # torch would draw what has no weight
            raise ConfigError(
                f"{type(self).__name__}: num_samples={num_samples} cannot be drawn with replacement=False: {possible} "
                "weights are not 0."
            )
        self.seed = _seed_or(129491412, seed)
        self.epoch = epoch
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose draws the next iteration makes."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(mix_key(self.seed, self.epoch) >> 1)
        return super().__iter__()


class ConcatDatasetBatchSampler(Sampler[list[int]]):
    """Makes batches of a fixed number of samples from each part of a ``ConcatDataset``.

    An epoch ends with the part that is used up first.

    Args:
        samplers: one per part, in the order of the parts. Each yields indices of its own part, from 0. The length of
            a part is the length of the sampler's ``data_source`` or ``weights`` if present, else of the sampler.
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

    def __init__(self, samplers: Sequence[Any], batch_sizes: Sequence[int], epoch: int = 0) -> None:
        are_lists = isinstance(samplers, (list, tuple)) and isinstance(batch_sizes, (list, tuple))
        if not are_lists or not 0 < len(samplers) == len(batch_sizes):
            raise ConfigError(
                f"samplers={samplers!r} and batch_sizes={batch_sizes!r} must be lists of the same length: one of both "
                "for each part of the dataset."
            )
        for size in batch_sizes:
            positive_whole("batch_sizes", size, "Every part gives at least one sample to a batch.")
        self.samplers = samplers
        self.batch_sizes = batch_sizes
        self.offsets = [0, *itertools.accumulate(_part_length(one) for one in samplers[:-1])]
        self.epoch = epoch
        self.set_epoch(epoch)

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return sum(self.batch_sizes)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers which epoch comes."""
        self.epoch = epoch
        for one in self.samplers:
            set_epoch_inside(one, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        iterators = [iter(one) for one in self.samplers]
        while True:
            batch: list[int] = []
            for offset, size, iterator in zip(self.offsets, self.batch_sizes, iterators, strict=True):
                drawn = [offset + index for index in itertools.islice(iterator, size)]
                if len(drawn) < size:
                    return
                batch += drawn
            yield batch

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return min(len(one) // size for one, size in zip(self.samplers, self.batch_sizes, strict=True))


class DynamicBatchSampler(Sampler[list[int]]):
    """Makes batches of samples of similar length: many short ones, or a few long ones.

    Samples of similar length share a bucket, and a bucket's batches have as many samples as fit into
    ``max_batch_length`` at the bucket's upper boundary. Which samples meet in a batch changes with the epoch, how many
    batches there are does not.

    Args:
        dataset: to sample from.
        max_batch_length: how long the samples of a batch may be together, with their padding; in the unit of the
            lengths. A sample that is longer is a batch by itself.
        num_buckets: number of buckets, whose boundaries are then the quantiles of a log-normal distribution, the last
            at ``max_batch_length``.
        length_func: returns the length of a sample, given the dataset's entry for it (``dataset.data[id]``), which
            costs no loading; where the entry lacks a key, that key alone is asked for through ``output_keys_as``.
        shuffle: whether samples are put together anew in every epoch.
        batch_ordering: ``"random"``, or ``"ascending"`` or ``"descending"`` by the longest sample of a batch.
        max_batch_ex: samples of a batch, at most.
        bucket_boundaries: upper boundaries of the buckets, ascending, in the unit of the lengths; instead of
            ``num_buckets``. Samples above the last are batches by themselves.
        lengths_list: the length of every sample; needed for a dataset without ``data`` and ``data_ids``.
        seed: of the shuffling; None: the experiment's seed.
        epoch: to begin with.
        drop_last: leave out the samples that do not fill a batch of their bucket.
        verbose: log the contents of every bucket.

    Raises:
        BucketingError: neither ``num_buckets`` nor ``bucket_boundaries``, or no way to know the lengths.
        ConfigError: arguments that cannot work.
        DataError: no sample, a length that is negative or no number, or no batch that is full with ``drop_last``.

    Ranks: local; alike on every rank.

    Source: the log-normal quantiles are ``exp(ndtri(k / (num_buckets + 1)))``, as in ``scipy.stats.lognorm`` with
    ``s=1``.

    Example:
        >>> lengths = [1, 9, 2, 8, 10, 2]
        >>> sampler = DynamicBatchSampler(
        ...     lengths, 20, bucket_boundaries=[2, 10], lengths_list=lengths, shuffle=False, batch_ordering="ascending"
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
            raise ConfigError(f"max_batch_length={max_batch_length!r} is not a positive number: no sample fits.")
        if batch_ordering not in {"random", "ascending", "descending"}:
            raise ConfigError(f"batch_ordering={batch_ordering!r} is not known. Use random, ascending or descending.")
        if max_batch_ex is not None:
            positive_whole("max_batch_ex", max_batch_ex, "It limits the samples of a batch; leave it out for no limit")
        self._lengths = sample_lengths(dataset, length_func, lengths_list)
        self._bucket_boundaries = upper_boundaries(max_batch_length, num_buckets, bucket_boundaries)
        self._bucket_lens = samples_that_fit(max_batch_length, self._bucket_boundaries, max_batch_ex)
        self._bucket_of = np.searchsorted(self._bucket_boundaries, self._lengths)
        self._in_bucket = np.bincount(self._bucket_of, minlength=len(self._bucket_lens))
        self._shuffle_ex, self._batch_ordering, self._drop_last = shuffle, batch_ordering, drop_last
        self._seed = _seed_or(42, seed)
        self._made: tuple[int, list[list[int]]] | None = None
        self.epoch = epoch
        self._report(max_batch_length, verbose=verbose)

    @property
    def seed(self) -> int:
        """The seed of the shuffling."""
        return self._seed

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
        samples = Order(number, self._seed, self.epoch, shuffle=self._shuffle_ex).at(np.arange(number))
        samples = samples[np.argsort(self._bucket_of[samples], kind="stable")]
        buckets = self._bucket_of[samples]
        place = np.arange(number) - (np.cumsum(self._in_bucket) - self._in_bucket)[buckets]
        sizes = self._bucket_lens[buckets]
        if self._drop_last:
            kept = place < (self._in_bucket // self._bucket_lens * self._bucket_lens)[buckets]
            samples, place, sizes = samples[kept], place[kept], sizes[kept]
        begins = np.flatnonzero(place % sizes == 0)
        ends = np.append(begins[1:], len(samples))
        order = self._order(np.maximum.reduceat(self._lengths[samples], begins))
        flat = samples.tolist()
        return [flat[begin:end] for begin, end in zip(begins[order].tolist(), ends[order].tolist(), strict=True)]

    def _order(self, longest: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return which batch comes when, from the longest length of each."""
        if self._batch_ordering == "random":
            return Order(len(longest), mix_key(self._seed, 1), self.epoch).at(np.arange(len(longest)))
        return np.argsort(longest if self._batch_ordering == "ascending" else -longest, kind="stable")

    def _report(self, max_batch_length: float, *, verbose: bool) -> None:
        if not len(self):
            raise DataError(
                f"DynamicBatchSampler: drop_last=True leaves no batch of the {len(self._lengths)} sample(s): no bucket "
                f"fills a batch ({self._bucket_lens.tolist()} samples). Leave drop_last out, or use a "
                "smaller max_batch_length, max_batch_ex or num_buckets."
            )
        logger.info(
            "DynamicBatchSampler: %d batches of %d samples, %d of %d buckets in use.",
            *(len(self), len(self._lengths), np.count_nonzero(self._in_bucket), len(self._bucket_lens)),
        )
        longer = int((self._lengths > max_batch_length).sum())
        if longer:
            logger.warning(
                "DynamicBatchSampler: %d sample(s) are longer than max_batch_length=%s (the longest: %s); each is a "
                "batch by itself.",
                *(longer, max_batch_length, self._lengths.max()),
            )
        if verbose:
            low = 0.0
            highs = [*self._bucket_boundaries.tolist(), math.inf]
            for high, size, held in zip(highs, self._bucket_lens, self._in_bucket, strict=True):
                logger.info("Lengths from %.2f to %.2f: %d samples, %d in a batch.", low, high, held, size)
                low = high


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Gives one rank its share of what a sampler or a batch sampler yields, as ``DistributedSampler`` does.

    As there, every rank gets the same number: without ``drop_last`` some indices are given out twice. **Given the inner
    sampler itself, ddpkit's loaders divide it without repeating anything**; a wrapped one counts as divided already.

    Args:
        sampler: yields indices, or lists of them; its length may change between epochs. If it is random and has no
            seed of its own, it is drawn alike on every rank.
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
            mix_key(self.seed, self.epoch, 0xD157), [given] if isinstance(given, torch.Generator) else []
        ):
            drawn = list(self.sampler)
        self._divide(len(drawn))
        order = Order(len(drawn), self.seed, self.epoch, shuffle=self.shuffle)
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
        dataset: its items are dicts. Of one with ``data`` and ``data_ids``, or with ``output_keys_as``, ``key`` alone
            is computed; the items of any other are loaded.
        key: of an item: its class.
        num_samples: draws per epoch; None: as many as the dataset has.
        replacement: whether a sample may be drawn more than once.
        seed: of the draws; None: the experiment's seed.
        epoch: to begin with.

    Raises:
        ConfigError: more samples without replacement than the dataset has.
        DataError: the dataset is empty, or an item lacks the key.

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
        self.dataset, self.key = dataset, key
        classes = ask_items(dataset, lambda item: item[key], "BalancingDataSampler")
        counts = Counter(classes)
        weights = [1.0 / counts[one] for one in classes]
        super().__init__(weights, num_samples or len(classes), replacement, seed, epoch)


def _seed_or(default: int, seed: int | None) -> int:
    if seed is None:
        seed = global_seed()
    return default if seed is None else int(seed)


def _part_length(sampler: Any) -> int:
    """Return the length of the dataset that a sampler draws from."""
    for name in ("data_source", "weights"):
        source = getattr(sampler, name, None)
        if source is not None:
            return len(source)
    return len(sampler)


# ---------------------------------------------------------------------------------------- lengths and buckets


def positive_whole(name: str, value: Any, advice: str) -> None:
    """Raise an error unless a value is a whole number >= 1.

    Args:
        name: of the argument, for the message.
        value: given for it.
        advice: what to do, for the message.

    Raises:
        ConfigError: it is none.

    Ranks: local.

    Example:
        >>> positive_whole("num_buckets", 3, "One bucket is the least.")
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a positive whole number. {advice}")


def sample_lengths(
    dataset: Any, length_func: Callable[[Any], float] | None, lengths_list: Sequence[float] | None
) -> NDArray[np.float64]:
    """Return the length of every sample of a dataset, loading as little as possible.

    Args:
        dataset: with ``data`` (id -> entry) and ``data_ids``, unless ``lengths_list`` is given.
        length_func: length of an entry; None: its ``"duration"``.
        lengths_list: the lengths, if they are known.

    Returns:
        Shape ``(samples,)``, in the unit of ``length_func`` or ``lengths_list``.

    Raises:
        BucketingError: the lengths cannot be determined.
        ConfigError: ``lengths_list`` is as long as some other dataset.
        DataError: the dataset is empty, or a length is negative or not a number.

    Ranks: local; alike on every rank.

    Example:
        >>> sample_lengths(range(3), None, [4, 0, 2.5])
        array([4. , 0. , 2.5])
    """
    if lengths_list is None:
        if not _gives_entries(dataset):
            raise BucketingError(
                f"DynamicBatchSampler cannot know how long the samples of {type(dataset).__name__} are: length_func "
                "is asked about entries of a dataset with data and data_ids. Give lengths_list, one length per sample."
            )
        lengths_list = ask_items(dataset, length_func or (lambda item: item["duration"]), "DynamicBatchSampler")
    elif hasattr(dataset, "__len__") and len(dataset) != len(lengths_list):
        raise ConfigError(
            f"lengths_list has {len(lengths_list)} entries for the {len(dataset)} samples of "
            f"{type(dataset).__name__}. Give one length per sample, in the order of the dataset."
        )
    try:
        lengths = np.asarray(lengths_list, dtype=np.float64).reshape(len(lengths_list))
    except (TypeError, ValueError) as error:
        raise DataError(f"DynamicBatchSampler: the lengths are not one number per sample: {error}.") from error
    if not lengths.size:
        raise DataError("DynamicBatchSampler: there is no sample. Check the paths and filters that made the dataset.")
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))
    if bad.size:
        raise DataError(
            f"DynamicBatchSampler: sample {bad[0]} has length {lengths[bad[0]]} ({bad.size} such sample(s)). A length "
            "is a number, 0 or more."
        )
    return lengths


def ask_items(dataset: Any, question: Callable[[Any], Any], who: str) -> list[Any]:
    """Ask something of every item of a dataset, loading as little as possible.

    The entries behind the items are asked first, which loads nothing. A key that they lack is computed through
    ``output_keys_as``, and that key alone. Only where a dataset has neither are its items loaded.

    Args:
        dataset: its items are dicts.
        question: called with an item; it raises ``KeyError`` for a key that the item lacks.
        who: asks, for the messages.

    Returns:
        The answers, in the order of the dataset.

    Raises:
        DataError: the dataset is empty, or has no such key.

    Ranks: local.

    Example:
        >>> ask_items([{"label": "a"}, {"label": "b"}], lambda item: item["label"], "a test")
        ['a', 'b']
    """
    if not len(dataset):
        raise DataError(f"{who}: the dataset is empty. Check the paths and filters that made it.")
    keys: list[Any] = []
    while True:
        try:
            if not keys:
                return [question(item) for item in _entries(dataset)]
            with dataset.output_keys_as(list(keys)):
                return [question(dataset[index]) for index in range(len(dataset))]
        except KeyError as error:
            if not error.args or error.args[0] in keys or not hasattr(dataset, "output_keys_as"):
                raise DataError(f"{who}: {type(dataset).__name__} gives no {error}. Name a key it has.") from error
            keys += error.args


def upper_boundaries(
    max_batch_length: float, num_buckets: int | None, bucket_boundaries: Sequence[float] = ()
) -> NDArray[np.float64]:
    """Return the upper boundaries of the buckets, ascending.

    Args:
        max_batch_length: the last boundary, where they are computed.
        num_buckets: how many are computed.
        bucket_boundaries: the boundaries themselves; then the other arguments do not matter.

    Raises:
        BucketingError: neither is given.
        ConfigError: boundaries that are not ascending, or not above 0; or no positive number of buckets.

    Ranks: local.

    Source: quantiles of the log-normal distribution, ``exp(ndtri(k / (num_buckets + 1)))``, as in
    ``scipy.stats.lognorm`` with ``s=1``.

    Example:
        >>> upper_boundaries(10.0, 3).round(2)
        array([ 2.6 ,  5.09, 10.  ])
    """
    if len(bucket_boundaries):
        boundaries = np.asarray(bucket_boundaries, dtype=np.float64)
        if not (np.isfinite(boundaries).all() and boundaries[0] > 0 and (np.diff(boundaries) > 0).all()):
            raise ConfigError(
                f"bucket_boundaries={list(bucket_boundaries)[:_MOST_SHOWN]} must be lengths above 0, each greater than "
                "the one before. Samples of no length belong to the first bucket."
            )
        return boundaries
    if num_buckets is None:
        raise BucketingError(
            "DynamicBatchSampler was given neither num_buckets nor bucket_boundaries. Give one of them: more buckets "
            "mean less padding, and less chance in what meets in a batch."
        )
    positive_whole("num_buckets", num_buckets, "One bucket is the least.")
    levels = torch.arange(1, num_buckets + 1, dtype=torch.float64) / (num_buckets + 1)
    quantiles = torch.special.ndtri(levels).exp().numpy()
    scaled: NDArray[np.float64] = quantiles * (max_batch_length / quantiles[-1])
    scaled[-1] = max_batch_length
    return scaled


def samples_that_fit(
    max_batch_length: float, boundaries: NDArray[np.float64], max_batch_ex: int | None
) -> NDArray[np.int64]:
    """Return how many samples make a batch, for every bucket and for what is longer than the last boundary.

    Args:
        max_batch_length: how long the samples of a batch may be together.
        boundaries: of the buckets, shape ``(buckets,)``.
        max_batch_ex: samples of a batch, at most.

    Returns:
        Shape ``(buckets + 1,)``; the last is 1.

    Ranks: local.

    Example:
        >>> samples_that_fit(10.0, np.array([2.0, 3.0, 20.0]), max_batch_ex=4)
        array([4, 3, 1, 1])
    """
    limit = math.inf if max_batch_ex is None else max_batch_ex
    fitting = [int(min(limit, max(1.0, max_batch_length / one))) for one in boundaries.tolist()]
    return np.array([*fitting, 1])


def _gives_entries(dataset: Any) -> bool:
    return hasattr(dataset, "data") and hasattr(dataset, "data_ids")


def _entries(dataset: Any) -> Iterator[Any]:
    """Yield what can be asked without loading; an empty dict, where keys must be named, makes the question name one."""
    if _gives_entries(dataset):
        return (dataset.data[one] for one in dataset.data_ids)
    if hasattr(dataset, "output_keys_as"):
        return iter([{}])
    return (dataset[index] for index in range(len(dataset)))
