"""The rendezvous: how the processes of a run find each other.

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
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpkit.base import spans
from ddpkit.comm.agreement import poll_until
from ddpkit.errors import LaunchError
from ddpkit.launch import LOOPBACK
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from datetime import timedelta

    from ddpkit.launch import LaunchInfo

logger = get_logger(__name__)


ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 60.0
UNKNOWN_HOST_SECONDS = 30.0
WARNING_SECONDS = 30.0


@dataclass(frozen=True)
class Awaiting:
    """What is done, and said, about ranks that have not come yet.

    Attributes:
        look: is given the missing ranks again and again; raises if one of them cannot come.
        of_main: what to look at if rank 0 does not come.
        of_others: what to look at if another rank does not.
    """

    look: Callable[[Collection[int]], object] = lambda _: None
    of_main: str = "Was it started?"
    of_others: str = "Were they started, and can their machines reach this one?"


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
        >>> from datetime import timedelta
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
        store = connect(info.address, info.port, end, timeout)
        if not info.run_id or _is_ours(store, info):
            break
    return store


def _is_ours(store: dist.Store, info: LaunchInfo) -> bool:
    with contextlib.suppress(dist.DistNetworkError):  # the earlier command ends at this moment
        is_full = store.check([f"ddpkit/rendezvous/done/{info.run_id}"])
        # this rank completed that rendezvous itself, and joins again
        return not is_full or store.get(f"ddpkit/here/{info.rank}").decode() == _me()
    return False


def connect(
    address: str,
    port: int,
    end: float,
    timeout: timedelta,
    origin: str = "The address is MASTER_ADDR and MASTER_PORT.",
) -> dist.Store:
    """Connect to a store on another process, as soon as it is there.

    Args:
        address: of its host.
        port: there.
        end: when to give up, as ``time.monotonic()`` counts.
        timeout: the store's own limit.
        origin: where the address is from, for messages.

    Raises:
        LaunchError: nobody answers there.
    """
    _await_listener(address, port, end, origin)
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


def _await_listener(address: str, port: int, end: float, origin: str) -> None:
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
        f"{address!r}? {origin}"
    )


def join_attempt(
    store: dist.Store,
    info: LaunchInfo,
    end: float,
    *,
    once: bool,
    awaiting: Awaiting | None = None,
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
        awaiting: what is done, and said, about ranks that are late.

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
    awaiting = awaiting or Awaiting()
    if once:
        _take_rank_slot(store, info)
    if info.rank == 0:
        _await_all(store, info, token, end, awaiting)
        store.set(f"ddpkit/rendezvous/done/{info.run_id}", "1")
        return f"ddpkit/{token}"
    store.set(_place(info.rank), token)
    answer = f"{_place(info.rank)}/{token}"
    for _ in poll_until(end):
        if store.check([answer]):
            name = store.get(answer).decode()
            store.set(f"ddpkit/rendezvous/joined/{name}/{info.rank}", "1")
            return f"ddpkit/{name}"
        awaiting.look([0])
    raise LaunchError(
        f"rank {info.rank} of {info.world_size} has waited at {info.address}:{info.port} for rank "
        f"0, which did not come. {awaiting.of_main} --distributed_timeout_minutes says how long "
        "to wait."
    )


def _await_all(
    store: dist.Store,
    info: LaunchInfo,
    name: str,
    end: float,
    awaiting: Awaiting,
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
        awaiting.look(missing)
        if time.monotonic() > warned:
            warned += 2 * WARNING_SECONDS
            logger.warning("Rank 0 waits for %s of %d processes.", _named(missing), info.world_size)
    raise LaunchError(
        f"{_named(missing)} of {info.world_size} processes did not come to rank 0 at "
        f"{info.address}:{info.port} in time. {awaiting.of_others} --distributed_timeout_minutes "
        "says how long to wait."
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
