"""Random augmentation that depends on the seed, the epoch and the sample, and on nothing else.

A dataset draws from the streams of its process, so that what a sample gets depends on which worker of which rank loads
it, and after what. Here every sample's streams (Python's, numpy's and torch's on the CPU) are seeded from
``(seed, epoch, sample)`` before it is loaded, and put back after the batch. A batch whose loading draws nothing, which
is found out by comparing the states, costs a few microseconds and no seeding.

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

from ddpkit.compat import watch_numpy_stream, watch_python_stream
from ddpkit.control.loader_workers import start_loading
from ddpkit.data.permutation import mix, mix_key
from ddpkit.errors import DataError
from ddpkit.sampler import PlannedBatchSampler, count_repeats, index_number, set_epoch_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpkit.sampler import DealtBatchSampler

    _State = tuple[Any, Any]  # what shows a state, and the state

_COLLATE = 0xC011A7E
_WHOLE, _COLLATING = -1, -2  # in place of a sample's place in its batch


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
        """Return the 64-bit key of a sample, or of the collating: that of the first sample, scrambled once more."""
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
    """Return a seed for the sample being loaded: for a generator of the dataset's own, which no loader can reach.

    Inside a collate function it is the batch's. Outside of ddpkit's loaders, and for an ``IterableDataset``, it is
    drawn from torch's global stream, so that the dataset works there as any other.

    Args:
        index: which sample, in a ``__getitems__`` that loads several; by default the one being loaded.

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
        >>> first, again = ([batch.tolist() for batch in make_dataloader(noisy, batch_size=2)] for _ in range(2))
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


def keyed_parts(loader: DataLoader[Any], place: Place | PlannedBatchSampler | DealtBatchSampler) -> dict[str, Any]:
    """Return the attributes with which a copy of a loader loads the same batches, their randomness keyed.

    Args:
        loader: of a map-style dataset.
        place: what deals its batches out, if that is one of ours; it knows seed and epoch.

    Returns:
        New values for ``dataset``, ``sampler``, ``batch_sampler``, ``collate_fn`` and ``worker_init_fn``.

    Ranks: local.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> parts = keyed_parts(DataLoader(range(4), batch_size=2), Place(seed=7))
        >>> [parts["dataset"][batch].tolist() for batch in parts["sampler"]]
        [[0, 1], [2, 3]]
    """
    batched = loader.batch_sampler is not None
    inner = cast("Iterable[Any]", loader.batch_sampler if batched else loader.sampler)
    return {
        "dataset": KeyedDataset(loader.dataset, loader.collate_fn, batched=batched, epoch=place.epoch),
        "sampler": KeyedSampler(inner, place, batched=batched),
        "batch_sampler": None,  # one item of the dataset is a batch
        "collate_fn": _as_it_is,
        "worker_init_fn": functools.partial(_start_worker, loader.worker_init_fn),
    }


