"""The batches of a rehearsal: of two sizes, from the first samples of the training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpkit.data import PlannedBatchSampler, inner_loader
from ddpkit.dataloader import plan_of

SMALL = 4  # samples: a batch of fewer is doubled, not halved; BatchNorm needs two
_DEEPEST = 6  # levels of containers


@dataclass(frozen=True, eq=False)
class RehearsalBatch:
    """A batch, and how many samples it has.

    Args:
        batch: as the recipe's loader yields it.
        samples: its samples; None where that is not known.
    """

    batch: Any
    samples: int | None

    @property
    def size(self) -> float:
        """The bytes of its tensors."""
        found = {}
        for tensor in tensors_in(self.batch):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = float(storage.nbytes())
        return sum(found.values())


def batches_to_rehearse(
    loader: Any,
    first: Iterator[Any],
    samples: int | None,
) -> list[RehearsalBatch]:
    """Return a batch of the recipe's size, and one of another size where that can be made; the
    smaller one comes first.

    Args:
        loader: of the training.
        first: yields batches as the training does; asked for one, where the loader's dataset cannot
            be.
        samples: of a full batch of one process; None where it changes from batch to batch.
    """
    inner = inner_loader(loader)
    sampler = plan_of(loader)
    is_divisible = isinstance(sampler, PlannedBatchSampler) and inner is loader
    # a sampler of the recipe, or a stream, says how large a batch is: nothing else can be asked for
    if samples is None or not is_divisible:
        return [RehearsalBatch(next(first), samples)]
    indices = next(iter(inner.batch_sampler))
    other = samples // 2 if samples >= SMALL else 2 * samples
    return [
        RehearsalBatch(
            _collated(inner, indices, size),
            size,
        )
        for size in sorted((samples, other))
    ]


def moves_early(loader: Any) -> bool:
    """Say whether a batch is on the device while the one before it is computed.

    Args:
        loader: of the training.
    """
    return getattr(inner_loader(loader), "passed_through", None) is not None


def _collated(
    loader: Any,
    indices: Sequence[Any],
    size: int,
) -> Any:
    """Return a batch of the first samples; they come again where there are too few."""
    # the same samples again: their kind counts, and no further file is read
    chosen = list(itertools.islice(itertools.cycle(indices), size))
    dataset = loader.dataset
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(chosen))
    return loader.collate_fn([dataset[index] for index in chosen])


def tensors_in(
    value: Any,
    depth: int = 0,
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch.

    Args:
        value: a tensor, or tensors in tuples, lists, mappings and objects with attributes.
        depth: of containers around it.

    Example:
        >>> sum(tensor.numel() for tensor in tensors_in({"a": torch.ones(2), "b": [torch.ones(3)]}))
        5
    """
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
        return
    if depth >= _DEEPEST or isinstance(value, (str, bytes)):
        return
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, depth + 1)
