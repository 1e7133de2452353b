"""How the processes of a run find each other: one store, and a name in it that no other attempt has used.

Where the launcher keeps a store (torchrun, ddpkit itself), all connect to it; otherwise rank 0 hosts it at
``MASTER_ADDR`` and ``MASTER_PORT``. A port that was made from the run's id may be taken by another program: rank 0 then
takes the next free one. Clients verify the run id (:class:`PortAnnouncer`) before they connect: torch's own store does
not, and connecting it to another program's port can hang for ever.

Then every process says that it is there (:func:`join_attempt`). That finds ranks that are missing or there twice, and
gives the attempt a name of its own: torchrun reuses its store after a restart, and with the same names in it the new
processes would read the addresses of the dead ones. See https://github.com/pytorch/pytorch/issues/135712. The name is
not made from torchrun's count of restarts, which differs between nodes and stands still when nodes come and go.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpkit.base import MPI_LAUNCHERS
from ddpkit.comm.consistency import poll_until
from ddpkit.errors import LaunchError
from ddpkit.launch import LOOPBACK, derived_port
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from typing_extensions import Self

    from ddpkit.launch import LaunchInfo

logger = get_logger(__name__)

PORTS_TO_TRY = 8
ANSWER_SECONDS = 2.0
CONNECT_SECONDS = 60.0
UNKNOWN_HOST_SECONDS = 30.0
WARNING_SECONDS = 30.0

_GREETING = "ddpkit run "
_MOST_ANSWERED = 256
_MOST_NAMED = 16


def open_store(info: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Connect all processes of a run to one store, each with the same prefix.

    Args:
        info: the place of this process.
        timeout: how long to wait for the others; the store's own limit too.

    Returns:
        The store, and whether this process hosts it.

    Raises:
        LaunchError: the rendezvous address is missing, the port is taken, or other ranks do not come.

    Ranks: collective.

    Example:
        >>> from ddpkit.launch.variables import LaunchInfo
        >>> alone = LaunchInfo("slurm", address="127.0.0.1", port=derived_port("doctest"), run_id="doctest")
        >>> store, hosts = open_store(alone, timedelta(seconds=10))
        >>> store.set("key", "value"); hosts
        True
    """
    run_id = info.run_id or _id_of_hydra(info)
    port = info.port or (derived_port(run_id) if run_id else 0)
    if not info.address or not port:
        raise LaunchError(_no_address(info))
    hosts = info.rank == 0 and not info.agent_hosts_store
    end = time.monotonic() + timeout.total_seconds()
    with contextlib.ExitStack() as until_met:
        if hosts and run_id:
            store: dist.Store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            until_met.enter_context(PortAnnouncer(run_id, int(store.port)))  # type: ignore[attr-defined]
        elif hosts:
            store = _host(info.address, port, timeout)
        else:
            if run_id:
                port = find_store_port(info.address, run_id, end)
            store = _connect(info.address, port, end, timeout)
        name = join_attempt(store, info, end, once=not info.agent_hosts_store)
    return dist.PrefixStore(name, store), hosts


def _no_address(info: LaunchInfo) -> str:
    wanted = {"MASTER_ADDR": "the host name of rank 0", "MASTER_PORT": "a free port there"}
    missing = {name: what for name, what in wanted.items() if not (info.address if "ADDR" in name else info.port)}
    advice = f"Set {' and '.join(f'{name} to {what}' for name, what in missing.items())}, or launch with torchrun"
    if info.launcher in MPI_LAUNCHERS:
        advice = f"Pass both to every rank: {MPI_LAUNCHERS[info.launcher].example}"
    return (
        f"this is rank {info.rank} of {info.world_size} ({info.launcher}), but {' and '.join(missing)} "
        f"{'are' if len(missing) > 1 else 'is'} not set: the processes cannot find each other. {advice}."
    )


def _id_of_hydra(info: LaunchInfo) -> str:
    """MPICH's launcher tells ranks nothing that only they share; on one node they have its helper as their ancestor."""
    if info.launcher != "pmi" or info.port or info.local_world_size != info.world_size:
        return ""
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if name.startswith("hydra_pmi_proxy"):
                return f"hydra {process} {fields[19]}"  # a pid and when it was started
            process = int(fields[1])
    return ""


# -------------------------------------------------------------------------------------------- the store