def load_keyed(
    loader: DataLoader[Any], indices: Sequence[Any], collate_fn: Callable[[Any], Any], seed: int
) -> list[Any]:
    """Load some samples of a loader's dataset as the loader does: keyed, and in a worker if it has any.

    So nothing of this process changes: no random stream, and nothing that the dataset opens when it is first asked.

    Args:
        loader: whose dataset and kind of workers it is.
        indices: of the samples, one by one.
        collate_fn: makes of a list of one sample what is returned of it; can be pickled.
        seed: of the randomness.

    Returns:
        What ``collate_fn`` made of each.

    Ranks: local.

    Example:
        >>> load_keyed(DataLoader("abc"), [2, 0], "".join, 3)
        ['c', 'a']
    """
    batches = [KeyedBatch(mix_key(seed, 1), 1, [index]) for index in indices]
    own: DataLoader[Any] = DataLoader(
        cast("Any", KeyedDataset(loader.dataset, collate_fn)),
        batch_size=None,
        sampler=batches,
        collate_fn=_as_it_is,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=functools.partial(_start_worker, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    return list(start_loading(own))


class KeyedSampler:
    """Yields a sampler's batches as :class:`KeyedBatch`.

    Args:
        inner: yields lists of indices; or indices, if not ``batched``.
        place: gives seed and epoch, and counts repeated samples alike on every rank if it is a plan; else those of
            ``inner`` are counted.
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
        self.inner, self.place, self.batched = inner, place, batched

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(cast("Any", self.inner))

    def __iter__(self) -> Iterator[KeyedBatch]:
        place = self.place
        epoch, first = place.epoch, 0 if isinstance(place, Place) else place.skip
        base = mix_key(place.seed, epoch)
        seen: dict[int, int] = {}
        if self.batched and isinstance(place, PlannedBatchSampler) and isinstance(place.source, int):
            for indices in self.inner:  # lists, in which no index comes twice
                yield KeyedBatch(base, epoch, indices)
            return
        for number, given in enumerate(self.inner, first):
            indices = given if self.batched else [given]
            if not hasattr(indices, "__getitem__"):
                indices = list(indices)
            repeats = count_repeats(indices, seen) if isinstance(place, Place) else place.repeats(number)
            yield KeyedBatch(base, epoch, indices, repeats if repeats and any(repeats) else None)


class KeyedDataset:
    """Loads and collates batches of a dataset, with randomness that depends on (seed, epoch, sample) alone.

    Which of the three streams loading draws from is learnt: in the first batch of a process each is seeded before each
    sample and looked at after it; later only those that moved then. Should another one move all the same, the states
    are put back and the batch is loaded once more, with that one seeded as well, from then on.

    Args:
        dataset: the user's.
        collate_fn: the user's; it is keyed on the batch's first sample.
        batched: whether the samples are collated from a list; else the one index gives a whole batch.
        epoch: which the dataset knows of.

    Ranks: local.

    State: the process's random streams are the same after a batch as before it.

    Example:
        >>> keyed = KeyedDataset("abc", "".join)
        >>> keyed[KeyedBatch(base=0, epoch=1, indices=[2, 0])]
        'ca'
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, batched: bool = True, epoch: int = 1) -> None:
        self.dataset, self.collate_fn, self.batched, self.epoch = dataset, collate_fn, batched, epoch
        self._by_list = batched and _takes_lists(dataset)
        self._apart = False  # by lists of one index, so that each sample can be keyed
        self._learning = True
        self._streams: list[_Stream] = []  # made by the process that loads
        self._seeded: list[_Stream] = []  # those that loading draws from
        self._is_plain = False  # loading has drawn nothing so far

    def __getitem__(self, batch: KeyedBatch) -> Any:
        if self._is_plain and batch.epoch == self.epoch and _NOW.batch is None:
            loaded, is_plain = self._load_plainly(batch)
            if is_plain:
                return loaded
        if batch.epoch != self.epoch or not self._streams:
            self._follow(batch.epoch)
        before = [stream.state() for stream in self._streams]
        outer, untouched = (_NOW.batch, _NOW.place, _NOW.asked), False
        learning = self._learning
        _NOW.batch, _NOW.asked = batch, False
        try:
            loaded, again = self._load(batch, before)
            while again:
                self._put_back(before)
                loaded, again = self._load(batch, before)
            untouched = not (learning or self._seeded)
            self._is_plain = self.batched and not (self._by_list or self._learning or self._seeded)
            return loaded
        except StopIteration as error:
            raise self._used_up(batch) from error
        finally:
            _NOW.batch, _NOW.place, _NOW.asked = outer
            if not untouched:
                self._put_back(before)

    def _load_plainly(self, batch: KeyedBatch) -> tuple[Any, bool]:
        """Load a batch in the shortest way, and say whether that drew nothing, so that it counts.

        All that is called for every batch and every stream is written out: it is time that each batch takes.
        """
        python, legacy, generator = self._streams
        shown = (python.peek(), legacy.peek())
        if shown[0] != python.last[0] or shown[1] != legacy.last[0]:
            python.state(), legacy.state()  # read anew, in case they must be put back
        state = torch.default_generator.get_state()
        words = state.numpy().tobytes()
        _NOW.batch, _NOW.asked = batch, False
        dataset, is_plain = self.dataset, False
        try:
            samples = [dataset[index] for _NOW.place, index in enumerate(batch.indices)]  # sample_seed asks for it
            _NOW.place = _COLLATING
            loaded = self.collate_fn(samples)
            is_plain = (python.peek(), legacy.peek()) == shown and generator.peek() == words
            return loaded, is_plain
        except StopIteration as error:
            raise self._used_up(batch) from error
        finally:
            _NOW.batch, _NOW.place, _NOW.asked = None, _WHOLE, False
            if not is_plain:
                before = [python.last, legacy.last, (words, state)]
                pairs = list(zip(self._streams, before, strict=True))
                self._seeded = [stream for stream, (seen, _) in pairs if stream.peek() != seen]
                self._is_plain = False
                self._put_back(before)

    def _used_up(self, batch: KeyedBatch) -> DataError:
        return DataError(
            f"{type(self.dataset).__name__} raised StopIteration for the samples {_shown(batch.indices)}: a loader "
            "takes that for the end of the data. Look for a next() on something that is used up, in __getitem__ and in "
            "the collate function."
        )

    def _follow(self, epoch: int) -> None:
        """Make ready for a batch of an epoch."""
        if not self._streams:
            self._streams = [_Python(), _Numpy(), _Torch()]
            self._seeded = self._streams
        if epoch != self.epoch:
            self.epoch = epoch
            if get_worker_info() is not None:  # nobody else can tell a worker's copy of the dataset
                set_epoch_inside(self.dataset, epoch)

    def _load(self, batch: KeyedBatch, before: list[_State]) -> tuple[Any, bool]:
        """Load a batch, and say whether it must be loaded again: it drew what was not keyed sample by sample."""
        for stream in self._seeded:
            stream.forget()
        samples = self._samples(batch)
        if self._by_list and not self._apart and isinstance(samples, list) and len(samples) > 1:
            self._apart = _NOW.asked or self._has_drawn(before)
            if self._apart:
                return None, True
        self._begin(batch, _COLLATING)
        loaded = self.collate_fn(samples if self.batched else samples[0])
        if self._learning:
            self._learning = False
            self._seeded = [stream for stream in self._streams if stream.has_moved()]
            return loaded, False
        pairs = zip(self._streams, before)  # noqa: B905 -- `strict` would cost more than the comparison
        late = [stream for stream, (seen, _) in pairs if stream not in self._seeded and stream.peek() != seen]
        if late:
            self._seeded = self._seeded + late
        return loaded, bool(late)

    def _samples(self, batch: KeyedBatch) -> Any:
        if self._by_list and not self._apart:
            self._begin(batch, _WHOLE)
            return self.dataset.__getitems__(batch.indices)
        dataset, samples = self.dataset, []
        if not self._seeded and not self._apart:
            for _NOW.place, index in enumerate(batch.indices):  # sample_seed asks for it
                samples.append(dataset[index])
            return samples
        for place, index in enumerate(batch.indices):
            self._begin(batch, place)
            samples += dataset.__getitems__([index]) if self._apart else [dataset[index]]
        return samples

    def _begin(self, batch: KeyedBatch, place: int) -> None:
        """Seed the streams for a sample, if any is drawn from."""
        _NOW.place = place
        if self._seeded:
            key, watch = batch.key(place), self._learning or place == _WHOLE
            for stream in self._seeded:
                stream.start(mix(key ^ stream.number), watch=watch)

    def _has_drawn(self, before: list[_State]) -> bool:
        return any(
            stream.has_moved() if stream in self._seeded else stream.peek() != seen
            for stream, (seen, _) in zip(self._streams, before, strict=True)
        )

    def _put_back(self, before: list[_State]) -> None:
        for stream, (seen, state) in zip(self._streams, before, strict=True):
            if stream.peek() != seen:
                stream.set(state)


class _Stream:
    """One of the process's global streams: read, compared, seeded and put back."""

    number = 0

    def __init__(self, peek: Callable[[], Any]) -> None:
        self.peek = peek  # returns something that is equal as long as the state is, in less time than reading the state
        self.last: _State = (None, None)
        self._mark: Any = None
        self._moved = False

    def state(self) -> _State:
        """Return what :meth:`peek` shows, and the state; it is read only if it is another one than the last time."""
        seen = self.peek()
        if seen != self.last[0]:
            self.last = (seen, self.get())
        return self.last

    def start(self, key: int, *, watch: bool) -> None:
        """Seed the stream; note, if asked to, whether it had moved since the last time."""
        if watch:
            self.has_moved()
        self.seed(key)
        if watch:
            self._mark = self.peek()

    def forget(self) -> None:
        self._mark, self._moved = None, False

    def has_moved(self) -> bool:
        """Say whether the stream has moved after any of the watched starts."""
        self._moved = self._moved or (self._mark is not None and self.peek() != self._mark)
        return self._moved

    def get(self) -> Any:
        raise NotImplementedError

    def set(self, state: Any) -> None:
        raise NotImplementedError

    def seed(self, key: int) -> None:
        raise NotImplementedError


class _Python(_Stream):
    """Python's stream."""

    number = 1

    def __init__(self) -> None:
        super().__init__(watch_python_stream())

    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, key: int) -> None:
        random.seed(key)


