"""How many batches a loader has, and how many samples each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from ddpkit.data import StreamLoader, guess_batch_size, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Counts(Protocol):
    """Tells how many samples a batch has, here and over all ranks."""

    def count(self, batch: int) -> int:
        """Return this rank's number of samples in a batch."""

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks."""

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch, where every batch counts the same."""

    def parts(self, batch: int) -> float:
        """Return the sum of all ranks' parts of a batch."""


@runtime_checkable
class CountingLoader(Counts, Protocol):
    """A loader that may count the batches of its epochs, as a plan counts those of a pass."""

    @property
    def has_counts(self) -> bool:
        """Whether the number of samples of every batch is known."""


def counts_of(loader: Any) -> Counts | None:
    """Return the plan or loader that counts the samples of each batch, or None."""
    return loader if isinstance(loader, CountingLoader) and loader.has_counts else plan_of(loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None for a stream, whose length is not reliable.

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
    """Return a function that counts the samples of the batch just read; it gives None for another
    rank's batch.
    """
    return loader.size_of if isinstance(loader, StreamLoader) else guess_batch_size


def counting(loader: Any) -> Callable[[int, Any], int]:
    """Return a function that counts a batch's samples: from the plan, otherwise from the loader or
    the batch.
    """
    counts = counts_of(loader)
    if counts is None:
        size = size_of(loader)
        return lambda _, batch: size(batch) or 0
    return lambda number, _: counts.count(number)
