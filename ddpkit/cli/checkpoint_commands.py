"""The commands of ``python -m ddpkit ckpt``. This module loads torch; :mod:`ddpkit.cli.ckpt` does not.

Looking changes nothing: it takes no lock, writes nothing, and runs no code of a checkpoint. A file may come from
anywhere: only regular files are opened, and text is shown without control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import stat
import sys
import time
import uuid
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpkit.base.plain_yaml import load_plain_yaml
from ddpkit.checkpointing.hooks import safe_load
from ddpkit.checkpointing.index import (
    DIRECTORY_PREFIX,
    META_NAME,
    SUFFIX,
    Checkpoint,
    Selection,
    average_checkpoints,
    ckpt_recency,
    damage_of,
    ranked,
    read_checkpoint,
)
from ddpkit.checkpointing.storage import MANIFEST_NAME, STAGING_PREFIX, TRASH_PREFIX, VerifyMode, read_text
from ddpkit.errors import CheckpointError, ConfigError, MissingExtraError

__all__ = ["command_average", "command_export", "command_ls", "command_show", "command_verify"]

PREFIX = "python -m ddpkit: error: "
NO_METRICS = frozenset({"unixtime", "end-of-epoch", "brain_intra_epoch_ckpt", "epoch"})
MAX_TEXT_BYTES, MAX_META_BYTES, KEPT_BYTES, MAX_ITEMS, MAX_DEPTH = 64_000, 4_000_000, 4096, 2000, 8
OF_TORCH = (b"PK", b"\x80")  # how a zip archive begins, and a pickle
UNKNOWN = "?"
UNITS = ("B", "kB", "MB", "GB", "TB")


# ---------------------------------------------------------------------------------------- text


def say(text: str = "") -> None:
    """Write a line to the standard output, whatever its encoding."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def complain(text: str) -> None:
    """Write a line to the standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")


def printable(text: Any) -> str:
    """Return a text as one line, without anything that a terminal would act upon."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def size_text(size: float) -> str:
    """Return a number of bytes with a unit."""
    power = 0
    while size >= 999.5 and power < len(UNITS) - 1:  # noqa: PLR2004 -- above it three digits round to 1000
        size, power = size / 1000, power + 1
    return f"{size:.0f} B" if power == 0 else f"{size:#.3g} {UNITS[power]}".replace(". ", " ")


def plain(value: Any, budget: list[int] | None = None, depth: int = 0) -> Any:
    """Turn a value of any origin into what JSON can hold; of a deep, long or endless one only the beginning."""
    budget = [MAX_ITEMS] if budget is None else budget
    budget[0] -= 1
    if isinstance(value, torch.Tensor):
        is_small = value.device.type != "meta" and value.numel() <= 16 and not value.is_complex()  # noqa: PLR2004
        value = value.tolist() if is_small else tensor_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if depth >= MAX_DEPTH or budget[0] <= 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(name): plain(inner, budget, depth + 1) for name, inner in list(value.items())[: max(budget[0], 0)]}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, budget, depth + 1) for inner in list(value)[: max(budget[0], 0)]]
    return str(value)


