"""What the commands of ``python -m ddpkit ckpt`` do. This module loads torch; :mod:`ddpkit.cli.ckpt` does not."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpkit.checkpoint_records import Selection
from ddpkit.cli.contents import Looking, describe
from ddpkit.cli.inspection import Found, Leftover, find, find_leftovers, is_checkpoint, look_at, names_checkpoint
from ddpkit.cli.outputs import Output, average, choose, export
from ddpkit.cli.words import (
    age_text,
    complain,
    indented,
    printable,
    say,
    say_json,
    size_text,
    table,
    value_text,
)
from ddpkit.errors import CheckpointError
from ddpkit.storage import VerifyMode

__all__ = ["command_average", "command_export", "command_ls", "command_show", "command_verify"]

PREFIX = "python -m ddpkit: error: "
TEXT_WIDTH = 120
UNKNOWN = "?"
ON_TOP = frozenset({"CKPT.yaml", "manifest.json"})  # told in the head of `show`


# ---------------------------------------------------------------------------------------- ls


def command_ls(options: argparse.Namespace) -> int:
    """List the checkpoints of a folder, newest first.

    Args:
        options: ``path``, ``verify``, ``json``.

    Returns:
        0, or 1 if there is none.

    Raises:
        CheckpointError: the folder cannot be read.

    Ranks: local.

    Example:
        >>> callable(command_ls)
        True
    """
    folder: Path = options.path
    found = find(folder, options.verify)
    leftovers = [] if names_checkpoint(folder) else find_leftovers(folder)
    if options.json:
        say_json(_as_data(folder, found, leftovers, options.verify))
    elif found:
        for line in _listing(found, options.verify, _width()):
            say(line)
        say()
        for line in _sums(folder, found, options.verify):
            say(line)
    for leftover in [] if options.json else leftovers:
        say(_leftover_text(leftover))
    if not found:
        complain(f"{PREFIX}there is no checkpoint in {printable(repr(str(folder)))}.{_hint(folder)}")
    return 0 if found else 1


def _width() -> int:
    """Return the terminal's width; where the output is no terminal, lines are not broken."""
    return shutil.get_terminal_size((100_000, 24)).columns


def _listing(found: Sequence[Found], mode: str, width: int) -> list[str]:
    def lay_out(*, ages: bool) -> list[str]:
        rows: list[tuple[str, ...]] = [("name", "age" if ages else "saved", "epoch", "step", "size", "ranks", "files")]
        rows += [_row(one, mode, ages=ages) for one in found]
        known = [column for column in zip(*rows, strict=True) if set(column[1:]) != {UNKNOWN}]
        right = [number for number, column in enumerate(known) if column[0] in {"step", "size", "ranks"}]
        return table(list(zip(*known, strict=True)), right)

    lines = lay_out(ages=False)
    if max(map(len, lines)) > width:
        lines = lay_out(ages=True)
    metrics = [
        "  ".join(f"{printable(name)}={value_text(value, 40)}" for name, value in one.metrics.items()) for one in found
    ]
    row = max(map(len, lines))
    if row + 2 + max(map(len, metrics)) <= width:
        lines = [f"{line:{row}}  {text}".rstrip() for line, text in zip(lines, ["", *metrics], strict=True)]
        metrics = [""] * len(found)
    listing = lines[:1]
    for line, one, text in zip(lines[1:], found, metrics, strict=True):
        listing += [line, *indented(text, width)]
        for reason in one.reasons:
            listing += indented(f"damaged: {printable(reason)}", width)
    return listing


def _row(one: Found, mode: str, *, ages: bool) -> tuple[str, ...]:
    steps = one.brain.get("optimizer_step")
    return (
        printable(one.path.name),
        UNKNOWN if one.saved is None else age_text(time.time() - one.saved) if ages else _time_text(one.saved),
        _epoch_text(one),
        UNKNOWN if steps is None else value_text(steps, 20),
        size_text(one.size),
        value_text(one.manifest.get("world_size", UNKNOWN), 20),
        _state(one, mode),
    )


