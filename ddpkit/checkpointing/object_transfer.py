"""Copies the files of a checkpoint from a disk into a store and back: several at once, in pieces
that are hashed on their way.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from ddpkit.checkpointing.storage import PIECE_BYTES, digest_of_pieces
from ddpkit.object_store import Objects

T = TypeVar("T")

FILES_AT_ONCE = 4
PIECES_AT_ONCE = 8
LOOKS_AT_ONCE = 16

# Takes bytes of a file, which begin at a position in it.
Take = Callable[[str, int, bytes], object]


def all_at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Make calls in threads; after an error no further one begins.

    Returns:
        What they return, in their order.

    Raises:
        Exception: of the first call that has failed.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ddpkit store") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [future.result() for future in futures]


def send_files(
    objects: Objects,
    folder: str,
    directory: Path,
    names: Iterable[str],
    before_each: Callable[[], object],
) -> None:
    """Copy files of a directory into a folder of a store.

    Args:
        objects: of the store.
        folder: there.
        directory: of this disk.
        names: of the files.
        before_each: called before each file; an exception of it ends the copying.
    """

    def send(name: str) -> None:
        before_each()
        objects.send(directory / name, f"{folder}/{name}")

    calls = [functools.partial(send, name) for name in names]
    all_at_once(calls, FILES_AT_ONCE)


def delete_objects(objects: Objects, names: Iterable[str]) -> None:
    """Delete objects; those that are gone are no error."""
    all_at_once([functools.partial(objects.delete, name) for name in names], LOOKS_AT_ONCE)


def sizes_now(objects: Objects, names: Iterable[str]) -> dict[str, int | None]:
    """Return the sizes of objects, by name, None where there is none; no listing is asked."""
    wanted = list(names)
    calls = [functools.partial(objects.size, name) for name in wanted]
    return dict(zip(wanted, all_at_once(calls, LOOKS_AT_ONCE), strict=True))


def read_files(
    objects: Objects,
    sizes: Mapping[str, int],
    take: Take,
    piece_bytes: int = PIECE_BYTES,
) -> dict[str, str]:
    """Read objects, several pieces at once.

    Args:
        objects: of the store.
        sizes: of those to be read, by name.
        take: called in threads with each piece.
        piece_bytes: of the pieces whose digests a file's digest is made of.

    Returns:
        Their digests by name, as ``storage.file_sha256`` gives them.

    Raises:
        FileNotFoundError: one is not there.
        ObjectStoreError: the store cannot be asked.
    """
    pieces = [
        (name, start, min(start + piece_bytes, size))
        for name, size in sizes.items()
        for start in range(0, size, piece_bytes)
    ]
    calls = [functools.partial(_read_piece, objects, *piece, take) for piece in pieces]
    digests: dict[str, list[bytes]] = {name: [] for name in sizes}
    for (name, _, _), digest in zip(pieces, all_at_once(calls, PIECES_AT_ONCE), strict=True):
        digests[name].append(digest)
    return {name: digest_of_pieces(parts) for name, parts in digests.items()}


def _read_piece(objects: Objects, name: str, start: int, end: int, take: Take) -> bytes:
    digest = hashlib.sha256()
    for begin, stop in _blocks(start, end):
        data = objects.read_range(name, begin, stop)
        digest.update(data)
        take(name, begin, data)
    return digest.digest()


def _blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a piece into what is held in memory at once: whole files are pieces in format 1."""
    for begin in range(start, end, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, end)


class FileWriter:
    """Writes what is read of objects into files of a disk, at any position.

    Args:
        paths: of the files, by the name of the object; they are made, with their directories.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def __call__(self, name: str, start: int, data: bytes) -> None:
        """Write bytes where they belong."""
        handle = os.open(self._paths[name], os.O_WRONLY)
        try:
            rest = memoryview(data)
            while rest:
                count = os.pwrite(handle, rest, start)
                rest = rest[count:]
                start += count
        finally:
            os.close(handle)


def as_sizes(files: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the sizes of the files of a manifest."""
    return {name: int(entry["size"]) for name, entry in files.items()}
