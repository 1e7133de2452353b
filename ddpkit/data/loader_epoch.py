"""How a loader, its samplers and its dataset learn which epoch comes."""

from __future__ import annotations

import contextlib
from typing import Any

from ddpkit.data.plan import set_epoch_inside
from ddpkit.data.saveable_loader import SaveableDataLoader
from ddpkit.data.streams import StreamLoader


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
