"""The default process group: how its processes find each other, how it is made, and its end when
they exit.

One store, and a name in it that no other attempt has used. Where the launcher keeps a store
(torchrun, ddpkit itself), all connect to it; otherwise rank 0 hosts it at ``MASTER_ADDR`` and
``MASTER_PORT``. Slurm and Open MPI tell all ranks the same id of the run, from which a port is made
where none was given. Another run may have that port: the store names the run that it belongs to.

Then every process says that it is there (:func:`join_attempt`). That finds ranks that are missing
or there twice, and gives the attempt a name of its own: torchrun reuses its store after a restart,
and with the same names in it the new processes would read the addresses of the dead ones. See
https://github.com/pytorch/pytorch/issues/135712. The name is not made from torchrun's count of
restarts, which differs between nodes and stands still when nodes come and go.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import threading
import time
import weakref
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import (
    POSITION,
    PROCESS,
    FailureReport,
    Reason,
    host_name,
    is_distributed_initialized,
    is_second_hand,
    spans,
    state_and_start,
    this_place,
)
from ddpkit.comm.agreement import code_facts, compare_over_store, poll_until, software_facts
from ddpkit.comm.mailbox import Runtime, control_group, get_runtime
from ddpkit.compat import all_groups
from ddpkit.control import (
    FINAL_REPORT_SECONDS,
    Watchdog,
    at_exit,
    kill_workers,
    usage_errors,
    watch_uncaught,
)
from ddpkit.device import default_backend, physical_device, resolve_device, sees_own_alone
from ddpkit.errors import ConfigError, LaunchError, RankFailedError
from ddpkit.launch import (
    LOOPBACK,
    find_launch,
    mark_rank_process,
    refuse_child_of_rank,
    refuse_lonely_node,
)
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpkit.launch import LaunchInfo

logger = get_logger(__name__)

DEFAULT_TIMEOUT_MINUTES = 30.0
AFTER_WATCH_SECONDS = 30.0  # that collectives wait longer, so that it is the watchdog that says why
DEPARTURE_SECONDS = 5.0
SEEN_SECONDS = 0.3  # in which torchrun's agent looks at its processes three times
NAP_SECONDS = 0.02
ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 60.0
UNKNOWN_HOST_SECONDS = 30.0
WARNING_SECONDS = 30.0


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
        _guard_group(hosts_store=False, destroy=False)
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
    try:
        with POSITION.inside(SimpleNamespace(epoch=0, step=0, optimizer_step=0)):
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
            claim_device(store, info, device)
            _join(report, info, backend, device, timeout)
            runtime = get_runtime(report)
            runtime.timeout = timeout
            runtime.watchdog = watchdog
            report.limits = limits_by_option(
                run_opts.get("distributed_timeout_minutes"),
                hang_timeout,
            )
            _guard_group(hosts_store=hosts, destroy=True)
            # a rank that ended now would fail those still connecting to it
            dist.barrier(group=control_group())
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
    """Report this rank's error to the others; if it is only a lost connection, look up the failure
    behind it.
    """
    if is_second_hand(error):
        return report.find_reason(None)
    report.tell(Reason.of(report.rank, error, is_final=True))
    return None


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

    Example:
        >>> from ddpkit.launch import LaunchInfo
        >>> claim_device(dist.HashStore(), LaunchInfo("environment", 1, 1, 2, 2), "cpu")
    """
    if info.own_devices or not sees_own_alone(torch.device(device).type, info):
        return
    number = physical_device(device)
    key = "/".join(("ddpkit/device", *this_place(), number))
    holder = int(store.compare_set(key, "", str(info.rank)).decode()) if number else info.rank
    if holder != info.rank:
        raise LaunchError(
            f"Not enough GPUs: rank {holder} and rank {info.rank} on {host_name()} see one GPU "
            f"each, and it is the same ({number}). Give each process another one "
            "(CUDA_VISIBLE_DEVICES), launch with --nproc_per_node=1, or run on the CPU with "
            "--device=cpu --distributed_backend=gloo."
        )


