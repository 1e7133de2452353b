"""The commands of ``python -m ddpkit ckpt``. This module loads torch; :mod:`ddpkit.cli.ckpt` does
not.

Looking changes nothing: it takes no lock, writes nothing, and runs no code of a checkpoint. A file
may come from anywhere: only regular files are opened, and text is shown without control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import reprlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpkit.base import StoredTensor, load_plain_yaml, replacing
from ddpkit.checkpointing import (
    BASE,
    DIRECTORY_PREFIX,
    MANIFEST_NAME,
    META_NAME,
    OWN_META,
    SUFFIX,
    Checkpoint,
    Selection,
    VerifyMode,
    average_checkpoints,
    base_of,
    ckpt_recency,
    ends_epoch,
    fingerprints,
    is_in_shards,
    load_lazily,
    ranked,
    read_checkpoint,
    read_text,
    read_weights,
    safe_load,
    stream_safetensors,
    stream_torch,
    verify,
)
from ddpkit.cli import say
from ddpkit.errors import CheckpointError, MissingExtraError
from ddpkit.logger import format_order_of_magnitude
from ddpkit.run import BRAIN_FILE, EPOCH, NO_METRICS, OPTIMIZER_STEP, STEP, beginning

__all__ = ["command_average", "command_export", "command_ls", "command_show", "command_verify"]

MAX_BRAIN_BYTES = 16_000_000  # of which the beginning is parsed
MAX_LINE = 4_000  # letters that are shown of a line
OF_TORCH = (b"PK", b"\x80")  # how a zip archive begins, and a pickle
SAFETENSORS = ".safetensors"
SHARD = "rows of one rank, as a file of safetensors; the file beside it without -shard says of what"
UNKNOWN = "?"


# ---------------------------------------------------------------------------------------- text


def printable(text: Any) -> str:
    """Return a text as one line, without anything that a terminal would act upon."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def size_text(size: int) -> str:
    """Return a number of bytes with a unit."""
    return f"{format_order_of_magnitude(size)}B"


_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 400


def value_text(value: Any, limit: int = 120) -> str:
    """Return a value of any origin in at most ``limit`` characters of one line; a deep or endless
    one in part.
    """
    text = (
        f"{value:.4g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else _REPR.repr(value)
    )
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def tensor_text(value: torch.Tensor) -> str:
    """Return a tensor's dtype and shape."""
    shape = " x ".join(map(str, value.shape)) or "one number"
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    return lines


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
    meta: dict[str, Any]
    files: dict[str, int]
    manifest: dict[str, Any]
    brain: dict[str, Any]
    reasons: list[str]

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def checkpoint(self) -> Checkpoint:
        own = [name for name in self.files if name.endswith(SUFFIX) and "/" not in name]
        return Checkpoint(
            self.path,
            self.meta,
            {name.removesuffix(SUFFIX): self.path / name for name in own},
        )

    @property
    def saved(self) -> float:
        return ckpt_recency(self.checkpoint) if self.meta else 0.0

    @property
    def metrics(self) -> dict[str, Any]:
        return {name: value for name, value in self.meta.items() if name not in NO_METRICS}

    @property
    def epoch_text(self) -> str:
        """The epoch that the meta names, or the Brain, and the batch where it was saved in the
        middle.
        """
        epoch = value_text(self.meta.get("epoch", self.brain.get(EPOCH, UNKNOWN)), 20)
        if ends_epoch(self.meta):
            return f"end of {epoch}" if self.meta else UNKNOWN
        return f"in {epoch}, batch {value_text(self.brain.get(STEP, UNKNOWN), 20)}"

    @property
    def time_text(self) -> str:
        """When it was saved, in local time."""
        try:
            return (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved))
                if self.meta
                else UNKNOWN
            )
        except (OverflowError, ValueError, OSError):
            return UNKNOWN


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint's directory: it has one's meta file or manifest."""
    return os.path.lexists(path / META_NAME) or os.path.lexists(path / MANIFEST_NAME)


def find(path: Path, mode: VerifyMode = "size") -> list[Entry]:
    """Look at a checkpoint, or at every one of a folder, the newest first.

    Raises:
        CheckpointError: there is none, or the path cannot be read.
    """
    try:
        named = (
            entry
            for entry in path.iterdir()
            if entry.name.startswith(DIRECTORY_PREFIX) and entry.is_dir()
        )
        paths = [path] if is_checkpoint(path) else list(named)
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read as a folder: {error.strerror}."
        ) from error
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}.")
    found = [look_at(each, mode) for each in paths]
    return sorted(
        found,
        key=lambda row: (row.saved, row.path.name),
        reverse=True,
    )


def look_at(path: Path, mode: VerifyMode = "size") -> Entry:
    """Look at one checkpoint's directory. Whatever is wrong with it becomes a reason."""
    meta: dict[str, Any] = {}
    try:
        meta = read_checkpoint(path).meta
        reasons = verify(path, mode)
    except CheckpointError as error:
        reasons = [str(error)]
    files = {}
    found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    for file in sorted(found):
        with contextlib.suppress(OSError):  # it may be deleted meanwhile
            if file.is_file():
                files[file.relative_to(path).as_posix()] = file.stat().st_size
    manifest: Any = None
    brain: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):  # verifying says why
        manifest = json.loads(read_text(path / MANIFEST_NAME))
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        brain = load_plain_yaml(beginning(read_text(path / BRAIN_FILE, MAX_BRAIN_BYTES)))
    made_by = manifest if isinstance(manifest, dict) else {}
    made_by = {
        name: value for name, value in made_by.items() if name not in {"files", "digest", "format"}
    }
    return Entry(
        path,
        meta,
        files,
        made_by,
        brain if isinstance(brain, dict) else {},
        reasons,
    )