def _epoch_text(one: Found) -> str:
    epoch = UNKNOWN if one.epoch is None else str(one.epoch)
    if not one.meta:
        return UNKNOWN
    if one.ends_epoch:
        return f"end of {epoch}"
    batch = one.brain.get("step")
    return f"in {epoch}, batch {batch}" if isinstance(batch, int) else f"in {epoch}"


def _state(one: Found, mode: str) -> str:
    if one.reasons:
        return "damaged"
    return {"size": "ok", "full": "verified", "off": UNKNOWN}[mode]


def _time_text(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _sums(folder: Path, found: Sequence[Found], mode: str) -> list[str]:
    damaged = sum(bool(one.reasons) for one in found)
    bare = sum(not one.manifest and not one.reasons for one in found)
    text = f"{_several(len(found), 'checkpoint')} in {printable(folder)}, {size_text(sum(one.size for one in found))}"
    text += f", {damaged} damaged" if damaged else ""
    text += f", {bare} without a manifest (as SpeechBrain makes them)" if bare else ""
    how = {
        "size": ["Sizes were compared; --verify full reads every byte."],
        "full": [],
        "off": ["Nothing was compared."],
    }
    return [f"{text}.", *how[mode]]


def _leftover_text(leftover: Leftover) -> str:
    name = f"{printable(leftover.path.name)} ({size_text(leftover.size)})"
    if leftover.replaced is not None:
        old = printable(leftover.replaced)
        return f"{name} is the old {old}: a save that was to replace it died. The next run restores it."
    return f"{name} is left of a save or a removal that is running, or died. The next run removes it."


def _hint(folder: Path) -> str:
    """Say where the checkpoints are if they are one or two folders further down."""
    try:
        near = sorted(
            {path.parent for form in ("*/CKPT*", "*/*/CKPT*") for path in folder.glob(form) if is_checkpoint(path)}
        )
    except OSError:
        near = []
    return f" Is {printable(repr(str(near[0])))} meant?" if near else ""


def _as_data(folder: Path, found: Sequence[Found], leftovers: Sequence[Leftover], mode: str) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "verify": mode,
        "checkpoints": [
            {
                "name": one.path.name,
                "path": str(one.path),
                "unixtime": one.saved,
                "end_of_epoch": one.ends_epoch if one.meta else None,
                "epoch": one.epoch,
                "step": one.brain.get("step"),
                "optimizer_step": one.brain.get("optimizer_step"),
                "bytes": one.size,
                "world_size": one.manifest.get("world_size"),
                "metrics": one.metrics,
                "meta": one.meta,
                "manifest": one.manifest,
                "files": one.files,
                "damaged": bool(one.reasons),
                "reasons": list(one.reasons),
            }
            for one in found
        ],
        "leftovers": [{"name": one.path.name, "bytes": one.size, "replaced": one.replaced} for one in leftovers],
    }


# ---------------------------------------------------------------------------------------- show


def command_show(options: argparse.Namespace) -> int:
    """Show what is in one checkpoint.

    Args:
        options: ``path``, ``verify``, ``tensors``, ``lines``.

    Returns:
        0, or 1 if it is damaged.

    Raises:
        CheckpointError: there is none.

    Ranks: local.

    Example:
        >>> callable(command_show)
        True
    """
    one = _one(options.path, options.verify)
    width = min(_width(), TEXT_WIDTH)
    for line in _facts(one, options.verify):
        say(line)
    how = Looking(tensors=options.tensors, lines=options.lines, width=width - 2)
    for name, size in one.files.items():
        if name in ON_TOP:
            continue
        say()
        say(f"{printable(name)}, {size_text(size)}")
        for line in describe(one.path / name, how):
            say(f"  {line}".rstrip())
    return 1 if one.reasons else 0


def _one(path: Path, mode: VerifyMode) -> Found:
    """Look at the checkpoint that is named, or at the newest of a folder."""
    found = find(path, mode)
    whole = [one for one in found if not one.reasons]
    if not found:
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}.{_hint(path)}")
    return (whole or found)[0]


