"""Fingerprints of tensors: equal for equal bits, whoever holds which part of them.

The fingerprint of a tensor is the sum over its elements of a mixture of the element's bits and its
place, modulo 2^64. So ranks that hold parts of it add up their sums, and a change of one element
shows. It tells accidents; against a forger it is none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import first_row, is_sharded, local_part
from ddpkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK = 1 << 18  # elements at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# odd numbers with bits all over, as 64-bit integers with a sign
_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype, the shape and a sum over the bits of each tensor.

    Args:
        tensors: by name; parts of tensors that are divided over the ranks count as the whole.

    Raises:
        CheckpointError: the bits of a tensor cannot be read, as of some that are quantized.

    Ranks: local; collective if a tensor is divided, with the same names in the same order.

    Example:
        >>> fingerprints({"w": torch.zeros(2)})
        {'w': 'float32 (2) 2429836b56f964b9'}
    """
    sums = [_sum_of(name, tensor) for name, tensor in tensors.items()]
    divided = [number for number, tensor in enumerate(tensors.values()) if is_sharded(tensor)]
    if divided:
        mesh: Any = next(tensor for tensor in tensors.values() if is_sharded(tensor))
        mesh = mesh.device_mesh
        parts = torch.tensor([sums[number] for number in divided], device=mesh.device_type)
        dist.all_reduce(parts, group=mesh.get_group())
        for number, total in zip(divided, parts.tolist(), strict=True):
            sums[number] = total
    return {
        name: f"{_kind(tensor)} {total % 2**64:016x}"
        for (name, tensor), total in zip(tensors.items(), sums, strict=True)
    }


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} ({', '.join(map(str, tensor.shape))})"


@torch.no_grad()
def _sum_of(name: str, tensor: torch.Tensor) -> int:
    try:
        bits = _bits(local_part(tensor))
    except (RuntimeError, TypeError, NotImplementedError, KeyError) as error:
        raise CheckpointError(
            f"trained_only: the bits of {name}, {_kind(tensor)}, cannot be read: {error}. Save the "
            "module whole: leave its name out of trained_only."
        ) from error
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    start = _start(tensor)
    for begin in range(0, bits.numel(), CHUNK):
        chunk = bits[begin : begin + CHUNK].to(torch.int64)
        place = torch.arange(
            start + begin,
            start + begin + chunk.numel(),
            dtype=torch.int64,
            device=bits.device,
        )
        # a new tensor: of 64-bit numbers the chunk is the memory of the weights
        mixed = chunk * _MIX[0]
        mixed += place.mul_(_MIX[1])
        mixed += _MIX[2]
        mixed ^= mixed >> 29
        mixed *= _MIX[0]
        mixed ^= mixed >> 32
        mixed *= _MIX[1]
        total += mixed.sum()
    return int(total)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as whole numbers, in one row."""
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.reshape(-1).view(_INTEGERS[flat.element_size()])


def _start(tensor: torch.Tensor) -> int:
    """Return the place of this rank's first element in the whole tensor."""
    if not is_sharded(tensor) or not tensor.shape:
        return 0
    # by the shape: what is asked of the tensor itself may communicate
    of_row = math.prod(tensor.shape[1:]) * (2 if tensor.is_complex() else 1)
    return first_row(tensor) * of_row
