"""Writes a file of weights block by block, from tensors that are still in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from ddpkit.base import StoredTensor
from ddpkit.checkpointing.safetensors_format import blocks_of, bytes_of, layout_of
from ddpkit.checkpointing.shard_files import InShards

if TYPE_CHECKING:
    from pathlib import Path


def stream_safetensors(
    tensors: Mapping[str, torch.Tensor | StoredTensor],
    file: BinaryIO,
) -> dict[str, int]:
    """Write a file of safetensors; of what is in shards a block at a time is in memory.

    Args:
        tensors: by name.
        file: open for writing.

    Returns:
        The first byte of each tensor in the file, by name.

    Raises:
        KeyError: the format has no tensors of a dtype.

    Ranks: local.

    Example:
        >>> import io
        >>> stream_safetensors({"w": torch.ones(2)}, io.BytesIO())
        {'w': 96}
    """
    layout = layout_of(tensors, {"format": "pt"})
    file.write(layout.header)
    for name in layout.starts:
        tensor = tensors[name]
        if isinstance(tensor, InShards):
            file.writelines(tensor.blocks())
        else:
            file.writelines(
                blocks_of(tensor.whole() if isinstance(tensor, StoredTensor) else tensor)
            )
    return layout.starts


def stream_torch(
    tensors: Mapping[str, torch.Tensor | StoredTensor],
    file: BinaryIO,
    scratch: Path,
) -> None:
    """Write a file of torch; what is in shards goes through a file beside it, which is mapped.

    Args:
        tensors: by name.
        file: open for writing.
        scratch: the path of that file; it is removed.

    Raises:
        KeyError: the format of that file has no tensors of a dtype.

    Ranks: local.
    """
    try:
        with scratch.open("wb") as raw:
            starts = stream_safetensors(tensors, raw)
        torch.save(
            {name: _mapped(scratch, tensors[name], starts[name]) for name in tensors},
            file,
        )
    finally:
        scratch.unlink(missing_ok=True)


def _mapped(path: Path, tensor: torch.Tensor | StoredTensor, start: int) -> torch.Tensor:
    """Return a tensor whose memory is a part of a file."""
    size = bytes_of(tuple(tensor.shape), tensor.dtype)
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    raw = np.memmap(path, np.uint8, mode="c", offset=start, shape=(size,))
    return torch.from_numpy(raw).view(tensor.dtype).reshape(tensor.shape)
