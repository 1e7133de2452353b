"""Looking at a folder of checkpoints without changing it: what is there, where each stands, and what is wrong.

Nothing here locks, writes, logs or runs anything. A file is opened only if it is a regular one: reading a pipe or a
device would not end.
"""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpkit.checkpoint_records import (
    DIRECTORY_PREFIX,
    META_NAME,
    SUFFIX,
    Checkpoint,
    ckpt_recency,
    damage_of,
    read_checkpoint,
)
from ddpkit.errors import CheckpointError
from ddpkit.plain_yaml import load_plain_yaml
from ddpkit.storage import MANIFEST_NAME, REPLACED_PREFIX, STAGING_PREFIX, TRASH_PREFIX, VerifyMode, read_text

__all__ = ["Found", "Leftover", "find", "find_leftovers", "is_checkpoint", "look_at", "names_checkpoint", "small_text"]

MAX_META_BYTES = 4_000_000
MAX_TEXT_BYTES = 64_000
MAX_NAMED = 5
UNSEEN = "it cannot be looked into"
BRAIN = f"brain{SUFFIX}"

#: What the meta of a checkpoint says beside the metrics.
NO_METRICS = frozenset({"unixtime", "end-of-epoch", "brain_intra_epoch_ckpt", "epoch"})


@dataclass(frozen=True)
class Found:
    """One directory that is, or was, a checkpoint.

    Attributes:
        path: the directory.
        meta: what ``CKPT.yaml`` holds; empty if it cannot be read.
        files: size in bytes of each regular file, by its name relative to the directory.
        manifest: what ``manifest.json`` says beside the files; empty if there is none that can be read.
        reasons: what is wrong; empty for a checkpoint that is whole as far as was looked.

    Ranks: local.

    Example:
        >>> found = Found(Path("CKPT+a"), {"unixtime": 1.0, "loss": 0.5, "epoch": 3}, {"model.ckpt": 10})
        >>> found.metrics, found.epoch, found.size
        ({'loss': 0.5}, 3, 10)
    """

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @functools.cached_property
    def brain(self) -> dict[str, Any]:
        """What ``brain.ckpt`` says of the loop; empty if it is not there or is no YAML. Read when it is asked for."""
        return _brain(self.path, self.files)

    @property
    def size(self) -> int:
        """All its files in bytes."""
        return sum(self.files.values())

    @property
    def saved(self) -> float | None:
        """When it was saved, in seconds since 1970; None if it does not say."""
        return ckpt_recency(self.checkpoint) if self.meta else None

    @property
    def ends_epoch(self) -> bool:
        """Whether it was made at the end of an epoch."""
        return bool(self.meta.get("end-of-epoch", True))

    @property
    def epoch(self) -> int | None:
        """The epoch that had ended, or that it was made in; None if it is not known."""
        told = self.meta.get("epoch")
        return told if isinstance(told, int) and not isinstance(told, bool) else self._counter

    @functools.cached_property
    def _counter(self) -> int | None:
        return _counter(self.path, self.files)

    @property
    def metrics(self) -> dict[str, Any]:
        """What the recipe stored with it, but for the epoch."""
        return {name: value for name, value in self.meta.items() if name not in NO_METRICS}

    @property
    def checkpoint(self) -> Checkpoint:
        """The same as the library's other functions want it."""
        own = {name.removesuffix(SUFFIX): self.path / name for name in self.files if _is_recoverable(name)}
        return Checkpoint(self.path, self.meta, own)


