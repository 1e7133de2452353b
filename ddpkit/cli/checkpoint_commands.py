"""The commands of ``python -m ddpkit ckpt``. This module loads torch; :mod:`ddpkit.cli.ckpt` does
not.

Looking changes nothing: it takes no lock, writes nothing, and runs no code of a checkpoint. A file
may come from anywhere: only regular files are opened, and text is shown without control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpkit.base import StoredTensor, replacing
from ddpkit.checkpointing import (
    BASE,
    DIRECTORY_PREFIX,
    MANIFEST_NAME,
    META_NAME,
    OWN_META,
    Checkpoint,
    Selection,
    VerifyMode,
    average_checkpoints,
    base_of,
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
from ddpkit.cli.checkpoint_entry import UNKNOWN, Entry, made_by, newest_first, said_of_loop
from ddpkit.cli.shown_text import printable, size_text, table, tensor_text, value_text
from ddpkit.cli.stored_checkpoints import find_in_store, small_files
from ddpkit.errors import CheckpointError, MissingExtraError
from ddpkit.object_store import is_url, shown_url
from ddpkit.run import BRAIN_FILE, OPTIMIZER_STEP

__all__ = ["command_average", "command_export", "command_ls", "command_show", "command_verify"]

MAX_BRAIN_BYTES = 16_000_000  # of which the beginning is parsed
MAX_LINE = 4_000  # letters that are shown of a line
OF_TORCH = (b"PK", b"\x80")  # how a zip archive begins, and a pickle
SAFETENSORS = ".safetensors"
NOT_COPIED = "is in the store and was not read; --tensors copies the checkpoint down and looks"
SHARD = "rows of one rank, as a file of safetensors; the file beside it without -shard says of what"


# ---------------------------------------------------------------------------------------- looking


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
    return newest_first(found)


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
    manifest: dict[str, Any] = {}
    brain: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # verifying says why
        manifest = made_by(read_text(path / MANIFEST_NAME))
    with contextlib.suppress(OSError, ValueError):
        brain = said_of_loop(read_text(path / BRAIN_FILE, MAX_BRAIN_BYTES))
    return Entry(
        path,
        meta,
        files,
        manifest,
        brain,
        reasons,
    )


# --------------------------------------------------------------------------------- ls, show, verify


def command_ls(options: argparse.Namespace) -> int:
    """List the checkpoints of a folder; of one in a store without copying them down."""
    is_of_store = is_url(options.path)
    found = find_in_store(options.path) if is_of_store else find(Path(options.path))
    for line in _listing(found):
        say(line)
    damaged = sum(bool(checkpoint.reasons) for checkpoint in found)
    size = size_text(sum(checkpoint.size for checkpoint in found))
    where = printable(shown_url(options.path) if is_of_store else options.path)
    say(f"\n{len(found)} checkpoint(s) in {where}, {size}, {damaged} damaged.")
    say(f"Sizes were compared; ckpt verify {where} reads every byte.")
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
    url = options.path if is_url(options.path) else ""
    found = find_in_store(url) if url else find(Path(options.path))
    row = next((checkpoint for checkpoint in found if not checkpoint.reasons), found[0])
    state = "damaged" if row.reasons else "sizes are right"
    made = ", ".join(
        f"{printable(name)} {value_text(value, 60)}" for name, value in row.manifest.items()
    )
    say(printable(row.path.name))
    say(f"  folder    {printable(shown_url(url) if url else row.path.parent.absolute())}")
    say(f"  saved     {row.time_text}, {row.epoch_text}")
    say(f"  made by   {made or 'unknown: there is no manifest, as in a checkpoint of SpeechBrain'}")
    say(f"  files     {len(row.files)} file(s), {size_text(row.size)}, {state}")
    for reason in row.reasons:
        say(f"  damaged   {printable(reason)}")
    for name in sorted(row.meta.keys() - OWN_META, key=str):
        say(f"  meta      {printable(name)}: {value_text(row.meta[name], 400)}")
    if not url:
        _say_files(row, row.path, options)
    else:
        with tempfile.TemporaryDirectory(prefix="ddpkit-") as copies:
            small_files(url, row, Path(copies))
            _say_files(row, Path(copies), options)
    return 1 if row.reasons else 0


def _say_files(row: Entry, folder: Path, options: argparse.Namespace) -> None:
    for name, size in row.files.items():
        if name in {META_NAME, MANIFEST_NAME}:
            continue
        say(f"\n{printable(name)}, {size_text(size)}")
        path = folder / name
        if folder != row.path and name.endswith(SAFETENSORS):
            lines = [SHARD]
        elif folder != row.path and not path.exists():
            lines = [NOT_COPIED]
        else:
            lines = describe(path, tensors=options.tensors, limit=options.lines)
        for line in lines:
            say(f"  {line}".rstrip())


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