class _Numpy(_Stream):
    """numpy's legacy stream."""

    number = 2

    def __init__(self) -> None:
        super().__init__(watch_numpy_stream())

    def get(self) -> Any:
        return np.random.get_state(legacy=False)  # noqa: NPY002 -- users' datasets draw from it

    def set(self, state: Any) -> None:
        np.random.set_state(state)  # noqa: NPY002 -- as above

    def seed(self, key: int) -> None:
        bits: Any = cast("Any", np.random).get_bit_generator()
        if isinstance(bits, np.random.MT19937):
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 -- as above
        else:  # another one in its place, which numpy does not seed
            np.random.set_state(type(bits)(key).state)  # noqa: NPY002 -- as above


class _Torch(_Stream):
    """torch's stream on the CPU; not ``torch.manual_seed``, which would seed the accelerators' as well."""

    number = 3

    def __init__(self) -> None:
        super().__init__(lambda: torch.default_generator.get_state().numpy().tobytes())

    def get(self) -> Any:
        return torch.default_generator.get_state()

    def set(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key >> 1)


def _takes_lists(dataset: Any) -> bool:
    """Say whether a dataset loads a list of indices in its own way; a ``Subset`` only if what it is of does."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _shown(indices: Any, most: int = 8) -> str:
    """Write the first few indices of a batch."""
    return ", ".join(str(index) for index in indices[:most]) + (", ..." if len(indices) > most else "")


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Show the user's dataset to whoever asks for it in a worker, and call the user's function."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, KeyedDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen for users
    if init is not None:
        init(worker)
