"""The default process group: made from the launcher's environment, destroyed at exit.

How the processes find each other is in :mod:`ddpkit.comm.rendezvous`.

Source: torch's trap list in ``docs/explanation/architecture.md``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import (
    LAST_WORDS_SECONDS,
    POSITION,
    PROCESS,
    FailureReport,
    Reason,
    host_name,
    is_distributed_initialized,
    is_second_hand,
    state_and_start,
)
from ddpkit.comm.consistency import compare_over_store, script_facts, software_facts
from ddpkit.comm.rendezvous import open_store
from ddpkit.comm.runtime import Runtime, control_group, get_runtime
from ddpkit.compat import all_groups
from ddpkit.control import Watchdog, at_exit, kill_workers, note_end_of_child, watch_uncaught
from ddpkit.device import resolve_device
from ddpkit.errors import ConfigError, LaunchError, RankFailedError
from ddpkit.launch import find_launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.launch import LaunchInfo

DEFAULT_TIMEOUT_MINUTES = 30.0
AFTER_WATCH_SECONDS = 30.0  # that collectives wait longer, so that it is the watchdog that says why
SHARED_GPU = "Duplicate GPU detected"  # in NCCL's own words
DEPARTURE_SECONDS = 5.0
SEEN_SECONDS = 0.3  # in which torchrun's agent looks at its processes three times
NAP_SECONDS = 0.02


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
        _attend(hosts_store=False, destroy=False)
        return
    info = find_launch()
    if not info.is_distributed:
        return
    device = resolve_device(run_opts.get("device"), info)
    backend = check_backend(run_opts.get("distributed_backend"), device)
    hang_timeout = float(run_opts.get("hang_timeout") or 0.0)
    timeout = timedelta(seconds=longest_wait(run_opts.get("distributed_timeout_minutes"), hang_timeout))
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    store, hosts = open_store(info, timeout)
    report = FailureReport(store, info.rank, info.world_size)
    watchdog = _start_watchdog(report, info, hang_timeout)
    try:
        with POSITION.inside(SimpleNamespace(epoch=0, step=0, optimizer_step=0)):
            if info.world_size > 1:
                facts = {"number of processes": str(info.world_size), "backend": backend}
                facts |= {**software_facts(), **script_facts()}
                compare_over_store(store, info.rank, info.world_size, facts, timeout.total_seconds())
            _join(report, info, backend, device, timeout)
            runtime = get_runtime(report)
            runtime.timeout, runtime.watchdog = timeout, watchdog
            _attend(hosts_store=hosts, destroy=True)
            dist.barrier(group=control_group())  # a rank that ended now would fail those still connecting to it
            watchdog.heartbeat.is_starting = False
    except BaseException as error:  # told here: nobody can go on, whatever becomes of the exception
        reason = _tell_or_ask(report, error)
        report.depart()
        if hosts:
            report.await_departures(DEPARTURE_SECONDS)  # until they have read why
        watchdog.stop()
        if reason is not None:
            raise RankFailedError(reason.summary()) from None
        raise


def _tell_or_ask(report: FailureReport, error: BaseException) -> Reason | None:
    """Tell the others of an error of this rank's own; of one that only shows a lost rank, find that one's reason."""
    if is_second_hand(error):
        return report.find_reason()
    report.tell(Reason.of(report.rank, error, is_final=True))
    return None


def _start_watchdog(report: FailureReport, info: LaunchInfo, hang_timeout: float) -> Watchdog:
    """Watch over this process from now on: a rank may fail before it has joined the group that the others wait in."""
    near = info.node_ranks or range(info.first_on_node, info.first_on_node + info.local_world_size)
    parent = os.getppid() if info.launcher == "torchrun" else None
    watchdog = Watchdog(report, near, parent)
    watchdog.hang_timeout = hang_timeout
    watchdog.heartbeat.is_starting = info.rank == 0  # without connections yet only silence shows that a rank is lost
    watchdog.start()
    return watchdog


def _join(report: FailureReport, info: LaunchInfo, backend: str, device: str, timeout: timedelta) -> None:
    own, size = torch.device(device) if device.startswith("cuda") else None, info.world_size
    try:
        dist.init_process_group(
            backend, rank=info.rank, world_size=size, store=report.store, timeout=timeout, device_id=own
        )
    except RuntimeError as error:  # torch.distributed.DistError derives from it
        raise LaunchError(
            f"rank {info.rank} of {info.world_size} could not join the process group "
            f"(backend={backend!r}, met at {info.address}:{info.port}): {error}. {_what_to_do(str(error), device)}"
        ) from error


def _what_to_do(error: str, device: str) -> str:
    """Say what helps against an error of a backend that has not come together."""
    if SHARED_GPU in error:
        return (
            f"Two ranks use one GPU, this one has {device!r}, or slices (MIG) of one. Start one process per GPU, each "
            "seeing all GPUs of its machine (srun --gpu-bind=none), or run with --distributed_backend=gloo."
        )
    return "Check the network that the backend takes between the machines (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."


def longest_wait(minutes: float | None, hang_timeout: float) -> float:
    """Return how long collectives wait: longer than the watchdog, which says why, unless the user wants something else.

    Args:
        minutes: the option ``distributed_timeout_minutes``; None: its default.
        hang_timeout: seconds; 0: never.

    Returns:
        Seconds.

    Ranks: local; every rank must give the same.

    Example:
        >>> longest_wait(30.0, 1800.0), longest_wait(None, 0.0), longest_wait(5.0, 1800.0)
        (1830.0, 1800.0, 300.0)
    """
    seconds = 60.0 * float(minutes or DEFAULT_TIMEOUT_MINUTES)
    if seconds != 60.0 * DEFAULT_TIMEOUT_MINUTES:
        return seconds
    return max(seconds, hang_timeout + AFTER_WATCH_SECONDS)


def check_backend(backend: str | None, device: str) -> str:
    """Check that a process-group backend is known, built in, and fits the device.

    Args:
        backend: such as ``"nccl"``, ``"gloo"``, ``"mpi"`` or ``"cpu:gloo,cuda:nccl"``; None chooses by the device.
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
    on_gpu = device.startswith("cuda")
    if backend is None:
        return "nccl" if on_gpu else "gloo"
    for part in str(backend).split(","):
        name = part.split(":")[-1].strip().lower()
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"distributed_backend={backend!r}: this torch ({torch.__version__}) has no backend {name!r}. "
                f"Run with --distributed_backend=gloo{'' if on_gpu else ' --device=cpu'}, or install a torch with it."
            )
    if backend == "nccl" and not on_gpu:
        raise ConfigError(
            f"distributed_backend='nccl' works between GPUs only, and the device is {device!r} "
            f"({torch.cuda.device_count()} GPUs found). Run with --distributed_backend=gloo."
        )
    return str(backend)