def _start_watchdog(report: FailureReport, info: LaunchInfo, hang_timeout: float) -> Watchdog:
    """Watch over this process from now on: a rank may fail before it has joined the group that the
    others wait in.
    """
    near = info.node_ranks or range(info.first_on_node, info.first_on_node + info.local_world_size)
    parent = os.getppid() if info.launcher == "torchrun" else None
    watchdog = Watchdog(report, near, parent, f"{info.address}:{info.port}")
    watchdog.hang_timeout = hang_timeout
    # without connections yet only silence shows that a rank is lost
    watchdog.heartbeat.is_starting = info.rank == 0
    watchdog.start()
    return watchdog


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


def longest_wait(minutes: float | None, hang_timeout: float) -> float:
    """Return how long collectives wait: longer than the watchdog, which says why, unless the user
    wants something else.

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


def limits_by_option(minutes: float | None, hang_timeout: float) -> dict[int, str]:
    """Say by which option collectives have their limits of time.

    Args:
        minutes: the option ``distributed_timeout_minutes``; None: its default.
        hang_timeout: seconds; 0: never.

    Returns:
        The option, for messages, by milliseconds: as the errors of backends give them.

    Ranks: local.

    Example:
        >>> limits_by_option(5.0, 60.0)
        {90000: '30 s more than --hang_timeout=60', 300000: '--distributed_timeout_minutes=5'}
    """
    found = {}
    if hang_timeout:
        seconds = hang_timeout + AFTER_WATCH_SECONDS
        found[round(1000 * seconds)] = (
            f"{AFTER_WATCH_SECONDS:g} s more than --hang_timeout={hang_timeout:g}"
        )
    longest = longest_wait(minutes, hang_timeout)
    found.setdefault(round(1000 * longest), f"--distributed_timeout_minutes={longest / 60:g}")
    return found


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


def shorten_timeout(seconds: float) -> None:
    """Set how long the collectives of the default process group wait from now on.

    Startup may be slow (compiling, reading data). After the first step a missing rank should be
    detected quickly. Nothing happens without a process group, nor where this torch or the backend
    cannot do it (``mpi``).

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
        raise ConfigError(
            f"a timeout of {seconds!r} seconds would end every collective at once. Give one above "
            "0."
        )
    if not is_distributed_initialized():
        return
    set_timeout = getattr(dist.group.WORLD, "set_timeout", None)
    if set_timeout is not None:
        with contextlib.suppress(RuntimeError):  # a backend that has none says so by this
            set_timeout(timedelta(seconds=seconds))


def _guard_group(*, hosts_store: bool, destroy: bool) -> None:
    """Make sure, once per group, that its end and its failures are told to the other ranks.

    Args:
        hosts_store: whether this process keeps the store.
        destroy: whether the group ends with it.
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


# ----------------------------------------------------------------------------------- the rendezvous


def open_store(info: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Connect all processes of a run to one store, each with the same prefix.

    Args:
        info: the place of this process.
        timeout: how long to wait for the others; the store's own limit too.

    Returns:
        The store, and whether this process hosts it.

    Raises:
        LaunchError: the rendezvous address is missing, the port is taken, or other ranks do not
            come.

    Ranks: collective.

    Example:
        >>> from ddpkit.launch import LaunchInfo, derived_port
        >>> alone = LaunchInfo(
        ...     "slurm", address="127.0.0.1", port=derived_port("doctest"), run_id="doctest"
        ... )
        >>> store, hosts = open_store(alone, timedelta(seconds=10))
        >>> store.set("key", "value"); hosts
        True
    """
    if not info.address or not info.port:
        raise LaunchError(
            f"this is rank {info.rank} of {info.world_size} ({info.launcher}), but MASTER_ADDR "
            "and MASTER_PORT are not both set: the processes cannot find each other. Give every "
            "rank MASTER_ADDR, the host name of rank 0, and MASTER_PORT, a free port there "
            "(mpirun -x, mpiexec -genv, jsrun -E), or launch with torchrun."
        )
    hosts = info.rank == 0 and not info.agent_hosts_store
    end = time.monotonic() + timeout.total_seconds()
    try:
        store = _host(info, timeout) if hosts else _find(info, end, timeout)
        name = join_attempt(store, info, end, once=not info.agent_hosts_store)
    except (dist.DistNetworkError, FutureTimeoutError) as error:
        raise LaunchError(
            f"rank {info.rank} has lost the store at {info.address}:{info.port} (see the output "
            "of rank 0), or what has that port does not answer as torch's store does: give every "
            "process another MASTER_PORT."
        ) from error
    return dist.PrefixStore(name, store), hosts


