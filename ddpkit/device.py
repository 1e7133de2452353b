"""On which device this process computes: a concrete name for each rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ddpkit.base import (
    accelerator_kind,
    count_devices,
    current_index,
    own_first,
    parse_device,
    use_deterministic_kernels,
    widest_float,
)
from ddpkit.errors import ConfigError
from ddpkit.launch import LaunchInfo, find_launch
from ddpkit.logger import get_logger

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
    kind, index = parse_device(requested)
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
