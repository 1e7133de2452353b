"""Random augmentation that depends on the seed, the epoch and the sample, and on nothing else.

A dataset draws from its process's generators, so a sample's augmentation depends on the worker and
rank that load it, and on the samples loaded before. Here the generators (Python's, numpy's and
torch's on the CPU) are seeded from ``(seed, epoch, sample)`` before a sample is loaded, and
restored after the batch. A batch that draws nothing, detected by comparing the states, costs a few
microseconds and is not seeded.

The epoch travels with the indices, so that it also reaches workers that live longer than an epoch.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, get_worker_info

from ddpkit.compat import look_at_random_streams
from ddpkit.control import start_loading
from ddpkit.data import count_repeats, index_number, set_epoch_inside
from ddpkit.errors import DataError
from ddpkit.seed import mix, mix_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpkit.data import DealtBatchSampler, PlannedBatchSampler

    # what shows that a stream has moved, and the three states
    _State = tuple[Any, Any, Any, torch.Tensor]

__all__ = [
    "KeyedBatch",
    "KeyedDataset",
    "KeyedSampler",
    "Place",
    "as_it_is",
    "keyed_loader",
    "load_keyed",
    "sample_seed",
]

LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_COLLATE = 0xC011A7E
# in place of a sample's place in its batch
_WHOLE = -1
_COLLATING = -2


class KeyedBatch(NamedTuple):
    """The indices of one batch, and what their samples' randomness is keyed on.

    Attributes:
        base: ``mix_key(seed, epoch)``.
        epoch: which the batch belongs to.
        indices: as the sampler gave them.
        repeats: how often each sample came before in the epoch; None where none did.

    Ranks: local.

    Example:
        >>> batch = KeyedBatch(mix_key(7, 1), 1, [3, 4, 3], [0, 0, 1])
        >>> batch.key(0) == mix_key(7, 1, 3), batch.key(2) == mix_key(7, 1, 3, 1)
        (True, True)
    """

    base: int
    epoch: int
    indices: Any
    repeats: Sequence[int] | None = None

    def key(self, place: int) -> int:
        """Return the 64-bit key of a sample; for collating, the first sample's key, scrambled once
        more.
        """
        if place < 0:
            first = self.key(0) if len(self.indices) else self.base
            return mix(first ^ _COLLATE) if place == _COLLATING else first
        key = mix(self.base ^ index_number(self.indices[place]))
        return mix(key ^ self.repeats[place]) if self.repeats and self.repeats[place] else key


class _Loading:
    """What this process is loading just now."""

    batch: KeyedBatch | None = None
    place: int = _WHOLE
    asked: bool = False  # for a sample's seed, when nobody could know which sample


_NOW = _Loading()


def sample_seed(index: int | None = None) -> int:
    """Return a seed for the sample being loaded: for a generator of the dataset's own, which no
    loader can reach.

    Inside a collate function it is the batch's. Outside of ddpkit's loaders, and for an
    ``IterableDataset``, it is drawn from torch's global stream, so that the dataset works there as
    any other.

    Args:
        index: which sample, in a ``__getitems__`` that loads several; by default the one being
            loaded.

    Returns:
        A 64-bit number, from (seed, epoch, sample).

    Ranks: local; equal on every rank that loads the sample.

    Example:
        >>> import numpy as np
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return np.random.default_rng(sample_seed()).normal()
        >>> from ddpkit.dataloader import make_dataloader
        >>> noisy = Noisy()
        >>> first, again = (
        ...     [batch.tolist() for batch in make_dataloader(noisy, batch_size=2)] for _ in range(2)
        ... )
        >>> first == again, len(set(first[0] + first[1]))
        (True, 4)
    """
    batch = _NOW.batch
    if batch is None:
        return int(torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator))
    if index is not None:
        return mix(batch.base ^ index_number(index))
    _NOW.asked = _NOW.asked or _NOW.place == _WHOLE
    return batch.key(_NOW.place)


@dataclass
class Place:
    """The seed and the epoch of a loader that follows no plan of ours.

    Ranks: local.

    Example:
        >>> Place(seed=7).epoch
        1
    """

    seed: int
    epoch: int = 1


def keyed_loader(
    loader: DataLoader[Any],
    batches: Iterable[KeyedBatch],
    *,
    batched: bool = True,
    epoch: int = 1,
    **options: Any,
) -> DataLoader[Any]:
    """Make a loader that loads given batches as another loader would, with their randomness keyed.

    Args:
        loader: of a map-style dataset.
        batches: what to load.
        batched: whether the samples are collated from a list; else the one index gives a whole
            batch.
        epoch: the epoch set on the dataset.
        options: of the new loader, where they differ from ``loader``'s.

    Ranks: local.

    Example:
        >>> batches = [KeyedBatch(mix_key(7, 1), 1, [2, 0])]
        >>> list(keyed_loader(DataLoader("abc", 2), batches, collate_fn="".join))
        ['ca']
    """
    given = {
        name: getattr(loader, name) for name in LOADER_OPTIONS if hasattr(loader, name)
    } | options
    dataset: Any = KeyedDataset(
        loader.dataset,
        given.pop("collate_fn"),
        batched=batched,
        epoch=epoch,
    )
    given |= {
        "collate_fn": as_it_is,
        "worker_init_fn": functools.partial(_start_worker, given["worker_init_fn"]),
    }
    # one item is a batch
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=cast("Any", batches),
        **given,
    )


def load_keyed(
    loader: DataLoader[Any],
    indices: Sequence[Any],
    collate_fn: Callable[[Any], Any],
    seed: int,
) -> list[Any]:
    """Load some samples of a loader's dataset as the loader does: keyed, and in a worker if it has
    any.

    So nothing of this process changes: no random stream, and nothing that the dataset opens when it
    is first asked.

    Args:
        loader: whose dataset and kind of workers it is.
        indices: of the samples, one by one.
        collate_fn: called with a list of one sample, returns the result for it; can be pickled.
        seed: of the randomness.

    Returns:
        What ``collate_fn`` made of each.

    Ranks: local.

    Example:
        >>> load_keyed(DataLoader("abc"), [2, 0], "".join, 3)
        ['c', 'a']
    """
    batches = [KeyedBatch(mix_key(seed, 1), 1, [index]) for index in indices]
    options: dict[str, Any] = {
        "num_workers": min(loader.num_workers, 1),
        "persistent_workers": False,
    }
    own = keyed_loader(
        loader,
        batches,
        collate_fn=collate_fn,
        generator=torch.Generator(),
        **options,
    )
    return list(start_loading(own))


class KeyedSampler:
    """Yields a sampler's batches as :class:`KeyedBatch`.

    Args:
        inner: yields lists of indices; or indices, if not ``batched``.
        place: gives seed and epoch. A plan also counts repeated samples, equally on all ranks; else
            repeats in ``inner`` are counted.
        batched: whether ``inner`` yields lists.

    Ranks: local.

    Example:
        >>> sampler = KeyedSampler([[0, 1], [1]], Place(seed=7))
        >>> [(batch.epoch, batch.indices, batch.repeats) for batch in sampler]
        [(1, [0, 1], None), (1, [1], [1])]
    """

    def __init__(
        self,
        inner: Iterable[Any],
        place: Place | PlannedBatchSampler | DealtBatchSampler,
        *,
        batched: bool = True,
    ) -> None:
        self.inner = inner
        self.place = place
        self.batched = batched

    def __iter__(self) -> Iterator[KeyedBatch]:
        place = self.place
        epoch = place.epoch
        first = 0 if isinstance(place, Place) else place.skip
        base = mix_key(place.seed, epoch)
        seen: dict[int, int] = {}
        repeats_of = None if isinstance(place, Place) else place.repeats
        for number, given in enumerate(self.inner, first):
            indices = given if self.batched else [given]
            if indices.__class__ is not list and not hasattr(indices, "__getitem__"):
                indices = list(indices)
            repeats = count_repeats(indices, seen) if repeats_of is None else repeats_of(number)
            yield KeyedBatch(
                base,
                epoch,
                indices,
                repeats if repeats and any(repeats) else None,
            )


class KeyedDataset:
    """Loads and collates batches of a dataset, with randomness that depends on (seed, epoch,
    sample) alone.

    Whether loading draws is learnt from the first sample, before which the streams are seeded. If
    it does not, a batch that moves a stream all the same is loaded once more, with the streams
    seeded before each sample, as from then on.

    Args:
        dataset: the user's.
        collate_fn: the user's; it is keyed on the batch's first sample.
        batched: whether the samples are collated from a list; else the one index gives a whole
            batch.
        epoch: which the dataset knows of.

    Ranks: local.

    State: the process's random streams are the same after a batch as before it.

    Example:
        >>> keyed = KeyedDataset("abc", "".join)
        >>> keyed[KeyedBatch(base=0, epoch=1, indices=[2, 0])]
        'ca'
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool = True,
        epoch: int = 1,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batched = batched
        self.epoch = epoch
        self._by_list = batched and _takes_lists(dataset)
        self._apart = False  # by lists of one index
        self._draws: bool | None = False if self._by_list else None  # None: nobody knows yet

    def __getitem__(self, batch: KeyedBatch) -> Any:
        if batch.epoch != self.epoch:
            self.epoch = batch.epoch
            if get_worker_info() is not None:  # nobody else can tell a worker's copy of the dataset
                set_epoch_inside(self.dataset, batch.epoch)
        outer = (_NOW.batch, _NOW.place, _NOW.asked)
        before = _STREAMS.state()
        has_moved = True
        _NOW.batch = batch
        _NOW.asked = False
        try:
            loaded = self._load(batch, before)
            has_moved = look_at_random_streams() != before[0]
            if has_moved and not self._draws:
                self._draws = True
                _STREAMS.restore(before)
                loaded = self._load(batch, before)
            return loaded
        except StopIteration as error:
            raise DataError(
                f"{type(self.dataset).__name__} raised StopIteration for the samples "
                f"{[*batch.indices][:8]}: to a loader that is the end of the data. Look for a "
                "next() on something used up, there or in collate_fn."
            ) from error
        finally:
            _NOW.batch, _NOW.place, _NOW.asked = outer
            if has_moved:
                _STREAMS.restore(before)

    def _load(self, batch: KeyedBatch, before: _State) -> Any:
        if self._draws is False and not self._by_list:
            # for sample_seed
            samples = [self.dataset[index] for _NOW.place, index in enumerate(batch.indices)]
            _NOW.place = _COLLATING
        else:
            samples = self._load_list(batch) if self._by_list else self._load_samples(batch, before)
            self._seed(batch, _COLLATING)
        return self.collate_fn(samples if self.batched else samples[0])

    def _load_samples(self, batch: KeyedBatch, before: _State) -> list[Any]:
        dataset = self.dataset
        samples = []
        for place, index in enumerate(batch.indices):
            self._seed(batch, place)
            is_first = self._draws is None
            seen = look_at_random_streams() if is_first else None
            samples.append(dataset[index])
            if is_first:
                self._draws = look_at_random_streams() != seen
                if not self._draws:
                    _STREAMS.restore(before)
        return samples

    def _load_list(self, batch: KeyedBatch) -> Any:
        """Ask for the whole list; one by one as soon as loading draws, so that each sample can be
        keyed.
        """
        if not self._apart:
            self._seed(batch, _WHOLE)
            seen = look_at_random_streams()
            found = self.dataset.__getitems__(batch.indices)
            draws = _NOW.asked or look_at_random_streams() != seen
            if not (draws and isinstance(found, list) and len(found) > 1):
                return found
        self._draws = self._apart = True
        samples: list[Any] = []
        for place, index in enumerate(batch.indices):
            self._seed(batch, place)
            samples += self.dataset.__getitems__([index])
        return samples

    def _seed(self, batch: KeyedBatch, place: int) -> None:
        """Say what is being loaded, and seed the streams for it, unless loading is known to draw
        nothing.
        """
        _NOW.place = place
        if self._draws is not False:
            key = batch.key(place)
            random.seed(mix(key ^ 1))
            np.random.seed(mix(key ^ 2) & 0xFFFFFFFF)  # noqa: NPY002 -- users' datasets draw from it
            # not torch.manual_seed: accelerators have their own
            torch.default_generator.manual_seed(mix(key ^ 3) >> 1)


