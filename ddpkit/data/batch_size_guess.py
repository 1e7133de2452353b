"""Guesses how many samples a batch has that some collate function has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpkit.logger import get_logger

logger = get_logger(__name__)


def guess_batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: its ``batchsize``, or the length of its first tensor
    or array.

    Args:
        batch: an object that knows its ``batchsize``; a tensor; a list, tuple or dict with one
            among its fields; or a list of samples.

    Returns:
        1 where nothing tells, with a warning.

    Example:
        >>> (
        ...     guess_batch_size([torch.zeros(3, 2), torch.zeros(3)]),
        ...     guess_batch_size({"x": torch.zeros(2)}),
        ... )
        (3, 2)
    """
    if hasattr(batch, "batchsize"):
        return int(batch.batchsize)
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(fields, (list, tuple)):
        for field in fields:
            shape = getattr(field, "shape", ())
            if isinstance(field, (torch.Tensor, np.ndarray)) and shape:
                return int(shape[0])
    first: Any = next(iter(fields), None) if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping) and isinstance(first, (Mapping, tuple)):
        return guess_batch_size(first)
    try:
        return len(first)
    except TypeError:
        logger.warning_once(
            "A batch of the type %s does not tell how many samples it has, and counts as one: "
            "give it an attribute `batchsize`.",
            type(batch).__name__,
        )
        return 1
