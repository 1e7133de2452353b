"""Batches that move to the device one ahead of the step, with the option ``prefetch_to_device``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from ddpkit.data import inner_loader
from ddpkit.dataloader import SaveableDataLoader
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = get_logger(__name__)


def move_ahead(loader: Any, device: str) -> None:
    """Move a loader's batches to a device one batch ahead of the current one.

    Args:
        loader: of this rank. A stream, a loader of another kind, or one without workers is left as
            it is, with a warning: there, to read a batch earlier would change which random numbers
            it is made with.
        device: such as ``"cuda:1"``.

    Example:
        >>> loader = SaveableDataLoader(range(4), batch_size=2, num_workers=1)
        >>> move_ahead(loader, "cpu")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """
    inner = inner_loader(loader)
    is_stream = isinstance(getattr(inner, "dataset", None), IterableDataset)
    if not isinstance(inner, SaveableDataLoader) or is_stream or not inner.num_workers:
        logger.warning_once(
            "prefetch_to_device needs a dataset with a length and num_workers >= 1: the batches "
            "of a %s%s are moved when they are used.", type(inner).__name__, "" if is_stream else " without workers",  # noqa: E501
        )  # fmt: skip
        return
    inner.passed_through = functools.partial(moved_ahead, device=torch.device(device))


def moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches on a device, each of which has begun to move before the one before it is
    yielded.

    No memory of a batch is overwritten that a step still reads: before it allocates, the copying
    stream waits for what the step's stream was given so far. ``Tensor.record_stream`` would do for
    tensors only, and not for objects whose tensors are unknown.

    Args:
        batches: read one ahead.
        device: where they go; on a GPU without waiting for it.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams

    Example:
        >>> next(moved_ahead(iter([{"x": torch.ones(1)}]), torch.device("cpu")))
        {'x': tensor([1.])}
    """
    side = _copying_stream(device) if device.type == "cuda" else None
    ahead: tuple[Any, Any] | None = None
    for batch in batches:
        coming = _begin(batch, device, side)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = coming
    if ahead is not None:
        yield _arrived(*ahead, device)


# a stream has memory of its own: a new one each epoch would hold more and more of it
@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _begin(
    batch: Any,
    device: torch.device,
    side: torch.cuda.Stream | None,
) -> tuple[Any, Any]:
    """Begin to move a batch; return it, and the event of its arrival."""
    if side is None:
        return _moved(batch, device), None
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return _moved(batch, device), side.record_event()


def _arrived(batch: Any, event: torch.cuda.Event | None, device: torch.device) -> Any:
    """Return a batch; what the current stream is given from now on waits for it."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return batch


def _moved(value: Any, device: torch.device) -> Any:
    """Move every object with a method ``to``, also inside mappings and sequences; leave others as
    they are.
    """
    if hasattr(value, "to"):
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # an object that takes nothing but the device
            return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: _moved(inner, device) for key, inner in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return moved
        alike = copy.copy(value)  # of the recipe's class, as the loader gives it
        alike.update(moved)
        return alike
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(inner, device) for inner in value))
    return (
        type(value)(_moved(inner, device) for inner in value)
        if type(value) in (list, tuple)
        else value
    )
