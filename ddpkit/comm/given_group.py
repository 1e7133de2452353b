"""The watch over a process group that somebody else has made: Ray Train, Accelerate, the recipe.

The ranks meet once more, in the group's own store, and agree there on a name that no earlier
attempt has used: torchrun keeps its store over restarts. From then on heartbeats, failures and the
values of main-only work go under that name.

A store in a file would grow with every heartbeat. There rank 0 hosts a store of its own, and the
file only tells where it is.
"""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import FailureReport, host_name, this_place
from ddpkit.comm.agreement import (
    code_facts,
    compare_over_store,
    poll_until,
    software_facts,
    tell_all_ranks,
)
from ddpkit.comm.group_end import guard_group
from ddpkit.comm.mailbox import CONNECTION_TAG, Runtime, control_group, get_runtime
from ddpkit.comm.node_size import learn_node_size
from ddpkit.comm.rendezvous import Awaiting, connect, join_attempt
from ddpkit.comm.time_limits import limits_by_option, longest_wait
from ddpkit.comm.watched_start import start_watchdog, watched_start
from ddpkit.compat import base_store
from ddpkit.errors import LaunchError, RankFailedError
from ddpkit.launch import LOOPBACK, NO_LAUNCHER, LaunchInfo, find_launch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ADDRESS = "ddpkit/address"  # of a store of our own, in the store of the group
STARTS = "ddpkit/starts"
LOOK_SECONDS = 1.0
ALL_COME = (
    "All ranks of a process group make their first Brain, or call ddp_init_group, and wait there "
    "for each other."
)


def watch_given_group(run_opts: Mapping[str, Any]) -> None:
    """Have the ranks of the default process group watch each other, once in the life of the group.

    Args:
        run_opts: with ``distributed_timeout_minutes`` and ``hang_timeout`` where present.

    Raises:
        LaunchError: a rank does not come, or rank 0 cannot be reached.
        RankFailedError: another process has ended meanwhile; the message says which.
        RankMismatchError: the processes differ in their versions, or in their code.

    Ranks: collective on the first call for a group, local afterwards.

    State: as of :func:`ddpkit.comm.process_group.init_group`.
    """
    runtime = get_runtime()
    if runtime.is_guarded or not _is_watchable(runtime):
        guard_group(hosts_store=False, destroy=False)
        return
    minutes = run_opts.get("distributed_timeout_minutes")
    hang_timeout = float(run_opts.get("hang_timeout") or 0.0)
    seconds = longest_wait(minutes, hang_timeout)
    store, info = _meet(runtime.store, _launch_of_group(runtime), seconds)
    hosts = info.rank == 0 and not info.agent_hosts_store
    report = FailureReport(store, info.rank, info.world_size)
    watchdog = start_watchdog(report, info, [], f"{info.address}:{info.port}", hang_timeout)
    with watched_start(report, watchdog, hosts=hosts):
        launchers, machines = _told_starts(store, info, seconds)
        here = machines[info.rank]
        near = tuple(rank for rank, machine in enumerate(machines) if machine == here)
        watchdog.heartbeat.neighbours = [rank for rank in near if rank != info.rank]
        if info.world_size > 1:
            facts = {**software_facts(), **code_facts()}
            compare_over_store(store, info.rank, info.world_size, facts, seconds)
        if len(set(launchers)) == 1:  # the variables may be of some ranks alone: spawned by one
            learn_node_size(store, info, seconds)
        watchdog.group_has_ended = lambda: not _is_current(runtime)
        runtime.take_report(report)
        runtime.watchdog = watchdog
        if info.launcher == NO_LAUNCHER:
            runtime.machine = (machines.index(here), near)
        report.limits = limits_by_option(minutes, hang_timeout)
        guard_group(hosts_store=hosts, destroy=False)
        # a rank that ended now would fail those still connecting to it
        dist.barrier(group=control_group())


def _is_current(runtime: Runtime) -> bool:
    """Say whether the group is there, and is the default one still."""
    group = runtime.group()
    return group is not None and dist.group.WORLD is group


