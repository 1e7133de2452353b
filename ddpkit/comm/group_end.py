"""The end of the process group, at the exit of its process."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpkit.base import (
    POSITION,
    PROCESS,
    Reason,
    host_name,
    is_distributed_initialized,
    is_second_hand,
    state_and_start,
)
from ddpkit.comm.mailbox import Runtime, get_runtime
from ddpkit.compat import all_groups
from ddpkit.control import FINAL_REPORT_SECONDS, at_exit, kill_workers, watch_uncaught
from ddpkit.launch import mark_rank_process

if TYPE_CHECKING:
    from collections.abc import Callable


DEPARTURE_SECONDS = 5.0
SEEN_SECONDS = 0.3  # in which torchrun's agent looks at its processes three times
NAP_SECONDS = 0.02


def guard_group(*, hosts_store: bool, destroy: bool) -> None:
    """Make sure, once per group, that its end and its failures are told to the other ranks.

    Args:
        hosts_store: whether this process keeps the store.
        destroy: whether the group ends with it.

    Ranks: local; do it on every rank.
    """
    runtime = get_runtime()
    if runtime.is_guarded:
        return
    runtime.is_guarded = True
    runtime.hosts_store = hosts_store
    watch_uncaught(runtime.report)
    mark_rank_process()
    POSITION.waits_for_device = "nccl" in dist.get_backend()
    # Groups before the current one are over: their connections close, but for a store that others
    # may still ask.
    kept: Callable[[], Runtime | None] = (lambda: runtime) if hosts_store else weakref.ref(runtime)
    at_exit(functools.partial(_leave, kept, destroy=destroy))


def _leave(kept: Callable[[], Runtime | None], *, destroy: bool) -> None:
    """Announce a normal exit, even if the script destroyed the group; otherwise others report this
    rank as lost.

    Args:
        kept: returns the group's runtime, if that is still there.
        destroy: whether it was started by :func:`init_group`, and is to be destroyed.
    """
    runtime = kept()
    if runtime is None or runtime.report.is_forked or runtime.has_left:
        return
    runtime.has_left = True
    has_group = is_distributed_initialized() and get_runtime() is runtime
    if has_group or not (runtime.is_over or runtime.watchdog is None):
        _leave_group(runtime, destroy=destroy and has_group)


def _leave_group(runtime: Runtime, *, destroy: bool) -> None:
    report = runtime.report
    failed = PROCESS.failed
    # what ends a process of multiprocessing reaches no excepthook
    has_failed = failed is not None or (
        PROCESS.left and multiprocessing.parent_process() is not None
    )
    # workers first: one that lives on keeps the connections that it has inherited open
    kill_workers()
    report.depart()
    if has_failed and destroy:
        # the others wait; a module may hold a group that has been destroyed
        for group in all_groups():
            # a backend, or a torch, that cannot
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()
    if destroy:
        _destroy_groups(failed=has_failed)
    if runtime.hosts_store:  # the others may still look something up: who failed, or who has left
        report.await_departures(FINAL_REPORT_SECONDS if has_failed else DEPARTURE_SECONDS)
    if (
        failed is not None
        and is_second_hand(failed)
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        _let_launcher_see(report.first_failure())
    if runtime.watchdog is not None:
        runtime.watchdog.stop()


def _let_launcher_see(reason: Reason | None) -> None:
    """Wait until torchrun has seen the end of the process behind this one's failure: it blames who
    ends first.

    Ranks that are in a collective with this one wait too: gloo closes no connection before the
    process ends.

    Args:
        reason: the failed process; if it is unknown or on another machine, wait a fixed time.
    """
    end = time.monotonic() + FINAL_REPORT_SECONDS
    pid = reason.pid if reason is not None and reason.host == host_name() else os.getpid()
    while time.monotonic() < end and state_and_start(pid)[0] not in {"", "Z", "X"}:
        time.sleep(NAP_SECONDS)
    time.sleep(SEEN_SECONDS)


def _destroy_groups(*, failed: bool) -> None:
    """Destroy all groups of this process; after a failure not NCCL groups, which would wait for
    others' kernels.
    """
    if not (failed and "nccl" in dist.get_backend()):
        dist.destroy_process_group()
        return
    for group in all_groups():
        # the process would abort at exit: it has threads of its own
        if "nccl" not in dist.get_backend(group):
            dist.destroy_process_group(group)
