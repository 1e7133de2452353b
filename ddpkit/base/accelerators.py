"""The accelerators of this machine, as this process sees them.

Only :func:`count_devices` and :func:`current_index` ask torch about the hardware, so all that is
built on them is tested on any machine.

Source: https://docs.pytorch.org/docs/stable/torch.html#accelerators .
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ddpkit.errors import ConfigError


def count_devices(kind: str) -> int:
    """Count the devices of one kind that this process can see.

    Args:
        kind: a torch device type, such as ``"cuda"`` (AMD's GPUs too), ``"xpu"`` or ``"mps"``.

    Returns:
        The number of devices; 0 where torch was built without them.

    Ranks: local.

    Example:
        >>> count_devices("cpu")
        1
    """
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    count = getattr(module, "device_count", None)
    return int(count()) if callable(available) and callable(count) and available() else 0


def current_index(kind: str) -> int:
    """Return the number of the device that the script has chosen: for its process group, or as the
    current one.

    Args:
        kind: a torch device type that this machine has.

    Ranks: local.

    Example:
        >>> current_index("cpu")
        0
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == kind:
        return int(bound.index or 0)
    module = None if kind == "cpu" else getattr(torch, kind, None)
    # never in a forked process, which may not ask for more
    is_in_use = getattr(module, "is_initialized", None)
    return (
        int(module.current_device())
        if module is not None and callable(is_in_use) and is_in_use()
        else 0
    )


def accelerator_kind() -> str:
    """Name the kind of accelerator to prefer here, or ``"cpu"`` where there is none.

    Ranks: local.

    Example:
        >>> isinstance(accelerator_kind(), str)
        True
    """
    if count_devices("cuda"):
        return "cuda"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def parse_device(requested: str | torch.device) -> tuple[str, int | None]:
    """Return the kind of a device, and its number if one was given."""
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={requested!r} is not a device that torch knows ({reason}). Give cpu, cuda:0, "
            "... (--device=cpu)."
        ) from error
    if device.type == "meta":
        raise ConfigError(
            "device='meta' holds no data, so nothing can be trained on it. Use --device=cpu."
        )
    return device.type, device.index if ":" in str(device) else None


def own_first(device: str) -> list[int]:
    """Number the devices of a kind that this process can see: first its own, then the others in
    their order.

    Args:
        device: its own, such as ``"cuda:1"``.

    Ranks: local.

    Example:
        >>> own_first("cpu")
        [0]
    """
    kind, index = parse_device(device)
    own = index or 0
    return [own, *(other for other in range(count_devices(kind)) if other != own)]


def widest_float(device: str | torch.device) -> torch.dtype:
    """Return the widest float of a device: float64 but on mps, which has none.

    Args:
        device: or its name.

    Ranks: local.

    Example:
        >>> widest_float("cpu"), widest_float("mps:0")
        (torch.float64, torch.float32)
    """
    return torch.float32 if str(device).startswith("mps") else torch.float64


def use_deterministic_kernels() -> None:
    """Have torch compute with deterministic kernels only, and raise where it has none.

    Ranks: local; every rank calls it, before it has computed anything on a GPU.

    State: this process's, for good; ``CUBLAS_WORKSPACE_CONFIG``, unless it is set.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html

    Example:
        >>> use_deterministic_kernels(); torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.use_deterministic_algorithms(False)
        >>> os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
        ':4096:8'
    """
    # cuBLAS is not reproducible without
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # by its times it might choose another algorithm on each process
    torch.backends.cudnn.benchmark = False