def _is_watchable(runtime: Runtime) -> bool:
    """Say whether the ranks share a store: ``mpi`` has none, and one in memory is for threads, or
    for a process alone.
    """
    store: Any = base_store(runtime.store)
    return store is not None and not isinstance(store, dist.HashStore)


def _launch_of_group(runtime: Runtime) -> LaunchInfo:
    """Return what the launcher says, if it speaks of these ranks, with the address of the group's
    store.
    """
    rank = runtime.report.rank
    world_size = runtime.report.world_size
    info = find_launch()
    if (info.rank, info.world_size) != (rank, world_size):
        info = LaunchInfo(rank=rank, world_size=world_size)
    store = base_store(runtime.store)
    if isinstance(store, dist.TCPStore):
        return dataclasses.replace(info, address=store.host, port=store.port, run_id="")
    return dataclasses.replace(info, address="", port=0, run_id="")


# --------------------------------------------------------------------------------------- the store


def _meet(given: dist.Store, info: LaunchInfo, seconds: float) -> tuple[dist.Store, LaunchInfo]:
    """Wait until all ranks are here; return a store with a prefix of this attempt, and where it
    is.
    """
    end = time.monotonic() + seconds
    awaiting = Awaiting(_Connections().look, ALL_COME, ALL_COME)
    try:
        name = join_attempt(given, info, end, once=False, awaiting=awaiting)
        store = dist.PrefixStore(name, given)
        if info.port or info.world_size == 1:
            return store, info
        return _own_store(store, info, end, timedelta(seconds=seconds), awaiting)
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank {info.rank} has lost the store of the process group at "
            f"{info.address}:{info.port}, before all ranks had come: the process that keeps it has "
            "ended. See the output of rank 0."
        ) from error


class _Connections:
    """Finds that a rank has ended that is waited for, where the group is gloo's: its connections
    break.
    """

    def __init__(self) -> None:
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._tell = "cpu:gloo" in dist.get_backend_config()

    def look(self, ranks: Collection[int]) -> None:
        if not self._tell or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        for rank in ranks:
            try:  # as in Runtime.check_connection
                dist.isend(torch.zeros(1, dtype=torch.uint8), rank, tag=CONNECTION_TAG)
            except RuntimeError:
                raise RankFailedError(
                    f"rank {rank} has ended, before it made a Brain or called ddp_init_group. See "
                    "its output."
                ) from None


def _own_store(
    given: dist.Store,
    info: LaunchInfo,
    end: float,
    timeout: timedelta,
    awaiting: Awaiting,
) -> tuple[dist.Store, LaunchInfo]:
    """Have rank 0 host a store, at any free port, and the others connect to it.

    Its own limit is the whole one: it serves the run, whatever time the ranks took to come.
    """
    if info.rank == 0:
        hosted = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        given.set(ADDRESS, json.dumps([this_place(), host_name(), hosted.port]))
        return hosted, _hosted_by_main(info, LOOPBACK, hosted.port)
    place, host, port = _told_address(given, end, awaiting)
    address = LOOPBACK if place == list(this_place()) else host
    store = connect(address, port, end, timeout, "The address is the host name of rank 0.")
    return store, _hosted_by_main(info, address, port)


def _hosted_by_main(info: LaunchInfo, address: str, port: int) -> LaunchInfo:
    return dataclasses.replace(info, address=address, port=port, agent_hosts_store=False)


def _told_address(given: dist.Store, end: float, awaiting: Awaiting) -> tuple[Any, str, int]:
    for _ in poll_until(end):
        if given.check([ADDRESS]):
            place, host, port = json.loads(given.get(ADDRESS))
            return place, host, port
        awaiting.look([0])
    raise LaunchError(
        "rank 0 joined the run, and has not said where its store is. Look into its output. "
        "--distributed_timeout_minutes says how long to wait."
    )


def _told_starts(
    store: dist.Store,
    info: LaunchInfo,
    seconds: float,
) -> tuple[list[str], list[list[str]]]:
    """Return the launcher and the machine of each rank."""
    own = [info.launcher, list(this_place())]
    told = tell_all_ranks(store, STARTS, info.rank, info.world_size, own, seconds)
    launchers, machines = zip(*told, strict=True)
    return list(launchers), list(machines)