# --------------------------------------------------------------------------------- ls, show, verify


def command_ls(options: argparse.Namespace) -> int:
    """List the checkpoints of a folder."""
    found = find(options.path)
    for line in _listing(found):
        say(line)
    damaged = sum(bool(checkpoint.reasons) for checkpoint in found)
    size = size_text(sum(checkpoint.size for checkpoint in found))
    say(f"\n{len(found)} checkpoint(s) in {printable(options.path)}, {size}, {damaged} damaged.")
    say(f"Sizes were compared; ckpt verify {printable(options.path)} reads every byte.")
    return 0


def _listing(found: Sequence[Entry]) -> list[str]:
    rows: list[tuple[str, ...]] = [("name", "saved", "epoch", "step", "size", "ranks", "files", "")]
    for checkpoint in found:
        state = "damaged" if checkpoint.reasons else "ok"
        metrics = "  ".join(
            f"{printable(name)}={value_text(value, 40)}"
            for name, value in checkpoint.metrics.items()
        )
        step = value_text(checkpoint.brain.get(OPTIMIZER_STEP, UNKNOWN), 20)
        ranks = value_text(checkpoint.manifest.get("world_size", UNKNOWN), 20)
        name, size = printable(checkpoint.path.name), size_text(checkpoint.size)
        rows.append(
            (
                name,
                checkpoint.time_text,
                checkpoint.epoch_text,
                step,
                size,
                ranks,
                state,
                metrics,
            )
        )
    columns = zip(*rows, strict=True)
    known = [column for column in columns if set(column[1:]) != {UNKNOWN}]
    title, *lines = table(list(zip(*known, strict=True)))
    reasons = [
        [f"    damaged: {printable(reason)}" for reason in checkpoint.reasons]
        for checkpoint in found
    ]
    pairs = zip(lines, reasons, strict=True)
    return [title, *(text for line, below in pairs for text in (line, *below))]


def command_show(options: argparse.Namespace) -> int:
    """Show what is in one checkpoint, or in the newest of a folder that is whole; return 1 if it is
    damaged.
    """
    found = find(options.path)
    row = next((checkpoint for checkpoint in found if not checkpoint.reasons), found[0])
    state = "damaged" if row.reasons else "sizes are right"
    made = ", ".join(
        f"{printable(name)} {value_text(value, 60)}" for name, value in row.manifest.items()
    )
    say(printable(row.path.name))
    say(f"  folder    {printable(row.path.parent.absolute())}")
    say(f"  saved     {row.time_text}, {row.epoch_text}")
    say(f"  made by   {made or 'unknown: there is no manifest, as in a checkpoint of SpeechBrain'}")
    say(f"  files     {len(row.files)} file(s), {size_text(row.size)}, {state}")
    for reason in row.reasons:
        say(f"  damaged   {printable(reason)}")
    for name in sorted(row.meta.keys() - OWN_META, key=str):
        say(f"  meta      {printable(name)}: {value_text(row.meta[name], 400)}")
    for name, size in row.files.items():
        if name not in {META_NAME, MANIFEST_NAME}:
            say(f"\n{printable(name)}, {size_text(size)}")
            for line in describe(
                row.path / name,
                tensors=options.tensors,
                limit=options.lines,
            ):
                say(f"  {line}".rstrip())
    return 1 if row.reasons else 0