def _host(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Host the store at a port that the user gave."""
    try:
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=True)
    except RuntimeError as error:  # torch.distributed.DistError derives from it
        if "EADDRINUSE" not in str(error) and os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise
        raise LaunchError(
            f"port {port} of MASTER_PORT is taken on this machine, where rank 0 was to be met ({address}:{port}): by "
            "another run, or by what an earlier run has left behind. Give MASTER_PORT another number, the same to "
            f"every process; `ss -ltnp | grep :{port}` shows who has it."
        ) from error


def _connect(address: str, port: int, end: float, timeout: timedelta) -> dist.Store:
    """Connect to a store on another process, as soon as it is there."""
    _await_listener(address, port, end)
    made: list[dist.Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            made.append(dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # noqa: BLE001 -- raised below, in the thread that waits
            failed.append(error)

    # What is not a store of torch's may take the connection and never answer; torch then waits without a limit.
    thread = threading.Thread(target=connect, name="ddpkit-connect", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if failed:
        raise failed[0]
    if not made:
        raise LaunchError(
            f"what listens at {address}:{port} does not answer as torch's store does: another program has the port, "
            "or an earlier run hangs there. Give MASTER_PORT another number, the same to every process."
        )
    return made[0]


def _await_listener(address: str, port: int, end: float) -> None:
    """Wait until the port accepts connections; torch would wait too, but print a stack for each attempt."""
    began, last = time.monotonic(), ""
    for _ in poll_until(end):
        try:
            with socket.create_connection((address, port), timeout=ANSWER_SECONDS):
                return
        except OSError as error:
            last = str(error)
            if _is_unknown(error, began):
                break
    raise LaunchError(
        f"nobody could be reached at {address}:{port} for {time.monotonic() - began:.0f} s ({last}). Was rank 0 "
        f"started, and is {address!r} its machine, by a name that this one knows? MASTER_ADDR and MASTER_PORT say "
        "where it is to be met."
    )


def _is_unknown(error: OSError, began: float) -> bool:
    """Say whether a name has not been found for so long that it will not be."""
    return isinstance(error, socket.gaierror) and time.monotonic() - began > UNKNOWN_HOST_SECONDS


class PortAnnouncer:
    """Tells clients the port of the run's store. It listens on a port computed from the run id.

    Args:
        run_id: known to all processes of the run; only its hash is sent.
        store_port: port of the store on this machine.

    Attributes:
        port: where it listens: the first of the run's ports that is free.

    Raises:
        LaunchError: none is.

    Ranks: rank 0, where no port was given.

    State: a listening socket and a thread, until the ``with`` block is left.

    Example:
        >>> with PortAnnouncer("slurm 77.0", 4000) as announcer:
        ...     find_store_port("127.0.0.1", "slurm 77.0", time.monotonic() + 5)
        4000
    """

    def __init__(self, run_id: str, store_port: int) -> None:
        self._answer = f"{_greeting(run_id)} {store_port}\n".encode()
        self._socket, self.port = self._listen(run_id)
        self._thread = threading.Thread(target=self._serve, name="ddpkit-port-announcer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(ANSWER_SECONDS)

    @staticmethod
    def _listen(run_id: str) -> tuple[socket.socket, int]:
        ports = [derived_port(run_id, attempt) for attempt in range(PORTS_TO_TRY)]
        for port in ports:
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), backlog=_MOST_ANSWERED), port
        raise LaunchError(
            f"the ports {', '.join(map(str, ports))}, made from the id of this run ({run_id}), are all taken on this "
            "machine. Give MASTER_PORT a free one, the same to every process."
        )

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it has been closed
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(self._answer)


def find_store_port(address: str, run_id: str, end: float) -> int:
    """Ask at the ports of a run until its rank 0 answers.

    Args:
        address: host of rank 0.
        run_id: what all processes of the run know.
        end: when to give up, as ``time.monotonic()`` counts.

    Returns:
        The port of the run's store.

    Raises:
        LaunchError: no process of this run has answered.

    Ranks: all but rank 0.

    Example:
        >>> find_store_port("127.0.0.1", "nobody", end=0.0)
        Traceback (most recent call last):
        ddpkit.errors.LaunchError: rank 0 could not be found at 127.0.0.1, ports ...
    """
    ports = [derived_port(run_id, attempt) for attempt in range(PORTS_TO_TRY)]
    began, last = time.monotonic(), "nobody listens"
    for _ in poll_until(end):
        for port in ports:
            try:
                answer = _ask(address, port)
            except OSError as error:
                last = str(error)
                if _is_unknown(error, began):
                    end = 0.0
                continue
            if answer.startswith(f"{_greeting(run_id)} "):
                return int(answer.split()[-1])
            last = "somebody else listens there"
        if not end:
            break
    raise LaunchError(
        f"rank 0 could not be found at {address}, ports {', '.join(map(str, ports))}, within "
        f"{time.monotonic() - began:.0f} s ({last}). Was it started? If another machine has it, or a firewall closes "
        "these ports, give MASTER_ADDR and MASTER_PORT to every process."
    )


def _ask(address: str, port: int) -> str:
    """Return what is said at a port, if it is said soon."""
    end, answer = time.monotonic() + ANSWER_SECONDS, b""
    connection = socket.create_connection((address, port), timeout=ANSWER_SECONDS)
    with connection, contextlib.suppress(TimeoutError):
        while not answer.endswith(b"\n") and len(answer) < _MOST_ANSWERED and time.monotonic() < end:
            part = connection.recv(_MOST_ANSWERED)
            if not part:
                break
            answer += part
    return answer.decode(errors="replace").strip()


def _greeting(run_id: str) -> str:
    return f"{_GREETING}{hashlib.blake2b(run_id.encode(), digest_size=16).hexdigest()}"


# ---------------------------------------------------------------------------------------------- meeting


def join_attempt(store: dist.Store, info: LaunchInfo, end: float, *, once: bool) -> str:
    """Wait until every rank is there, and agree on a name for this attempt.

    Each rank leaves a token of this attempt, and rank 0 answers to it with the name; tokens of dead processes of an
    earlier attempt are answered too, but the answers are not read.

    Args:
        store: the same on all ranks; it may hold what earlier attempts have left.
        info: the place of this process.
        end: when to give up, as ``time.monotonic()`` counts.
        once: whether the store serves one attempt only, so that a rank can be found to be there twice.

    Returns:
        A prefix for all that this attempt keeps in the store.

    Raises:
        LaunchError: a rank is missing, or there twice.

    Ranks: collective.

    Example:
        >>> from ddpkit.launch.variables import LaunchInfo
        >>> join_attempt(dist.HashStore(), LaunchInfo("slurm"), end=0.0, once=True).startswith("ddpkit/")
        True
    """
    token = secrets.token_hex(8)
    if once:
        _claim(store, info)
    if info.rank == 0:
        _await_all(store, info, token, end)
        return f"ddpkit/{token}"
    store.set(_place(info.rank), token)
    answer = f"{_place(info.rank)}/{token}"
    for _ in poll_until(end):
        if store.check([answer]):
            name = store.get(answer).decode()
            store.set(f"ddpkit/met/{name}/{info.rank}", "1")
            return f"ddpkit/{name}"
    raise LaunchError(
        f"rank {info.rank} of {info.world_size} has waited at {info.address}:{info.port} for rank 0, which did not "
        "come. Was it started? --distributed_timeout_minutes says how long to wait."
    )


def _await_all(store: dist.Store, info: LaunchInfo, name: str, end: float) -> None:
    """Answer to every token until each rank has read its answer."""
    missing, answered = set(range(1, info.world_size)), dict[int, str]()
    warned = time.monotonic() + WARNING_SECONDS
    for _ in poll_until(end):
        for rank in sorted(missing):
            if store.check([_place(rank)]):
                token = store.get(_place(rank)).decode()
                if answered.get(rank) != token:
                    store.set(f"{_place(rank)}/{token}", name)
                    answered[rank] = token
            if store.check([f"ddpkit/met/{name}/{rank}"]):
                missing.discard(rank)
        if not missing:
            return
        if time.monotonic() > warned:
            warned += 2 * WARNING_SECONDS
            logger.warning("Rank 0 waits for %s of %d processes.", _named(missing), info.world_size)
    raise LaunchError(
        f"{_named(missing)} of {info.world_size} processes did not come to rank 0 at {info.address}:{info.port} in "
        "time. Were they started, and can their machines reach this one? --distributed_timeout_minutes says how long "
        "to wait."
    )


def _claim(store: dist.Store, info: LaunchInfo) -> None:
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"ddpkit/here/{info.rank}", "", me).decode()
    if holder != me:
        raise LaunchError(
            f"rank {info.rank} is there twice: {holder} has met the others at {info.address}:{info.port} before "
            f"{me} did. Two runs use the same MASTER_ADDR and MASTER_PORT (give one of them another port), or two "
            "processes were given the same RANK."
        )


def _place(rank: int) -> str:
    return f"ddpkit/meet/{rank}"


def _named(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} ({len(ranks)})"