# ---------------------------------------------------------------------------------------- the store


def _host(info: LaunchInfo, timeout: timedelta) -> dist.Store:
    """Host the store at the port where the others look for it."""
    port = info.port
    try:
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=True,
        )
    except RuntimeError as error:  # torch.distributed.DistError derives from it
        if "EADDRINUSE" not in str(error):
            raise
        origin = (
            f"made from the id of this run ({info.run_id})" if info.run_id else ("of MASTER_PORT")
        )
        raise LaunchError(
            f"port {port} {origin} is taken on this machine, where rank 0 was to be met "
            f"({info.address}:{port}): by another run, or by what an earlier run has left behind. "
            "Give MASTER_PORT another number, the same to every process; `ss -ltnp | grep "
            f":{port}` shows who has it."
        ) from error


def _find(info: LaunchInfo, end: float, timeout: timedelta) -> dist.Store:
    """Connect to the store; not to that of an earlier command of the same job step, which has the
    same port.
    """
    for _ in poll_until(end):
        store = _connect(info.address, info.port, end, timeout)
        if not info.run_id or _is_ours(store, info):
            break
    return store


def _is_ours(store: dist.Store, info: LaunchInfo) -> bool:
    with contextlib.suppress(dist.DistNetworkError):  # the earlier command ends at this moment
        is_full = store.check([f"ddpkit/rendezvous/done/{info.run_id}"])
        # this rank completed that rendezvous itself, and joins again
        return not is_full or store.get(f"ddpkit/here/{info.rank}").decode() == _me()
    return False


def _connect(
    address: str,
    port: int,
    end: float,
    timeout: timedelta,
) -> dist.Store:
    """Connect to a store on another process, as soon as it is there."""
    _await_listener(address, port, end)
    made = Future[dist.Store]()

    def connect() -> None:
        try:
            made.set_result(
                dist.TCPStore(
                    address,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timeout,
                )
            )
        except Exception as error:  # noqa: BLE001 -- raised below, in the thread that waits
            made.set_exception(error)

    # What is not a store of torch's may take the connection and never answer; torch then waits
    # without a limit.
    threading.Thread(target=connect, name="ddpkit-connect", daemon=True).start()
    return made.result(CONNECT_SECONDS)


def _await_listener(address: str, port: int, end: float) -> None:
    """Wait until the port accepts connections; torch would wait too, but print a stack for each
    attempt.
    """
    began = time.monotonic()
    last = ""
    for _ in poll_until(end):
        try:
            with socket.create_connection((address, port), timeout=ANSWER_SECONDS):
                return
        except OSError as error:
            last = str(error)
            # a name that has not been found for so long will not be
            if (
                isinstance(error, socket.gaierror)
                and time.monotonic() - began > UNKNOWN_HOST_SECONDS
            ):
                break
    raise LaunchError(
        f"cannot connect to rank 0 at {address}:{port}, after {time.monotonic() - began:.0f} s "
        f"({last}). Was rank 0 started, and does this machine know the machine of rank 0 as "
        f"{address!r}? The address is MASTER_ADDR and MASTER_PORT."
    )


# --------------------------------------------------------------------------------------- rendezvous


