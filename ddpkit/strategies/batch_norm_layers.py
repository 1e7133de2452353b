"""The BatchNorm layers of a model, and which of its buffers are no batch statistics."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_moving_buffers(module: nn.Module) -> bool:
    """Say whether a module has saved floating-point buffers that are not batch statistics.

    Such buffers (codebooks, running normalisers) may drift apart between ranks, so DDP broadcasts
    them from rank 0 before each training forward pass, as it does by default. Batch statistics are
    equal already.

    Example:
        >>> has_moving_buffers(nn.BatchNorm1d(3))
        False
    """
    saved = module.state_dict(keep_vars=True)
    batch_statistics = {
        id(buffer) for part in batch_norms(module) for buffer in part.buffers(recurse=False)
    }
    return any(
        name in saved and buffer.is_floating_point() and id(buffer) not in batch_statistics
        for name, buffer in module.named_buffers()
    )


def batch_norms(modules: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers of a model, synchronised or not.

    Example:
        >>> len(batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        1
    """
    return [part for part in modules.modules() if isinstance(part, _BatchNorm)]


def batch_norm_row(modules: nn.Module, synchronises: bool | None) -> str:
    """Say over which rows the BatchNorm layers of a model normalise in training; nothing where it
    has none.

    Args:
        modules: after its conversion.
        synchronises: the option ``sync_batchnorm``.

    Example:
        >>> model = nn.Sequential(nn.SyncBatchNorm(2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2))
        >>> batch_norm_row(model, None)
        'over the rows of all processes (--sync_batchnorm=auto): 2 of 3 layers; the others by those
        of each process'
        >>> batch_norm_row(model, False)
        'each process by its own rows, as --sync_batchnorm=off says'
    """
    layers = batch_norms(modules)
    if not layers:
        return ""
    if synchronises is False:
        return "each process by its own rows, as --sync_batchnorm=off says"
    from ddpkit.syncbn import SyncBatchNorm  # loaded already where there is one

    shared = sum(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in layers)
    given = "auto" if synchronises is None else "on"
    rest = (
        ""
        if shared == len(layers)
        else f": {shared} of {len(layers)} layers; the others by those of each process"
    )
    return f"over the rows of all processes (--sync_batchnorm={given}){rest}"
