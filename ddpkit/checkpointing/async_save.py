"""A checkpoint that is written while training goes on: its states are copied in memory, and a
thread writes the copy.

Each storage is copied once, whole: tensors that share one, or are views of it, share its copy. The
memory of the copies is kept for the next snapshot: its pages are there already then, and the
copying costs no more than a ``memcpy``.

The thread is not a daemon: a process that exits, also by an exception, first waits for it. A killed
process loses only the save in progress. A forked process, such as a loader worker, has no writer
thread.

Source: the files of ``/proc`` and of control groups are described at
https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ddpkit.base import map_values
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

# for training: a thread that has just begun keeps Python's lock for up to 5 ms
HEAD_START_SECONDS = 0.001
WITHOUT_COPY = (
    "Checkpoints are written while training waits, because the state cannot be copied first: %s"
)
SPARE_BYTES = 256 << 20  # left to the process when a snapshot is made
# control groups of version 1 write "no limit" as a number of pages that fills 63 bits
HUGE = 1 << 60


# --------------------------------------------------------------------------------------- the thread


class BackgroundSave:
    """Writes one checkpoint in a thread.

    Attributes:
        threads: of this process: the one that writes in a folder, or was the last to do so, by the
            folder's real path.

    Ranks: main only.

    State: a thread while something is being written; its error until :meth:`wait`.

    Example:
        >>> done, background = [], BackgroundSave()
        >>> background.start(Path("CKPT+one"), lambda: done.append(1))
        >>> background.wait()
        >>> done
        [1]
    """

    threads: ClassVar[dict[str, threading.Thread]] = {}

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, path: Path, work: Callable[[], object]) -> None:
        """Begin some work; what was begun before must have been waited for.

        Args:
            path: the directory that appears by it.
            work: done in the thread.

        Ranks: main only.
        """
        self._thread = threading.Thread(
            target=self._run,
            args=(path, work),
            name=f"ddpkit saves {path.name}",
        )
        self.threads[os.path.realpath(path.parent)] = self._thread
        self._thread.start()

    def wait(self, folder: Path | None = None) -> None:
        """Wait for the work that was begun last.

        Args:
            folder: of checkpoints; whatever else in this process writes there is waited for, too.

        Raises:
            CheckpointError: the work failed; its error is this one, or the cause. Raised once.

        Ranks: main only.
        """
        other = None if folder is None else self.threads.get(os.path.realpath(folder))
        for thread in filter(None, (self._thread, other)):
            is_own = thread is threading.current_thread()  # which may collect a Checkpointer
            if not is_own and thread.ident is not None:  # else the system has granted none
                thread.join()
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in progress; an error is logged, not raised.

        Ranks: main only.
        """
        try:
            self.wait()
        except CheckpointError as error:  # called when an object or the process ends
            logger.error("A checkpoint is lost: %s", error)  # noqa: TRY400 -- the message says it all

    def _run(self, path: Path, work: Callable[[], object]) -> None:
        time.sleep(HEAD_START_SECONDS)
        try:
            work()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 -- raised in `wait`
            self._error = CheckpointError(
                f"saving {path} in the background: {type(error).__name__}: {error}"
            )
            self._error.__cause__ = error


# ---------------------------------------------------------------------------------------- the copy


