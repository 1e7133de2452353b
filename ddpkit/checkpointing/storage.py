"""Directories that are complete or not there, and the lock of the folder that they are in.

Every file operation of a save stands behind :data:`FILES`, so that a crash test can stop or break
each. The order of :func:`make_staging` and :func:`commit_staging` is what makes a save atomic::

    make .tmp-x -> write every file, fsync each -> manifest.json, fsync -> fsync .tmp-x
                -> rename .tmp-x to its name -> fsync the parent

Whatever has its final name is therefore complete, and :func:`verify` tells whether it still is what
was written. The manifest guards against damage, not against forgery. A file of :func:`write_file`
is hashed while it is written, by the thread that writes it: ``hashlib`` releases the interpreter
lock. Only what others have made is read again for the manifest. SHA-256 is slower than the load of
a file that is in memory, and one sum needs one core. So a large file is hashed in pieces, which
several cores do when it is verified; its digest is that of theirs.

One run at a time saves into a folder. Its lock is a file there, locked with ``flock``, which says
what process it is. The kernel frees it when the process ends, however it ends, and not before its
last write is done. Where a file system cannot lock, or locks for each host by itself (NFS with
``nolock`` or ``local_lock``), the run that starts last has the folder: the other one finds another
record in the file before its next rename or deletion (:meth:`FolderLock.require`), and stops.

Source: flock(2), https://man7.org/linux/man-pages/man2/flock.2.html: a lock belongs to the open
file, is shared with forked children, and over NFS is one of the server, for which the file must be
open for writing. The order of a save follows Pillai et al., "All File Systems Are Not Created
Equal", OSDI 2014 (https://www.usenix.org/conference/osdi14/technical-sessions/presentation/pillai);
that ``torch.save`` keeps the error of a full disk only in ``__context__`` was measured with torch
2.13.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import socket
import stat
import threading
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, cast

import torch

from ddpkit import __version__
from ddpkit.base import FULL, OUTPUT_EXAMPLE
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError, FolderInUseError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

META_NAME = "CKPT.yaml"
META_MARK = "# ddpkit: manifest.json lists the files beside this one\n"
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 2
PIECE_BYTES_OF_FORMAT = {1: 1 << 63, 2: 16 << 20}  # format 1, of ddpkit 0.1: a file is hashed whole
PIECE_BYTES = PIECE_BYTES_OF_FORMAT[MANIFEST_FORMAT]
BLOCK_BYTES = 1 << 20
FILE_THREADS = min(8, os.cpu_count() or 1)
STAGING_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
REPLACED_PREFIX = ".trash-of-"  # followed by the name whose place a new directory is about to take

LOCK_NAME = ".lock"
GRACE_SECONDS = 2.0  # for a run that is about to end
NAP_SECONDS = 0.05
CANNOT_LOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}

MOST_TEXT = 16 << 20  # bytes of a manifest or a CKPT.yaml; theirs are kilobytes

VerifyMode = Literal["full", "size", "off"]


class FileOperations:
    """The file operations of a save, one method each: the one seam for tests that make them fail.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> FileOperations().write(folder / "a", lambda handle: handle.write(b"x"))
        >>> FileOperations().sync_file(folder / "a")
        >>> FileOperations().remove_tree(folder)
    """

    def make_directory(self, path: Path) -> None:
        """Make one directory; its parent must exist."""
        path.mkdir()

    def write(self, path: Path, writer: Callable[[BinaryIO], object]) -> None:
        """Open a file for writing, let ``writer`` fill it, close it."""
        with path.open("wb") as handle:
            writer(handle)

    def sync_file(self, path: Path) -> None:
        """Wait until a file's content is on the disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_directory(self, path: Path) -> None:
        """Wait until a directory's entries are on the disk (where the file system can promise
        it).
        """
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory another name in the same parent."""
        source.rename(target)

    def link(self, name: str, path: Path) -> None:
        """Have a link stand for a directory beside it, in the place of an earlier link."""
        unfinished = path.with_name(f"{STAGING_PREFIX}{path.name}")
        unfinished.unlink(missing_ok=True)  # of a run that died here
        unfinished.symlink_to(name)
        unfinished.replace(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with all that is in it, or a link to one."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


FILES = FileOperations()


# --------------------------------------------------------------------------------------- committing


class _HashingFile:
    """What ``torch.save`` needs of a file for writing; hashes the bytes on their way."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._left = 0
        self.pieces: list[Any] = []

    def write(self, data: bytes) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            if not self._left:
                self.pieces.append(hashlib.sha256())
                self._left = PIECE_BYTES
            part = rest[: self._left]
            rest = rest[self._left :]
            self.pieces[-1].update(part)
            self._left -= len(part)
        return self._handle.write(data)

    def writelines(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            self.write(block)

    def flush(self) -> None:
        self._handle.flush()


def write_file(path: Path, writer: Callable[[BinaryIO], object]) -> str:
    """Write one file of a save through a Python handle, which keeps the reason when the disk is
    full.

    Args:
        path: the file; an existing file is overwritten.
        writer: called with the open binary handle, on which only ``write``, ``writelines`` and
            ``flush`` may be called.

    Returns:
        The digest of what was written, as :func:`file_sha256` gives it.

    Raises:
        OSError: the file cannot be opened or written.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "weights.ckpt"
        >>> write_file(
        ...     path, lambda handle: torch.save({"w": torch.ones(2)}, handle)
        ... ) == file_sha256(path)
        True
    """
    return digest_of_pieces(write_in_pieces(path, writer))


def write_in_pieces(path: Path, writer: Callable[[BinaryIO], object]) -> list[bytes]:
    """Write a file as :func:`write_file` does; return the SHA-256 of each of its pieces."""
    pieces: list[Any] = []

    def write(handle: BinaryIO) -> None:
        hashing = _HashingFile(handle)
        writer(cast("BinaryIO", hashing))
        pieces.extend(hashing.pieces)

    FILES.write(path, write)
    return [piece.digest() for piece in pieces]


def file_sha256(path: Path, piece_bytes: int = PIECE_BYTES, threads: int = 1) -> str:
    """Return the SHA-256 of a file, or of the digests of its pieces if it has several, in
    hexadecimal digits.

    Args:
        path: the file.
        piece_bytes: size of a piece; the last one may be smaller.
        threads: that hash pieces; with one this thread does, also while the interpreter ends.

    Raises:
        OSError: it cannot be read.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_bytes(b"12")
        >>> one, two = (hashlib.sha256(part).digest() for part in (b"1", b"2"))
        >>> file_sha256(path, 1) == hashlib.sha256(one + two).hexdigest()
        True
    """
    starts = range(0, path.stat().st_size, piece_bytes)
    digest_at = functools.partial(_piece_digest, path, piece_bytes)
    if threads == 1 or len(starts) == 1:
        return digest_of_pieces(list(map(digest_at, starts)))
    with ThreadPoolExecutor(threads) as pool:
        return digest_of_pieces(list(pool.map(digest_at, starts)))


def _piece_digest(path: Path, size: int, start: int) -> bytes:
    digest = hashlib.sha256()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as handle:
        handle.seek(start)
        while size and (count := handle.readinto(block[:size])):
            digest.update(block[:count])
            size -= count
    return digest.digest()


def digest_of_pieces(pieces: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its pieces, in hexadecimal digits, as
    :func:`file_sha256` does.

    Args:
        pieces: digests, in the order of the pieces; none of an empty file.

    Ranks: local.

    Example:
        >>> digest_of_pieces([b"0" * 32])[:4]
        '3030'
    """
    return pieces[0].hex() if len(pieces) == 1 else hashlib.sha256(b"".join(pieces)).hexdigest()


def make_staging(final: Path) -> Path:
    """Make the empty directory in which the files of ``final`` are to be written.

    Args:
        final: the name that :func:`commit_staging` will give it.

    Returns:
        A directory beside ``final``, which a search for checkpoints does not find.

    Raises:
        CheckpointError: it cannot be made.

    Ranks: main only (any one process).

    Example:
        >>> import tempfile
        >>> staging = make_staging(Path(tempfile.mkdtemp()) / "CKPT+one")
        >>> staging.name.startswith(".tmp-")
        True
    """
    staging = final.with_name(f"{STAGING_PREFIX}{uuid.uuid4().hex[:12]}")
    try:
        FILES.make_directory(staging)
    except OSError as error:
        raise save_error(final, error) from error
    return staging


@contextlib.contextmanager
def cleaned_on_error(staging: Path, final: Path, bytes_needed: int = 0) -> Iterator[None]:
    """Remove a directory made by :func:`make_staging` if the block that fills it raises.

    Args:
        staging: the directory.
        final: the name that it is to have, for the message.
        bytes_needed: how much the block has to write, about, for the message of a full disk.

    Raises:
        CheckpointError: the block raised an ``Exception``; what means "stop now" comes out as it
            is.

    Ranks: main only (any one process).

    Example:
        >>> import tempfile
        >>> final = Path(tempfile.mkdtemp()) / "CKPT+one"
        >>> staging = make_staging(final)
        >>> with cleaned_on_error(staging, final):
        ...     _ = (staging / "a.ckpt").write_text("1")
        ...     commit_staging(staging, final)
        >>> (final / "a.ckpt").exists()
        True
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # the next save removes what resists
            FILES.remove_tree(staging)
        # that says it all
        if not isinstance(error, Exception) or isinstance(error, FolderInUseError):
            raise
        raise save_error(final, error, bytes_needed) from (_os_error(error) or error)


def commit_staging(
    staging: Path,
    final: Path,
    digests: Mapping[Path, str] = MappingProxyType({}),
    world_size: int = 1,
    *,
    before_rename: Callable[[], object] = lambda: None,
) -> None:
    """Seal a directory made by :func:`make_staging` with a manifest and give it its final name.

    Args:
        staging: the directory; every file in it must be complete.
        final: its name from now on. A directory of that name is replaced.
        digests: the SHA-256 of files in it, by path, as :func:`write_file` returns them; the others
            are read.
        world_size: number of processes of the run; goes into the manifest.
        before_rename: called when all files are on the disk; an exception prevents the commit.

    Raises:
        OSError: anything went wrong; an old directory of that name is back in its place.

    Ranks: main only (any one process).

    Example:
        >>> import tempfile
        >>> final = Path(tempfile.mkdtemp()) / "CKPT+one"
        >>> staging = make_staging(final)
        >>> commit_staging(staging, final)
        >>> final.is_dir(), staging.exists()
        (True, False)
    """
    _seal(staging, world_size, digests)
    before_rename()
    publish_staging(staging, final)


def _seal(staging: Path, world_size: int, digests: Mapping[Path, str]) -> None:
    directories = [staging]
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(staging.rglob("*")):
        if path.is_dir():
            directories.append(path)
            continue
        FILES.sync_file(path)
        digest = digests.get(path) or file_sha256(path)
        files[path.relative_to(staging).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": digest,
        }
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "ddpkit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "world_size": world_size,
        "files": files,
    }
    manifest["digest"] = _manifest_digest(manifest)
    text = json.dumps(manifest, indent=2) + "\n"
    FILES.write(staging / MANIFEST_NAME, lambda handle: handle.write(text.encode()))
    FILES.sync_file(staging / MANIFEST_NAME)
    for directory in reversed(directories):
        FILES.sync_directory(directory)


def sync_tree(directory: Path) -> None:
    """Wait until all files of a directory are on the disk, and then its entries.

    Args:
        directory: with all that is in it.

    Raises:
        OSError: the disk cannot promise it.

    Ranks: local.
    """
    directories = [directory]
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            directories.append(path)
        else:
            FILES.sync_file(path)
    for path in reversed(directories):
        FILES.sync_directory(path)


def publish_staging(staging: Path, final: Path) -> None:
    """Give a directory that has its manifest, and is on the disk, its final name.

    Args:
        staging: the directory.
        final: its name from now on. A directory of that name is replaced.

    Raises:
        OSError: it cannot be renamed; an old directory of that name is back in its place.

    Ranks: main only (any one process).
    """
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    replaces = os.path.lexists(final)
    if replaces:
        FILES.rename(final, replaced)
    try:
        FILES.rename(staging, final)
    except BaseException:
        if replaces:
            FILES.rename(replaced, final)
        raise
    FILES.sync_directory(final.parent)
    if replaces:
        remove_directory(replaced)


def remove_directory(path: Path) -> None:
    """Delete a directory: rename it out of sight at once, then remove its files.

    Args:
        path: the directory; it may be gone already.

    Raises:
        CheckpointError: it cannot be moved out of the way. What cannot be deleted then is left for
            the next save.

    Ranks: main only (any one process).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "CKPT+old"
        >>> path.mkdir()
        >>> remove_directory(path)
        >>> path.exists()
        False
    """
    trash = path.with_name(f"{TRASH_PREFIX}{uuid.uuid4().hex[:12]}")
    try:
        FILES.rename(path, trash)
        FILES.sync_directory(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"cannot remove {path}: {error.strerror or error}. The folder {path.parent} must be "
            "writable."
        ) from error
    with contextlib.suppress(OSError):  # a network file system keeps files that are still open
        FILES.remove_tree(trash)


# ---------------------------------------------------------------------------------------- errors


def save_error(
    final: Path,
    error: BaseException,
    bytes_needed: int = 0,
    what: str = "",
) -> CheckpointError:
    """Say why a save failed, what was and was not lost, and what to do.

    Args:
        final: the directory that was to be made.
        error: what went wrong. The ``OSError`` may hide in its ``__cause__`` or ``__context__``.
        bytes_needed: how much was to be written, about; 0 where it is not known.
        what: cannot be done; by default "cannot save" and ``final``.

    Returns:
        The error to raise.

    Ranks: local.

    Example:
        >>> full = OSError(errno.ENOSPC, "No space left on device")
        >>> "no space left" in str(save_error(Path("/tmp/CKPT+one"), full))
        True
    """
    cause = _os_error(error)
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    if cause is not None and cause.errno in FULL:
        needed = f"about {bytes_needed} bytes needed, " if bytes_needed else ""
        text = (
            f"{cause.strerror}: no space left ({needed}{shutil.disk_usage(final.parent).free} "
            "bytes free). Free some space, or keep fewer checkpoints: a new one is written before "
            "an old one is deleted."
        )
    elif cause is not None and str(cause) not in text:  # torch says where its file stood instead
        text = f"{text}, because of {type(cause).__name__}: {cause}."
    text = text.removesuffix(".")
    return CheckpointError(
        f"{what or f'cannot save {final}'}: {text}. Existing checkpoints are unchanged."
    )


def _os_error(error: BaseException | None) -> OSError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


# ---------------------------------------------------------------------------------------- verifying


def verify(
    directory: Path,
    mode: VerifyMode = "full",
    *,
    only: str | None = None,
) -> list[str]:
    """Say why a checkpoint is not what was saved.

    Args:
        directory: of the checkpoint. One without a manifest is damaged if its ``CKPT.yaml`` is
            ddpkit's. Else it was made by SpeechBrain, and is checked as far as its files allow:
            torch's files carry checksums of their own.
        mode: ``"full"`` reads every byte, ``"size"`` looks at names and sizes, ``"off"`` looks at
            nothing.
        only: look at this file alone.

    Returns:
        One reason per fault, each naming the file; empty when all is well. Files that were added
        later are no fault.

    Raises:
        ConfigError: an unknown ``mode``.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> final = Path(tempfile.mkdtemp()) / "CKPT+one"
        >>> staging = make_staging(final)
        >>> _ = (staging / "a.ckpt").write_text("123")
        >>> commit_staging(staging, final)
        >>> _ = (final / "a.ckpt").write_text("12")
        >>> verify(final)
        ['a.ckpt has 2 bytes instead of 3']
    """
    if mode not in {"full", "size", "off"}:
        raise ConfigError(f"verify(mode={mode!r}): the modes are 'full', 'size' and 'off'.")
    if mode == "off":
        return []
    try:
        if os.path.lexists(directory / MANIFEST_NAME):
            files, piece_bytes = read_manifest(directory / MANIFEST_NAME)
            wanted = [name for name in files if only in {None, name}]
            faults = [_fault(directory, name, files[name], mode, piece_bytes) for name in wanted]
        elif META_MARK in read_text(directory / META_NAME):
            return [f"{MANIFEST_NAME} is missing"]
        else:
            paths = sorted(path for path in directory.rglob("*.ckpt") if only in {None, path.name})
            faults = [_fault_without_manifest(path, mode) for path in paths]
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        return [str(error)]
    return [fault for fault in faults if fault is not None]


def _fault(
    directory: Path,
    name: str,
    entry: Mapping[str, Any],
    mode: VerifyMode,
    piece_bytes: int,
) -> str | None:
    if is_outside(name):
        return f"{MANIFEST_NAME} names a file outside the directory: {name!r}"
    path = directory / name
    try:
        size = _regular(path).st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        if mode == "full" and file_sha256(path, piece_bytes, FILE_THREADS) != entry["sha256"]:
            return f"{name} fails its checksum: its content has changed since it was saved"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be read: {error}"
    return None


def is_outside(name: str) -> bool:
    """Say whether what a manifest names would be a file outside of the checkpoint.

    Args:
        name: of a file, with slashes.

    Ranks: local.

    Example:
        >>> is_outside("a/b.ckpt"), is_outside("../b.ckpt"), is_outside("/b.ckpt")
        (False, True, True)
    """
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts


def _regular(path: Path) -> os.stat_result:
    """Return the status of a regular file, following links; opening a pipe or a device might block
    forever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return status


def _fault_without_manifest(path: Path, mode: VerifyMode) -> str | None:
    if path.is_dir():
        return None
    try:
        size = _regular(path).st_size
        if size == 0:
            return f"{path.name} is empty"
        with path.open("rb") as handle:
            if handle.read(2) != b"PK":  # not a file of torch.save, or one from before torch 1.6
                return None
        with zipfile.ZipFile(path) as archive:
            # torch.save compresses nothing
            if sum(member.file_size for member in archive.infolist()) > size:
                return (
                    f"{path.name} was not written by torch.save: it would unpack to more than it "
                    "holds"
                )
            broken = archive.testzip() if mode == "full" else None
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} fails its checksum in {broken}" if broken else None


def read_text(path: Path, limit: int = MOST_TEXT) -> str:
    """Read a text file of at most so many bytes; refuse pipes, devices and larger files.

    Args:
        path: the file.
        limit: bytes that it may have.

    Returns:
        Its text.

    Raises:
        OSError: it cannot be read, is a pipe or a device, or has more than ``limit`` bytes.
        ValueError: it is not UTF-8.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "CKPT.yaml"
        >>> _ = path.write_text("unixtime: 1.5")
        >>> read_text(path)
        'unixtime: 1.5'
    """
    size = _regular(path).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes; at most {limit} are read")
    return path.read_text(encoding="utf-8")


def read_manifest(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what a manifest says of each file, and the size of the pieces in which files were
    hashed.

    Args:
        path: of the manifest.

    Raises:
        CheckpointError: it cannot be read or understood, or fails its checksum.

    Ranks: local.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    return parse_manifest(text)


def parse_manifest(text: str | bytes) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what the text of a manifest says, as :func:`read_manifest` does.

    Args:
        text: of a manifest.

    Raises:
        CheckpointError: it cannot be understood, or fails its checksum.

    Ranks: local.
    """
    try:
        manifest = json.loads(text)
        stated = manifest.pop("digest")
        piece_bytes = PIECE_BYTES_OF_FORMAT.get(manifest["format"])
        if piece_bytes is None:
            known = " and ".join(map(str, PIECE_BYTES_OF_FORMAT))
            raise CheckpointError(
                f"{MANIFEST_NAME} has format {manifest['format']!r}, this ddpkit reads {known}"
            )
        files: dict[str, Any] = dict(manifest["files"])
        complete = all(
            isinstance(entry, dict) and {"size", "sha256"} <= set(entry) for entry in files.values()
        )
        if stated != _manifest_digest(manifest) or not complete:
            raise CheckpointError(f"{MANIFEST_NAME} fails its checksum")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} cannot be read: {error}") from error
    return files, piece_bytes


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------- the lock


