"""What is in one file of a checkpoint, in words. No code of the file runs, whatever it holds.

Files of ``torch.save`` are read with :func:`ddpkit.checkpoint_hooks.safe_load`, one storage at a time: of the large
ones nothing is kept but the size, so that looking needs little memory.
"""

from __future__ import annotations

import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpkit.checkpoint_hooks import safe_load
from ddpkit.cli.inspection import small_text
from ddpkit.cli.words import dtype_text, indented, printable, shape_text, table, value_text
from ddpkit.errors import CheckpointError

__all__ = ["Looking", "describe", "load_plainly", "tensors_in"]

KEPT_BYTES = 4096
MAX_NESTING = 6
MAX_TENSORS = 100_000
_OF_TORCH = (b"PK", b"\x80")  # how a zip archive begins, and a pickle


@dataclass(frozen=True)
class Looking:
    """How much of a file to show.

    Attributes:
        tensors: name, shape and dtype of every tensor.
        lines: lines of text, or entries of a mapping, at most.
        width: characters of a line.

    Ranks: local.

    Example:
        >>> Looking().tensors
        False
    """

    tensors: bool = False
    lines: int = 20
    width: int = 100


def describe(path: Path, how: Looking) -> list[str]:
    """Say what a file holds.

    Args:
        path: a regular file.
        how: how much to show.

    Returns:
        Lines for a person.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.ckpt"
        >>> torch.save(torch.nn.Linear(2, 1).state_dict(), path)
        >>> describe(path, Looking())
        ['module: 3 numbers in 2 tensors (float32)']
    """
    try:
        start = _start(path)
    except OSError as error:
        return [f"cannot be read: {error.strerror or error}"]
    if not start:
        return ["empty"]
    if start.startswith(_OF_TORCH):
        return _describe_saved(path, how)
    text = small_text(path)
    if text is None:
        return ["neither text nor a file of torch.save: not looked into"]
    return _cut([printable(line) for line in text.splitlines()], how.lines, "lines")


def _describe_saved(path: Path, how: Looking) -> list[str]:
    try:
        value = load_plainly(path, map_location=_without_large_storages)
    except CheckpointError as error:
        return indented(printable(error), how.width, "")
    ranks = _ranks_in(value)
    found = dict(tensors_in(value if ranks is None else _alike(ranks)))
    lines = _summary(value, found, how) if ranks is None else _ranks(ranks, how)
    if how.tensors and found:
        rows = [(printable(name), shape_text(tensor), dtype_text(tensor)) for name, tensor in found.items()]
        lines += ["", *table([("name", "shape", "dtype"), *rows])]
    return lines


def _start(path: Path) -> bytes:
    with path.open("rb") as handle:
        return handle.read(2)