class SnapshotMemory:
    """Takes snapshots, each in the memory of the one before, which must be done with by then.

    Ranks: local.

    State: host memory of the size of the states, from the first snapshot until :meth:`clear`;
    pinned for a GPU's.

    Example:
        >>> weight = torch.ones(2)
        >>> snapshot = SnapshotMemory().take({"model": {"w": weight, "n": 3}})
        >>> _ = weight.zero_()
        >>> snapshot
        {'model': {'w': tensor([1., 1.]), 'n': 3}}
    """

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []

    def take(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Copy states.

        Args:
            states: what ``torch.save`` could store, by name. Tensors may be on any device.

        Returns:
            The copies, on the CPU and complete: the states may be changed at once.

        Raises:
            MemoryError: not enough memory; the message says how much is free.
            Exception: raised by the copy of an object other than tensors and plain containers.

        Ranks: local.
        """
        storages = _storages(states)
        # By order: a run has the same states in each save. Memory of another size is not used again
        # and is freed before new memory is asked for.
        kept = zip(storages.items(), self._kept, strict=False)
        copies = {key: own for (key, storage), own in kept if own.nbytes() == storage.nbytes()}
        self._kept.clear()
        _require(sum(storage.nbytes() for key, storage in storages.items() if key not in copies))
        for key, storage in storages.items():
            copies[key] = self._copy(storage, copies.get(key))
            self._kept.append(copies[key])
        # copies into pinned memory are asynchronous, and the thread reads them without a stream
        for device in {
            storage.device for storage in storages.values() if storage.device.type == "cuda"
        }:
            torch.cuda.current_stream(device).synchronize()

        def copied(value: Any) -> Any:
            if not _is_plain_tensor(value):
                return (
                    value.detach().clone() if type(value) is torch.Tensor else copy.deepcopy(value)
                )
            storage = copies[id(value.untyped_storage())]
            tensor = torch.empty(0, dtype=value.dtype, device="cpu")
            tensor.set_(
                storage,
                value.storage_offset(),
                value.size(),
                value.stride(),
            )
            return tensor.requires_grad_(value.requires_grad)

        return {name: map_values(state, copied) for name, state in states.items()}

    def clear(self) -> None:
        """Give the memory back, as soon as no snapshot is in it."""
        self._kept.clear()

    def _copy(
        self,
        storage: torch.UntypedStorage,
        own: torch.UntypedStorage | None,
    ) -> torch.UntypedStorage:
        on_gpu = storage.device.type == "cuda"
        size = storage.nbytes()
        if own is None:
            try:
                own = torch.empty(
                    size,
                    dtype=torch.uint8,
                    device="cpu",
                    pin_memory=on_gpu,
                ).untyped_storage()
            except RuntimeError as error:
                raise MemoryError(f"{size} bytes are needed: {error}") from error
        return own.copy_(storage, non_blocking=on_gpu)


def state_bytes(states: Mapping[str, Any]) -> int:
    """Return how much the tensors of some states take in files of ``torch.save``, in bytes.

    Args:
        states: what ``torch.save`` could store, by name.

    Returns:
        The size of the storages; a storage that two states share counts twice: it is in two files.

    Ranks: local.

    Example:
        >>> state_bytes({"model": {"w": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64)}})
        32
    """
    return sum(
        storage.nbytes() for state in states.values() for storage in _storages({"": state}).values()
    )


def _storages(states: Mapping[str, Any]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors in some states, each once, by id: torch makes one object
    for a storage.
    """
    found: dict[int, torch.UntypedStorage] = {}

    def note(value: Any) -> None:
        if _is_plain_tensor(value):
            storage = value.untyped_storage()
            found[id(storage)] = storage

    for state in states.values():
        map_values(state, note)
    return found


def _is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a plain dense tensor: no subclass, not quantized or nested, no lazy
    view.
    """
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type in {"cpu", "cuda"}
        and not (value.is_quantized or value.is_nested or value.is_conj() or value.is_neg())
    )


# ---------------------------------------------------------------------------------------- memory


def _require(size: int) -> None:
    free = available_bytes()
    if size and free is not None and size + SPARE_BYTES > free:
        raise MemoryError(
            f"a copy takes {size} bytes of host memory, {SPARE_BYTES} more must stay free, of "
            f"{free}"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much more memory this process may take: what the machine has, and what its control
    groups allow.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        The least of all that is said, in bytes; None where nothing is said (no Linux). Cached files
        count as free.

    Ranks: local.
    """
    limits = list(_control_groups(root))
    if machine := _numbers(root / "proc" / "meminfo").get("MemAvailable"):
        limits.append(machine * 1024)
    return max(0, min(limits)) if limits else None


def _control_groups(root: Path) -> Iterator[int]:
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, names = (mounted / "memory", _VERSION_1) if kinds else (mounted, _VERSION_2)
        group = top / path.lstrip("/")
        # a limit may be set on any of them; in a container a path may not exist
        for each in (group, *group.parents):
            if top in {each, *each.parents}:
                yield from _one_group(each, *names)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _one_group(
    group: Path,
    limit_name: str,
    usage_name: str,
    cache_name: str,
) -> Iterator[int]:
    limit = _text(group / limit_name).strip()
    usage = _text(group / usage_name).strip()
    if limit.isdigit() and usage.isdigit() and int(limit) < HUGE:
        yield int(limit) - int(usage) + _numbers(group / "memory.stat").get(cache_name, 0)


def _numbers(path: Path) -> dict[str, int]:
    words = [line.split() for line in _text(path).splitlines()]
    return {
        parts[0].rstrip(":"): int(parts[1])
        for parts in words
        if len(parts) > 1 and parts[1].isdigit()
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
