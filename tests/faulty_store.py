"""A store that misbehaves as stores do: by a filesystem of fsspec that is asked like any other.

Its objects are in memory. What it does wrong is said by :class:`Faults`.
"""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from ddpkit.object_store import filesystem

PROTOCOL = "faulty"


@dataclass
class Faults:
    """What a store does wrong.

    Attributes:
        every: each so many-th request fails, but a thread's next one after it does not, however the
            requests of several threads fall; 0: none, 1: all.
        after: whether a request that fails has been done, and only its answer is lost.
        seconds: that each request takes.
        late: whether a listing shows nothing that was written since the last :meth:`catch_up`, and
            all that was deleted since.
        short: whether each second read gives one byte less.
        damaged: how many reads of ranges give another byte.
        calls: requests so far.
    """

    every: int = 0
    after: bool = False
    seconds: float = 0.0
    late: bool = False
    short: bool = False
    damaged: int = 0
    calls: int = 0
    reads: int = 0
    listed: dict = field(default_factory=dict)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    failed: set[int] = field(default_factory=set)  # threads whose last request has failed

    def fails(self):
        thread = threading.get_ident()
        with self.mutex:
            self.calls += 1
            may = self.every == 1 or thread not in self.failed
            self.failed.discard(thread)
            if not (self.every and may and self.calls % self.every == 0):
                return False
            self.failed.add(thread)
            return True


FAULTS = Faults()


def refuse():
    raise OSError(errno.EBUSY, "Reduce your request rate")


def faulty(method):
    def request(self, *args, **options):
        time.sleep(FAULTS.seconds)
        fails = FAULTS.fails()
        if fails and not FAULTS.after:
            refuse()
        result = method(self, *args, **options)
        if fails:
            refuse()
        return result

    return request


class FaultyFileSystem(MemoryFileSystem):
    """Objects in memory, and requests that go wrong."""

    protocol = PROTOCOL
    store = {}  # noqa: RUF012 -- of the process, as that of its parent
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://"))

    @faulty
    def pipe_file(self, path, value, mode="overwrite", **options):
        return super().pipe_file(path, value, mode=mode, **options)

    @faulty
    def put_file(self, local, remote, **options):
        MemoryFileSystem.pipe_file(self, remote, Path(local).read_bytes())

    @faulty
    def cat_file(self, path, start=None, end=None, **options):
        data = super().cat_file(path, start=start, end=end, **options)
        with FAULTS.mutex:
            FAULTS.reads += 1
            is_short = FAULTS.short and FAULTS.reads % 2
            is_damaged = FAULTS.damaged and start is not None
            FAULTS.damaged -= bool(is_damaged)
        if is_damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        return data[:-1] if is_short and start is not None else data

    @faulty
    def info(self, path, **options):
        return super().info(path, **options)

    @faulty
    def rm_file(self, path):
        return super()._rm(path)

    @faulty
    def find(self, path, **options):
        found = {
            name: {"size": self.store[name].size, "type": "file"}
            for name in sorted(self.store)
            if name.startswith(f"{self._strip_protocol(path)}/")
        }
        if not FAULTS.late:
            return found
        prefix = f"{self._strip_protocol(path)}/"
        return {name: one for name, one in FAULTS.listed.items() if name.startswith(prefix)}

    def catch_up(self):
        """Have listings show what there is now."""
        FAULTS.listed = {
            name: {"size": file.size, "type": "file"} for name, file in self.store.items()
        }


def register():
    fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
    filesystem.kinds()[PROTOCOL] = filesystem.Kind(creates=True)


def reset(**faults):
    """Begin with faults, and say what they are."""
    for name, value in vars(Faults(**faults)).items():
        setattr(FAULTS, name, value)
    FaultyFileSystem(skip_instance_cache=True).catch_up()
    return FAULTS
