"""A loader that is cut into nominal epochs, of a fixed number of batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import IterableDataset

from ddpkit.base import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.data.batch_size_guess import guess_batch_size
from ddpkit.data.loader_epoch import set_epoch
from ddpkit.data.loader_plan import plan_of
from ddpkit.data.pass_progress import batches_after, batches_from, done_in, stream_marks
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.data.saveable_loader import SaveableDataLoader
from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _NominalEpochs:
    """The batches of a looped loader, to which ``iter()`` does nothing; after the end of an epoch
    comes the next.
    """

    def __init__(self, loader: LoopedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> _NominalEpochs:
        return self

    def __next__(self) -> Any:
        return next(self._loader)


def inner_loader(loader: Any) -> Any:
    """Return the loader that is cut into nominal epochs; one that is not cut is returned as it is.

    Args:
        loader: of any kind.

    Ranks: local.

    Example:
        >>> inner_loader(LoopedLoader("abc", 2)), inner_loader("abc")
        ('abc', 'abc')
    """
    return loader.loader if isinstance(loader, LoopedLoader) else loader


@register_checkpoint_hooks
class LoopedLoader:
    """Cuts an endless stream or a long loader into epochs of a fixed number of batches.

    An iterator of it ends with each nominal epoch, and ``next()`` after that end begins the next
    one.

    Args:
        loader: started again whenever it ends.
        epoch_length: batches per nominal epoch.
        batchsize_fn: gives the number of samples of a batch; by default its ``batchsize``, or the
            length of its first tensor.

    Raises:
        DataError: when iterated, if the loader yields nothing.

    Ranks: local.

    Example:
        >>> looped = LoopedLoader([[1], [2], [3]], epoch_length=2)
        >>> list(looped), list(looped)
        ([[1], [2]], [[3], [1]])
    """

    def __init__(
        self,
        loader: Any,
        epoch_length: int,
        batchsize_fn: Callable[[Any], int] | None = None,
    ) -> None:
        self.loader = loader
        self.epoch_length = epoch_length
        self.batchsize_fn = batchsize_fn or guess_batch_size
        self.step = 0
        self.total_steps = 0
        self.total_samples = 0
        self._passes = 0  # over the data that have begun
        self._in_pass = 0  # batches drawn in the present one
        self._skip = 0  # batches to leave out of the next one
        self._again = 0  # batches to read again, where their pass is unknown
        self._inner: Iterator[Any] | None = None  # over the data, in the present pass
        # loaded in the middle of a nominal epoch, and not iterated since: iter() keeps the step
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
        """Return this rank's number of samples in a batch of the nominal epoch; 0 where it repeats
        one to keep step.
        """
        return self._plan().count(self._place(batch))

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch of the nominal epoch, over all ranks."""
        return self._plan().total(self._place(batch))

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch of the nominal epoch, where every batch counts the
        same.
        """
        return self._plan().part(self._place(batch))

    def parts(self, batch: int) -> float:
        """Return what all ranks' parts of a batch come to."""
        return self._plan().parts(self._place(batch))

    def _plan(self) -> PlannedBatchSampler:
        # asked for where `has_counts` says so
        return cast("PlannedBatchSampler", plan_of(self.loader))

    def _place(self, batch: int) -> int:
        """Say which batch of its pass a batch of the nominal epoch is."""
        return (self.total_steps - self.step + batch) % len(self.loader)

    def _next_pass(self) -> Iterator[Any]:
        self._passes += 1
        set_epoch(self.loader, self._passes)
        skip = self._skip
        self._skip = 0
        marks = stream_marks(self.loader)
        self._in_pass = skip + (0 if marks is None else marks.first)
        if skip and isinstance(self.loader, SaveableDataLoader):
            self.loader.skip_next(skip)
            skip = 0
        return itertools.islice(iter(self.loader), skip, None)

    def _draw(self) -> Any:
        again = self._again
        self._again = 0
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
        """Return which pass over the data this rank is in, how far, and what the data says of where
        that is.

        Args:
            undone: how many batches were drawn of this pass and are not done: 1 while the last one
                is worked on.
        """
        marks = stream_marks(self.loader)
        done = self._in_pass - undone
        return {
            "pass": self._passes,
            "in_pass": done,
            "done": done_in(self.loader, done),
            "has_begun": self._inner is not None,
            "loader": None if marks is None else marks.around(done),
        }

    def resume_in_pass(self, state: dict[str, Any] | None) -> None:
        """Continue at a saved position, instead of by the counters alone; without a state nothing
        is changed.

        If the batch size has changed, the position is counted in samples, and a partly trained
        batch is repeated whole.

        Args:
            state: what :meth:`state_in_pass` returned.
        """
        if state is None or not state["has_begun"]:
            return
        self._again = 0
        self._inner = None
        self._passes = state["pass"] - 1
        marks = stream_marks(self.loader)
        if self.has_counts:
            set_epoch(self.loader, state["pass"])  # its length is read below
        before = state["in_pass"]
        done = state.get("done")
        self._skip = batches_after(self.loader, done, before)
        if marks is not None and state["loader"] is not None:
            number, mark = state["loader"]["again"]
            first, self._skip = batches_from(self.loader, done, before, number)
            marks.go_on(first, mark)
        if self.has_counts:  # whose numbers follow from the batches of all passes
            self.total_steps = self._passes * len(self.loader) + self._skip

    def resume_at(self, step: int, state: dict[str, Any] | None) -> None:
        """Have the next iteration go on after so many batches of the nominal epoch.

        Args:
            step: batches of this epoch that are done, of the sizes that batches have now.
            state: what :meth:`state_in_pass` returned when the checkpoint was made, or None.
        """
        if self._recovered and step != self.step:  # this loader has been loaded by itself, too
            # The counters of the two files differ, for one of three reasons.
            begins_next_epoch = step == 0 and self.step == self.epoch_length
            state_tells_place = state is not None and state["has_begun"]  # for resume_in_pass
            batch_size_changed = not begins_next_epoch and not state_tells_place
            if batch_size_changed and self.step:
                self._go_to(self.total_steps * step // self.step)
            self.step = step
        self.resume_in_pass(state)

    @mark_as_saver
    def save(self, path: str | Path) -> None:
        """Write step, total steps and total samples, one number a line."""
        # a script that saves by itself may give the name as text
        Path(path).write_text(
            f"{self.step}\n{self.total_steps}\n{self.total_samples}\n",
            encoding="utf-8",
        )

    @mark_as_loader
    def load(self, path: str | Path, end_of_epoch: bool = True) -> None:
        """Take the numbers over; a save at the very end of an epoch makes the next iteration stop
        at once.

        The data goes on where it was: by position if the length of a pass is known, else by reading
        it again, unless the Brain knows more of it (:meth:`resume_in_pass`).
        """
        numbers = [int(line) for line in Path(path).read_text(encoding="utf-8").split()]
        self.step, total_steps, self.total_samples = numbers
        self._recovered = not end_of_epoch
        self._go_to(total_steps)

    def _go_to(self, total_steps: int) -> None:
        """Go on after so many batches of all epochs."""
        self.total_steps = total_steps
        self._inner = None
        if isinstance(getattr(self.loader, "dataset", None), IterableDataset) or not hasattr(
            self.loader,
            "__len__",
        ):
            self._passes = 0
            self._again = self.total_steps
        else:
            self._passes, self._skip = divmod(self.total_steps, max(len(self.loader), 1))
