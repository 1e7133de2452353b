"""Copies of a batch, of which the same kernels make the same bits: for work that is made again,
here or on another rank.

A tensor's copy has its strides, and begins as far from a multiple of 64 bytes as it does: kernels
may add up in another order where a tensor lies in memory in another way. Of a view the part that it
shows is copied, and not all that it is a view of.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from ddpkit.errors import ConfigError

ALIGNED_BYTES = 64
DOES_NOT_PICKLE = (
    "audit_every: a batch of the training, {}, cannot be copied for the process that computes it "
    "again: {}. Have the loader yield what pickle takes, such as tensors, lists and dicts, or "
    "leave --audit_every out."
)


def copied(batch: Any) -> bytes:
    """Return a copy of a batch as bytes, before anything changes it.

    Args:
        batch: as a loader yields it.

    Raises:
        ConfigError: something in it does not pickle.

    Ranks: local.

    Example:
        >>> rows = torch.arange(6.0).view(2, 3)
        >>> again = restored(copied([rows.T, "name"]), "cpu")
        >>> torch.equal(again[0], rows.T), again[0].stride(), again[1]
        (True, (1, 3), 'name')
    """
    written = io.BytesIO()
    try:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(batch)
    except Exception as error:
        kind = type(batch).__name__
        raise ConfigError(DOES_NOT_PICKLE.format(kind, error)) from error
    return written.getvalue()


def restored(data: bytes, device: str) -> Any:
    """Return a batch again.

    Args:
        data: as :func:`copied` has returned it, in a process of this very run.
        device: of this rank: what was on an accelerator is put there.

    Ranks: local.

    Example:
        >>> restored(copied({"x": torch.ones(2)}), "cpu")
        {'x': tensor([1., 1.])}
    """
    reader = _Unpickler(io.BytesIO(data))
    reader.device = device
    return reader.load()


class _Pickler(pickle.Pickler):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._written: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a plain tensor; None for all else."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        key = id(value)
        if key in self._written:  # it stands in the batch twice, and is one tensor
            return key, None
        self._written[key] = value
        return key, _description(value)


class _Unpickler(pickle.Unpickler):
    device = "cpu"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._read: dict[int, torch.Tensor] = {}

    def persistent_load(self, known: Any) -> torch.Tensor:
        """Return the tensor that stood there."""
        key, description = known
        if description is not None:
            self._read[key] = _tensor(*description, device=self.device)
        return self._read[key]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is strided, has each of its elements once, without gaps, and is of no
    graph.
    """
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
        return False
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.as_strided((tensor.numel(),), (1,)).cpu()
    data = flat.view(torch.uint8).numpy().tobytes()
    gap = tensor.data_ptr() % ALIGNED_BYTES // tensor.element_size()
    kind = tensor.device.type
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), gap, kind, data


def _tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    gap: int,
    kind: str,
    data: bytes,
    *,
    device: str,
) -> torch.Tensor:
    # torch begins its memory at a multiple of ALIGNED_BYTES
    memory = torch.empty(gap + len(data) // dtype.itemsize, dtype=dtype)
    numbers: Any = memory[gap:].view(torch.uint8).numpy()
    numbers[:] = np.frombuffer(data, dtype=np.uint8)
    return memory.to("cpu" if kind == "cpu" else device).as_strided(shape, strides, gap)