def shorten_timeout(seconds: float) -> None:
    """Set how long the collectives of the default process group wait from now on.

    A start may take long: compiling, reading data, ranks that come late. A step does not; after the first one a rank
    that does not come is better missed soon. Nothing happens without a process group, nor where this torch or the
    backend cannot do it (``mpi``).

    Args:
        seconds: the new limit.

    Raises:
        ConfigError: it is not above zero.

    Ranks: local; every rank should call it, with the same number.

    State: the default process group's limit, on each of its backends.

    Example:
        >>> shorten_timeout(60.0)  # no process group: nothing happens
    """
    if not seconds > 0:
        raise ConfigError(f"a timeout of {seconds!r} seconds would end every collective at once. Give one above 0.")
    if not is_distributed_initialized():
        return
    set_timeout = getattr(dist.group.WORLD, "set_timeout", None)
    if set_timeout is not None:
        with contextlib.suppress(RuntimeError):  # a backend that has none says so by this
            set_timeout(timedelta(seconds=seconds))


def _attend(*, hosts_store: bool, destroy: bool) -> None:
    """Make sure, once per group, that its end and its failures are told to the other ranks.

    Args:
        hosts_store: whether this process keeps the store.
        destroy: whether the group ends with it.
    """
    runtime = get_runtime()
    if runtime.is_attended:
        return
    runtime.is_attended, runtime.hosts_store = True, hosts_store
    watch_uncaught(runtime.report)
    POSITION.waits_for_device = "nccl" in dist.get_backend()
    at_exit(functools.partial(_leave, runtime, destroy=destroy, handled=sys.exc_info()[1]))


def _leave(runtime: Runtime, *, destroy: bool, handled: BaseException | None) -> None:
    """Depart at exit, also where the script has destroyed the group itself: else this rank would be missed, and sought.

    Args:
        runtime: of the group.
        destroy: whether it was started by :func:`init_group`, and is to be destroyed.
        handled: the exception that was being handled when this was registered.
    """
    if runtime.report.is_forked or runtime.has_left:
        return
    runtime.has_left = True
    note_end_of_child(handled)
    has_group = is_distributed_initialized() and get_runtime() is runtime
    if has_group or not (runtime.is_over or runtime.watchdog is None):
        _leave_group(runtime, destroy=destroy and has_group)


def _leave_group(runtime: Runtime, *, destroy: bool) -> None:
    report, failed = runtime.report, PROCESS.failed
    kill_workers()
    report.depart()
    if failed is not None and destroy:
        _abort_groups()
    if destroy:
        _destroy_groups(failed=failed is not None)
    if runtime.hosts_store:  # the others may still look something up: who failed, or who has left
        report.await_departures(DEPARTURE_SECONDS if failed is None else LAST_WORDS_SECONDS)
    if failed is not None and is_second_hand(failed) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _let_launcher_see(report.first_failure())
    if runtime.watchdog is not None:
        runtime.watchdog.stop()


def _let_launcher_see(reason: Reason | None) -> None:
    """Wait until torchrun has seen the end of the process behind this one's failure: it blames who ends first.

    While this one waits, so do ranks that are in a collective with it: gloo closes no connection before its end.

    Args:
        reason: which process that is; one that is not known, or not of this machine, is given a while.
    """
    end = time.monotonic() + LAST_WORDS_SECONDS
    pid = reason.pid if reason is not None and reason.host == host_name() else os.getpid()
    while time.monotonic() < end and state_and_start(pid)[0] not in {"", "Z", "X"}:
        time.sleep(NAP_SECONDS)
    time.sleep(SEEN_SECONDS)


def _abort_groups() -> None:
    """Close the connections to the other ranks, which wait: a module may hold a group that has been destroyed."""
    for group in all_groups():
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend, or a torch, that cannot
            group.abort()


def _destroy_groups(*, failed: bool) -> None:
    """Destroy all groups of this process; after a failure not NCCL groups, which would wait for others' kernels."""
    if not (failed and "nccl" in dist.get_backend()):
        dist.destroy_process_group()
        return
    for group in all_groups():
        if "nccl" not in dist.get_backend(group):  # the process would abort at exit: it has threads of its own
            dist.destroy_process_group(group)
