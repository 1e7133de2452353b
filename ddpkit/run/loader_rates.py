"""How many samples a loader gives in a second, alone, by its number of workers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddpkit.augmentation import LOADER_OPTIONS
from ddpkit.control import start_loading
from ddpkit.data import StreamLoader, guess_batch_size, inner_loader
from ddpkit.dataloader import SaveableDataLoader

PREFETCHED = 2  # torch's default, of each worker


def loader_rates(loader: Any, numbers: Sequence[int], seconds: float) -> dict[int, float]:
    """Measure a loader as it is, and with other numbers of workers.

    Args:
        loader: of this rank, as ``fit`` uses it.
        numbers: of workers. Where a loader cannot be made anew (one of a class of its own, or
            batches that the recipe makes), it is measured as it is.
        seconds: for each.

    Returns:
        Samples per second, by the number of workers; none where there is one batch alone.

    Ranks: local; on a host all ranks measure at the same time.

    State: the loader itself is iterated only where it cannot be made anew.

    Example:
        >>> rates = loader_rates(SaveableDataLoader(range(4000), batch_size=2), [0], 0.01)
        >>> list(rates), rates[0] > 0
        ([0], True)
    """
    inner = inner_loader(loader)
    own = own_workers(loader)
    if not can_be_remade(inner):
        return _known({own: rate_of(inner, 0, seconds)})
    chosen = sorted({own, *numbers})
    return _known(
        {
            number: rate_of(
                with_workers(inner, number),
                number,
                seconds,
                _length(inner),
            )
            for number in chosen
        }
    )


def own_workers(loader: Any) -> int:
    """Return the number of workers that a loader has.

    Example:
        >>> own_workers([1, 2])
        0
    """
    inner = inner_loader(loader)
    if isinstance(inner, StreamLoader) and inner.of_batches:
        inner = inner.whole
    return int(getattr(inner, "num_workers", 0) or 0)


def can_be_remade(loader: Any) -> bool:
    """Say whether a loader can be made anew with another number of workers.

    Example:
        >>> can_be_remade([1, 2]), can_be_remade(SaveableDataLoader([1, 2]))
        (False, True)
    """
    if isinstance(loader, StreamLoader):
        return not loader.of_batches
    return isinstance(loader, SaveableDataLoader)


def with_workers(loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    """Make a loader like another one, with another number of workers.

    Args:
        loader: can be made anew.
        number: of workers.

    Example:
        >>> with_workers(SaveableDataLoader("abc"), 1).num_workers
        1
    """
    options: dict[str, Any] = {
        name: getattr(loader, name) for name in LOADER_OPTIONS if hasattr(loader, name)
    }
    options |= {"num_workers": number, "persistent_workers": False}
    if number == 0:
        options |= {"prefetch_factor": None, "multiprocessing_context": None, "timeout": 0}
    if isinstance(loader.dataset, IterableDataset):
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if isinstance(loader, StreamLoader):
            return StreamLoader(loader.dataset, 1, **sizes, **options)
        return SaveableDataLoader(loader.dataset, **sizes, **options)
    if loader.batch_sampler is None:
        return SaveableDataLoader(
            loader.dataset,
            batch_size=None,
            sampler=loader.sampler,
            **options,
        )
    return SaveableDataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **options)


def rate_of(
    loader: Iterable[Any],
    workers: int,
    seconds: float,
    length: int | None = None,
) -> float | None:
    """Return the samples per second of a loader; None if it has fewer than two batches.

    The batches that workers load ahead while the first one is waited for do not count.

    Args:
        loader: yields batches.
        workers: that it has.
        seconds: to measure.
        length: batches of a pass, where that is known.
    """
    ahead = 1 + PREFETCHED * workers
    if length is not None:
        ahead = max(1, min(ahead, length // 2))
    with _iterated(loader) as batches:
        for _ in itertools.islice(batches, ahead):
            pass
        samples = 0
        began = now = time.perf_counter()
        for batch in batches:
            samples += guess_batch_size(batch)
            now = time.perf_counter()
            if now - began > seconds:
                break
    return samples / (now - began) if samples else None


@contextlib.contextmanager
def _iterated(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Iterate, and end the workers at the end, wherever the iteration is."""
    batches = start_loading(loader)
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def _known(rates: dict[int, float | None]) -> dict[int, float]:
    return {number: rate for number, rate in rates.items() if rate is not None}


def _length(loader: Any) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    return len(loader)
