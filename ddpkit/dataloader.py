"""Loaders: a rank's part of a dataset, which remembers how far it has come, or cut into epochs of a fixed length.

Every loader that the Brain makes follows the plan of :mod:`ddpkit.data.plan`. A loader draws its workers' seeds from a
generator of its own, so that making an iterator does not move the global random stream.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.augmentation import LOADER_OPTIONS, KeyedSampler, Place, as_it_is, keyed_loader, load_keyed
from ddpkit.base import get_rank, get_world_size, mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.control import start_loading
from ddpkit.data import (
    DealtBatchSampler,
    PlannedBatchSampler,
    StreamLoader,
    StreamShard,
    WorkerCopies,
    guess_batch_size,
    is_sharded,
    layers,
    require_loader_arguments,
    set_epoch_inside,
    stream_loader,
    summarize,
    worker_key,
)
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.seed import global_seed, mix_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ddpkit.data import FirstItems, StreamPosition

__all__ = [
    "LoopedLoader",
    "SaveableDataLoader",
    "Sharding",
    "deal_batches",
    "default_seed",
    "distributed_loader_specifics",
    "is_batches",
    "keep_states",
    "make_dataloader",
    "plan_of",
    "reshard",
    "resume_after_call",
    "resume_after_end",
    "resume_at",
    "set_epoch",
    "shard",
    "spread_samples",
    "state_at",
    "state_at_begin",
    "state_at_end",
    "stream_state",
]

logger = get_logger(__name__)

NOTHING_DROPPED = (
    "drop_last=True has no effect in an evaluation: every sample counts once, on any number of processes. To leave "
    "samples out, give a smaller dataset, such as a torch.utils.data.Subset."
)
DECIDED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
DEFAULT_SEED = 563375142


def default_seed() -> int:
    """Return the experiment's seed, or a fixed one where ``seed_everything`` was not called.

    Ranks: local.

    Example:
        >>> isinstance(default_seed(), int)
        True
    """
    seed = global_seed()
    return DEFAULT_SEED if seed is None else seed


@dataclass(frozen=True)
class Sharding:
    """Which part of the data a loader gives to this process.

    Attributes:
        rank: this rank.
        world_size: number of ranks that divide the data; 1 gives everything to everybody.
        keep_step: whether every rank must yield the same number of batches, as training must.
        seed: of the shuffling.
        global_batch_size: samples of an optimizer step over all ranks; takes the place of ``batch_size``.
        micro_batches: batches that those are worked on in, one after the other.
        virtual_ranks: a multiple of the ranks, over which the data is divided then; each rank takes as many of their
            parts as it stands for, one after another. None: the ranks themselves.
        may_drop: whether ``drop_last`` counts. In an evaluation it does not: what it leaves out follows from the number
            of ranks.

    Ranks: local.

    Example:
        >>> Sharding(rank=0, world_size=2).keep_step
        True
    """

    rank: int = 0
    world_size: int = 1
    keep_step: bool = True
    seed: int = DEFAULT_SEED
    global_batch_size: int | None = None
    micro_batches: int = 1
    virtual_ranks: int | None = None
    may_drop: bool = True

    @property
    def shards(self) -> int:
        """How many parts of every batch each rank takes."""
        return (self.virtual_ranks or self.world_size) // self.world_size

    @property
    def is_virtual(self) -> bool:
        """Whether a stream is divided over virtual ranks: in training, not where it is only evaluated."""
        return self.virtual_ranks is not None and self.keep_step

    @property
    def shards_of_stream(self) -> range:
        """The parts of a stream's blocks that this rank takes: its own one, but of virtual ranks."""
        each = self.shards if self.is_virtual else 1
        return range(self.rank * each, (self.rank + 1) * each)

    @classmethod
    def of_this_rank(cls, **given: Any) -> Sharding:
        """Return the part of this rank among all ranks of its process group, shuffled by the experiment's seed.

        Args:
            given: the other attributes by name; or other values for these three.

        Example:
            >>> Sharding.of_this_rank(global_batch_size=32).world_size
            1
        """
        return cls(**{"rank": get_rank() or 0, "world_size": get_world_size(), "seed": default_seed(), **given})


