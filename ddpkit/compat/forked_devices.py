"""Accelerators in a forked process.

Reason: a process that is forked after its parent has used an accelerator's driver cannot use that
driver any more. torch knows in the forked process, and there alone: ``torch.cuda.is_initialized()``
of the parent is still False after ``torch.cuda.is_available()``, which has started the driver.

Source: ``poison_fork`` in torch's ``torch/csrc/cuda/Module.cpp``; issues 940, 1751 and 3925 of
Accelerate show what users see of it.
"""

from __future__ import annotations

import torch


def is_lost_by_fork(kind: str) -> bool:
    """Say whether this process was forked after its parent had used the driver of a kind of device;
    otherwise, with another torch, torch's own error comes at the first use.

    Args:
        kind: a torch device type, such as ``"cuda"``.

    Ranks: local.

    Example:
        >>> is_lost_by_fork("cpu"), is_lost_by_fork("cuda")
        (False, False)
    """
    ask = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return bool(ask()) if callable(ask) else False