def load_plainly(path: Path, map_location: Any = "cpu") -> Any:
    """Load a file of ``torch.save`` without running code from it, and without blowing it up.

    Args:
        path: a regular file.
        map_location: as in ``torch.load``.

    Raises:
        CheckpointError: it cannot be read, is no file of ``torch.save``, would run code, or is compressed, which
            ``torch.save`` never does: a small file could then ask for any amount of memory.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.ckpt"
        >>> torch.save({"step": 3}, path)
        >>> load_plainly(path)
        {'step': 3}
    """
    try:
        if not _start(path).startswith(_OF_TORCH):
            raise CheckpointError(f"cannot load {path}: it is no file of torch.save, and holds no tensors.")
    except OSError as error:
        raise CheckpointError(f"cannot load {path}: {error.strerror or error}.") from error
    try:
        with zipfile.ZipFile(path) as archive:
            squeezed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        squeezed = []  # torch says what is wrong, or knows an older format
    if squeezed:
        raise CheckpointError(f"cannot load {path}: {squeezed[0]!r} in it is compressed, which torch.save never does.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch speaks of its older formats to whoever wrote them
            return safe_load(path, map_location)
    except CheckpointError:
        raise
    except Exception as error:  # what torch's reader does not expect of a file
        raise CheckpointError(f"cannot load {path}: {type(error).__name__}: {error}.") from error


def _without_large_storages(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
    if storage.nbytes() <= KEPT_BYTES:
        return storage
    return torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]


def tensors_in(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk through containers and give each tensor with the names that lead to it, joined by dots.

    Args:
        value: what a file holds.
        prefix: the names that lead to it.
        depth: how many they are.

    Ranks: local.

    Example:
        >>> [name for name, _ in tensors_in({"a": torch.ones(1), "b": [torch.ones(2)]})]
        ['a', 'b.0']
    """
    if isinstance(value, torch.Tensor):
        yield prefix, value
    if depth > MAX_NESTING:
        return
    inside = (
        enumerate(value) if isinstance(value, (list, tuple)) else value.items() if isinstance(value, Mapping) else ()
    )
    for number, (name, inner) in enumerate(inside):
        if number >= MAX_TENSORS:
            return
        yield from tensors_in(inner, f"{prefix}.{name}" if prefix else str(name), depth + 1)


def _summary(value: Any, found: Mapping[str, torch.Tensor], how: Looking) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [value_text(value)]
    if not isinstance(value, Mapping):
        return indented(f"{type(value).__name__}: {value_text(value, 400)}", how.width, "")
    if {"state", "param_groups"} <= value.keys() and isinstance(value["param_groups"], list):
        return _optimizer(value, found, how)
    if found and all(isinstance(inner, torch.Tensor) for inner in value.values()):
        return [f"module: {_amount(found)}"]
    entries = [f"{printable(name)}: {value_text(inner, how.width)}" for name, inner in value.items()]
    return _cut(entries, how.lines, "entries") or ["an empty mapping"]


def _amount(found: Mapping[str, torch.Tensor]) -> str:
    dtypes = Counter(dtype_text(tensor) for tensor in found.values())
    kinds = ", ".join(name if len(dtypes) == 1 else f"{count} {name}" for name, count in dtypes.most_common())
    numbers = sum(tensor.numel() for tensor in found.values())
    return f"{numbers:,} number{'s' * (numbers != 1)} in {len(found)} tensor{'s' * (len(found) != 1)} ({kinds})"


def _optimizer(value: Mapping[str, Any], found: Mapping[str, torch.Tensor], how: Looking) -> list[str]:
    state, groups = value["state"], value["param_groups"]
    count = len(state) if isinstance(state, Mapping) else 0
    head = f"optimizer: state of {count} parameter{'s' * (count != 1)}"
    if found:
        names = dict.fromkeys(name for one in _mappings(state) for name in one)
        head += f" ({', '.join(map(printable, names))}), {_amount(found)}"
    lines = indented(head, how.width, "")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            continue
        options = [
            f"{printable(name)}={value_text(option, 40)}" for name, option in group.items() if _is_told(name, option)
        ]
        owned = len(group["params"]) if isinstance(group.get("params"), list) else 0
        text = f"group {number}: {owned} parameter{'s' * (owned != 1)}, {', '.join(options)}"
        lines += indented(text, how.width, "")
    return _cut(lines, how.lines, "lines")


# ---------------------------------------------------------------------------------------- the states of ranks


def _ranks_in(value: Any) -> list[Any] | None:
    """Return the state of each rank if a file holds those of several, as ``ranks.ckpt`` does; else None."""
    ranks = value.get("ranks") if isinstance(value, Mapping) else None
    return ranks if isinstance(ranks, list) and {"format", "ranks"} <= value.keys() else None


def _ranks(ranks: Sequence[Any], how: Looking) -> list[str]:
    """Say what is known of each rank; those of which it is the same stand on one line."""
    groups: dict[str, list[int]] = {}
    for number, state in enumerate(ranks):
        groups.setdefault(_rank_text(state), []).append(number)
    lines = [line for text, ones in groups.items() for line in indented(f"{_spans(ones)}: {text}", how.width, "")]
    return _cut(lines, how.lines, "lines") or ["no ranks"]


def _rank_text(state: Any) -> str:
    if state is None:
        return "not known"
    if not isinstance(state, Mapping):
        return value_text(state, 60)
    told = []
    for name, inner in state.items():
        if isinstance(inner, Mapping):
            names = [printable(one) for one, content in inner.items() if not _is_nothing(content)]
            told += [f"{printable(name)} ({', '.join(names)})"] if names else []
        elif not _is_nothing(inner):
            told.append(f"{printable(name)}={value_text(inner, 60)}")
    return ", ".join(told) or "nothing"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, Mapping, str)) and not value)


def _spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, runs of them by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return f"rank{'s' * (len(numbers) != 1)} " + ", ".join("-".join(map(str, run)) for run in runs)


def _alike(ranks: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return one tensor for all of one name, shape and dtype, under the ranks that have it."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    tensors: dict[tuple[str, str, str], torch.Tensor] = {}
    for number, state in enumerate(ranks):
        for name, tensor in tensors_in(state):
            key = name, shape_text(tensor), dtype_text(tensor)
            groups.setdefault(key, []).append(number)
            tensors[key] = tensor
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, ones in groups.items():
        found.setdefault(_spans(ones), {})[key[0]] = tensors[key]
    return found


def _mappings(state: Any) -> list[Mapping[str, Any]]:
    return [one for one in state.values() if isinstance(one, Mapping)] if isinstance(state, Mapping) else []


def _is_told(name: Any, option: Any) -> bool:
    return name != "params" and option is not None and option is not False


def _cut(lines: list[str], limit: int, what: str) -> list[str]:
    if len(lines) <= limit:
        return lines
    return [*lines[:limit], f"... and {len(lines) - limit} more {what}"]