@register_checkpoint_hooks
class SaveableDataLoader(DataLoader[Any]):
    """A ``DataLoader`` that is saved as the number of batches it has yielded, and continues after them.

    Random augmentation is keyed on (seed, epoch, sample), by :mod:`ddpkit.augmentation`: it is the same on any number
    of workers and ranks, and after a recovery.

    The batches skipped after a recovery are not loaded if the sampler is ours, as it is in every loader that this
    module makes: the sampler leaves them out. Of another one they are loaded and dropped.

    Args:
        args: as for ``torch.utils.data.DataLoader``.
        kwargs: likewise.

    Attributes:
        yielded: batches handed out in this iteration, with those skipped; None before the first.
        worker_copies: what persistent workers know of the dataset.
        passed_through: what the batches pass through before they are handed out, which may read ahead; or None.

    Ranks: local.

    Example:
        >>> loader = SaveableDataLoader(range(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        super().__init__(*args, **kwargs)
        self.yielded: int | None = None
        self.passed_through: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        self.worker_copies = WorkerCopies()
        self._skip = 0
        self._keyed: DataLoader[Any] | None = None
        self._place = Place(default_seed())  # for batches that no plan of ours deals out
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and worker seeds the next iteration follows."""
        self._place.seed, self._place.epoch = default_seed(), epoch
        if self.generator is not None:
            self.generator.manual_seed(mix_key(global_seed() or 0, epoch) >> 1)
        set_epoch_inside(self.sampler if self.batch_sampler is None else self.batch_sampler, epoch)

    def skip_next(self, batches: int) -> None:
        """Leave out the first ``batches`` batches of the next iteration, without loading them."""
        self._skip = batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self._skip = self._skip, 0
        self.yielded = skip
        plan = plan_of(self)
        if plan is not None:
            plan.skip = skip  # before the workers are started, which ask for their first batches
        inner = self._begin()
        if skip and plan is None:
            inner = itertools.islice(inner, skip, None)
        return self._counted(inner if self.passed_through is None else self.passed_through(inner))

    def _begin(self) -> Iterator[Any]:
        """Start torch's iterator, of a loader like this one whose randomness is keyed (but for a stream)."""
        if self.persistent_workers:
            self.worker_copies.compare(self.dataset)
        if isinstance(self.dataset, IterableDataset):
            return start_loading(self, super().__iter__)
        if self._keyed is None or not self.persistent_workers:
            plan, batched = plan_of(self), self.batch_sampler is not None
            place = self._place if plan is None else plan
            batches = KeyedSampler(cast("Any", self.batch_sampler if batched else self.sampler), place, batched=batched)
            options = {"generator": self.generator, "batched": batched, "epoch": place.epoch}
            self._keyed = keyed_loader(self, batches, **options)
        return start_loading(self._keyed)

    def _counted(self, inner: Iterator[Any]) -> Iterator[Any]:
        own = self.__dict__  # what DataLoader does with a written attribute costs more than to count
        for number, batch in enumerate(inner, (self.yielded or 0) + 1):
            own["yielded"] = number
            yield batch

    @mark_as_saver
    def save(self, path: Path) -> None:
        """Write the number of batches yielded, or None before the first iteration."""
        path.write_text(str(self.yielded), encoding="utf-8")

    @mark_as_loader
    def load(self, path: Path, end_of_epoch: bool) -> None:
        """Continue after the saved number of batches; start afresh after an end-of-epoch checkpoint.

        Once the loader has been iterated nothing is loaded: the checkpoint is then wanted for its weights.
        """
        if self.yielded is not None:
            logger.debug("The loader has been iterated before: its place in the checkpoint is ignored.")
            return
        text = path.read_text(encoding="utf-8").strip()
        if not end_of_epoch and text not in {"", "None"}:
            self.skip_next(int(text))

    @property
    def _speechbrain_recovery_skip_to(self) -> int | None:
        return self._skip or None

    def _speechbrain_save(self, path: Path) -> None:
        self.save(path)

    def _speechbrain_load(self, path: Path, end_of_epoch: bool) -> None:
        self.load(path, end_of_epoch)


