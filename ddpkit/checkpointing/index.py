"""Checkpoints that exist: what they are, reading, ranking and averaging them.

Nothing here writes, and all but :class:`DamageLedger` are values and pure functions of them.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddpkit.checkpointing.hooks import safe_load
from ddpkit.checkpointing.storage import MANIFEST_NAME, VerifyMode, read_text, verify
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

DIRECTORY_PREFIX = "CKPT"
META_NAME = "CKPT.yaml"
META_MARK = "# ddpkit: manifest.json lists the files beside this one\n"
SUFFIX = ".ckpt"


class Checkpoint(NamedTuple):
    """One saved checkpoint; two are equal when their paths are.

    Attributes:
        path: its directory.
        meta: what ``CKPT.yaml`` holds: ``unixtime`` (seconds), ``end-of-epoch`` and what the caller added.
        paramfiles: the file of each recoverable, by name.

    Ranks: local.

    Example:
        >>> path = Path("CKPT+a")
        >>> Checkpoint(path, {"unixtime": 1.0}, {}) == Checkpoint(path, {"unixtime": 2.0}, {})
        True
    """

    path: Path
    meta: dict[str, Any]
    paramfiles: dict[str, Path]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.path)


ImportanceKey = Callable[[Checkpoint], Any]
Predicate = Callable[[Checkpoint], bool]


def ckpt_recency(ckpt: Checkpoint) -> float:
    """Return when a checkpoint was saved, in seconds since 1970: the importance key for "the newest".

    Args:
        ckpt: the checkpoint.

    Returns:
        Its ``unixtime``.

    Ranks: local.

    Example:
        >>> ckpt_recency(Checkpoint(Path("CKPT+a"), {"unixtime": 5.0}, {}))
        5.0
    """
    return float(ckpt.meta["unixtime"])


# ---------------------------------------------------------------------------------------- ranking


@dataclass(frozen=True)
class Selection:
    """Which checkpoints count, and what makes one better than another; by default the newest is best.

    Attributes:
        importance_key: gives a checkpoint's importance; the greatest is best.
        max_key: a key of the meta whose greatest value is best. Checkpoints without it do not count.
        min_key: a key of the meta whose smallest value is best. Checkpoints without it do not count.
        ckpt_predicate: says whether a checkpoint counts.

    Raises:
        ConfigError: more than one kind of key is given.

    Ranks: local.

    Example:
        >>> Selection(min_key="loss").importance(Checkpoint(Path("CKPT+a"), {"loss": 2}, {}))
        -2.0
    """

    importance_key: ImportanceKey | None = None
    max_key: str | None = None
    min_key: str | None = None
    ckpt_predicate: Predicate | None = None

    def __post_init__(self) -> None:
        keys = ("importance_key", "max_key", "min_key")
        given = [name for name in keys if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given, but only one can decide which checkpoint is best.")

    def counts(self, checkpoint: Checkpoint) -> bool:
        """Say whether a checkpoint has the key and passes the predicate."""
        keys = {self.max_key, self.min_key} - {None}
        return keys <= checkpoint.meta.keys() and (self.ckpt_predicate is None or bool(self.ckpt_predicate(checkpoint)))

    def importance(self, checkpoint: Checkpoint) -> Any:
        """Return a value that is greater for a better checkpoint; None for one that ranks worst."""
        if self.max_key is not None:
            return as_number(checkpoint.meta[self.max_key])
        if self.min_key is not None:
            value = as_number(checkpoint.meta[self.min_key])
            return None if value is None else -value
        importance = (self.importance_key or ckpt_recency)(checkpoint)
        if isinstance(importance, (tuple, list)):
            return None if any(isinstance(part, float) and math.isnan(part) for part in importance) else importance
        return as_number(importance) if isinstance(importance, (float, torch.Tensor)) else importance


@dataclass(frozen=True)
class Retention:
    """What a deletion leaves: the best few by each key, the newest, and whatever the predicate excludes.

    Attributes:
        num_to_keep: how many to keep for each key; 0 keeps none.
        importance_keys: functions of a checkpoint whose greatest values are best.
        max_keys: keys of the meta whose greatest values are best.
        min_keys: keys of the meta whose smallest values are best.
        ckpt_predicate: only checkpoints for which it is true may be deleted, or count as kept.
        keep_recent: True keeps the newest ``num_to_keep`` as well; a number greater than 0 keeps so many of the newest,
            whatever ``num_to_keep`` is and also where ``importance_keys`` name :func:`ckpt_recency`. With False or 0
            the newest are kept only if ``importance_keys`` say so.

    Raises:
        ConfigError: ``num_to_keep`` or ``keep_recent`` is negative or no whole number.

    Ranks: local.

    Example:
        >>> retention = Retention(3, min_keys=("loss",), keep_recent=1)
        >>> [(selection.min_key, number) for selection, number in retention.selections()]
        [('loss', 3), (None, 1)]
    """

    num_to_keep: int
    importance_keys: Sequence[ImportanceKey] | None = ()
    max_keys: Sequence[str] | None = ()
    min_keys: Sequence[str] | None = ()
    ckpt_predicate: Predicate | None = None
    keep_recent: bool | int = False

    def __post_init__(self) -> None:
        _check_count("num_to_keep", self.num_to_keep, "0 keeps none")
        _check_count("keep_recent", self.keep_recent, "True keeps the newest num_to_keep, a number so many, False none")

    def selections(self) -> list[tuple[Selection, int]]:
        """Return one selection per key, and how many of the best it keeps."""
        newest = self.num_to_keep if self.keep_recent is True else self.keep_recent
        importance_keys = [key for key in self.importance_keys or () if not (self.keep_recent and key is ckpt_recency)]
        found = [
            *((Selection(importance_key=key), self.num_to_keep) for key in importance_keys),
            *((Selection(max_key=key), self.num_to_keep) for key in self.max_keys or ()),
            *((Selection(min_key=key), self.num_to_keep) for key in self.min_keys or ()),
            *([(Selection(importance_key=ckpt_recency), newest)] if self.keep_recent else []),
        ]
        return [(replace(one, ckpt_predicate=self.ckpt_predicate), number) for one, number in found]


def _check_count(name: str, value: Any, words: str) -> None:
    if not isinstance(value, numbers.Integral) or int(value) < 0:
        raise ConfigError(f"{name}={value!r} must be a whole number >= 0: {words}.")


def as_number(value: Any) -> float | None:
    """Return a metric as a number, or None for what cannot be compared: NaN, text, more than one number.

    Args:
        value: of any type.

    Ranks: local.

    Example:
        >>> as_number(torch.tensor(2)), as_number("2")
        (2.0, None)
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    try:
        return float(value) if isinstance(value, (bool, int, float)) and not math.isnan(value) else None
    except OverflowError:  # a whole number beyond all measure
        return None