def describe(
    path: Path,
    *,
    tensors: bool = False,
    limit: int = 20,
) -> list[str]:
    """Say what a regular file holds, in lines for a person."""
    rows: list[tuple[str, str]] = []
    try:
        with path.open("rb") as handle:
            is_of_torch = handle.read(2).startswith(OF_TORCH)
        if path.suffix == SAFETENSORS:
            lines = [SHARD]
        elif is_of_torch:
            value = safe_load(path, "meta")  # no content of tensors is read
            lines = _summary(value)
            found = tensors_in(value) if tensors else []
            rows = [(printable(name), tensor_text(tensor)) for name, tensor in found]
        else:
            whole = read_text(path).splitlines()
            lines = [
                printable(
                    f"{checkpoint[:MAX_LINE]} ..." if len(checkpoint) > MAX_LINE else checkpoint
                )
                for checkpoint in whole
            ]
    except UnicodeDecodeError:
        return ["neither text nor a file of torch.save: not looked into"]
    except (OSError, CheckpointError) as error:
        return [printable(error)]
    more = [f"... and {len(lines) - limit} more lines"] if len(lines) > limit else []
    shown = [*lines[:limit], *more]
    return [*shown, *table(rows)] if rows else shown


def _summary(value: Any) -> list[str]:
    """Summarize a value: number and size of its tensors, and its other contents."""
    kinds: Counter[str] = Counter()
    numbers = 0
    for _, tensor in tensors_in(value):
        kinds[str(tensor.dtype).removeprefix("torch.")] += 1
        numbers += tensor.numel()
    dtypes = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
    lines = [f"{numbers:,} number(s) in {kinds.total()} tensor(s): {dtypes}"] if kinds else []
    inner = value.items() if isinstance(value, Mapping) else [(type(value).__name__, value)]
    rest = [(name, value) for name, value in inner if next(tensors_in(value), None) is None]
    if base := base_of(value):
        lines.append(f"without its base: {len(base)} tensor(s) from elsewhere, by fingerprint")
        rest = [(name, value) for name, value in rest if name != BASE]
    return lines + [f"{printable(name)}: {value_text(value, 400)}" for name, value in rest]