class _NominalEpochs:
    """The batches of a looped loader, to which ``iter()`` does nothing; after the end of an epoch comes the next."""

    def __init__(self, loader: LoopedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> _NominalEpochs:
        return self

    def __next__(self) -> Any:
        return next(self._loader)


@register_checkpoint_hooks
class LoopedLoader:
    """Cuts an endless stream or a long loader into epochs of a fixed number of batches.

    An iterator of it ends with each nominal epoch, and ``next()`` after that end begins the next one.

    Args:
        loader: started again whenever it ends.
        epoch_length: batches per nominal epoch.
        batchsize_fn: gives the number of samples of a batch; by default its ``batchsize``, or the length of its first
            tensor.

    Raises:
        DataError: when iterated, if the loader yields nothing.

    Ranks: local.

    Example:
        >>> looped = LoopedLoader([[1], [2], [3]], epoch_length=2)
        >>> list(looped), list(looped)
        ([[1], [2]], [[3], [1]])
    """

    def __init__(self, loader: Any, epoch_length: int, batchsize_fn: Callable[[Any], int] | None = None) -> None:
        self.loader = loader
        self.epoch_length = epoch_length
        self.batchsize_fn = batchsize_fn or guess_batch_size
        self.step = 0
        self.total_steps = 0
        self.total_samples = 0
        self._passes = 0
        self._in_pass = 0
        self._skip = 0
        self._again = 0  # batches to read again, where nobody knows which pass they are of
        self._inner: Iterator[Any] | None = None
        self._recovered = False

    def __len__(self) -> int:
        """Return the number of batches of a nominal epoch."""
        return self.epoch_length

    def __iter__(self) -> Iterator[Any]:
        if not self._recovered:
            self.step = 0
        self._recovered = False
        return _NominalEpochs(self)  # to which iter() does nothing

    def __next__(self) -> Any:
        if self.step >= self.epoch_length:
            self.step = 0
            raise StopIteration
        batch = self._draw()
        self.step += 1
        self.total_steps += 1
        self.total_samples += self.batchsize_fn(batch)
        return batch

    @property
    def has_counts(self) -> bool:
        """Whether the number of samples of every batch is known."""
        return isinstance(plan_of(self.loader), PlannedBatchSampler)

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch of the nominal epoch; 0 where it repeats one to keep step."""
        return self._plan().count(self._place(batch))

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch of the nominal epoch, over all ranks."""
        return self._plan().total(self._place(batch))

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch of the nominal epoch, where every batch counts the same."""
        return self._plan().part(self._place(batch))

    def parts(self, batch: int) -> float:
        """Return what all ranks' parts of a batch come to."""
        return self._plan().parts(self._place(batch))

    def _plan(self) -> PlannedBatchSampler:
        return cast("PlannedBatchSampler", plan_of(self.loader))  # asked for where `has_counts` says so

    def _place(self, batch: int) -> int:
        """Say which batch of its pass a batch of the nominal epoch is."""
        return (self.total_steps - self.step + batch) % len(self.loader)

    def _next_pass(self) -> Iterator[Any]:
        self._passes += 1
        set_epoch(self.loader, self._passes)
        skip, self._skip = self._skip, 0
        marks = _marks(self.loader)
        self._in_pass = skip + (0 if marks is None else marks.first)
        if skip and isinstance(self.loader, SaveableDataLoader):
            self.loader.skip_next(skip)
            skip = 0
        return itertools.islice(iter(self.loader), skip, None)

    def _draw(self) -> Any:
        again, self._again = self._again, 0
        for _ in range(again):
            self._draw()
        for _ in range(2):  # in this pass, or in the next one
            if self._inner is None:
                self._inner = self._next_pass()
            for batch in self._inner:
                self._in_pass += 1
                return batch
            self._inner = None
        raise DataError(f"LoopedLoader: {type(self.loader).__name__} yields no batch at all.")

    def state_in_pass(self, undone: int = 0) -> dict[str, Any]:
        """Return which pass over the data this rank is in, how far, and what the data says of where that is.

        Args:
            undone: how many batches were drawn of this pass and are not done: 1 while the last one is worked on.
        """
        marks, done = _marks(self.loader), self._in_pass - undone
        return {
            "pass": self._passes,
            "in_pass": done,
            "done": _done_in(self.loader, done),
            "has_begun": self._inner is not None,
            "loader": None if marks is None else marks.around(done),
        }

    def resume_in_pass(self, state: dict[str, Any] | None) -> None:
        """Continue at a saved position, instead of by the counters alone; without a state nothing is changed.

        If the batch size has changed, the position is counted in samples, and a partly trained batch is repeated
        whole.

        Args:
            state: what :meth:`state_in_pass` returned.
        """
        if state is None or not state["has_begun"]:
            return
        self._again, self._inner = 0, None
        self._passes = state["pass"] - 1
        marks = _marks(self.loader)
        if self.has_counts:
            set_epoch(self.loader, state["pass"])  # its length is read below
        before, done = state["in_pass"], state.get("done")
        self._skip = _batches_after(self.loader, done, before)
        if marks is not None and state["loader"] is not None:
            number, place = state["loader"]["again"]
            first, self._skip = _batches_from(self.loader, done, before, number)
            marks.go_on(first, place)
        if self.has_counts:  # whose numbers follow from the batches of all passes
            self.total_steps = self._passes * len(self.loader) + self._skip

    def resume_at(self, step: int, state: dict[str, Any] | None) -> None:
        """Have the next iteration go on after so many batches of the nominal epoch.

        Args:
            step: batches of this epoch that are done, of the sizes that batches have now.
            state: what :meth:`state_in_pass` returned when the checkpoint was made, or None.
        """
        if self._recovered and step != self.step:
            is_next = not step and self.step == self.epoch_length  # the nominal epoch after a whole one
            if self.step and not is_next and (state is None or not state["has_begun"]):
                self._go_to(self.total_steps * step // self.step)
            self.step = step
        self.resume_in_pass(state)

    @mark_as_saver
    def save(self, path: Path) -> None:
        """Write step, total steps and total samples, one number a line."""
        path.write_text(f"{self.step}\n{self.total_steps}\n{self.total_samples}\n", encoding="utf-8")

    @mark_as_loader
    def load(self, path: Path, end_of_epoch: bool = True) -> None:
        """Take the numbers over; a save at the very end of an epoch makes the next iteration stop at once.

        The data goes on where it was: by position if the length of a pass is known, else by reading it again, unless
        the Brain knows more of it (:meth:`resume_in_pass`).
        """
        numbers = [int(line) for line in path.read_text(encoding="utf-8").split()]
        self.step, total_steps, self.total_samples = numbers
        self._recovered = not end_of_epoch
        self._go_to(total_steps)

    def _go_to(self, total_steps: int) -> None:
        """Go on after so many batches of all epochs."""
        self.total_steps, self._inner = total_steps, None
        if isinstance(getattr(self.loader, "dataset", None), IterableDataset) or not hasattr(self.loader, "__len__"):
            self._passes, self._again = 0, self.total_steps
        else:
            self._passes, self._skip = divmod(self.total_steps, max(len(self.loader), 1))


def shard(dataset: Any, sharding: Sharding, **loader_kwargs: Any) -> Any:
    """Make the loader that gives one process its part of a dataset.

    Args:
        dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields batches.
        sharding: which part.
        loader_kwargs: as for ``torch.utils.data.DataLoader``; not changed. Without a ``collate_fn`` a dataset with a
            method ``set_output_keys`` and an attribute ``pipeline``, by which SpeechBrain's ``DynamicItemDataset`` is
            known, gets :class:`ddpkit.batch.PaddedBatch`.

    Returns:
        The loader; its ``batch_sampler`` is a :class:`~ddpkit.data.plan.PlannedBatchSampler` or
        :class:`~ddpkit.data.plan.DealtBatchSampler`, but for iterable datasets, and where a ``DistributedSampler`` was
        given, which has divided the data already.

    Raises:
        ConfigError: an argument that no loader takes, ``shuffle`` with a sampler, a bad batch size, or other arguments
            that exclude each other.
        DataError: the dataset is empty, or what was given is no dataset.

    Ranks: local; all ranks must give the same arguments but ``sharding.rank``.

    Example:
        >>> loader = shard(range(5), Sharding(rank=1, world_size=2), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4]]
    """
    require_loader_arguments(loader_kwargs)
    options = _with_all_samples(loader_kwargs, sharding)
    if options.get("batch_sampler") is not None or options.get("batch_size", 1) is None:
        _refuse(sharding, "global_batch_size", "batches that are made already, by a batch_sampler or by the dataset")
    if isinstance(dataset, IterableDataset):
        return stream_loader(dataset, sharding, options)
    if is_batches(dataset) and not options:
        return deal_batches(dataset, sharding)
    _check_exclusive(options)
    makes_batches = (options.get("batch_size", 1), options.get("batch_sampler")) != (None, None)
    if makes_batches and hasattr(dataset, "set_output_keys") and hasattr(dataset, "pipeline"):
        from ddpkit.batch import PaddedBatch

        options.setdefault("collate_fn", PaddedBatch)
    batch_sampler, sampler = options.pop("batch_sampler", None), options.pop("sampler", None)
    share = _plan_in(batch_sampler, sampler)  # made by `distributed_loader_specifics`
    if _is_divided(batch_sampler, sampler) or (share is not None and share.world_size > 1):
        _refuse_divided(sharding, "what a DistributedSampler has divided already")
        return SaveableDataLoader(dataset, batch_sampler=batch_sampler, sampler=sampler, **options)
    shuffle, drop_last = bool(options.pop("shuffle", False)), bool(options.pop("drop_last", False))
    common: dict[str, Any] = {
        "seed": sharding.seed,
        "drop_last": drop_last,
        "keep_step": sharding.keep_step,
        "shards": sharding.shards,
    }
    if batch_sampler is not None:
        options.pop("batch_size", None)
        planned: Any = DealtBatchSampler(batch_sampler, sharding.rank, sharding.world_size, **common)
        return SaveableDataLoader(dataset, batch_sampler=planned, **options)
    size = _length(dataset) if sampler is None or hasattr(dataset, "__len__") else 0
    batch_size = options.pop("batch_size", 1)
    planned = PlannedBatchSampler(
        size if sampler is None else sampler,
        1 if batch_size is None else batch_size,
        sharding.rank,
        sharding.world_size,
        shuffle=shuffle,
        global_batch_size=sharding.global_batch_size,
        micro_batches=sharding.micro_batches,
        **common,
    )
    if batch_size is None:  # the dataset gives whole batches: one index, one batch
        return SaveableDataLoader(dataset, sampler=_Single(planned), batch_size=None, **options)
    return SaveableDataLoader(dataset, batch_sampler=planned, **options)


def reshard(loader: DataLoader[Any], sharding: Sharding) -> Any:
    """Make a loader that gives one process its share of a ready-made loader's batches.

    Args:
        loader: its dataset, batch size, order, collate function and workers are kept.
        sharding: which part.

    Returns:
        A new loader; the same one if a ``DistributedSampler`` is in it, for then its maker has divided the data. Of one
        that says ``is_sharded = True`` each rank reads all, and may have another number of batches than the others.

    Ranks: local.

    Example:
        >>> ready = DataLoader(range(5), batch_size=2)
        >>> [batch.tolist() for batch in reshard(ready, Sharding(rank=0, world_size=2))]
        [[0, 1], [4]]
    """
    options: dict[str, Any] = {name: getattr(loader, name) for name in LOADER_OPTIONS if hasattr(loader, name)}
    if is_sharded(loader) or _has_its_own_way(loader) or (isinstance(loader, StreamLoader) and loader.of_batches):
        return deal_batches(loader, sharding)
    if isinstance(loader.dataset, IterableDataset):
        sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return shard(loader.dataset, sharding, **sizes, **options)
    if _is_divided(loader.batch_sampler, loader.sampler):
        _refuse_divided(sharding, "a loader that a DistributedSampler has divided already")
        return loader
    return shard(loader.dataset, sharding, **_order_of(loader), **options)


def deal_batches(loader: Any, sharding: Sharding) -> StreamLoader:
    """Shard an opaque iterable of batches: rank r keeps every world_size-th batch.

    Args:
        loader: yields batches, anew whenever it is iterated. One that says ``is_sharded = True`` has been divided by
            its maker, and gives all it has.
        sharding: which part.

    Ranks: local.

    Example:
        >>> list(deal_batches({"ab": 1, "cd": 2, "e": 3}.keys(), Sharding(rank=0, world_size=2)))
        ['ab', 'e']
    """
    _refuse(sharding, "global_batch_size", "the batches of a loader of one's own")
    if isinstance(loader, StreamLoader):
        loader = loader.whole
    name = type(loader).__name__
    if is_sharded(loader):
        _refuse_divided(sharding, f"{name}, which divides itself over the processes")
        sharding = Sharding(seed=mix_key(sharding.seed, sharding.rank))
    elif sharding.world_size > 1 and not sharding.is_virtual:
        logger.info(
            "%s is dealt out by batches: every rank reads all of them, and trains on one in %d.",
            name,
            sharding.world_size,
        )
    own = StreamShard(loader, sharding, of_batches=True)
    return StreamLoader(own, worker_key(sharding), batch_size=None, collate_fn=as_it_is)


def _with_all_samples(loader_kwargs: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """Return a copy of loader arguments, without ``drop_last`` where nothing may be left out."""
    options = dict(loader_kwargs)
    if options.get("drop_last") and not sharding.may_drop:
        logger.warning_once(NOTHING_DROPPED)
        options["drop_last"] = False
    return options


def _has_its_own_way(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class has its own iteration, which a rebuilt loader would lose."""
    kind = next(one for one in type(loader).__mro__ if "__iter__" in vars(one))
    return kind.__module__.split(".")[0] not in {"torch", "torchdata", "ddpkit"}


def _refuse_divided(sharding: Sharding, what: str) -> None:
    for option in ("virtual_ranks", "global_batch_size"):
        _refuse(sharding, option, what)


def _refuse(sharding: Sharding, option: str, what: str) -> None:
    value = getattr(sharding, option)
    if value is not None:
        raise ConfigError(
            f"{option}={value} cannot divide {what}. Leave {option} out, or give a dataset or a stream of samples that "
            "is not divided, with a sampler if you like."
        )


def is_batches(data: Any) -> bool:
    """Return whether an object is an opaque source of batches: neither a dataset nor a loader that can be rebuilt.

    Args:
        data: the training set as given.

    Returns:
        True for what can be iterated, and neither derives from torch's ``Dataset`` or ``DataLoader`` nor has
        ``__getitem__``, as map-style datasets do.

    Ranks: local.

    Example:
        >>> is_batches(iter([1, 2])), is_batches([1, 2])
        (True, False)
    """
    if isinstance(data, (Dataset, DataLoader)):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def plan_of(loader: Any) -> PlannedBatchSampler | DealtBatchSampler | None:
    """Return ddpkit's batch sampler of a loader, which divides its batches over the ranks; None if it has none.

    Ranks: local.

    Example:
        >>> plan_of(shard(range(5), Sharding(), batch_size=2)).count(2), plan_of([1, 2])
        (1, None)
    """
    return _plan_in(getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))


def _plan_in(batch_sampler: Any, sampler: Any) -> PlannedBatchSampler | DealtBatchSampler | None:
    source = sampler.planned if isinstance(sampler, _Single) else batch_sampler
    return source if isinstance(source, (PlannedBatchSampler, DealtBatchSampler)) else None


def spread_samples(loader: Any, number: int, readings: int = 1) -> FirstItems | None:
    """Summarize a few samples of a sharded dataset, for a comparison with the other ranks.

    Args:
        loader: any.
        number: of samples, beginning with sample 0 and going on over the whole set.
        readings: how many times they are read, all in one process: with workers, each process that starts has a copy
            of the dataset and its generators, and would draw the same noise.

    Returns:
        Their indices, and sketches of them, reading after reading. None where the loader has no such dataset, or they
        cannot be loaded.

    Ranks: local.

    State: nothing of this process changes but what loading them changes in the dataset, without workers.

    Example:
        >>> spread_samples(shard(range(9), Sharding(0, 2)), 2), spread_samples([1, 2], 2)
        (((0, 4), [{'0': '0'}, {'0': '4'}]), None)
    """
    plan, dataset = plan_of(loader), getattr(loader, "dataset", None)
    if plan is None or plan.world_size == 1 or not isinstance(dataset, Sized):
        return None
    try:
        indices = sorted({place * len(dataset) // number for place in range(number)})
        return tuple(indices), load_keyed(loader, indices * readings, summarize, plan.seed)
    except Exception:  # what is wrong with it comes up where it is needed; perhaps it never is
        logger.debug("%d samples of %s cannot be loaded.", number, type(dataset).__name__, exc_info=True)
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, and the samplers and the dataset inside it, which epoch comes.

    Args:
        loader: any; what does not know epochs is left alone.
        epoch: which comes.

    Ranks: local.

    Example:
        >>> set_epoch([1, 2], 3)
    """
    if isinstance(loader, SaveableDataLoader):
        loader.set_epoch(epoch)
    else:
        set_epoch_inside(loader, epoch)
    if isinstance(loader, StreamLoader):  # which has told its stream
        return
    dataset = getattr(loader, "dataset", None)
    is_own = isinstance(loader, SaveableDataLoader)
    with loader.worker_copies.telling(dataset) if is_own else contextlib.nullcontext():
        set_epoch_inside(dataset, epoch)


def _is_divided(batch_sampler: Any, sampler: Any) -> bool:
    """Say whether the user has divided the data already: with a ``DistributedSampler``, or one that says so."""
    deciding = sampler if batch_sampler is None else batch_sampler
    return any(isinstance(one, DistributedSampler) or is_sharded(one) for one in layers(deciding))


def _order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Say in loader arguments how a ready-made loader orders its data."""
    plan = plan_of(loader)
    if isinstance(plan, DealtBatchSampler):
        return {"batch_sampler": plan.batch_sampler, "drop_last": plan.drop_last}
    if isinstance(plan, PlannedBatchSampler):
        inner = {} if isinstance(plan.source, int) else {"sampler": plan.source}
        batch_size = None if loader.batch_sampler is None else plan.batch_size
        return {"batch_size": batch_size, "shuffle": plan.shuffle, "drop_last": plan.drop_last, **inner}
    batches, sampler = loader.batch_sampler, cast("Any", loader.sampler)
    sizes: dict[str, Any] = {"batch_size": None}
    if _is_torchs(batches, BatchSampler):  # made by the loader or by the user
        batches = cast("Any", batches)
        sampler, sizes = batches.sampler, {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    elif batches is not None:
        return {"batch_sampler": batches}
    is_random = _is_torchs(sampler, RandomSampler)
    whole = type(sampler) is SequentialSampler or (is_random and not sampler.replacement)
    if whole and hasattr(loader.dataset, "__len__") and len(sampler) == _length(loader.dataset):
        return {**sizes, "shuffle": is_random}
    return {**sizes, "sampler": sampler}


def _is_torchs(one: Any, kind: type) -> bool:
    """Say whether a sampler is torch's own, or the one that a ``StatefulDataLoader`` of torchdata has in its place."""
    return type(one) is kind or (
        type(one).__name__ == kind.__name__ and type(one).__module__.startswith("torchdata.stateful_dataloader.")
    )


class _Single(torch.utils.data.Sampler[int]):
    """Turns batches of one index into indices, for datasets that give whole batches."""

    def __init__(self, planned: PlannedBatchSampler) -> None:
        self.planned = planned

    def set_epoch(self, epoch: int) -> None:
        self.planned.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[int]:
        return (indices[0] for indices in self.planned)


def _check_exclusive(options: dict[str, Any]) -> None:
    has_batches, has_sampler = (options.get(name) is not None for name in ("batch_sampler", "sampler"))
    has_size = has_batches and options.get("batch_size") not in {None, 1}
    if has_batches + has_sampler + has_size + bool(options.get("shuffle")) > 1:
        raise ConfigError(
            "a loader takes one of shuffle=True, sampler and batch_sampler, and batch_sampler without batch_size: give "
            "one of them."
        )


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{kind} has no length: give a map-style dataset, a stream, or batches without arguments.")
    size = len(dataset)
    if size < 1:
        raise DataError(f"the dataset is empty: len({kind}) is {size}. Check the paths and filters that made it.")
    return size


def make_dataloader(dataset: Any, looped_nominal_epoch: int | None = None, **loader_kwargs: Any) -> Any:
    """Make a loader over the whole dataset, for this process alone.

    ``Brain.make_dataloader`` is the one that divides the data; a loader made here and given to ``fit`` is divided then.

    Args:
        dataset: map-style or iterable.
        looped_nominal_epoch: batches per nominal epoch; makes a :class:`LoopedLoader`.
        loader_kwargs: as for ``torch.utils.data.DataLoader``. Without a ``collate_fn`` a ``DynamicItemDataset`` of
            SpeechBrain gets :class:`~ddpkit.batch.PaddedBatch`.

    Returns:
        A :class:`SaveableDataLoader`, a ``DataLoader`` for an ``IterableDataset``, or a :class:`LoopedLoader`.

    Raises:
        ConfigError: arguments that exclude each other.

    Ranks: local.

    Example:
        >>> [batch.tolist() for batch in make_dataloader(range(3), batch_size=2)]
        [[0, 1], [2]]
    """
    loader = shard(dataset, Sharding(seed=default_seed()), **loader_kwargs)
    return loader if looped_nominal_epoch is None else LoopedLoader(loader, looped_nominal_epoch)


def distributed_loader_specifics(
    distributed_launch: bool, rank: int | None, dataset: Any, loader_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return loader arguments that give one rank its share, for a loader that a recipe makes itself.

    Given to ``Brain.fit``, such a loader is divided like any other, as a whole and once.

    Args:
        distributed_launch: False returns the arguments as they are.
        rank: this rank; None: the rank of the process.
        dataset: the loader's dataset. A stream cannot be divided by arguments: its arguments come back with a
            warning.
        loader_kwargs: as for ``torch.utils.data.DataLoader``; not changed.

    Ranks: local; all ranks must give the same arguments but ``rank``.

    Example:
        >>> distributed_loader_specifics(False, 0, range(4), {"batch_size": 2})
        {'batch_size': 2}
    """
    if not distributed_launch:
        return loader_kwargs
    if isinstance(dataset, IterableDataset):
        logger.warning("%s is a stream: give it to Brain.fit, which divides it.", type(dataset).__name__)
        return loader_kwargs
    sharding = Sharding((get_rank() or 0) if rank is None else rank, get_world_size(), seed=default_seed())
    loader = shard(dataset, sharding, **loader_kwargs)
    others = {name: value for name, value in loader_kwargs.items() if name not in DECIDED}
    if loader.batch_sampler is None:
        return {**others, "batch_size": None, "sampler": loader.sampler}
    return {**others, "batch_sampler": loader.batch_sampler}


# ------------------------------------------------------------------------------------------- positions


def state_at(loader: Any, step: int) -> Any:
    """Return what a loader needs to go on after ``step`` batches of an epoch, beyond their number.

    Args:
        loader: any.
        step: batches done, not read.

    Returns:
        Plain containers and what the stream's own state holds; None where the number says it all, or where the data
        cannot tell and has to be read again.

    Ranks: local.

    Example:
        >>> state_at([1, 2], 1) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass(int(loader.step == step + 1))
    marks = _marks(loader)
    around = None if marks is None else marks.around(step)
    return None if around is None else {**around, "step": step, "batch": _batch_size(loader)}


def resume_at(loader: Any, step: int, state: Any, *, same_batches: bool = True) -> int:
    """Have a loader's next iteration go on after ``step`` batches.

    Args:
        loader: any.
        step: batches done.
        state: what :func:`state_at` returned for it.
        same_batches: whether a batch is the same part of an optimizer step as it was when the state was taken.

    Returns:
        How many batches of that iteration are to be read and left out.

    Ranks: local.

    Example:
        >>> resume_at([1, 2], 1, None)
        1
    """
    if isinstance(loader, LoopedLoader):
        loader.resume_at(step, state)
        return 0
    if isinstance(loader, SaveableDataLoader):
        loader.skip_next(step)
        return 0
    marks = _marks(loader)
    if marks is None or state is None or not step:
        return step
    size = _batch_size(loader)
    same_batches = same_batches and (state.get("step", step), state.get("batch", size)) == (step, size)
    number, place = state["again"] if same_batches else (step, state["next"])
    if place is None:
        return step
    marks.go_on(number, place)
    return step - int(number)


def keep_states(loader: Any) -> None:
    """Have a loader remember what :func:`state_at` will ask for, which costs a look at its data's state per batch.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> keep_states([1, 2])
    """
    marks = _marks(loader.loader if isinstance(loader, LoopedLoader) else loader)
    if marks is not None:
        marks.want()


def state_at_begin(loader: Any) -> Any:
    """Return what a loader needs to begin an epoch again, while its first batch is worked on; or None.

    It is for :func:`resume_after_end`, and for :func:`resume_at` with a step of 0.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> state_at_begin([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass(loader.step)
    marks = _marks(loader)
    return None if marks is None else marks.at_begin()


def state_at_end(loader: Any) -> Any:
    """Return what a loader takes over from one epoch into the next, or None.

    Ranks: local.

    Example:
        >>> state_at_end([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass()
    marks = _marks(loader)
    return None if marks is None else marks.at_end()


def resume_after_end(loader: Any, state: Any) -> None:
    """Restore the state that a loader carries over from the epoch before.

    Args:
        loader: any.
        state: what :func:`state_at_end` returned.

    Ranks: local.

    Example:
        >>> resume_after_end([1, 2], None)
    """
    if isinstance(loader, LoopedLoader):
        loader.resume_in_pass(state)
        return
    marks = _marks(loader)
    if marks is not None and state is not None:
        marks.resume_after_end(state)


def stream_state(loader: Any) -> Any:
    """Return where the stream of a loader is now, for another loader of it; None where it cannot say that.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> stream_state([1, 2]) is None
        True
    """
    marks = _marks(loader.loader if isinstance(loader, LoopedLoader) else loader)
    return None if marks is None else marks.at_end()


def resume_after_call(loader: Any, state: Any) -> None:
    """Have a loader begin where the loader of an earlier call of ``fit`` has left their stream.

    Args:
        loader: made anew, of the same stream.
        state: what :func:`stream_state` returned then; None changes nothing.

    Ranks: local.

    Example:
        >>> resume_after_call([1, 2], None)
    """
    if not isinstance(loader, LoopedLoader):
        resume_after_end(loader, state)
        return
    marks = _marks(loader.loader)
    if marks is not None and state is not None:
        marks.put_at(state)  # a stream at its end is begun again by the next pass


def _marks(loader: Any) -> StreamPosition | None:
    return loader.position if isinstance(loader, StreamLoader) else None


def _batch_size(loader: Any) -> list[Any] | None:
    """Return in what the batches of a loader are counted over all ranks, and how many one has; None if unknown."""
    plan, dataset, own = plan_of(loader), getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if isinstance(plan, DealtBatchSampler):
        return ["batches", plan.world_size]
    if isinstance(plan, PlannedBatchSampler):
        return None  # not all are alike
    if isinstance(dataset, StreamShard):
        return ["batches" if own is None else "samples", dataset.block_size]
    return ["samples of a rank", own] if isinstance(own, int) else None


def _done_in(loader: Any, batches: int) -> list[Any] | None:
    """Return how far a pass is after so many batches, in a unit that does not depend on the batch size."""
    plan, size = plan_of(loader), _batch_size(loader)
    if isinstance(plan, PlannedBatchSampler):
        return ["samples", plan.plan.done_before(batches)]
    return None if size is None else [size[0], size[1] * batches]


def _batches_after(loader: Any, done: list[Any] | None, batches: int) -> int:
    """Return how many batches of the present size are done; ``batches`` if the sizes are unknown."""
    plan, size = plan_of(loader), _batch_size(loader)
    unit, number = done or ("", 0)
    if isinstance(plan, PlannedBatchSampler) and unit == "samples":
        return plan.plan.batch_after(number)
    return batches if size is None or unit != size[0] else int(number // size[1])


def _batches_from(loader: Any, done: list[Any] | None, batches: int, mark: int) -> tuple[int, int]:
    """Convert a saved mark to the current batch size: the batch after it, and the batches to the resume position.

    Args:
        loader: a stream, or a source of batches.
        done: what :func:`_done_in` returned for ``batches``.
        batches: done then.
        mark: the batch then that it was before; at most ``batches``.
    """
    size = _batch_size(loader)
    if size is None or done is None or done[0] != size[0] or not mark:
        return mark, _batches_after(loader, done, batches) - mark
    before = done[1] * mark // batches
    return max(before // size[1], 1), int((done[1] - before) // size[1])
