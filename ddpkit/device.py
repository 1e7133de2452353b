"""On which device this process computes: a concrete name for each rank.

Only :func:`count_devices` and :func:`current_index` ask torch about the hardware, so all else here
is tested on any machine.

Source: https://docs.pytorch.org/docs/stable/torch.html#accelerators .
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from ddpkit.launch import LaunchInfo

__all__ = [
    "accelerator_kind",
    "count_devices",
    "current_index",
    "default_backend",
    "infer_device",
    "own_first",
    "physical_device",
    "resolve_device",
    "sees_own_alone",
    "use_deterministic_kernels",
    "widest_float",
]

logger = get_logger(__name__)

# Devices without a number: there is one of them at most.
_SINGLE_DEVICES = ("mps",)

# Variables that hide accelerators from a process.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


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


def infer_device(local_rank: int | None = None) -> str:
    """Choose the device for this process: its own accelerator where there is one, the CPU
    otherwise.

    Args:
        local_rank: number of this process on its node; None takes it from the launcher's
            environment.

    Returns:
        Such as ``"cuda:0"``, ``"cuda:3"`` (local rank 3), ``"mps"`` or ``"cpu"``.

    Raises:
        ConfigError: there are GPUs, but fewer than processes on this node.
        LaunchError: ``local_rank`` is None and the environment contradicts itself.

    Ranks: local.

    Example:
        >>> infer_device().split(":")[0] in {"cpu", "cuda", "mps", "xpu"}
        True
    """
    if local_rank is None:
        from ddpkit.launch import find_launch

        local_rank = _own_index(accelerator_kind(), find_launch())
    kind = accelerator_kind()
    return "cpu" if kind == "cpu" or count_devices(kind) == 0 else _numbered(kind, local_rank)


def resolve_device(requested: str | torch.device | None, info: LaunchInfo) -> str:
    """Turn what the user asked for into the one device of this process.

    Under a launcher an accelerator is always bound to the local rank: ``cuda`` and ``cuda:0`` both
    mean "my GPU" there, and a warning says so (once per node) where the number that was asked for
    is another.

    Args:
        requested: such as ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``torch.device("cuda")``; None
            chooses.
        info: the place of this process, from :func:`ddpkit.launch.launchers.find_launch`.

    Returns:
        ``"cpu"``, or an accelerator with its number (``"cuda:1"``); ``"mps"`` has none.

    Raises:
        ConfigError: this node has no such device, or fewer devices than processes.

    Ranks: local.

    Example:
        >>> from ddpkit.launch.launchers import LaunchInfo
        >>> resolve_device("cpu:0", LaunchInfo())
        'cpu'
        >>> resolve_device("meta", LaunchInfo())
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: device='meta' holds no data...
    """
    if requested is None:
        return infer_device(_own_index(accelerator_kind(), info))
    kind, index = _parse(requested)
    if kind == "cpu":
        return "cpu"
    count = count_devices(kind)
    if count == 0:
        raise ConfigError(
            f"device={str(requested)!r}, but found {_found(kind, 0)}. {_cpu_remedy(info)}"
        )
    if index is not None and index >= count:
        raise ConfigError(
            f"device={str(requested)!r}, but found {_found(kind, count)}. "
            f"Run with --device={_name(kind, count - 1)}, or leave --device out."
        )
    if not info.is_distributed:
        return _numbered(kind, _own_index(kind, info) if index is None else index)
    bound = _numbered(kind, _own_index(kind, info))
    is_heard = info.local_rank == (1 if index == 0 else 0)  # one process of the node says it
    if index is not None and is_heard and not info.own_devices:
        logger.warning_once(
            f"device={str(requested)!r} under a launcher: each process uses its own "
            f"{kind}:<LOCAL_RANK> instead ({bound} here). Give --device={kind}, or nothing.",
            main_process_only=False,
        )
    return bound


def _own_index(kind: str, info: LaunchInfo) -> int:
    """Number this process's device: by its place on the node, unless the launcher shows it no other
    than its own.

    In a process group that was made without a launcher (``mp.spawn``) nothing tells that place, and
    the script chooses.
    """
    if not info.is_distributed and dist.is_available() and dist.is_initialized():
        return current_index(kind)
    count = count_devices(kind)
    if info.own_devices and count < info.local_world_size:
        return 0
    return 0 if sees_own_alone(kind, info) else info.local_rank


def sees_own_alone(kind: str, info: LaunchInfo) -> bool:
    """Say whether a process that is one of several on its node seems to be shown its own
    accelerator alone.

    submitit, Slurm with ``--gpus-per-task``, and a script that sets ``CUDA_VISIBLE_DEVICES`` for
    each process do that. Where torchrun has not been told of visible devices, all its processes see
    the same. Whether two processes have come to one device is found out when they meet:
    :func:`physical_device`.

    Args:
        kind: a torch device type.
        info: the place of this process.

    Ranks: local.

    Example:
        >>> from ddpkit.launch.launchers import LaunchInfo
        >>> sees_own_alone("cpu", LaunchInfo("environment", 1, 1, 2, 2))
        False
    """
    if kind in {"cpu", *_SINGLE_DEVICES} or info.local_world_size == 1 or count_devices(kind) != 1:
        return False
    return info.launcher != "torchrun" or any(os.environ.get(name) for name in _VISIBLE)


def physical_device(device: str) -> str:
    """Return what is equal for two processes of a machine that compute on one accelerator; empty
    where unknown.

    Args:
        device: such as ``"cuda:0"``.

    Ranks: local.

    Example:
        >>> physical_device("cpu")
        ''
    """
    kind = torch.device(device).type
    module = getattr(torch, kind, None)
    properties = getattr(module, "get_device_properties", None)
    if kind == "cpu" or not callable(properties):
        return ""
    number = str(
        getattr(
            properties(torch.device(device)),
            "uuid",
            "",
        )
    )
    part = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # of a GPU that is divided (MIG)
    return f"{number} {part}" if number and part.startswith("MIG-") else number


def default_backend(device: str) -> str:
    """Name the process-group backend that fits a device.

    Args:
        device: such as ``"cpu"`` or ``"cuda:1"``.

    Returns:
        ``"nccl"`` for a CUDA device, ``"gloo"`` for any other.

    Ranks: local.

    Example:
        >>> default_backend("cuda:1"), default_backend("cpu")
        ('nccl', 'gloo')
    """
    return "nccl" if device.split(":", maxsplit=1)[0] == "cuda" else "gloo"


def _parse(requested: str | torch.device) -> tuple[str, int | None]:
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


def _numbered(kind: str, index: int) -> str:
    """Name device number ``index`` of a kind, if there are so many."""
    count = count_devices(kind)
    if index >= count:
        raise ConfigError(
            f"Not enough GPUs: this is LOCAL_RANK={index}, counted from 0, but found "
            f"{_found(kind, count)}. Launch with --nproc_per_node={count}, or run on the CPU with "
            "--device=cpu --distributed_backend=gloo."
        )
    return _name(kind, index)


def _name(kind: str, index: int) -> str:
    return kind if kind in _SINGLE_DEVICES else f"{kind}:{index}"


def _found(kind: str, count: int) -> str:
    """Say in words how many devices were found, and whether the environment hides some."""
    names = ", ".join(_name(kind, index) for index in range(count))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = f"; CUDA_VISIBLE_DEVICES={visible!r}" if kind == "cuda" and visible is not None else ""
    return (
        f"{count} GPU{'' if count == 1 else 's'} "
        f"({names or f'by torch {torch.__version__}'}{hidden})"
    )


def _cpu_remedy(info: LaunchInfo) -> str:
    backend = " --distributed_backend=gloo" if info.is_distributed else ""
    return f"Run with --device=cpu{backend}, or leave --device out."


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
    kind, index = _parse(device)
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
