"""Loaders as recipes make them: over a whole dataset, for one rank, or cut into epochs of a fixed length.

What deals an epoch out to the ranks is in :mod:`ddpkit.data.sharded_loader`, whose names can be imported from here.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import IterableDataset

from ddpkit.base import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.data import (
    DECIDED,
    DEFAULT_SEED,
    DealtBatchSampler,
    PlannedBatchSampler,
    SaveableDataLoader,
    Sharding,
    StreamLoader,
    StreamShard,
    deal_batches,
    default_seed,
    guess_batch_size,
    one_by_one,
    plan_of,
    reshard,
    set_epoch,
    shard,
)
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import DataError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpkit.data import StreamPosition

__all__ = [
    "DEFAULT_SEED",
    "LoopedLoader",
    "SaveableDataLoader",
    "Sharding",
    "deal_batches",
    "default_seed",
    "distributed_loader_specifics",
    "keep_states",
    "make_dataloader",
    "plan_of",
    "reshard",
    "resume_after_end",
    "resume_at",
    "set_epoch",
    "shard",
    "state_at",
    "state_at_end",
]

logger = get_logger(__name__)


@register_checkpoint_hooks
class LoopedLoader:
    """Cuts an endless stream or a long loader into epochs of a fixed number of batches.

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
        return one_by_one(self)  # to which iter() does nothing

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

    def state_in_pass(self) -> dict[str, Any]:
        """Return which pass over the data this rank is in, how far, and what the data says of where that is."""
        marks = _marks(self.loader)
        return {
            "pass": self._passes,
            "in_pass": self._in_pass,
            "done": _done_in(self.loader, self._in_pass),
            "has_begun": self._inner is not None,
            "loader": None if marks is None else marks.around(self._in_pass),
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
            if self.step and (state is None or not state["has_begun"]):
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
        return loader.state_in_pass()
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
    """Say which batch a mark is before, and how many come from there to what is done, both of the size they have now.

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
    if looped_nominal_epoch is not None:
        return LoopedLoader(loader, looped_nominal_epoch)
    return loader


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
