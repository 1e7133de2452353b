"""The default process group: how it is made, on which device and with which backend."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import (
    FailureReport,
    host_name,
    is_distributed_initialized,
    this_place,
)
from ddpkit.comm.agreement import code_facts, compare_over_store, software_facts
from ddpkit.comm.given_group import watch_given_group
from ddpkit.comm.group_end import guard_group
from ddpkit.comm.mailbox import control_group, get_runtime
from ddpkit.comm.node_size import learn_node_size
from ddpkit.comm.rendezvous import open_store
from ddpkit.comm.time_limits import limits_by_option, longest_wait
from ddpkit.comm.watched_start import start_watchdog, watched_start
from ddpkit.control import Watchdog, usage_errors
from ddpkit.device import default_backend, physical_device, resolve_device, sees_own_alone
from ddpkit.errors import ConfigError, LaunchError
from ddpkit.launch import find_launch, refuse_child_of_rank, refuse_lonely_node
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.launch import LaunchInfo


logger = get_logger(__name__)


def init_group(run_opts: Mapping[str, Any]) -> None:
    """Start the default process group: see :func:`ddpkit.distributed.ddp_init_group`.

    Args:
        run_opts: as there.

    Raises:
        ConfigError: as there.
        LaunchError: as there.
        RankFailedError: as there.
        RankMismatchError: as there.

    Ranks: collective.

    State: as there.

    Example:
        >>> init_group({"distributed_backend": "gloo"})  # no launcher: nothing happens
    """
    if is_distributed_initialized():
        watch_given_group(run_opts)
        return
    info = find_launch()
    if not info.is_distributed:
        with usage_errors():
            refuse_lonely_node()
        return
    with usage_errors():
        refuse_child_of_rank(info)
    device = resolve_device(run_opts.get("device"), info)
    backend = check_backend(run_opts.get("distributed_backend"), device)
    hang_timeout = float(run_opts.get("hang_timeout") or 0.0)
    timeout = timedelta(
        seconds=longest_wait(run_opts.get("distributed_timeout_minutes"), hang_timeout)
    )
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    store, hosts = open_store(info, timeout)
    report = FailureReport(store, info.rank, info.world_size)
    watchdog = _start_watchdog(report, info, hang_timeout)
    with watched_start(report, watchdog, hosts=hosts):
        if info.world_size > 1:
            facts = {"number of processes": str(info.world_size), "backend": backend}
            facts |= {**software_facts(), **code_facts()}
            compare_over_store(
                store,
                info.rank,
                info.world_size,
                facts,
                timeout.total_seconds(),
            )
        learn_node_size(store, info, timeout.total_seconds())
        claim_device(store, info, device)
        _join(report, info, backend, device, timeout)
        runtime = get_runtime(report)
        runtime.timeout = timeout
        runtime.watchdog = watchdog
        report.limits = limits_by_option(
            run_opts.get("distributed_timeout_minutes"),
            hang_timeout,
        )
        guard_group(hosts_store=hosts, destroy=True)
        # a rank that ended now would fail those still connecting to it
        dist.barrier(group=control_group())


def claim_device(store: dist.Store, info: LaunchInfo, device: str) -> None:
    """Take the accelerator of this process, where each is shown its own alone: two of a machine may
    have come to one.

    Args:
        store: of this attempt.
        info: the place of this process.
        device: of this process.

    Raises:
        LaunchError: another rank has it.

    Ranks: local.
    """
    if info.own_devices or not sees_own_alone(torch.device(device).type, info):
        return
    number = physical_device(device)
    if not number:
        return
    key = "/".join(("ddpkit/device", *this_place(), number))
    holder = int(store.compare_set(key, "", str(info.rank)).decode())
    if holder != info.rank:
        raise LaunchError(
            f"Not enough GPUs: rank {holder} and rank {info.rank} on {host_name()} see one GPU "
            f"each, and it is the same ({number}). Give each process another one "
            "(CUDA_VISIBLE_DEVICES), launch with --nproc_per_node=1, or run on the CPU with "
            "--device=cpu --distributed_backend=gloo."
        )


def _start_watchdog(report: FailureReport, info: LaunchInfo, hang_timeout: float) -> Watchdog:
    near = info.node_ranks or range(info.first_on_node, info.first_on_node + info.local_world_size)
    return start_watchdog(report, info, near, f"{info.address}:{info.port}", hang_timeout)


def _join(
    report: FailureReport,
    info: LaunchInfo,
    backend: str,
    device: str,
    timeout: timedelta,
) -> None:
    own = torch.device(device) if device.startswith("cuda") else None
    size = info.world_size
    try:
        dist.init_process_group(
            backend,
            rank=info.rank,
            world_size=size,
            store=report.store,
            timeout=timeout,
            device_id=own,
        )
    except RuntimeError as error:  # torch.distributed.DistError derives from it
        raise LaunchError(
            f"rank {info.rank} of {info.world_size} could not join the process group "
            f"(backend={backend!r}, device={device!r}, met at {info.address}:{info.port}): "
            f"{error}. Check the network that the backend takes between the machines "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME). With NCCL each process needs a GPU of its "
            "own, no slice (MIG) of one, and sees all GPUs of its machine (srun --gpu-bind=none); "
            "--distributed_backend=gloo works on shared ones."
        ) from error


def check_backend(backend: str | None, device: str) -> str:
    """Check that a process-group backend is known, built in, and fits the device.

    Args:
        backend: such as ``"nccl"``, ``"gloo"``, ``"mpi"`` or ``"cpu:gloo,cuda:nccl"``; None chooses
            by the device.
        device: such as ``"cpu"`` or ``"cuda:1"``.

    Returns:
        The backend.

    Raises:
        ConfigError: it cannot work; the message says what was found and what to run instead.

    Ranks: local.

    Example:
        >>> check_backend(None, "cpu")
        'gloo'
    """
    if backend is None:
        return default_backend(device)
    for part in str(backend).split(","):
        name = part.split(":")[-1].strip().lower()
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"distributed_backend={backend!r}: this torch ({torch.__version__}) has no "
                f"backend {name!r}. Run with --distributed_backend=gloo, or install a torch with "
                "it."
            )
    if backend == "nccl" and not device.startswith("cuda"):
        raise ConfigError(
            f"distributed_backend='nccl' works between GPUs only, and the device is {device!r} "
            f"({torch.cuda.device_count()} GPUs found). Run with --distributed_backend=gloo."
        )
    return str(backend)