def value_text(value: Any, limit: int = 120) -> str:
    """Return a value in at most ``limit`` characters of one line."""

    def words(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{name}: {words(inner)}" for name, inner in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ", ".join(map(words, one)) + "]"
        return printable(f"{one:.4g}" if isinstance(one, float) else one)

    text = words(plain(value))
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def tensor_text(value: torch.Tensor) -> str:
    """Return a tensor's dtype and shape."""
    shape = " x ".join(map(str, value.shape)) or "one number"
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def several(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ---------------------------------------------------------------------------------------- looking


@dataclass(frozen=True)
class Entry:
    """One directory that is, or was, a checkpoint.

    Attributes:
        path: the directory.
        meta: of ``CKPT.yaml``; empty if it cannot be read.
        files: size in bytes of each regular file, by its relative name.
        manifest: what ``manifest.json`` says beside the files; empty if it cannot be read.
        brain: what ``brain.ckpt`` says of the loop; likewise.
        reasons: what is wrong.
    """

    path: Path
    meta: Mapping[str, Any]
    files: Mapping[str, int]
    manifest: Mapping[str, Any]
    brain: Mapping[str, Any]
    reasons: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def checkpoint(self) -> Checkpoint:
        own = {name.removesuffix(SUFFIX): self.path / name for name in self.files if _is_recoverable(name)}
        return Checkpoint(self.path, dict(self.meta), own)

    @property
    def saved(self) -> float | None:
        return ckpt_recency(self.checkpoint) if self.meta else None

    @property
    def metrics(self) -> dict[str, Any]:
        return {name: value for name, value in self.meta.items() if name not in NO_METRICS}

    @property
    def epoch(self) -> int | None:
        """The epoch that the meta names, or else an epoch counter: a number, or YAML with ``current_epoch``."""
        counters = [
            _yaml(self.path / name)
            for name in self.files
            if _is_recoverable(name) and any(word in name.lower() for word in ("counter", "stopper"))
        ]
        for told in (self.meta.get("epoch"), *counters):
            number = told.get("current_epoch") if isinstance(told, dict) else told
            if isinstance(number, int) and not isinstance(number, bool):
                return number
        return None


def _is_recoverable(name: str) -> bool:
    return name.endswith(SUFFIX) and "/" not in name


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint's directory: it has one's meta file or manifest."""
    return os.path.lexists(path / META_NAME) or os.path.lexists(path / MANIFEST_NAME)


def _directories(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.name.startswith(DIRECTORY_PREFIX) and entry.is_dir()]


def find(path: Path, mode: VerifyMode = "size") -> list[Entry]:
    """Look at a checkpoint, or at every one of a folder, the newest first.

    Raises:
        CheckpointError: the path is not there, cannot be read, or is a file.
    """
    try:
        if not path.exists():
            raise CheckpointError(f"there is no {_noun(path)} {str(path)!r}.")
        if not path.is_dir():
            raise CheckpointError(
                f"{str(path)!r} is a file. Give a checkpoint's directory, or the folder of checkpoints."
            )
        is_one = is_checkpoint(path) or (path.name.startswith(DIRECTORY_PREFIX) and not _directories(path))
        paths = [path] if is_one else _directories(path)
    except PermissionError as error:
        if _noun(path) == "folder":
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        paths = [path]  # looking at it says why
    return sorted(
        (look_at(each, mode) for each in paths), key=lambda one: (one.saved or 0.0, one.path.name), reverse=True
    )


def _noun(path: Path) -> str:
    return "checkpoint" if path.name.startswith(DIRECTORY_PREFIX) else "folder"


def look_at(path: Path, mode: VerifyMode = "size") -> Entry:
    """Look at one checkpoint's directory. Whatever is wrong with it becomes a reason."""
    files, reasons = _files(path)
    meta: dict[str, Any] = {}
    if not reasons and META_NAME not in files:
        reasons.append(f"it has no {META_NAME}")
    elif files.get(META_NAME, 0) > MAX_META_BYTES:
        reasons.append(f"{META_NAME} has {files[META_NAME]} bytes, too many for one")
    elif META_NAME in files:
        try:
            meta = read_checkpoint(path).meta
        except CheckpointError as error:
            reasons.append(str(error))
        reasons += damage_of(path, mode)
    manifest: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # verifying says why
        manifest = json.loads(read_text(path / MANIFEST_NAME)) if MANIFEST_NAME in files else {}
    hidden = {"files", "digest", "format"}
    manifest = {name: manifest[name] for name in manifest if name not in hidden} if isinstance(manifest, dict) else {}
    brain = _yaml(path / f"brain{SUFFIX}") if f"brain{SUFFIX}" in files else None
    return Entry(path, meta, files, manifest, brain if isinstance(brain, dict) else {}, tuple(dict.fromkeys(reasons)))


def _files(path: Path) -> tuple[dict[str, int], list[str]]:
    """List the regular files below a directory, and what else is there; links to directories are not followed."""
    files: dict[str, int] = {}
    reasons: list[str] = []
    for folder, directories, names in os.walk(path, onerror=lambda error: reasons.append(_unseen(path, error))):
        directories.sort()
        for name in sorted([*names, *(inner for inner in directories if Path(folder, inner).is_symlink())]):
            file = Path(folder, name)
            relative = file.relative_to(path).as_posix()
            try:
                status = file.stat()
            except OSError as error:
                reasons.append(f"{relative} cannot be read: {error.strerror or error}")
                continue
            if stat.S_ISREG(status.st_mode):
                files[relative] = status.st_size
            else:
                reasons.append(f"{relative} is no regular file")
    return files, reasons


def _unseen(path: Path, error: OSError) -> str:
    inside = Path(error.filename).relative_to(path).as_posix()
    return f"{'it' if inside == '.' else inside} cannot be looked into: {error.strerror}"


def _text(path: Path) -> str | None:
    """Return the content of a small text file; None if it is large, unreadable, or not text."""
    try:
        with path.open("rb") as handle:
            content = handle.read(MAX_TEXT_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    is_text = all(character.isprintable() or character in "\n\r\t" for character in text)
    return text if is_text and len(content) <= MAX_TEXT_BYTES else None


def _yaml(path: Path) -> Any:
    try:
        return load_plain_yaml(_text(path) or "")
    except CheckpointError:
        return None


# ---------------------------------------------------------------------------------------- ls


def command_ls(options: argparse.Namespace) -> int:
    """List the checkpoints of a folder; return 0, or 1 if there is none."""
    found = find(options.path, options.verify)
    leftovers = [] if is_checkpoint(options.path) else _leftovers(options.path)
    if options.json:
        say(json.dumps(plain_listing(options, found, leftovers), indent=2, allow_nan=False))
    elif found:
        for line in _listing(found, options.verify):
            say(line)
        damaged = sum(bool(one.reasons) for one in found)
        size = size_text(sum(one.size for one in found))
        text = f"{several(len(found), 'checkpoint')} in {printable(options.path)}, {size}"
        bare = sum(not one.manifest and not one.reasons for one in found)
        text += f", {damaged} damaged" if damaged else ""
        say(f"\n{text}{f', {bare} without a manifest (as SpeechBrain makes them)' if bare else ''}.")
        how = {"size": "Sizes were compared; --verify full reads every byte.", "off": "Nothing was compared."}
        if options.verify in how:
            say(how[options.verify])
    for path, left in [] if options.json else leftovers:
        say(f"{printable(path.name)} ({size_text(left)}) is left of a save or a removal that is running, or died. The "
            "next run removes it, or gives it its name back.")  # fmt: skip
    if not found:
        complain(f"{PREFIX}{_none_in(options.path)}")
    return 0 if found else 1


def plain_listing(options: argparse.Namespace, found: Iterable[Entry], leftovers: Iterable[tuple[Path, int]]) -> Any:
    """Return all that is known, for JSON."""
    return {
        "folder": str(options.path),
        "verify": options.verify,
        "checkpoints": [
            {
                "name": one.path.name,
                "path": str(one.path),
                "unixtime": one.saved,
                "end_of_epoch": bool(one.meta.get("end-of-epoch", True)) if one.meta else None,
                "epoch": one.epoch,
                "step": plain(one.brain.get("step")),
                "optimizer_step": plain(one.brain.get("optimizer_step")),
                "bytes": one.size,
                "world_size": plain(one.manifest.get("world_size")),
                "metrics": plain(one.metrics),
                "meta": plain(one.meta),
                "manifest": plain(one.manifest),
                "files": dict(one.files),
                "damaged": bool(one.reasons),
                "reasons": list(one.reasons),
            }
            for one in found
        ],
        "leftovers": [{"name": path.name, "bytes": size} for path, size in leftovers],
    }


def _listing(found: Sequence[Entry], mode: str) -> list[str]:
    rows: list[tuple[str, ...]] = [("name", "saved", "epoch", "step", "size", "ranks", "files", "")]
    for one in found:
        state = "damaged" if one.reasons else {"size": "ok", "full": "verified", "off": UNKNOWN}[mode]
        metrics = "  ".join(f"{printable(name)}={value_text(value, 40)}" for name, value in one.metrics.items())
        step, ranks = one.brain.get("optimizer_step", UNKNOWN), one.manifest.get("world_size", UNKNOWN)
        name, when, epoch = printable(one.path.name), _time_text(one.saved, "%Y-%m-%d %H:%M"), _epoch_text(one)
        rows.append(
            (name, when, epoch, value_text(step, 20), size_text(one.size), value_text(ranks, 20), state, metrics)
        )
    known = [column for column in zip(*rows, strict=True) if set(column[1:]) != {UNKNOWN}]
    lines = table(list(zip(*known, strict=True)))
    reasons = [[f"    damaged: {printable(reason)}" for reason in one.reasons] for one in found]
    return [lines[0], *(text for line, below in zip(lines[1:], reasons, strict=True) for text in (line, *below))]


def _epoch_text(one: Entry) -> str:
    epoch = UNKNOWN if one.epoch is None else str(one.epoch)
    if not one.meta:
        return UNKNOWN
    if one.meta.get("end-of-epoch", True):
        return f"end of {epoch}"
    batch = one.brain.get("step")
    return f"in {epoch}, batch {batch}" if isinstance(batch, int) else f"in {epoch}"


def _time_text(seconds: float | None, form: str) -> str:
    try:
        return UNKNOWN if seconds is None else time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _leftovers(folder: Path) -> list[tuple[Path, int]]:
    try:
        left = sorted(path for path in folder.iterdir() if path.name.startswith((STAGING_PREFIX, TRASH_PREFIX)))
    except OSError:
        return []
    return [(path, sum(_files(path)[0].values())) for path in left if path.is_dir()]


def _none_in(folder: Path) -> str:
    """Say that there is no checkpoint, and where they are if they are one or two folders further down."""
    near: list[Path] = []
    with contextlib.suppress(OSError):
        near = sorted(
            {one.parent for form in ("*/CKPT*", "*/*/CKPT*") for one in folder.glob(form) if is_checkpoint(one)}
        )
    hint = f" Is {printable(repr(str(near[0])))} meant?" if near else ""
    return f"there is no checkpoint in {printable(repr(str(folder)))}.{hint}"


# ---------------------------------------------------------------------------------------- show, verify


def command_show(options: argparse.Namespace) -> int:
    """Show what is in one checkpoint, or in the newest of a folder that is whole; return 1 if it is damaged."""
    found = find(options.path, options.verify)
    if not found:
        raise CheckpointError(_none_in(options.path))
    one = next((one for one in found if not one.reasons), found[0])
    for line in _facts(one, options.verify):
        say(line)
    for name, size in one.files.items():
        if name not in {META_NAME, MANIFEST_NAME}:
            say(f"\n{printable(name)}, {size_text(size)}")
            for line in describe(one.path / name, tensors=options.tensors, limit=options.lines):
                say(f"  {line}".rstrip())
    return 1 if one.reasons else 0


def _facts(one: Entry, mode: str) -> list[str]:
    made = ", ".join(f"{printable(name)} {value_text(value, 60)}" for name, value in one.manifest.items())
    state = {"size": "sizes are right", "full": "every byte is right", "off": "not compared"}[mode]
    facts = {
        "folder": printable(one.path.parent.absolute()),
        "saved": _time_text(one.saved, "%Y-%m-%d %H:%M:%S"),
        "epoch": _epoch_text(one),
        "made by": made or "unknown: there is no manifest, as in a checkpoint of SpeechBrain",
        "files": f"{several(len(one.files), 'file')}, {size_text(one.size)}, {'damaged' if one.reasons else state}",
    }
    lines = [printable(one.path.name), *(f"  {name:8}  {text}" for name, text in facts.items())]
    lines += [f"  damaged   {printable(reason)}" for reason in one.reasons]
    told = {name: value for name, value in one.meta.items() if name not in {"unixtime", "end-of-epoch"}}
    return [
        *lines,
        *(["  meta"] if told else []),
        *(f"    {printable(n)}: {value_text(v, 400)}" for n, v in told.items()),
    ]


def describe(path: Path, *, tensors: bool = False, limit: int = 20) -> list[str]:
    """Say what a regular file holds, in lines for a person."""
    try:
        with path.open("rb") as handle:
            start = handle.read(2)
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    if not start:
        return ["empty"]
    if start.startswith(OF_TORCH):
        try:
            value = load_plainly(path, map_location=_without_large_storages)
        except CheckpointError as error:
            return [printable(error)]
        lines, found = _summary(value), dict(tensors_in(value))
        rows = [(printable(name), tensor_text(tensor)) for name, tensor in found.items()] if tensors else []
        return [*_cut(lines, limit), *(["", *table(rows)] if rows else [])]
    text = _text(path)
    if text is None:
        return ["neither text nor a file of torch.save: not looked into"]
    return _cut([printable(line) for line in text.splitlines()], limit)


def _cut(lines: list[str], limit: int) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"... and {len(lines) - limit} more lines"]


def _summary(value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{type(value).__name__}: {value_text(value, 400)}"]
    if isinstance(value.get("ranks"), list):
        return [f"what is saved of each of {several(len(value['ranks']), 'rank')}"]
    amount = _amount(dict(tensors_in(value)))
    if {"state", "param_groups"} <= value.keys() and isinstance(value["param_groups"], list):
        groups = [
            ", ".join(
                f"{printable(name)}={value_text(option, 40)}" for name, option in group.items() if name != "params"
            )
            for group in value["param_groups"]
            if isinstance(group, Mapping)
        ]
        return [f"optimizer: {amount}", *(f"group {number}: {text}" for number, text in enumerate(groups))]
    if value and all(isinstance(inner, torch.Tensor) for inner in value.values()):
        return [f"module: {amount}"]
    return [f"{printable(name)}: {value_text(inner)}" for name, inner in value.items()] or ["an empty mapping"]


def _amount(found: Mapping[str, torch.Tensor]) -> str:
    kinds = Counter(tensor_text(tensor).split(" ")[0] for tensor in found.values())
    text = ", ".join(name if len(kinds) == 1 else f"{count} {name}" for name, count in kinds.most_common())
    numbers = several(sum(tensor.numel() for tensor in found.values()), "number")
    return f"{numbers} in {several(len(found), 'tensor')}{f' ({text})' if text else ''}"


def tensors_in(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk through containers; yield each tensor with the names that lead to it, joined by dots."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    if depth <= MAX_DEPTH and isinstance(value, (list, tuple, Mapping)):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_in(inner, f"{prefix}.{name}" if prefix else str(name), depth + 1)


def load_plainly(path: Path, map_location: Any = "cpu") -> Any:
    """Load a file of ``torch.save`` without running code from it, and without blowing it up.

    Raises:
        CheckpointError: it cannot be read, is no such file, would run code, or is compressed, which ``torch.save``
            never does: a small file could then ask for any amount of memory.
    """
    try:
        with path.open("rb") as handle:
            if not handle.read(2).startswith(OF_TORCH):
                raise CheckpointError(f"cannot load {path}: it is no file of torch.save, and holds no tensors.")
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise CheckpointError(f"cannot load {path}: it is compressed, which torch.save never does.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch speaks of its older formats to whoever wrote them
            return safe_load(path, map_location)
    except CheckpointError:
        raise
    except Exception as error:  # what torch's reader does not expect of a file
        raise CheckpointError(f"cannot load {path}: {type(error).__name__}: {error}.") from error


def _without_large_storages(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
    """Keep nothing of a large storage but its size: looking needs little memory."""
    if storage.nbytes() <= KEPT_BYTES:
        return storage
    return torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]


def command_verify(options: argparse.Namespace) -> int:
    """Compare every byte with what was saved; return 1 if any is damaged."""
    damaged = False
    for path in options.paths:
        found = find(path, "full")
        if not found:
            raise CheckpointError(_none_in(path))
        for one in found:
            damaged = damaged or bool(one.reasons)
            about = f"{several(len(one.files), 'file')}, {size_text(one.size)}"
            whole = f"whole{'' if one.manifest else ' as far as can be told without a manifest'} ({about})"
            broken = f"damaged: {printable('; '.join(one.reasons))}"
            say(f"{printable(one.path.name)}: {broken if one.reasons else whole}")
    return 1 if damaged else 0


# ---------------------------------------------------------------------------------------- average, export


def command_average(options: argparse.Namespace) -> int:
    """Average a module over checkpoints into one file."""
    _check_output(options)
    chosen = choose(options.paths, Selection(max_key=options.max_key, min_key=options.min_key), options.num)
    for checkpoint in chosen:
        _require(checkpoint, options.recoverable)
    try:
        state = average_checkpoints(chosen, options.recoverable, parameter_loader=_load_module)
    except ConfigError as error:
        raise CheckpointError(f"{printable(options.recoverable)!r} cannot be averaged: {error}") from error
    say(f"average of {several(len(chosen), 'checkpoint')}: {', '.join(printable(one.path.name) for one in chosen)}")
    _write(state, options)
    return 0


def command_export(options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file of their own."""
    _check_output(options)
    [checkpoint] = choose([options.path], Selection(max_key=options.max_key, min_key=options.min_key), 1)
    state = _load_module(_require(checkpoint, options.recoverable))
    say(f"from {printable(checkpoint.path.name)}")
    _write(state, options)
    return 0


def choose(paths: Sequence[Path], selection: Selection, limit: int | None) -> list[Checkpoint]:
    """Choose the best checkpoints that are whole to the last byte; a damaged one in a folder is passed over.

    Raises:
        CheckpointError: none counts, or one that was named is damaged.
    """
    found = {one.path: one for path in paths for one in find(path, "off")}
    where = ", ".join(repr(str(path)) for path in paths)
    chosen: list[Checkpoint] = []
    for checkpoint in ranked([one.checkpoint for one in found.values() if one.meta], selection):
        if limit is not None and len(chosen) >= limit:
            break
        looked = look_at(checkpoint.path, "full")
        if not looked.reasons:
            chosen.append(checkpoint)
            continue
        text = f"{printable(looked.path)} is damaged: {printable('; '.join(looked.reasons))}"
        if looked.path in paths:
            raise CheckpointError(f"{text}. Name another checkpoint.")
        complain(f"{text}; passed over.")
    key = selection.max_key or selection.min_key
    if not chosen and key is not None and not any(key in one.meta for one in found.values()):
        keys = sorted({printable(name) for one in found.values() for name in one.meta})
        raise CheckpointError(
            f"no checkpoint in {where} has {key!r} in its meta; they have: {', '.join(keys) or 'none'}."
        )
    if not chosen:
        raise CheckpointError(f"there is no checkpoint in {where} that is whole.")
    return chosen


def _require(checkpoint: Checkpoint, recoverable: str) -> Path:
    path = checkpoint.paramfiles.get(recoverable)
    if path is None:
        there = ", ".join(printable(name) for name in checkpoint.paramfiles) or "nothing"
        raise CheckpointError(f"{printable(checkpoint.path)} has no recoverable {recoverable!r}; it has: {there}.")
    return path


def _load_module(path: Path, map_location: Any = "cpu") -> dict[str, torch.Tensor]:
    """Load a module's state; entries that are not tensors (an extra state) are left out and named."""
    state = load_plainly(path, map_location)
    if not isinstance(state, Mapping) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(
            f"{printable(path)} does not hold the state of a module. Give --recoverable the name of one."
        )
    others = [printable(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        complain(f"{printable(path)}: left out, because they are not tensors: {', '.join(others[:8])}.")
    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _check_output(options: argparse.Namespace) -> None:
    """Refuse a file that cannot or must not be written, before any work is done."""
    path, folder = options.output, options.output.parent
    if options.format == "safetensors":
        try:
            import safetensors.torch  # noqa: F401 -- is it there?
        except ImportError as error:
            raise MissingExtraError(
                "--format safetensors needs safetensors, which is not installed. Run `pip install "
                "ddpkit[safetensors]`, or use --format pt."
            ) from error
    problem = None
    if not folder.is_dir():
        problem = f"there is no folder {str(folder)!r}. Make it first."
    elif path.is_dir():
        problem = "that is a folder. Name a file in it."
    elif os.path.lexists(path) and not options.force:
        problem = "it is there already. Give --force to replace it, or another name."
    elif any(is_checkpoint(parent) for parent in (folder.resolve(), *folder.resolve().parents)):
        problem = "it is inside a checkpoint, which would no longer be what was saved. Write it elsewhere."
    if problem is not None:
        raise CheckpointError(f"cannot write {str(path)!r}: {problem}")


def _write(state: Mapping[str, torch.Tensor], options: argparse.Namespace) -> None:
    """Write tensors to the output, which appears when it is complete."""
    path: Path = options.output
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}")
    try:
        with temporary.open("xb") as handle:
            if options.format == "safetensors":
                import safetensors.torch

                separate = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
                handle.write(safetensors.torch.save(separate, metadata={"format": "pt"}))
            else:
                torch.save(dict(state), handle)
            handle.flush()
            os.fsync(handle.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {str(path)!r} as {options.format}: {reason}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    say(f"wrote {printable(path)}: {several(len(state), 'tensor')}, {size_text(size)}")