def join_attempt(
    store: dist.Store,
    info: LaunchInfo,
    end: float,
    *,
    once: bool,
) -> str:
    """Wait until every rank is there, and agree on a name for this attempt.

    Each rank leaves a token of this attempt, and rank 0 answers to it with the name; tokens of dead
    processes of an earlier attempt are answered too, but the answers are not read.

    Args:
        store: the same on all ranks; it may hold what earlier attempts have left.
        info: the place of this process.
        end: when to give up, as ``time.monotonic()`` counts.
        once: whether the store serves one attempt only, so that a rank can be found to be there
            twice.

    Returns:
        A prefix for all that this attempt keeps in the store.

    Raises:
        LaunchError: a rank is missing, or there twice.

    Ranks: collective.

    Example:
        >>> from ddpkit.launch.launchers import LaunchInfo
        >>> join_attempt(dist.HashStore(), LaunchInfo("slurm"), end=0.0, once=True).startswith(
        ...     "ddpkit/"
        ... )
        True
    """
    token = os.urandom(8).hex()
    if once:
        _take_rank_slot(store, info)
    if info.rank == 0:
        _await_all(store, info, token, end)
        store.set(f"ddpkit/rendezvous/done/{info.run_id}", "1")
        return f"ddpkit/{token}"
    store.set(_place(info.rank), token)
    answer = f"{_place(info.rank)}/{token}"
    for _ in poll_until(end):
        if store.check([answer]):
            name = store.get(answer).decode()
            store.set(f"ddpkit/rendezvous/joined/{name}/{info.rank}", "1")
            return f"ddpkit/{name}"
    raise LaunchError(
        f"rank {info.rank} of {info.world_size} has waited at {info.address}:{info.port} for rank "
        "0, which did not come. Was it started? --distributed_timeout_minutes says how long to "
        "wait."
    )


def _await_all(
    store: dist.Store,
    info: LaunchInfo,
    name: str,
    end: float,
) -> None:
    """Answer to every token until each rank has read its answer."""
    missing = set(range(1, info.world_size))
    warned = time.monotonic() + WARNING_SECONDS
    for _ in poll_until(end):
        for rank in sorted(missing):
            if store.check([_place(rank)]):
                store.set(f"{_place(rank)}/{store.get(_place(rank)).decode()}", name)
            if store.check([f"ddpkit/rendezvous/joined/{name}/{rank}"]):
                missing.discard(rank)
        if not missing:
            return
        if time.monotonic() > warned:
            warned += 2 * WARNING_SECONDS
            logger.warning("Rank 0 waits for %s of %d processes.", _named(missing), info.world_size)
    raise LaunchError(
        f"{_named(missing)} of {info.world_size} processes did not come to rank 0 at "
        f"{info.address}:{info.port} in time. Were they started, and can their machines reach "
        "this one? --distributed_timeout_minutes says how long to wait."
    )


def _take_rank_slot(store: dist.Store, info: LaunchInfo) -> None:
    """Take this rank's place in the store, if it is the store of this run, and the place is
    free.
    """
    owner = store.compare_set("ddpkit/run", "", info.run_id).decode() if info.run_id else ""
    if owner != info.run_id:
        raise LaunchError(
            f"the store at {info.address}:{info.port} is another run's ({owner}; this one is "
            f"{info.run_id}): both have made the same port from their ids. Give MASTER_PORT "
            "another number, the same to every process."
        )
    holder = store.compare_set(f"ddpkit/here/{info.rank}", "", _me()).decode()
    if holder != _me():
        raise LaunchError(
            f"two processes are rank {info.rank} of the run at {info.address}:{info.port}: "
            f"{holder} came first, then {_me()}. Either two runs use the same MASTER_ADDR and "
            "MASTER_PORT (give one another port), or two processes were given the same RANK."
        )


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _place(rank: int) -> str:
    return f"ddpkit/rendezvous/token/{rank}"


def _named(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)} ({len(ranks)})"