def _is_recoverable(name: str) -> bool:
    return name.endswith(SUFFIX) and "/" not in name


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint's directory: it has one's meta file or manifest.

    Ranks: local.

    Example:
        >>> is_checkpoint(Path("/"))
        False
    """
    return os.path.lexists(path / META_NAME) or os.path.lexists(path / MANIFEST_NAME)


def names_checkpoint(path: Path) -> bool:
    """Say whether a path means one checkpoint, or what is left of one, and not a folder of them.

    Ranks: local.

    Example:
        >>> names_checkpoint(Path("/"))
        False
    """
    if is_checkpoint(path):
        return True
    if not path.name.startswith(DIRECTORY_PREFIX) or not os.path.isdir(path):  # noqa: PTH112 -- Path's raises
        return False
    try:
        return not _directories(path)
    except OSError:
        return True  # looking at it says why


def find(path: Path, mode: VerifyMode = "size") -> list[Found]:
    """Look at a checkpoint, or at every one of a folder.

    Args:
        path: the checkpoint, or the folder that holds them.
        mode: how closely to look, as for :func:`ddpkit.storage.verify`.

    Returns:
        The newest first; those that do not say when they were saved by the date of their directory.

    Raises:
        CheckpointError: it is not there or cannot be read.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> find(Path(tempfile.mkdtemp()))
        []
    """
    if names_checkpoint(path):
        return [look_at(path, mode)]
    try:
        paths = _directories(path)
    except FileNotFoundError as error:
        raise CheckpointError(_what_is_missing(path)) from error
    except NotADirectoryError as error:
        raise CheckpointError(_what_is_no_folder(path)) from error
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    return sorted((look_at(each, mode) for each in paths), key=_when, reverse=True)


def _directories(folder: Path) -> list[Path]:
    """List the directories of a folder that are named like checkpoints."""
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.name.startswith(DIRECTORY_PREFIX) and entry.is_dir()]


def _what_is_missing(path: Path) -> str:
    if not path.name.startswith(DIRECTORY_PREFIX):
        return f"there is no folder {str(path)!r}."
    try:
        names = sorted((each.name for each in _directories(path.parent)), reverse=True)
    except OSError:
        return f"there is no checkpoint {str(path)!r}, and no folder {str(path.parent)!r}."
    there = ", ".join(map(ascii, names[:MAX_NAMED])) or "none"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"there is no checkpoint {path.name!r} in {str(path.parent)!r}; there is {there}{more}."


def _what_is_no_folder(path: Path) -> str:
    for parent in path.parents:
        if is_checkpoint(parent):
            return f"{str(path)!r} is a file of the checkpoint {str(parent)!r}: give that."
    return f"{str(path)!r} is a file. Give a checkpoint's directory, or the folder that holds the checkpoints."


def _when(found: Found) -> tuple[float, str]:
    if found.saved is not None:
        return found.saved, found.path.name
    try:
        return found.path.stat().st_mtime, found.path.name
    except OSError:
        return 0.0, found.path.name


def look_at(path: Path, mode: VerifyMode = "size") -> Found:
    """Look at one checkpoint's directory. Whatever is wrong with it becomes a reason.

    Args:
        path: the directory.
        mode: how closely to look, as for :func:`ddpkit.storage.verify`.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> look_at(Path(tempfile.mkdtemp())).reasons
        ('it has no CKPT.yaml',)
    """
    files, strange = _files(path)
    meta, meta_reasons = _meta(path, files)
    if not files and strange:
        meta_reasons = []  # what cannot be seen may be there
    reasons = [*strange, *meta_reasons]
    if not strange and META_NAME in files:
        reasons += damage_of(path, mode)
    return Found(path, meta, files, _manifest(path, files), tuple(dict.fromkeys(reasons)))


def _files(path: Path) -> tuple[dict[str, int], list[str]]:
    """List the regular files below a directory; links to directories are not followed."""
    files: dict[str, int] = {}
    strange: list[str] = []
    errors: list[OSError] = []
    for folder, directories, names in os.walk(path, onerror=errors.append):
        directories.sort()
        for name in sorted([*names, *(inner for inner in directories if (Path(folder) / inner).is_symlink())]):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            try:
                status = file.stat()
            except OSError as error:
                strange.append(f"{relative} cannot be read: {error.strerror or error}")
                continue
            if stat.S_ISREG(status.st_mode):
                files[relative] = status.st_size
            else:
                strange.append(f"{relative} is no regular file")
    for failure in errors:
        inside = Path(failure.filename).relative_to(path).as_posix()
        strange.append(f"{UNSEEN if inside == '.' else f'{inside} cannot be read'}: {failure.strerror}")
    return files, strange


def _meta(path: Path, files: Mapping[str, int]) -> tuple[dict[str, Any], list[str]]:
    if META_NAME not in files:
        return {}, [f"it has no {META_NAME}"]
    if files[META_NAME] > MAX_META_BYTES:
        return {}, [f"{META_NAME} has {files[META_NAME]} bytes, too many for one"]
    try:
        return read_checkpoint(path).meta, []
    except CheckpointError as error:
        return {}, [str(error)]


def _manifest(path: Path, files: Mapping[str, int]) -> dict[str, Any]:
    if MANIFEST_NAME not in files:
        return {}
    try:
        manifest = json.loads(read_text(path / MANIFEST_NAME))
    except (OSError, ValueError, RecursionError):
        return {}  # verifying says why
    hidden = {"files", "digest", "format"}
    return {name: manifest[name] for name in manifest if name not in hidden} if isinstance(manifest, dict) else {}


def small_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str | None:
    """Return what a small file of text holds; None for one that is large, cannot be read or is no text.

    Args:
        path: a regular file.
        limit: what small is, in bytes.

    Ranks: local.

    Example:
        >>> small_text(Path("/there/is/no/such/file")) is None
        True
    """
    try:
        with path.open("rb") as handle:
            content = handle.read(limit + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    readable = all(character.isprintable() or character in "\n\r\t" for character in text)
    return text if len(content) <= limit and readable else None


def _brain(path: Path, files: Mapping[str, int]) -> dict[str, Any]:
    text = small_text(path / BRAIN) if BRAIN in files else None
    try:
        state = load_plain_yaml(text or "")
    except CheckpointError:
        return {}
    return state if isinstance(state, dict) else {}


def _counter(path: Path, files: Mapping[str, int]) -> int | None:
    """Read the epoch out of what a counter saves: a number, or YAML with ``current_epoch``."""
    for name in files:
        told_by_name = any(word in name.lower() for word in ("counter", "epoch", "stopper"))
        if not told_by_name or not _is_recoverable(name) or "dataloader" in name:
            continue
        try:
            state = load_plain_yaml(small_text(path / name, 1000) or "")
        except CheckpointError:
            continue
        number = state.get("current_epoch") if isinstance(state, dict) else state
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return None


# ---------------------------------------------------------------------------------------- leftovers


@dataclass(frozen=True)
class Leftover:
    """What an interrupted save or removal has left.

    Attributes:
        path: the directory.
        size: in bytes.
        replaced: the checkpoint that this one is the old version of, if the save that was to replace it died
            between two renames; the next start gives the name back.

    Ranks: local.

    Example:
        >>> Leftover(Path(".tmp-1"), 10).replaced is None
        True
    """

    path: Path
    size: int
    replaced: str | None = None


def find_leftovers(folder: Path) -> list[Leftover]:
    """List what interrupted saves and removals have left in a folder.

    Args:
        folder: where the checkpoints are.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / ".tmp-0123").mkdir()
        >>> [leftover.path.name for leftover in find_leftovers(folder)]
        ['.tmp-0123']
    """
    try:
        left = [path for path in folder.iterdir() if path.name.startswith((STAGING_PREFIX, TRASH_PREFIX))]
    except OSError:
        return []
    found = []
    for path in sorted(path for path in left if path.is_dir()):
        original = path.name.removeprefix(REPLACED_PREFIX)
        is_only_one = original != path.name and not os.path.lexists(folder / original)
        found.append(Leftover(path, sum(_files(path)[0].values()), original if is_only_one else None))
    return found
