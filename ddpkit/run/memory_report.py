"""What the error says when a step runs out of memory: what has taken it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpkit.base import local_part
from ddpkit.distributed import get_rank
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpkit.training import RunContext, TrainStep

logger = get_logger(__name__)

_SAYS_SO = (
    "out of memory",
    "can't allocate memory",  # of torch's allocator on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_TOLD = "_ddpkit_memory_is_told"  # of an exception that goes through several stages
_LARGEST = 5  # weights that are named
_LARGEST_SHOWN = 1000  # of a unit, then the next one is taken
_MEMINFO = Path("/proc/meminfo")

REST = "the rest is what a step computes: activations, batches, and what a kernel needs"
HINT = "--memory_snapshot_on_oom records who allocates what, for a picture of it."


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that there was no memory left, of the device or of the host.

    Example:
        >>> (
        ...     is_out_of_memory(RuntimeError("CUDA error: out of memory")),
        ...     is_out_of_memory(ValueError("no")),
        ... )
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYS_SO)


class MemoryReport:
    """Tells what took the memory when it is full.

    Args:
        context: of the run.
        train_step: has the optimizers.

    Ranks: local. A rank that runs out of memory tells of its own.
    """

    def __init__(self, context: RunContext, train_step: TrainStep) -> None:
        self._context = context
        self._train_step = train_step

    def tell(self, error: BaseException) -> None:
        """Log what takes the memory of this rank now, and tell the parts. Once for an error.

        Args:
            error: says that no memory is left; its traceback keeps tensors alive.
        """
        if _TOLD in vars(error):
            return
        vars(error)[_TOLD] = True
        device = self._context.device
        rank = get_rank() or 0
        lines = [f"Memory of rank {rank} on {device}, when it ran out:"]
        lines += [f"  {line}" for line in (*memory_lines(device), *self._parts())]
        parts = self._context.parts
        if not parts.hears("on_out_of_memory") and torch.device(device).type in {"cuda", "xpu"}:
            lines.append(HINT)
        logger.warning("%s", "\n".join(lines), main_process_only=False)
        parts.tell("on_out_of_memory", error)

    def _parts(self) -> list[str]:
        """Return lines about what ddpkit knows by name: weights, gradients, states of
        optimizers.
        """
        modules = self._context.modules
        parameters = list(modules.named_parameters())
        gradients = [parameter.grad for _, parameter in parameters if parameter.grad is not None]
        states = [
            value
            for optimizer in self._train_step.named_optimizers().values()
            for state in getattr(optimizer, "state", {}).values()
            if isinstance(state, dict)
            for value in state.values()
        ]
        sizes = {
            "weights": [parameter for _, parameter in parameters] + list(modules.buffers()),
            "gradients": gradients,
            "optimizers": states,
        }
        words = ", ".join(f"{name} {shown_bytes(_bytes_of(kept))}" for name, kept in sizes.items())
        return [words, REST, *_largest(parameters)]


def _largest(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    ranked = sorted(
        parameters,
        key=lambda item: _bytes_of([item[1]]),
        reverse=True,
    )[:_LARGEST]
    rows = [
        (
            f"  {name} {tuple(tensor.shape)} {str(tensor.dtype).rpartition('.')[2]}: "
            f"{shown_bytes(_bytes_of([tensor]))}"
        )
        for name, tensor in ranked
    ]
    return ["the largest weights:", *rows] if rows else []


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Return the memory that tensors take on this rank, each memory once."""
    found = {}
    for tensor in tensors:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and not tensor.is_meta
        ):
            storage = local_part(tensor).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def shown_bytes(number: float) -> str:
    """Return a number of bytes as a text with three digits.

    Example:
        >>> shown_bytes(3 * 1024**3 / 2), shown_bytes(2048), shown_bytes(12)
        ('1.50 GiB', '2.00 KiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < _LARGEST_SHOWN or unit == "GiB":
            break
        number /= 1024
    return (
        f"{number:.0f} B"
        if unit == "B"
        else f"{number:.{max(0, 3 - len(str(int(number))))}f} {unit}"
    )


# ---------------------------------------------------------- the memory of a device, and of the host


class _Use(NamedTuple):
    """Bytes of one device: what torch has given out, what it holds, and the most it had given
    out.
    """

    allocated: float
    reserved: float
    peak: float | None


def memory_lines(device: str) -> list[str]:
    """Return what is known of the memory of a device, a sentence a line; of the host's, for a CPU.

    Args:
        device: such as ``"cuda:1"``.

    Example:
        >>> memory_lines("cpu")[0]
        'the process has used up to ...iB'
    """
    use = _use_of(device)
    if use is None:
        return _lines_of_host()
    words = f"allocated {shown_bytes(use.allocated)}, reserved by torch {shown_bytes(use.reserved)}"
    if use.peak is not None:
        words += f", at most allocated {shown_bytes(use.peak)}"
    lines = [words]
    ask = getattr(
        torch.get_device_module(torch.device(device).type),
        "mem_get_info",
        None,
    )
    if ask is not None:
        free, total = ask(device)
        others = max(0, total - free - use.reserved)
        lines.append(
            f"the device has {shown_bytes(total)}, {shown_bytes(free)} free; "
            f"{shown_bytes(others)} are its driver's and other processes'"
        )
    return lines


def _use_of(device: str) -> _Use | None:
    """Return what torch's allocator knows of a device; None where it has none."""
    kind = torch.device(device).type
    module: Any = getattr(torch, kind, None)
    if kind == "cpu" or module is None:
        return None
    if hasattr(module, "max_memory_allocated"):
        peak = module.max_memory_allocated(device)
        return _Use(module.memory_allocated(device), module.memory_reserved(device), peak)
    if hasattr(module, "driver_allocated_memory"):  # of Apple's GPUs
        return _Use(module.current_allocated_memory(), module.driver_allocated_memory(), None)
    return None


def _lines_of_host() -> list[str]:
    import resource  # few runs need it

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    highest *= 1 if sys.platform == "darwin" else 1024
    lines = [f"the process has used up to {shown_bytes(highest)}"]
    if _MEMINFO.exists():
        rows = (line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        kib = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
        total, left = (1024 * kib.get(name, 0) for name in ("MemTotal", "MemAvailable"))
        lines.append(f"the machine has {shown_bytes(total)}, {shown_bytes(left)} available")
    return lines
