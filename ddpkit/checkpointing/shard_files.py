"""A state of which each rank has written its own part, its shard.

Of such a recoverable a checkpoint has::

    <name>.ckpt                              a file of torch: the state, in which the tensors that
                                             are in shards have no values, and where these stand
    <name>-shard-<rank>-of-<ranks>.safetensors   the rows of rank <rank>

The first is written last and by the main process. It knows the SHA-256 of each piece of each shard:
what is read of a shard is compared with it, whoever reads it, and however little. So a shard that
is damaged, or of another rank or another checkpoint, is not taken for the right one, even where
nothing was verified before.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddpkit.base import StoredTensor, kind_of, map_named, map_values
from ddpkit.checkpointing.checkpoint import SUFFIX
from ddpkit.checkpointing.module_state import is_on_meta
from ddpkit.checkpointing.safetensors_format import bytes_of
from ddpkit.checkpointing.storage import BLOCK_BYTES, PIECE_BYTES
from ddpkit.errors import CheckpointError, CheckpointUsageError

ENTRY = "__shards__"  # of the file of torch
STATE = "state"
FORMAT = 1
CPU = torch.device("cpu")
DIGEST_BYTES = hashlib.sha256().digest_size
KEPT_PIECES = 2  # of each shard, while small tensors of it are read


class ShardError(CheckpointError):
    """A shard is missing or damaged."""


class Rows(NamedTuple):
    """A run of rows in a shard.

    Attributes:
        shard: its number.
        first: number of the first row, in the whole tensor.
        number: how many rows.
        place: where they begin in the file, in bytes.
    """

    shard: int
    first: int
    number: int
    place: int


@dataclass(frozen=True)
class ShardReport:
    """What a rank tells of a shard that it has written.

    Attributes:
        size: of the file, in bytes.
        pieces: the SHA-256 of each of its pieces.
        rows: by tensor: number of the first row, how many, and where they begin in the file.
    """

    size: int
    pieces: list[bytes]
    rows: dict[str, list[int]]


def shard_path(path: Path, number: int, count: int) -> Path:
    """Return the path of a shard.

    Args:
        path: of the recoverable's file of torch.
        number: of the rank.
        count: number of ranks.

    Ranks: local.

    Example:
        >>> shard_path(Path("CKPT+one/model.ckpt"), 0, 2).name
        'model-shard-0-of-2.safetensors'
    """
    name = path.name.removesuffix(SUFFIX)
    return path.with_name(f"{name}-shard-{number}-of-{count}.safetensors")


def has_shards(path: Path) -> bool:
    """Say whether there are shards beside a recoverable's file, which is not opened.

    Args:
        path: of the file.

    Ranks: local.
    """
    name = glob.escape(path.name.removesuffix(SUFFIX))
    return any(path.parent.glob(f"{name}-shard-*-of-*.safetensors"))


def sharded_file(skeleton: Any, reports: Sequence[ShardReport]) -> dict[str, Any]:
    """Return the content of the file of torch.

    Args:
        skeleton: the state; the tensors in shards are on the meta device.
        reports: of the shards, by their numbers.

    Ranks: main only.
    """
    rows: dict[str, list[list[int]]] = {}
    for number, report in enumerate(reports):
        for name, known in report.rows.items():
            rows.setdefault(name, []).append([number, *known])
    entry = {
        "format": FORMAT,
        "shards": list(map(_shard_entry, reports)),
        "rows": {name: torch.tensor(table) for name, table in rows.items()},
    }
    return {ENTRY: entry, STATE: skeleton}


def _shard_entry(report: ShardReport) -> dict[str, Any]:
    raw = bytearray().join(report.pieces)
    return {
        "size": report.size,
        "pieces": torch.frombuffer(raw, dtype=torch.uint8),
    }


def is_sharded_file(value: Any) -> bool:
    """Say whether the content of a file of torch stands for a state in shards.

    Example:
        >>> is_sharded_file({"weight": 1})
        False
    """
    return isinstance(value, dict) and ENTRY in value


def shards_of(path: Path, value: Any) -> list[Path]:
    """Return the paths of the shards of a file of torch, whose content is given; of another file
    none.

    Raises:
        CheckpointError: the content is damaged.
    """
    if not is_sharded_file(value):
        return []
    count = len(_entry(path, value)["shards"])
    return [shard_path(path, number, count) for number in range(count)]


def open_state(path: Path, value: Any, *, verifies: bool = True) -> Any:
    """Return the state that a file of torch stands for; tensors in shards are
    :class:`~ddpkit.base.states.StoredTensor`.

    Args:
        path: of the file.
        value: its content.
        verifies: whether what is read of shards is compared with its digest.

    Raises:
        CheckpointError: the content is damaged.

    Ranks: local.

    Example:
        >>> open_state(Path("model.ckpt"), {"weight": 1})
        {'weight': 1}
    """
    if not is_sharded_file(value):
        return value
    entry = _entry(path, value)
    paths = shards_of(path, value)
    shards = [
        _Shard(
            shard,
            known["size"],
            _digests(known),
            verifies=verifies,
        )
        for shard, known in zip(paths, entry["shards"], strict=True)
    ]

    def stored(name: str, tensor: Any) -> Any:
        if not is_on_meta(tensor):
            return tensor
        table = entry["rows"].get(name)
        if not (tensor.ndim and _is_table(table)):
            raise ShardError(f"cannot load {path}: it does not say where {name} stands.")
        return InShards(
            f"{name} of {path}",
            tensor,
            itertools.starmap(Rows, table.tolist()),
            shards,
        )

    return map_named(value[STATE], stored)


def read_whole(path: Path, value: Any, map_location: Any = "cpu") -> Any:
    """Return the state that a file of torch stands for, with all of its tensors in memory.

    Args:
        path: of the file.
        value: its content, which was loaded with ``map_location``.
        map_location: a device, where the tensors go; on the meta device no shard is read.

    Raises:
        CheckpointError: the content, or a shard, is damaged or missing.
        CheckpointUsageError: ``map_location`` is no device.

    Ranks: local.
    """
    if not isinstance(map_location, (str, torch.device)):
        raise CheckpointUsageError(
            f"{path} is in shards, and map_location={map_location!r} is no device. Give a device, "
            "such as 'cpu'."
        )
    device = torch.device(map_location)
    if device.type == "meta":
        return value[STATE]
    state = open_state(path, value)
    return whole_tensors(state, device)


def whole_tensors(state: Any, device: torch.device = CPU) -> Any:
    """Read what of a state is still in files; it goes to a device.

    Example:
        >>> whole_tensors({"step": 3})
        {'step': 3}
    """

    def read(value: Any) -> Any:
        return value.whole().to(device) if isinstance(value, StoredTensor) else value

    return map_values(state, read)


def _entry(path: Path, value: Mapping[str, Any]) -> Mapping[str, Any]:
    entry: Any = value[ENTRY]
    known = entry.get("format") if isinstance(entry, dict) else None
    if known != FORMAT:
        raise CheckpointError(
            f"cannot load {path}: its shards have format {known!r}, this ddpkit reads {FORMAT}."
        )
    shards = entry.get("shards")
    rows = entry.get("rows")
    is_right = (
        STATE in value
        and isinstance(rows, dict)
        and isinstance(shards, list)
        and all(map(_is_shard, shards))
    )
    if not is_right:
        raise CheckpointError(f"cannot load {path}: it is damaged, and does not say what it holds.")
    known_entry: Mapping[str, Any] = entry
    return known_entry


def _is_shard(known: Any) -> bool:
    if not isinstance(known, dict):
        return False
    size = known.get("size")
    pieces = known.get("pieces")
    if not (type(size) is int and isinstance(pieces, torch.Tensor)):
        return False
    digests = -(-size // PIECE_BYTES)
    return pieces.dtype == torch.uint8 and pieces.shape == (digests * DIGEST_BYTES,)


def _is_table(table: Any) -> bool:
    return bool(
        isinstance(table, torch.Tensor)
        and table.ndim
        and table.dtype == torch.int64
        and table.shape == (len(table), len(Rows._fields))
    )


def _digests(known: Mapping[str, Any]) -> list[bytes]:
    rows = known["pieces"].cpu().reshape(-1, DIGEST_BYTES)
    return [row.tobytes() for row in rows.numpy()]


# ------------------------------------------------------------------------------------- reading


@dataclass(eq=False)
class _Shard:
    """A shard that is read in pieces, each of which is compared with its digest."""

    path: Path
    size: int
    digests: list[bytes]
    verifies: bool = True
    _kept: OrderedDict[int, bytearray] = field(default_factory=OrderedDict)
    _has_size: bool = False

    def require_size(self) -> None:
        """Make sure that the file is there and is as long as it was.

        Raises:
            CheckpointError: it is not.
        """
        if self._has_size:
            return
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise ShardError(f"cannot read {self.path}: {error.strerror}.") from error
        if size != self.size:
            raise ShardError(f"{self.path} has {size} bytes instead of {self.size}.")
        self._has_size = True

    def read_into(self, place: int, target: memoryview) -> None:
        """Fill some memory with the bytes from a place on."""
        try:
            with self.path.open("rb", buffering=0) as file:
                if self.verifies:
                    self._read_pieces(file, place, target)
                else:
                    self._read(file, place, target)
        except OSError as error:
            raise ShardError(f"cannot read {self.path}: {error}.") from error

    def _read_pieces(self, file: Any, place: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            number, skipped = divmod(place + done, PIECE_BYTES)
            size = min(PIECE_BYTES, self.size - number * PIECE_BYTES)
            count = min(size - skipped, len(target) - done)
            part = target[done : done + count]
            if count == size:
                self._read_piece(file, number, part)
            else:
                part[:] = memoryview(self._piece(file, number, size))[skipped : skipped + count]
            done += count

    def _piece(self, file: Any, number: int, size: int) -> bytearray:
        kept = self._kept.get(number)
        if kept is None:
            while len(self._kept) >= KEPT_PIECES:
                self._kept.popitem(last=False)
            kept = bytearray(size)
            self._read_piece(file, number, memoryview(kept))
            self._kept[number] = kept
        self._kept.move_to_end(number)
        return kept

    def _read_piece(self, file: Any, number: int, target: memoryview) -> None:
        self._read(file, number * PIECE_BYTES, target)
        if hashlib.sha256(target).digest() != self.digests[number]:
            raise ShardError(
                f"{self.path} fails its checksum: its content has changed since it was saved, or "
                "it is of another checkpoint."
            )

    def _read(self, file: Any, place: int, target: memoryview) -> None:
        file.seek(place)
        done = 0
        while done < len(target):
            count = file.readinto(target[done:])
            if not count:
                raise ShardError(f"{self.path} has less than {self.size} bytes.")
            done += count


class InShards(StoredTensor):
    """A tensor whose rows are in shards."""

    def __init__(
        self,
        name: str,
        like: torch.Tensor,
        table: Iterable[Rows],
        shards: Sequence[_Shard],
    ) -> None:
        self.name = name
        self.shape = like.shape
        self.dtype = like.dtype
        self._table = sorted(table, key=operator.attrgetter("first"))
        self._shards = shards
        self._row_bytes = bytes_of(tuple(like.shape[1:]), like.dtype)

    def __repr__(self) -> str:
        """Describe it."""
        return f"<{kind_of(self)} {self.name}, {tuple(self.shape)}>"

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read some rows into new memory."""
        ranges = list(self.ranges(first, count))
        found = torch.empty((count, *self.shape[1:]), dtype=self.dtype, device="cpu")
        if found.numel():
            target = found.view(-1).view(torch.uint8).numpy().data
            for shard, place, size in ranges:
                shard.read_into(place, target[:size])
                target = target[size:]
        return found

    def blocks(self) -> Iterator[bytearray]:
        """Yield the bytes of the whole tensor in blocks, one of which is in memory."""
        for shard, place, size in self.ranges(0, self.shape[0]):
            for start in range(place, place + size, BLOCK_BYTES):
                block = bytearray(min(BLOCK_BYTES, place + size - start))
                shard.read_into(start, memoryview(block))
                yield block

    def ranges(self, first: int, count: int) -> Iterator[tuple[_Shard, int, int]]:
        """Yield where some rows stand: shard, place and size in bytes, in the order of the rows."""
        end = first + count
        for row in self._table:
            last = min(row.first + row.number, end)
            if row.first <= first < last:
                place = row.place + (first - row.first) * self._row_bytes
                size = (last - first) * self._row_bytes
                yield self._shard(row.shard, place, size), place, size
                first = last
        if first != end:
            raise ShardError(f"cannot load {self.name}: it has no row {first}.")

    def _shard(self, number: int, place: int, size: int) -> _Shard:
        is_there = 0 <= number < len(self._shards)
        if not is_there or place < 0 or place + size > self._shards[number].size:
            raise ShardError(f"cannot load {self.name}: it names rows outside of its shards.")
        self._shards[number].require_size()
        return self._shards[number]
