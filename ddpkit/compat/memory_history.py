"""Torch's record of who has allocated what on a GPU, for a picture of its memory when it is full.

Reason: ``torch.cuda.memory`` writes such a record, and a public page draws it, but the functions
have names that begin with an underscore. They are looked for on the device's module, which is
public, so that other accelerators with the same functions have it, too. Where they are missing, or
take other arguments, nothing is recorded: a summary in numbers, from public functions, is all there
is then.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_MOST_EVENTS = 100_000  # older ones are forgotten: about 100 MB of host memory


def record_memory_history(device: str) -> bool:
    """Begin to note each allocation on a device, with the line of Python that has made it.

    Args:
        device: such as ``"cuda:1"``.

    Returns:
        Whether torch can do that here.

    State: of torch's allocator, until :func:`stop_memory_history`.

    Example:
        >>> record_memory_history("cpu")
        False
    """
    record, dump = _functions(device)
    if record is None or dump is None:
        return False
    try:
        record(max_entries=_MOST_EVENTS, stacks="python")
    except TypeError:  # of a torch with other arguments
        return False
    return True


def stop_memory_history(device: str) -> None:
    """Note allocations no more; otherwise nothing."""
    record, _ = _functions(device)
    if record is not None:
        record(enabled=None)


def write_memory_history(device: str, path: Path) -> None:
    """Write what was noted, and what is allocated now.

    Args:
        device: for which :func:`record_memory_history` has returned True.
        path: a pickle, for https://pytorch.org/memory_viz.

    Raises:
        OSError: of the file system.
    """
    _, dump = _functions(device)
    if dump is not None:
        dump(str(path))


def _functions(device: str) -> tuple[Any, Any]:
    """Return torch's functions that record and write; None in the place of one that is not
    there.
    """
    kind = torch.device(device).type
    module: Any = getattr(torch, kind, None)
    memory = getattr(module, "memory", None)
    is_ready = getattr(module, "is_available", bool)()
    if kind == "cpu" or memory is None or not is_ready:
        return None, None
    return getattr(memory, "_record_memory_history", None), getattr(memory, "_dump_snapshot", None)