class _Streams:
    """The process's global random streams: Python's, numpy's and torch's on the CPU."""

    def __init__(self) -> None:
        self._known: Any = None

    def state(self) -> _State:
        """Return what shows that a stream has moved, and the states, which are read only where one
        has.
        """
        shown = look_at_random_streams()
        if self._known is None or shown != self._known[0]:
            legacy = np.random.get_state()  # noqa: NPY002 -- as above
            self._known = shown, random.getstate(), legacy, torch.default_generator.get_state()
        known: _State = self._known
        return known

    def restore(self, state: _State) -> None:
        """Put the streams where they were."""
        _, python, legacy, generator = state
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 -- as above
        torch.default_generator.set_state(generator)


_STREAMS = _Streams()


def _takes_lists(dataset: Any) -> bool:
    """Return whether a dataset has its own ``__getitems__``; a ``Subset`` only if its dataset
    has.
    """
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def as_it_is(batch: Any) -> Any:
    """Collate what is a batch already: return it.

    Ranks: local.

    Example:
        >>> as_it_is("a batch")
        'a batch'
    """
    return batch


def _start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Make ``get_worker_info().dataset`` the user's dataset, and call the user's
    ``worker_init_fn``.
    """
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, KeyedDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen for users
    if init is not None:
        init(worker)
