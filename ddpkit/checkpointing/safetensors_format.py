"""The format of safetensors: a header in JSON that says where each tensor is, then the tensors.

Nothing in such a file is code. A header of ``{"w": {"dtype": "F32", "shape": [2], "data_offsets":
[0, 8]}}`` stands behind its own length, a number of 8 bytes. The data is written in blocks: no
tensor is copied as a whole.

Source: https://github.com/huggingface/safetensors#format. That its reader for torch needs each
tensor to begin at a multiple of its element's size was read in safetensors 0.6; so tensors of large
elements come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpkit.base import StoredTensor
from ddpkit.checkpointing.storage import BLOCK_BYTES

LENGTH_BYTES = 8  # of the number before the header
MOST_HEADER_BYTES = 100_000_000  # as in safetensors
METADATA = "__metadata__"
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a file stand.

    Attributes:
        header: the bytes before the data.
        starts: the first byte of each tensor in the file, by name, in the order of the data.
        size: of the file, in bytes.
    """

    header: bytes
    starts: dict[str, int]
    size: int


def layout_of(
    tensors: Mapping[str, torch.Tensor | StoredTensor],
    metadata: Mapping[str, str],
) -> Layout:
    """Lay out a file; only dtypes and shapes of the tensors are looked at.

    Args:
        tensors: by name; may be on the meta device, or in files.
        metadata: texts by name, for the header.

    Raises:
        KeyError: the format has no tensors of a dtype.

    Ranks: local.

    Example:
        >>> layout_of({"w": torch.ones(2)}, {}).starts
        {'w': 80}
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    offsets = {}
    place = 0
    for name in order:
        tensor = tensors[name]
        offsets[name] = place
        end = place + bytes_of(tuple(tensor.shape), tensor.dtype)
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(f"the header takes {len(text)} bytes, of {MOST_HEADER_BYTES}")
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    begin = len(header)
    return Layout(header, {name: begin + start for name, start in offsets.items()}, begin + place)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many bytes a tensor takes."""
    return math.prod(shape) * dtype.itemsize


def blocks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks; from another device each is copied by itself.

    Args:
        tensor: contiguous; else it is copied first.

    Ranks: local.

    Example:
        >>> [list(block) for block in blocks_of(torch.tensor([1, 2], dtype=torch.uint8))]
        [[1, 2]]
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    count = max(1, BLOCK_BYTES // flat.element_size())
    for start in range(0, flat.numel(), count):
        block = flat[start : start + count].cpu().contiguous()
        yield block.view(torch.uint8).numpy().data