@dataclass(eq=False)
class _Hold:
    """A locked file of this process, and how often it was acquired."""

    path: Path
    handle: int
    record: bytes
    count: int = 0

    def require(self) -> None:
        is_own = False
        with contextlib.suppress(OSError):
            is_own = self.path.read_bytes() == self.record
        if not is_own:
            raise FolderInUseError(
                f"The folder {self.path.parent} is no longer locked by this run: the lock file is "
                f"missing or belongs to {_owner(self.path)}. Nothing more is saved or deleted "
                "there. End this run, or give it a folder of its own."
            )

    def give_back(self) -> None:
        # where it is lost, the file is another run's
        with contextlib.suppress(OSError, FolderInUseError):
            self.require()
            FILES.remove_tree(self.path)
        os.close(self.handle)


def _take(path: Path) -> _Hold:
    end = time.monotonic() + GRACE_SECONDS
    while (handle := _locked(path)) is None:
        if time.monotonic() > end:
            raise FolderInUseError(
                f"the folder {path.parent} is in use by another run: {_owner(path)}. Wait for it, "
                "end it, or give this run a folder of its own."
            )
        time.sleep(NAP_SECONDS)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    who = f"process {os.getpid()} on {socket.gethostname()}, since {since} UTC"
    hold = _Hold(path, handle, f"{who}\n{uuid.uuid4().hex}\n".encode())
    try:
        FILES.write(path, lambda file: file.write(hold.record))
        FILES.sync_file(path)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)
        raise
    return hold