def ranked(checkpoints: Iterable[Checkpoint], selection: Selection) -> list[Checkpoint]:
    """Rank the checkpoints that count.

    Args:
        checkpoints: in any order.
        selection: which count, and what is better.

    Returns:
        The best first; among equals the newest first; what has no number (NaN) last.

    Ranks: local.

    Example:
        >>> metas = {"a": {"unixtime": 1, "loss": 3.0}, "b": {"unixtime": 2, "loss": float("nan")}}
        >>> saved = [Checkpoint(Path(name), meta, {}) for name, meta in metas.items()]
        >>> [checkpoint.path.name for checkpoint in ranked(saved, Selection(min_key="loss"))]
        ['a', 'b']
    """

    def order(checkpoint: Checkpoint) -> tuple[Any, ...]:
        value = selection.importance(checkpoint)
        newest = (ckpt_recency(checkpoint), checkpoint.path.name)
        return (0, 0, *newest) if value is None else (1, value, *newest)

    return sorted(filter(selection.counts, checkpoints), key=order, reverse=True)


def deletable(checkpoints: Sequence[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Return the checkpoints that may be deleted: ranked by some key, and protected by none.

    Args:
        checkpoints: in any order.
        retention: what to keep.

    Returns:
        What may be deleted.

    Ranks: local.

    Example:
        >>> two = [Checkpoint(Path(f"CKPT+{time}"), {"unixtime": time}, {}) for time in (1, 2)]
        >>> [checkpoint.path.name for checkpoint in deletable(two, Retention(1, [ckpt_recency]))]
        ['CKPT+1']
    """
    candidates: dict[Checkpoint, None] = {}
    protected: set[Checkpoint] = set()
    for selection, number in retention.selections():
        order = ranked(checkpoints, selection)
        candidates.update(dict.fromkeys(order))
        protected.update(order[:number])
    return [checkpoint for checkpoint in candidates if checkpoint not in protected]


# ---------------------------------------------------------------------------------------- reading


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint directory says of itself; its files are not looked into.

    Args:
        path: the directory.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: its ``CKPT.yaml`` cannot be read; the message does not repeat the path.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> _ = (path / "CKPT.yaml").write_text("unixtime: 1.5")
        >>> read_checkpoint(path).meta
        {'unixtime': 1.5}
    """
    from ddpkit.base import load_plain_yaml

    try:
        meta = load_plain_yaml(read_text(path / META_NAME))
        files = {file.name.removesuffix(SUFFIX): file for file in sorted(path.iterdir()) if file.suffix == SUFFIX}
    except CheckpointError as error:
        raise CheckpointError(f"{META_NAME}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{META_NAME} cannot be read: {error}") from error
    if not isinstance(meta, dict) or as_number(meta.get("unixtime")) is None:
        raise CheckpointError(f"{META_NAME} is empty or does not say when the checkpoint was saved (unixtime)")
    for file in files.values():
        if not (file.is_file() or file.is_dir()):  # opening a pipe or a device may never end
            raise CheckpointError(f"{file.name} is neither a file nor a directory")
    return Checkpoint(path, meta, files)


def _holds_a_checkpoint(path: Path) -> bool:
    """Say whether a directory is a checkpoint, whole or with files missing."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except NotADirectoryError:
        return False
    except OSError as error:
        raise CheckpointError(f"it cannot be looked into: {error}") from error
    return any(name in {META_NAME, MANIFEST_NAME} or name.endswith(SUFFIX) for name in names)


def damage_of(path: Path, mode: VerifyMode) -> list[str]:
    """Say why a checkpoint is not what was saved. Its manifest must be there.

    Otherwise it is checked as by :func:`ddpkit.checkpointing.storage.verify`.

    Args:
        path: the directory.
        mode: how closely to look.

    Returns:
        One reason per fault; empty when all is well.

    Raises:
        ConfigError: an unknown ``mode``.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> _ = (path / "CKPT.yaml").write_text(META_MARK)
        >>> damage_of(path, "size")
        ['manifest.json is missing']
    """
    try:
        marked = META_MARK in read_text(path / META_NAME)
    except (OSError, UnicodeDecodeError) as error:
        return [f"{META_NAME} cannot be read: {error}"]
    return verify(path, mode, expect_manifest=marked)


class DamageLedger:
    """Finds the checkpoints of a folder, and remembers which are damaged so that each is reported once.

    Attributes:
        reasons: for each damaged checkpoint, by path: what is damaged.
        latest: the greatest ``unixtime`` of all checkpoints seen, in seconds since 1970.
        failures: how often a save has failed and training has gone on.

    Ranks: local.

    State: its attributes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "CKPT+a").mkdir()
        >>> _ = (folder / "CKPT+a" / "CKPT.yaml").write_text("")
        >>> ledger = DamageLedger()
        >>> ledger.scan(folder), [path.name for path in ledger.reasons]
        ([], ['CKPT+a'])
    """

    def __init__(self) -> None:
        self.reasons: dict[Path, str] = {}
        self.latest = 0.0
        self.failures = 0

    def note_time(self, checkpoint: Checkpoint) -> None:
        """Update :attr:`latest` with a checkpoint's time; later checkpoints get a later time."""
        time = ckpt_recency(checkpoint)
        if math.isfinite(time):
            self.latest = max(self.latest, time)

    def scan(self, folder: Path, mode: VerifyMode = "off") -> list[Checkpoint]:
        """Read the checkpoints in a folder; log and skip damaged ones.

        Args:
            folder: where they are.
            mode: how closely to look at ``CKPT.yaml``, by which they are ranked; see :func:`verify`.

        Raises:
            CheckpointError: the folder itself cannot be read.
        """
        found = []
        try:
            paths = sorted(path for path in folder.iterdir() if path.name.startswith(DIRECTORY_PREFIX))
        except FileNotFoundError:
            paths = []
        except OSError as error:
            raise CheckpointError(f"the checkpoint folder {folder} cannot be read: {error}") from error
        self.reasons = {path: reason for path, reason in self.reasons.items() if path in paths}
        for path in paths:
            try:
                if _holds_a_checkpoint(path):
                    checkpoint, faults = read_checkpoint(path), verify(path, mode, only=META_NAME)
                    if faults:
                        raise CheckpointError("; ".join(faults))
                    found.append(checkpoint)
                    self.note_time(checkpoint)
            except CheckpointError as error:
                if os.path.lexists(path):  # else another process has deleted it meanwhile
                    self.report(path, str(error))
        return found

    def is_whole(self, checkpoint: Checkpoint, mode: VerifyMode) -> bool:
        """Verify a checkpoint; report one that is damaged, forget what was reported of one that is whole."""
        faults = damage_of(checkpoint.path, mode)
        if faults:
            self.report(checkpoint.path, "; ".join(faults))
        else:
            self.reasons.pop(checkpoint.path, None)
        return not faults

    def report(self, path: Path, reason: str) -> None:
        """Say, once for each reason, that a checkpoint is damaged."""
        if self.reasons.get(path) != reason:
            logger.warning("The checkpoint %s is damaged and passed over: %s", path, reason)
        self.reasons[path] = reason


# ---------------------------------------------------------------------------------------- averaging


def average_state_dicts(state_dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the parameters of several states of one model.

    Args:
        state_dicts: states with the same names and shapes; none is changed, and one at a time is held.

    Returns:
        A state whose floating-point and complex tensors are the means, in their own dtype (summed in at least
        float32). All else (counters, masks) is taken from the first state. Tensors of 8 bits or less, whose scale is
        stored elsewhere, must be equal in all states.

    Raises:
        ConfigError: ``states`` is empty, or names, shapes or a tensor of 8 bits or less differ.

    Ranks: local.

    Example:
        >>> average_state_dicts([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        {'w': tensor([2.])}
    """
    first: dict[str, Any] = {}
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for count, state in enumerate(state_dicts, 1):
        if not isinstance(state, Mapping):
            raise ConfigError(f"a {type(state).__name__} cannot be averaged: states of modules are needed, by name.")
        if count == 1:
            first = {name: value.detach().clone() if _is_tensor(value) else value for name, value in state.items()}
            sums = {name: _wide_copy(value) for name, value in first.items() if _can_be_averaged(value)}
            continue
        if state.keys() != first.keys():
            different = sorted(map(str, state.keys() ^ first.keys()))
            raise ConfigError(f"the states differ in {different}: they are of other models.")
        for name, own in first.items():
            _require_alike(name, own, state[name])
        for name, total in sums.items():
            total.add_(state[name].detach().to(total.device, total.dtype))
    if not count:
        raise ConfigError("average_state_dicts was given no state; at least one is needed.")
    return first | {name: (total / count).to(first[name].dtype) for name, total in sums.items()}


def _require_alike(name: str, one: Any, other: Any) -> None:
    """Refuse what has no mean: other shapes, and quantized weights that differ, whose scales are kept elsewhere."""
    if is_code(one) or is_code(other):
        is_same = is_code(one) and is_code(other) and one.dtype == other.dtype
        if not (is_same and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))):
            raise ConfigError(
                f"{name} has 8 bits and is not the same in all states: such codes have no mean without their scales. "
                "Average states in which it is float32, float16 or bfloat16, and quantize the average."
            )
    elif _can_be_averaged(one) and not (_is_tensor(other) and other.shape == one.shape):
        raise ConfigError(f"{name} is {_kind(one)} in one of the states and {_kind(other)} in another.")


def is_code(value: Any) -> bool:
    """Say whether a tensor holds floating-point numbers of 8 bits or less, such as ``float8_e4m3fn``.

    Args:
        value: anything.

    Returns:
        Whether it does; such weights are quantized, with a scale stored elsewhere.

    Ranks: local.

    Example:
        >>> is_code(torch.ones(2)), is_code(torch.ones(2).to(torch.float8_e5m2))
        (False, True)
    """
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 1


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if _is_tensor(value) else f"a {type(value).__name__}"


def _can_be_averaged(value: Any) -> bool:
    return _is_tensor(value) and (value.is_floating_point() or value.is_complex()) and not is_code(value)


def _wide_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


def average_checkpoints(
    checkpoint_list: Iterable[Checkpoint],
    recoverable_name: str,
    parameter_loader: Callable[..., Any] = safe_load,
    averager: Callable[[Iterable[Any]], Any] = average_state_dicts,
) -> Any:
    """Average one recoverable over several checkpoints.

    Args:
        checkpoint_list: such as ``Checkpointer.find_checkpoints`` returns, best first.
        recoverable_name: whose files to average.
        parameter_loader: called with a path and ``map_location="cpu"``.
        averager: called with the iterator of what was loaded.

    Returns:
        What ``averager`` returns: a ``state_dict``.

    Raises:
        CheckpointError: a checkpoint has no such recoverable, or its file cannot be loaded.
        ConfigError: no checkpoint given, or the checkpoints are of different models.

    Ranks: local.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for weight in (1.0, 3.0):
        ...     torch.save({"w": torch.tensor([weight])}, folder / f"{weight}.ckpt")
        >>> saved = [Checkpoint(folder, {}, {"model": path}) for path in sorted(folder.iterdir())]
        >>> average_checkpoints(saved, "model")
        {'w': tensor([2.])}
    """

    def states() -> Iterator[Any]:
        for checkpoint in checkpoint_list:
            path = checkpoint.paramfiles.get(recoverable_name)
            if path is None:
                raise CheckpointError(
                    f"{checkpoint.path} has no file for {recoverable_name!r}; it has {sorted(checkpoint.paramfiles)}."
                )
            yield parameter_loader(path, map_location="cpu")

    return averager(states())
