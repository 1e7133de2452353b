"""A copy of states in host memory, made as fast as memory is copied, to be written while training goes on.

What ``torch.save`` would store is what is copied: a state is pickled as ``torch.save`` does it, with every tensor's
storage left out, and each storage is copied once, whole. Tensors that share one, or are views of it, therefore share
its copy. The copies lie side by side in one piece of memory that is kept for the next snapshot: its pages are there
already then, and the copying costs no more than a ``memcpy``. The first snapshot would have to wait for the pages; a
thread can touch them before, while training goes on. On Linux the memory is not shown to forked processes, such as
loader workers, which would make each of its pages a new one at the next snapshot.

Source: that ``torch.save`` tells storages apart by ``_cdata`` and stores them whole was read in
``torch/serialization.py`` of torch 2.6 and 2.13; the files of ``/proc`` and of control groups are described at
https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Snapshot", "SnapshotMemory", "available_bytes", "state_bytes"]

ALIGNMENT_BYTES = 64  # of a copied storage: what torch's own allocator gives
SPARE_BYTES = 256 << 20  # left to the process when a snapshot is made
TOUCHED_BYTES = 2 << 20  # at a time, of memory that a thread prepares
RESTS = 3  # times as long as it has worked, so that training has the processor
HUGE = 1 << 60  # control groups of version 1 write "no limit" as a number of pages that fills 63 bits


class Snapshot:
    """States as they were when it was made.

    Args:
        pickles: each state without its storages, by name.
        storages: copies of the storages of all of them.
        nbytes: size of the storages.

    Attributes:
        nbytes: as given.

    Ranks: local.

    State: the memory is that of the :class:`SnapshotMemory` that made it, which uses it again for its next one.

    Example:
        >>> weight = torch.ones(2)
        >>> snapshot = SnapshotMemory().take({"model": {"w": weight}})
        >>> _ = weight.zero_()
        >>> snapshot.state("model")
        {'w': tensor([1., 1.])}
    """

    def __init__(self, pickles: Mapping[str, bytes], storages: Sequence[torch.UntypedStorage], nbytes: int) -> None:
        self._pickles = pickles
        self._storages = storages
        self.nbytes = nbytes

    def state(self, name: str) -> Any:
        """Return one state, made of tensors on the CPU."""
        return _Unpickler(io.BytesIO(self._pickles[name]), self._storages).load()


class SnapshotMemory:
    """Takes snapshots, each in the memory of the one before, which must be done with by then.

    Ranks: local.

    State: host memory of the size of the states, from the first snapshot until :meth:`clear`.

    Example:
        >>> memory = SnapshotMemory()
        >>> memory.take({"counter": {"n": 3}}).state("counter")
        {'n': 3}
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._pinned = False
        self._preparing: _Preparing | None = None

    def prepare(self, states: Mapping[str, Any]) -> None:
        """Make room for a copy of states, and let a thread touch it, so that the first snapshot need not.

        Args:
            states: as :meth:`take` will be given; nothing of them is kept, or copied yet.

        Raises:
            MemoryError: there is no room for it; the text says how much there is.
            Exception: what pickling a state raises.

        Ranks: local.

        State: a thread, until all is touched, :meth:`take` or :meth:`clear`. Nothing is done for tensors on a GPU, for
            which the driver makes the memory.

        Example:
            >>> memory = SnapshotMemory()
            >>> memory.prepare({"model": {"w": torch.ones(2)}})
            >>> memory.take({"model": {"w": torch.ones(2)}}).nbytes
            8
        """
        if self._memory is not None:
            return
        storages = _Storages()
        for state in states.values():
            storages.pickle(state)
        if any(storage.device.type == "cuda" for storage in storages.found):
            return
        self._make_room(storages.places()[1], pinned=False)
        self._preparing = _Preparing(self._memory)

    def take(self, states: Mapping[str, Any]) -> Snapshot:
        """Copy states.

        Args:
            states: what ``torch.save`` could store, by name. Tensors may be on any device.

        Returns:
            The copy, complete: the states may be changed at once.

        Raises:
            MemoryError: there is no room for it; the text says how much there is.
            Exception: what pickling a state raises.

        Ranks: local.
        """
        self._stop_preparing()
        storages = _Storages()
        pickles = {name: storages.pickle(state) for name, state in states.items()}
        offsets, size = storages.places()
        self._make_room(size, pinned=any(storage.device.type == "cuda" for storage in storages.found))
        copies = [self._copy(storage, offset) for storage, offset in zip(storages.found, offsets, strict=True)]
        for device in {storage.device for storage in storages.found if storage.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(pickles, copies, storages.nbytes)

    def clear(self) -> None:
        """Give the memory back, as soon as no snapshot is in it; pinned memory to the system only if none is now."""
        self._stop_preparing()
        self._drop()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.stop()
            self._preparing = None

    def _make_room(self, size: int, *, pinned: bool) -> None:
        present = 0 if self._memory is None else len(self._memory)
        if size <= present <= max(2 * size, mmap.PAGESIZE) and pinned == self._pinned:
            return
        self._drop()
        self._pinned = pinned
        self._memory = _pinned_memory(size) if pinned else _pageable_memory(size)

    def _drop(self) -> None:
        was_pinned = self._memory is not None and self._pinned
        self._memory = None
        empty_cache = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 -- torch.cuda.empty_cache has no twin
        if was_pinned and empty_cache is not None:
            empty_cache()  # torch would keep what it has pinned for whoever asks for as much again

    def _copy(self, storage: torch.UntypedStorage, offset: int) -> torch.UntypedStorage:
        size = storage.nbytes()
        if storage.device.type == "meta":
            return storage
        if size == 0:
            return torch.empty(0).untyped_storage()  # on the CPU, as the copies are
        copy = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy.copy_(source, non_blocking=storage.device.type == "cuda")
        return copy.untyped_storage()


class _Preparing:
    """Touches memory in a thread, which no process waits for when it ends."""

    def __init__(self, memory: Any) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._touch, args=(memory,), name="ddpkit makes room", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system grants no thread: the first snapshot touches it
            self._ended.set()

    def stop(self) -> None:
        """Leave the rest as it is. In a forked process there is no thread to wait for."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _touch(self, memory: Any) -> None:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for offset in range(0, len(whole), TOUCHED_BYTES):
            start = time.perf_counter()
            whole[offset : offset + TOUCHED_BYTES : mmap.PAGESIZE].zero_()  # which releases Python's lock
            if self._ended.wait(RESTS * (time.perf_counter() - start)):
                return


def state_bytes(states: Mapping[str, Any]) -> int:
    """Return how much the tensors of some states take in files of ``torch.save``, in bytes.

    Args:
        states: what ``torch.save`` could store, by name.

    Returns:
        The size of the storages; one that two states share counts twice, as it is in two files.

    Raises:
        Exception: what pickling a state raises.

    Ranks: local.

    Example:
        >>> state_bytes({"model": {"w": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64)}})
        32
    """
    total = 0
    for state in states.values():
        storages = _Storages()
        storages.pickle(state)
        total += storages.nbytes
    return total


# ---------------------------------------------------------------------------------------- pickling


class _Storages:
    """The storages of some states, each once, in the order in which they are met."""

    def __init__(self) -> None:
        self.found: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # by id: torch makes one object for a storage, which is held in `found`
        self._tensors: dict[int, torch.Tensor] = {}  # by id, and held, so that no other tensor gets the id

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.found)

    def number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.setdefault(id(storage), len(self.found))
        if number == len(self.found):
            self.found.append(storage)
        return number

    def words(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return what a plain tensor is made of again: which one it is, and where its numbers lie."""
        self._tensors[id(tensor)] = tensor
        storage, size, stride = self.number(tensor.untyped_storage()), tuple(tensor.size()), tensor.stride()
        return id(tensor), storage, tensor.dtype, tensor.storage_offset(), size, stride, tensor.requires_grad

    def pickle(self, state: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self).dump(state)
        return file.getvalue()

    def places(self) -> tuple[list[int], int]:
        """Return the offset of each storage in one piece of memory, and the size of that."""
        offsets, end = [], 0
        for storage in self.found:
            offsets.append(end)
            end += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offsets, end


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages = storages

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):  # a tenth of the time of its own way to be pickled
            return self._storages.words(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            return self._storages.number(obj._untyped_storage), obj.dtype  # noqa: SLF001 -- as torch.save does
        return (self._storages.number(obj), None) if isinstance(obj, torch.UntypedStorage) else None


class _Unpickler(pickle.Unpickler):
    """Reads what :class:`_Pickler` has made in this process, and nothing else."""

    def __init__(self, file: io.BytesIO, storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if len(pid) > 2:  # noqa: PLR2004 -- a tensor's words, not a storage's
            return self._tensor(*pid)
        number, dtype = pid
        storage = self._storages[number]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    def _tensor(self, identity: int, *words: Any) -> torch.Tensor:
        if identity not in self._tensors:
            number, dtype, offset, size, stride, requires_grad = words
            tensor = torch.empty(0, dtype=dtype).set_(self._storages[number], offset, size, stride)
            self._tensors[identity] = tensor.requires_grad_(requires_grad)
        return self._tensors[identity]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is no more than numbers in a storage: what :meth:`_Unpickler._tensor` makes again."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and tensor.is_leaf
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (tensor._is_zerotensor() or tensor.__dict__)  # noqa: SLF001 -- torch has no other name for it
        and tensor._backward_hooks is None  # noqa: SLF001 -- which torch pickles
    )


# ---------------------------------------------------------------------------------------- memory


def _pageable_memory(size: int) -> Any:
    _require(size)
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes are needed: {error}") from error
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):  # without it a snapshot after a fork is slower, and no less right
            memory.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has none
            # For later copies: medians 67 and 97 ms instead of 101 and 113 for 300 MiB, in a busy virtual machine. The
            # first copy depends on the host: fresh memory 2 s with either; memory freed just before 0.07 s at best and
            # 2.6 s in the median with huge pages, 0.5 and 0.8 s without. Five rounds; `prepare` takes it off the loop.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _pinned_memory(size: int) -> Any:
    """Return memory from which a GPU copies at full speed; torch rounds it up to a power of two."""
    _require(1 << max(size - 1, 1).bit_length())
    try:
        return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        raise MemoryError(f"{size} bytes of pinned memory are needed: {error}") from error