def _locked(path: Path) -> int | None:
    """Open and lock a file; return None where another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    is_own = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # else its owner has just removed it
        is_own = os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        is_own = error.errno in CANNOT_LOCK
        if not is_own:
            raise
        logger.warning_once("%s cannot be locked here: nothing stops a second run.", path.parent)
    finally:
        if not is_own:
            os.close(handle)
    return handle if is_own else None


def _owner(path: Path) -> str:
    words = ""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        words = file.readline(300).strip()
    return words if words.isprintable() and words else "an unknown process"


_HELD: dict[Path, _Hold] = {}
_MUTEX = threading.RLock()


@functools.cache
def _close_in_children() -> None:
    """Have forked children close what this process holds: a loader worker that outlives its rank
    keeps no folder.
    """
    os.register_at_fork(
        before=_MUTEX.acquire,
        after_in_parent=_MUTEX.release,
        after_in_child=_forget,
    )


def _forget() -> None:
    for hold in _HELD.values():
        os.close(hold.handle)
    _HELD.clear()
    _MUTEX.release()


class FolderLock:
    """The right to save into a folder, for one process at a time.

    Within a process several locks of one folder share it, and it is given back with the last. A
    forked child holds nothing. ``kill -9`` frees it at once. See the module for where a second run
    is not stopped.

    Args:
        folder: to be locked; must exist when the lock is taken.
        name: of the lock's file in it.

    Attributes:
        folder: as given, an absolute ``Path``: the working directory may change while it is held.

    Ranks: main only (one process of a run).

    State: a file in the folder as long as it is held.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder)
        >>> with lock.hold():
        ...     lock.require()
        ...     [path.name for path in folder.iterdir()]
        ['.lock']
        >>> list(folder.iterdir())
        []
    """

    def __init__(self, folder: str | os.PathLike[str], name: str = LOCK_NAME) -> None:
        self.folder = Path(folder).absolute()
        self._name = name
        self._holds: list[_Hold] = []

    @property
    def held(self) -> bool:
        """Whether this lock was acquired by this process, and not yet released."""
        return bool(self._holds) and self._holds[-1] in _HELD.values()

    def acquire(self) -> None:
        """Take the lock, or share it if this process has it already; then other runs cannot save in
        the folder.

        Waits two seconds for a run that is about to end.

        Raises:
            FolderInUseError: another run has it, or this one has lost it.
            CheckpointError: the folder is not there, full or read-only: a run that could not save
                says so before it trains.

        Ranks: main only.
        """
        _close_in_children()
        with _MUTEX:
            path = Path(os.path.realpath(self.folder)) / self._name
            try:
                hold = _HELD.get(path) or _take(path)
            except OSError as error:
                what = (
                    f"cannot save or delete a checkpoint in {self.folder}, because its lock "
                    f"{path} cannot be taken"
                )
                reason = save_error(path, error, what=what)
                remedy = f"Give another folder, {OUTPUT_EXAMPLE}."
                if error.errno in FULL:  # the reason has a remedy already
                    remedy = f"Or give another folder, {OUTPUT_EXAMPLE}."
                raise CheckpointUsageError(f"{reason} {remedy}") from error
            _HELD[path] = hold
            hold.require()
            hold.count += 1
            self._holds.append(hold)

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one in this process gives the folder back. Without
        one, does nothing.

        Ranks: main only.
        """
        with _MUTEX:
            if not self.held:
                return
            hold = self._holds.pop()
            hold.count -= 1
            if not hold.count:
                del _HELD[hold.path]
                hold.give_back()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock for the length of a ``with`` block.

        Raises:
            CheckpointError: as :meth:`acquire`.

        Ranks: main only.
        """
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def require(self) -> None:
        """Make sure that the folder is still this run's, right before something in it is renamed or
        deleted.

        Costs one small read; may be called from any thread.

        Raises:
            CheckpointError: the lock is not held, or another run has taken it over.

        Ranks: main only.
        """
        if not self.held:
            raise CheckpointError(f"the lock of {self.folder} is not held: acquire it first.")
        self._holds[-1].require()

    def clean(self) -> None:
        """Remove what interrupted saves have left, and restore the name of what one of them was
        about to replace.

        Raises:
            CheckpointError: as :meth:`require`; what cannot be removed is left without a word.

        Ranks: main only, with no save of this process in progress.
        """
        names = [path.name for path in self.folder.iterdir()]
        self.require()  # what another run makes from now on is not in the list
        for name in names:
            final = self.folder / name.removeprefix(REPLACED_PREFIX)
            with contextlib.suppress(CheckpointError, OSError):
                if name.startswith(REPLACED_PREFIX) and not os.path.lexists(final):
                    FILES.rename(self.folder / name, final)
                    logger.warning(
                        "%s is back: the save that was to replace it did not end.",
                        final,
                    )
                elif (
                    name.startswith((STAGING_PREFIX, TRASH_PREFIX))
                    and (self.folder / name).is_dir()
                ):
                    remove_directory(self.folder / name)