def tensors_in(
    value: Any,
    prefix: str = "",
    depth: int = 8,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk through containers; yield each tensor with the names that lead to it, joined by dots."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    if depth and isinstance(value, (list, tuple, Mapping)):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_in(inner, f"{prefix}.{name}" if prefix else str(name), depth - 1)


def command_verify(options: argparse.Namespace) -> int:
    """Compare every byte with what was saved; return 1 if any is damaged."""
    found = [checkpoint for path in options.paths for checkpoint in find(path, "full")]
    for checkpoint in found:
        about = f"{len(checkpoint.files)} file(s), {size_text(checkpoint.size)}"
        limit = "" if checkpoint.manifest else " as far as can be told without a manifest"
        whole = f"whole{limit} ({about})"
        broken = f"damaged: {printable('; '.join(checkpoint.reasons))}"
        say(f"{printable(checkpoint.path.name)}: {broken if checkpoint.reasons else whole}")
    return 1 if any(checkpoint.reasons for checkpoint in found) else 0


# ---------------------------------------------------------------------------------- average, export


def command_export(options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file of their own: the average of one."""
    options.paths = [options.path]
    options.num = 1
    return command_average(options)


def command_average(options: argparse.Namespace) -> int:
    """Average a module over checkpoints into one file."""
    path: Path = options.output
    if os.path.lexists(path) and not options.force:
        raise CheckpointError(
            f"{str(path)!r} is there already. Give --force to replace it, or another name."
        )
    if any(is_checkpoint(parent) for parent in path.resolve().parents):
        raise CheckpointError(
            f"{str(path)!r} is inside a checkpoint, which must stay as it was saved."
        )
    chosen = choose(
        options.paths,
        Selection(max_key=options.max_key, min_key=options.min_key),
        options.num,
    )
    bases: list[Mapping[str, str]] = []

    def load(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
        state = _tensors_of(path, safe_load(path, map_location))
        bases.append(base_of(state))
        return state

    only = chosen[0].paramfiles.get(options.recoverable) if len(chosen) == 1 else None
    if only is not None and is_in_shards(only):
        state = _tensors_of(only, load_lazily(only, verifies=False))  # `choose` has verified
        bases.append(base_of(state))
        state.pop(BASE, None)
    else:
        state = average_checkpoints(chosen, options.recoverable, parameter_loader=load)
    if options.base is not None:
        state |= weights_of_base(options.base, bases[0])
    elif bases[0]:
        say(f"without its base, {len(bases[0])} tensor(s) from elsewhere: --base FILE adds them")
    _write(state, path, options.format)
    say(f"from {', '.join(printable(checkpoint.path.name) for checkpoint in chosen)}")
    say(f"wrote {printable(path)}: {len(state)} tensor(s), {size_text(path.stat().st_size)}")
    return 0


def choose(paths: Sequence[Path], selection: Selection, limit: int | None) -> list[Checkpoint]:
    """Choose the best checkpoints, and compare every byte of them.

    Raises:
        CheckpointError: none counts, or one is damaged.
    """
    found = [listed.checkpoint for path in paths for listed in find(path, "off") if listed.meta]
    chosen = ranked(dict.fromkeys(found), selection)[:limit]
    if not chosen:
        where = ", ".join(repr(str(path)) for path in paths)
        key = selection.max_key or selection.min_key
        keys = sorted({printable(name) for checkpoint in found for name in checkpoint.meta})
        has = f" that has {key!r} in its meta; there are: {', '.join(keys)}" if key else ""
        raise CheckpointError(f"there is no checkpoint in {where}{has}.")
    for checkpoint in chosen:
        reasons = verify(checkpoint.path, "full")
        if reasons:
            text = f"{printable(checkpoint.path)} is damaged: {printable('; '.join(reasons))}"
            raise CheckpointError(f"{text}. Name the checkpoints that are to be used.")
    return chosen


def weights_of_base(path: Path, base: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Read the base of a checkpoint that does not hold it.

    Args:
        path: a file of weights with the names of the module.
        base: fingerprints by name.

    Raises:
        CheckpointError: the checkpoint has no base elsewhere, or the file has another one.
    """
    if not base:
        raise CheckpointError(f"--base {printable(path)}: the checkpoint holds all of its weights.")
    given = read_weights(path)
    found = {name: given[name] for name in base if isinstance(given.get(name), torch.Tensor)}
    present = fingerprints(found)
    wrong = [printable(name) for name in base if present.get(name) != base[name]]
    if wrong:
        shown = ", ".join(wrong[:8])
        raise CheckpointError(
            f"--base {printable(path)} is not the base of this checkpoint: {len(wrong)} of "
            f"{len(base)} tensors are missing there or differ: {shown}."
        )
    return found


def _tensors_of(path: Path, state: Any) -> dict[str, Any]:
    """Return the tensors of a module's state; other entries (an extra state) are left out and
    named.
    """
    tensors: dict[str, Any] = {}
    if isinstance(state, Mapping):
        tensors = {
            str(name): value
            for name, value in state.items()
            if isinstance(value, (torch.Tensor, StoredTensor))
        }
    if not tensors:
        raise CheckpointError(
            f"{printable(path)} does not hold a module's state. Give --recoverable the name of one."
        )
    if base := base_of(state):
        tensors[BASE] = base
    others = [printable(name) for name in state if name not in tensors]
    if others:
        text = f"left out, because they are not tensors: {', '.join(others[:8])}"
        sys.stderr.write(f"{printable(path)}: {text}.\n")
    return tensors


def _write(state: Mapping[str, Any], path: Path, form: str) -> None:
    """Write tensors to a file, which appears when it is complete."""
    is_stored = any(isinstance(value, StoredTensor) for value in state.values())
    try:
        with replacing(path) as unfinished, unfinished.open("wb") as handle:
            if is_stored and form == "safetensors":
                stream_safetensors(state, handle)
            elif is_stored:
                stream_torch(state, handle, unfinished.with_suffix(f"{path.suffix}.tensors"))
            elif form == "safetensors":
                from safetensors.torch import save

                separate = {
                    name: tensor.detach().contiguous().clone() for name, tensor in state.items()
                }
                handle.write(save(separate, metadata={"format": "pt"}))
            else:
                torch.save(dict(state), handle)
            handle.flush()
            os.fsync(handle.fileno())
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error}: run `pip install safetensors`, or give --format=pt."
        ) from error
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {str(path)!r} as {form}: {reason}.") from error