def _require(size: int) -> None:
    free = available_bytes()
    if free is not None and size + SPARE_BYTES > free:
        raise MemoryError(f"a copy takes {size} bytes of host memory, {SPARE_BYTES} more must stay free, of {free}")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much more memory this process may take: what the machine has, and what its control groups allow.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        The least of all that is said, in bytes; None where nothing is said (no Linux). Cached files count as free.

    Ranks: local.

    Example:
        >>> available_bytes() != 0
        True
    """
    limits = [*_machine(root), *_control_groups(root)]
    return max(0, min(limits)) if limits else None


def _machine(root: Path) -> Iterator[int]:
    words = _numbers(root / "proc" / "meminfo")
    if "MemAvailable" in words:
        yield words["MemAvailable"] * 1024


def _control_groups(root: Path) -> Iterator[int]:
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        top, names = (mounted / "memory", _VERSION_1) if kinds else (mounted, _VERSION_2)
        group = top / path.strip().lstrip("/")
        while True:  # a limit may be set on any group above; in a container the path may not be there at all
            yield from _one_group(group, *names)
            if group == top or top not in group.parents:
                break
            group = group.parent


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _one_group(group: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
    if limit.isdigit() and usage.isdigit() and int(limit) < HUGE:
        yield int(limit) - int(usage) + _numbers(group / "memory.stat").get(cache_name, 0)


def _numbers(path: Path) -> dict[str, int]:
    words = [line.split() for line in _text(path).splitlines()]
    return {parts[0].rstrip(":"): int(parts[1]) for parts in words if len(parts) > 1 and parts[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
