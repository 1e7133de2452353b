"""Which process holds a lock in a store: its record, and whether it is known to be gone."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpkit.base import has_ended, host_name, state_and_start

MOST_SHOWN = 120


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, as its record says.

    Attributes:
        token: of this one time that it has taken the lock.
        host: its name.
        space: of process ids: where it is this process's, ``pid`` can be looked up here.
        pid: of the process.
        started: when the process began, in the kernel's ticks; another one may get its pid.
        since: UTC, when it has taken the lock.
    """

    token: str
    host: str = ""
    space: str = ""
    pid: int = 0
    started: int = 0
    since: str = ""

    @property
    def words(self) -> str:
        """Who it is, for messages."""
        text = f"process {self.pid} on {self.host}, since {self.since} UTC"
        return text if self.pid and text.isprintable() and len(text) < MOST_SHOWN else "another run"

    @property
    def is_gone(self) -> bool:
        """Whether its process ran on this machine and has ended."""
        return self._is_of_this_machine and has_ended(self.pid, self.started)

    @property
    def is_here(self) -> bool:
        """Whether its process runs on this machine."""
        return self._is_of_this_machine and not has_ended(self.pid, self.started)

    def is_of_process_of(self, other: Owner) -> bool:
        """Say whether two records are of one process."""
        process = self.space, self.pid, self.started
        return bool(self.space) and process == (other.space, other.pid, other.started)

    @property
    def _is_of_this_machine(self) -> bool:
        return bool(self.space) and self.space == _space()

    def encoded(self) -> bytes:
        """Return the record, as it stands in the store."""
        return json.dumps(asdict(self)).encode()


def this_process() -> Owner:
    """Return a new record of this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    pid = os.getpid()
    started = state_and_start(pid)[1]
    return Owner(uuid.uuid4().hex, host_name(), _space(), pid, started, since)


def decoded(data: bytes) -> Owner:
    """Return whom a record names; one that cannot be read is some owner, which does not renew
    it.
    """
    try:
        fields = json.loads(data)
        words = {name: str(fields[name]) for name in ("token", "host", "space", "since")}
        return Owner(**words, pid=int(fields["pid"]), started=int(fields["started"]))
    except (ValueError, LookupError, TypeError):
        return Owner(token=f"unreadable-{hashlib.sha256(data).hexdigest()}")


def _space() -> str:
    """Return what tells where a pid counts: the boot of the kernel, and the namespace; empty if
    unknown.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""