def _facts(one: Found, mode: str) -> list[str]:
    made = [
        f"{printable(name)} {value_text(value, 60)}" for name, value in one.manifest.items() if name != "world_size"
    ]
    if "world_size" in one.manifest:
        made.append(_several(one.manifest["world_size"], "process", "es"))
    facts = {"folder": printable(one.path.parent.absolute())}
    if one.saved is not None:
        ago = age_text(time.time() - one.saved)
        facts["saved"] = f"{_time_text(one.saved, '%Y-%m-%d %H:%M:%S')}, {ago} ago"
        facts["epoch"] = _epoch_text(one)
    facts["made by"] = ", ".join(made) or "unknown: there is no manifest, as in a checkpoint of SpeechBrain"
    facts["files"] = f"{_several(len(one.files), 'file')}, {size_text(one.size)}, {_state_words(one, mode)}"
    lines = [printable(one.path.name), *(f"  {name:8}  {text}" for name, text in facts.items())]
    lines += [f"  damaged   {printable(reason)}" for reason in one.reasons]
    if one.metrics or "epoch" in one.meta:
        lines.append("  meta")
        told = {name: value for name, value in one.meta.items() if name not in {"unixtime", "end-of-epoch"}}
        lines += [f"    {printable(name)}: {value_text(value, 400)}" for name, value in told.items()]
    return lines


def _state_words(one: Found, mode: str) -> str:
    if one.reasons:
        return "damaged"
    if not one.manifest and mode != "off":
        return "nothing wrong as far as files without a manifest can tell"
    return {"size": "sizes are right", "full": "every byte is right", "off": "not compared"}[mode]


def _several(number: Any, noun: str, plural: str = "s") -> str:
    return f"{value_text(number, 20)} {noun}{'' if number == 1 else plural}"


# ---------------------------------------------------------------------------------------- verify


def command_verify(options: argparse.Namespace) -> int:
    """Compare every byte with what was saved.

    Args:
        options: ``paths``.

    Returns:
        0, or 1 if any is damaged.

    Raises:
        CheckpointError: there is none.

    Ranks: local.

    Example:
        >>> callable(command_verify)
        True
    """
    damaged = False
    for path in options.paths:
        found = find(path, "off")
        if not found:
            raise CheckpointError(f"there is no checkpoint in {str(path)!r}.{_hint(path)}")
        for directory in (one.path for one in found):
            one = look_at(directory, "full")
            damaged = damaged or bool(one.reasons)
            about = f"{_several(len(one.files), 'file')}, {size_text(one.size)}"
            if one.reasons:
                say(f"{printable(directory.name)}: damaged: {printable('; '.join(one.reasons))}")
            elif one.manifest:
                say(f"{printable(directory.name)}: whole ({about})")
            else:
                say(f"{printable(directory.name)}: whole as far as can be told without a manifest ({about})")
    return 1 if damaged else 0


# ---------------------------------------------------------------------------------------- average, export


def command_average(options: argparse.Namespace) -> int:
    """Average a module over checkpoints into one file.

    Args:
        options: ``paths``, ``min_key``, ``max_key``, ``num``, ``recoverable``, ``output``, ``format``, ``force``.

    Returns:
        0.

    Raises:
        CheckpointError: it cannot be done; nothing is written.

    Ranks: local.

    Example:
        >>> callable(command_average)
        True
    """
    output = _output(options)
    average(choose(options.paths, _selection(options), options.num), options.recoverable, output)
    return 0


def _output(options: argparse.Namespace) -> Output:
    """Return where the result goes; refuse it before every byte of the checkpoints is read."""
    output = Output(options.output, options.format, options.force)
    output.check()
    return output


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(max_key=options.max_key, min_key=options.min_key)


def command_export(options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file of their own.

    Args:
        options: ``path``, ``min_key``, ``max_key``, ``recoverable``, ``output``, ``format``, ``force``.

    Returns:
        0.

    Raises:
        CheckpointError: it cannot be done; nothing is written.

    Ranks: local.

    Example:
        >>> callable(command_export)
        True
    """
    output = _output(options)
    [checkpoint] = choose([options.path], _selection(options), 1)
    export(checkpoint, options.recoverable, output)
    return 0
