"""Counts what would make the host wait for a device; on a CPU, too, where it takes no time."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """A context in which ``.item()`` and its like are counted."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))
