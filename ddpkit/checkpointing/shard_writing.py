"""Writes the shards of a rank: the rows that it holds of states that are divided over the ranks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ddpkit.base import do_nothing, file_system_here, host_name
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.checkpoint import SUFFIX
from ddpkit.checkpointing.safetensors_format import NAMES, blocks_of, layout_of
from ddpkit.checkpointing.shard_files import ShardReport, shard_path
from ddpkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

VISIBLE_SECONDS = 30.0  # for a directory of another machine: NFS looks anew after that at most
NAP_SECONDS = 0.01
LOOK_SECONDS = 0.5  # between two questions whether a wait still has a reason
_NOT_THERE = "{}, which another rank has made, is not there on {}{}. "
NOT_SHARED = _NOT_THERE + (
    "Each rank writes its own shard of a checkpoint, so all machines must share the folder: give "
    "one on a file system that they share. Or have rank 0 gather and write all: with "
    "--ckpt_layout=whole, or with an output folder in an object store, such as "
    "--output_folder=s3://BUCKET/FOLDER."
)
NOT_SHARED_BY_SAVERS = _NOT_THERE + (
    "A saver that runs on every rank writes there, so all machines must share the folder: give one "
    "on a file system that they share. Or have the main process alone save it, with what the other "
    "ranks have sent it before (ddpkit.distributed.exchange)."
)


def write_shards(
    staging: Path,
    rows: Mapping[str, Mapping[str, torch.Tensor]],
    first_rows: Mapping[str, Mapping[str, int]],
    number: int,
    count: int,
    look: Callable[[], object] = do_nothing,
) -> dict[str, ShardReport]:
    """Write this rank's shards; they are on the disk at the return.

    Args:
        staging: the directory, made by the main process.
        rows: this rank's rows, by recoverable and by name.
        first_rows: numbers of the first of them, likewise.
        number: of this rank.
        count: number of ranks.
        look: is called now and then while the directory is not seen; raises a CheckpointError
            where it will never be.

    Returns:
        What is told of each, by recoverable.

    Raises:
        CheckpointError: one cannot be written.

    Ranks: local.
    """
    await_path(staging, NOT_SHARED, look=look)
    reports = {}
    for name, tensors in rows.items():
        path = shard_path(staging / f"{name}{SUFFIX}", number, count)
        try:
            reports[name] = _write(path, tensors, first_rows[name], number, count)
        except Exception as error:
            raise CheckpointError(
                f"saving the recoverable {name!r}: {type(error).__name__}: {error}"
            ) from error
    return reports


def _write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    first_rows: Mapping[str, int],
    number: int,
    count: int,
) -> ShardReport:
    known = {name: _as_known(tensor) for name, tensor in tensors.items()}
    metadata = {
        "format": "pt",
        "shard": str(number),
        "shards": str(count),
        "first_rows": json.dumps(first_rows),
    }
    layout = layout_of(known, metadata)

    def write(file: BinaryIO) -> None:
        file.write(layout.header)
        for name in layout.starts:
            file.writelines(blocks_of(known[name]))

    pieces = storage.write_in_pieces(path, write)
    storage.FILES.sync_file(path)
    rows = {
        name: [
            first_rows[name],
            tensors[name].shape[0],
            start,
        ]
        for name, start in layout.starts.items()
    }
    return ShardReport(layout.size, pieces, rows)


def _as_known(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, as plain bytes where the format does not know its dtype."""
    if tensor.dtype in NAMES:
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def await_path(
    path: Path,
    words: str,
    size: int | None = None,
    look: Callable[[], object] = do_nothing,
) -> None:
    """Wait, for a limited time, until what another rank has written is seen here. On a file system
    that this machine does not share nothing is waited for.

    Args:
        path: of a file or a directory.
        words: of the error: with places for the path, this machine, and how that is known.
        size: that the file has; None: any.
        look: is called now and then; may raise a CheckpointError.

    Raises:
        CheckpointError: it is not seen.

    Ranks: local.
    """
    next_look = begin = time.monotonic()
    end = begin + VISIBLE_SECONDS
    own = None
    while True:
        try:
            is_there = path.stat().st_size == size or size is None
        except FileNotFoundError:
            is_there = False
        if is_there:
            return
        now = time.monotonic()
        if now >= next_look:
            next_look = now + LOOK_SECONDS
            look()
        own = own or file_system_here(path)
        if own.is_local:
            known = f", whose own disk it would be on ({own.kind}, mounted at {own.mount})"
            raise CheckpointError(words.format(path, host_name(), known))
        if now > end:
            raise CheckpointError(
                words.format(path, host_name(), f" after {VISIBLE_SECONDS:.0f} s")
            )
        time.sleep(NAP_SECONDS)


def to_text(reports: Mapping[str, ShardReport]) -> str:
    """Return reports as a text, for the main process."""
    return json.dumps(
        {
            name: {
                "size": report.size,
                "pieces": [piece.hex() for piece in report.pieces],
                "rows": report.rows,
            }
            for name, report in reports.items()
        }
    )


def from_text(text: str) -> dict[str, ShardReport]:
    """Return the reports that :func:`to_text` has made a text of.

    Example:
        >>> from_text(to_text({"net": ShardReport(3, [b"a"], {"w": [0, 1, 2]})}))
        {'net': ShardReport(size=3, pieces=[b'a'], rows={'w': [0, 1, 2]})}
    """
    found: dict[str, Any] = json.loads(text)
    return {
        name: ShardReport(
            known["size"],
            [bytes.fromhex(piece) for piece in known["pieces"]],
            known["rows"],
        )
        for name, known in found.items()
    }
