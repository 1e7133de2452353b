"""Weights out of checkpoints: choosing, averaging, and writing them to a file that is complete or not there."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from ddpkit.checkpoint_records import Checkpoint, Selection, average_checkpoints, ranked
from ddpkit.cli.contents import load_plainly
from ddpkit.cli.inspection import Found, find, is_checkpoint, look_at, names_checkpoint
from ddpkit.cli.words import complain, printable, say, size_text
from ddpkit.errors import CheckpointError, ConfigError, MissingExtraError

__all__ = ["Output", "average", "choose", "export"]


@dataclass(frozen=True)
class Output:
    """The file to write.

    Attributes:
        path: where.
        form: ``"safetensors"`` or ``"pt"``.
        force: replace a file that is there.

    Ranks: local.

    Example:
        >>> Output(Path("model.pt"), "pt").force
        False
    """

    path: Path
    form: str
    force: bool = False

    def check(self) -> None:
        """Refuse what cannot or must not be written, before any work is done.

        Raises:
            CheckpointError: there is a file already, no folder for it, or it would change a checkpoint.
            MissingExtraError: the format's package is not installed.
        """
        if self.form == "safetensors":
            _safetensors()
        folder = self.path.parent
        if not folder.is_dir():
            raise CheckpointError(
                f"cannot write {str(self.path)!r}: there is no folder {str(folder)!r}. Make it first."
            )
        if self.path.is_dir():
            raise CheckpointError(f"cannot write {str(self.path)!r}: that is a folder. Name a file in it.")
        if os.path.lexists(self.path) and not self.force:
            raise CheckpointError(f"{str(self.path)!r} is there already. Give --force to replace it, or another name.")
        own = folder.resolve()
        if any(is_checkpoint(parent) for parent in (own, *own.parents)):
            raise CheckpointError(
                f"cannot write {str(self.path)!r}: it is inside a checkpoint, which would no longer be what was saved. "
                "Write it elsewhere."
            )

    def write(self, state: Mapping[str, torch.Tensor]) -> int:
        """Write tensors; the file appears when it is complete.

        Args:
            state: tensors by name, of any shapes.

        Returns:
            The file's size in bytes.

        Raises:
            CheckpointError: it cannot be written; nothing of it is left.
        """
        temporary = self.path.with_name(f".tmp-{uuid.uuid4().hex[:12]}")
        try:
            if self.form == "safetensors":
                _write_safetensors(temporary, state)
            else:
                _write_pt(temporary, state)
            size = temporary.stat().st_size
            temporary.replace(self.path)
            return size
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"cannot write {str(self.path)!r}: {reason}.") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _write_pt(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    with path.open("xb") as handle:
        torch.save(dict(state), handle)
        _sync(handle)


def _write_safetensors(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    strange = [name for name, tensor in state.items() if tensor.layout is not torch.strided or tensor.is_quantized]
    if strange:
        raise CheckpointError(f"safetensors has no sparse or quantized tensors: {_names(strange)}. Use --format pt.")
    separate = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
    try:
        _safetensors().save_file(separate, path, metadata={"format": "pt"})
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"safetensors cannot hold this state: {error}. Use --format pt.") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise CheckpointError(f"safetensors cannot write {str(path.parent)!r}: {error}.") from error
    with path.open("rb+") as handle:
        _sync(handle)


def _sync(handle: BinaryIO) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError(
            "--format safetensors needs safetensors, which is not installed. Run `pip install ddpkit[safetensors]`, or "
            "use --format pt."
        ) from error
    return safetensors.torch


# ---------------------------------------------------------------------------------------- choosing


def choose(paths: Sequence[Path], selection: Selection, limit: int | None) -> list[Checkpoint]:
    """Choose among checkpoints that are whole, to the last byte.

    Args:
        paths: checkpoints, or folders of checkpoints. A damaged one in a folder is passed over with a word.
        selection: what makes one better than another.
        limit: how many at most.

    Returns:
        The best first.

    Raises:
        CheckpointError: none counts, or one that was named is damaged.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> choose([Path(tempfile.mkdtemp())], Selection(), None)
        Traceback (most recent call last):
            ...
        ddpkit.errors.CheckpointError: there is no checkpoint in '...'.
    """
    found: dict[Path, Found] = {}
    named: set[Path] = set()
    for path in paths:
        found |= {one.path: one for one in find(path)}
        named |= {path} if names_checkpoint(path) else set()
    where = ", ".join(repr(str(path)) for path in paths)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {where}.")
    readable = {one.path: one.checkpoint for one in found.values() if one.meta}
    broken = [one for one in found.values() if not one.meta]
    chosen: list[Checkpoint] = []
    for checkpoint in ranked(readable.values(), selection):
        if limit is not None and len(chosen) >= limit:
            break
        looked = look_at(checkpoint.path, "full")
        if looked.reasons:
            broken.append(looked)
        else:
            chosen.append(checkpoint)
    _report(broken, named)
    if not chosen:
        raise CheckpointError(_why_none(where, readable, selection))
    return chosen


def _report(broken: Sequence[Found], named: set[Path]) -> None:
    for one in broken:
        text = f"{printable(one.path)} is damaged: {printable('; '.join(one.reasons))}"
        if one.path in named:
            raise CheckpointError(f"{text}. Name another checkpoint.")
        complain(f"{text}; passed over.")


def _why_none(where: str, readable: Mapping[Path, Checkpoint], selection: Selection) -> str:
    key = selection.max_key or selection.min_key
    if key is not None and not any(map(selection.counts, readable.values())):
        keys = sorted({printable(name) for checkpoint in readable.values() for name in checkpoint.meta})
        return f"no checkpoint in {where} has {key!r} in its meta; they have: {', '.join(keys) or 'none'}."
    return f"no checkpoint in {where} is whole."


# ---------------------------------------------------------------------------------------- averaging and exporting


def average(checkpoints: Sequence[Checkpoint], recoverable: str, output: Output) -> None:
    """Average a module over checkpoints and write the result.

    Args:
        checkpoints: the first gives what cannot be averaged, such as counters.
        recoverable: the module's name in the checkpoints.
        output: where to.

    Raises:
        CheckpointError: one has no such file, it holds something else, or the output cannot be written.
        ConfigError: they are of different models.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for weight in (1.0, 3.0):
        ...     torch.save({"w": torch.tensor([weight])}, folder / f"{weight}.ckpt")
        >>> two = [Checkpoint(path, {}, {"model": path}) for path in sorted(folder.iterdir())]
        >>> average(two, "model", Output(folder / "mean.pt", "pt"))
        average of 2 checkpoints: 1.0.ckpt, 3.0.ckpt
        wrote ...mean.pt: 1 tensor, ... kB
        >>> torch.load(folder / "mean.pt")
        {'w': tensor([2.])}
    """
    output.check()
    for checkpoint in checkpoints:
        _require(checkpoint, recoverable)
    try:
        state = average_checkpoints(checkpoints, recoverable, parameter_loader=_load_module)
    except ConfigError as error:
        raise CheckpointError(f"{printable(recoverable)!r} cannot be averaged: {error}") from error
    names = ", ".join(printable(checkpoint.path.name) for checkpoint in checkpoints)
    say(f"average of {len(checkpoints)} checkpoint{'s' * (len(checkpoints) != 1)}: {names}")
    _write(state, output)


def export(checkpoint: Checkpoint, recoverable: str, output: Output) -> None:
    """Write a module of a checkpoint to a file of its own.

    Args:
        checkpoint: which.
        recoverable: the module's name in it.
        output: where to.

    Raises:
        CheckpointError: it has no such file, it holds something else, or the output cannot be written.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> torch.save({"w": torch.tensor([1.0])}, folder / "model.ckpt")
        >>> export(Checkpoint(folder, {}, {"model": folder / "model.ckpt"}), "model", Output(folder / "w.pt", "pt"))
        from ...
        wrote ...w.pt: 1 tensor, ... kB
    """
    output.check()
    state = _load_module(_require(checkpoint, recoverable))
    say(f"from {printable(checkpoint.path.name)}")
    _write(state, output)


def _require(checkpoint: Checkpoint, recoverable: str) -> Path:
    path = checkpoint.paramfiles.get(recoverable)
    if path is None:
        there = ", ".join(printable(name) for name in checkpoint.paramfiles) or "nothing"
        raise CheckpointError(f"{printable(checkpoint.path)} has no recoverable {recoverable!r}; it has: {there}.")
    return path


def _load_module(path: Path, map_location: Any = "cpu") -> dict[str, torch.Tensor]:
    """Load a module's state. What is no tensor (an extra state) is left out and named; all of it is no module."""
    state = load_plainly(path, map_location)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{printable(path)} holds a {type(state).__name__}, not a module's state.")
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    others = [
        printable(f"{name} ({type(value).__name__})") for name, value in state.items() if str(name) not in tensors
    ]
    if others and not tensors:
        raise CheckpointError(
            f"{printable(path)} holds no module's state but {_names(others)}. Give --recoverable the name of a module."
        )
    if others:
        complain(f"{printable(path)}: left out, for they are no tensors: {_names(others)}.")
    return tensors


def _names(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _write(state: Mapping[str, torch.Tensor], output: Output) -> None:
    size = output.write(state)
    say(f"wrote {printable(output.path)}: {len(state)} tensor{'s' * (len(state) != 1)}, {size_text(size)}")
