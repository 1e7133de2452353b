"""The machine, as the checks see it: files, environment and functions in one object that a test can
replace.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpkit.base import host_name
from ddpkit.see.doctor.gpus.sight import GpuSight
from ddpkit.see.doctor.interfaces import Interface, interfaces_of_machine
from ddpkit.see.doctor.load import Load, measure_load


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a host name stands for, as gloo would find them.

    Args:
        name: of a host.

    Raises:
        OSError: it stands for none.

    Example:
        >>> addresses_of("127.0.0.1")
        ['127.0.0.1']
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def disk_of(folder: Path) -> os.statvfs_result:
    """Return what the file system of a folder says of itself.

    Args:
        folder: that is there.
    """
    return os.statvfs(folder)


def threads_of_torch() -> int:
    """Return how many threads torch computes with in this process."""
    import torch

    return torch.get_num_threads()


def versions_here() -> dict[str, str]:
    """Return the versions of what computes in this process.

    Example:
        >>> list(versions_here())[:4]
        ['Python', 'torch', 'numpy', 'ddpkit']
    """
    import torch

    from ddpkit.comm import software_facts

    versions = software_facts()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # by torch
    return versions


@dataclass(frozen=True)
class Machine:
    """How a check looks at the world. ``dataclasses.replace`` plants a fault.

    Attributes:
        root: the folder in which files such as ``proc/meminfo`` are.
        environ: the variables of this process.
        name: returns the name of this host.
        affinity: returns the numbers of the cores that this process may use.
        limit: returns the soft limit of a resource, by its number in :mod:`resource`; -1: none.
        threads: returns how many threads torch computes with in this process.
        is_root: whether this process may do everything.
        resolve: returns the addresses of a host name; raises :class:`OSError`.
        interfaces: lists the network interfaces.
        versions: the versions of what computes, by name.
        disk: what the file system of a folder says of itself.
        pid: of this process.
        load: measures what other processes take of the cores.
        clock: seconds since 1970.
        gpus: how GPUs are looked at.

    Example:
        >>> Machine(environ={"RANK": "0"}).environ["RANK"]
        '0'
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    name: Callable[[], str] = host_name
    affinity: Callable[[], set[int]] = lambda: os.sched_getaffinity(0)
    limit: Callable[[int], int] = lambda number: resource.getrlimit(number)[0]
    threads: Callable[[], int] = threads_of_torch
    is_root: Callable[[], bool] = lambda: os.geteuid() == 0
    resolve: Callable[[str], list[str]] = addresses_of
    interfaces: Callable[[], list[Interface]] = interfaces_of_machine
    versions: Callable[[], dict[str, str]] = versions_here
    disk: Callable[[Path], os.statvfs_result] = disk_of
    pid: Callable[[], int] = os.getpid
    load: Callable[[set[int]], Load] = measure_load
    clock: Callable[[], float] = time.time
    gpus: GpuSight = field(default_factory=GpuSight)

    def read(self, path: str) -> str:
        """Return the text of a file below the root, such as ``"proc/meminfo"``; raises
        :class:`OSError`.
        """
        return self.root.joinpath(path.lstrip("/")).read_text(encoding="utf-8", errors="replace")

    def read_if_there(self, path: str) -> str:
        """Return the text of a file below the root; empty where it is missing."""
        try:
            return self.read(path)
        except FileNotFoundError:
            return ""
