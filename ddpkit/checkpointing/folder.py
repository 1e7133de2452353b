"""Checkpoints in a folder: what they are, which is best, and what is done there: save, find, delete, average, load.

What the main process does for all ranks, :func:`checkpoint_work_on_main` has it do. To load, every rank reads the files
of a checkpoint, or rank 0 reads them and sends the others copies (:func:`load_recoverables`). Savers that run
on every rank come between :meth:`CheckpointFolder.begin` and :meth:`CheckpointFolder.finish`;
:meth:`CheckpointFolder.commit` may run in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import numbers
import operator
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import LoadHook, SaveHook, earlier_folder, kind_of
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.async_save import BackgroundSave, state_bytes
from ddpkit.checkpointing.hooks import safe_load, saved_state, saves_on_every_rank, torch_save, write_state
from ddpkit.checkpointing.save_report import Retained, SaveReport, size_of_files
from ddpkit.checkpointing.storage import (
    MANIFEST_NAME,
    META_MARK,
    META_NAME,
    MOST_TEXT,
    REPLACED_PREFIX,
    FolderLock,
    VerifyMode,
    cleaned_on_error,
    commit_staging,
    make_staging,
    read_text,
    remove_directory,
    verify,
    write_file,
)
from ddpkit.comm import failures_of, get_runtime
from ddpkit.distributed import (
    control_group,
    ddp_prevent_block,
    exchange,
    get_world_size,
    if_main_process,
    run_on_main,
)
from ddpkit.errors import CheckpointError, ConfigError, FolderInUseError, MainCheckpointError, MainProcessError
from ddpkit.logger import get_logger, shown_path

logger = get_logger(__name__)

DIRECTORY_PREFIX = "CKPT"
META_HEAD = "# yamllint disable\n"
SUFFIX = ".ckpt"
LONGEST_NAME = 240  # bytes: file systems allow 255, and ".trash-of-CKPT+" takes 15

LOAD_WAIT_SECONDS = 30.0  # for the other ranks, to load on all of them
SENT_BYTES = 16 << 20  # at a time
TELL_SECONDS = 10.0  # until a longer wait is told
ALONE = (
    "The main process waits for the other ranks to %s, too, %.0f s in all, and some have not come. It is called on "
    "every rank: not under `if if_main_process():`."
)

T = TypeVar("T")

LoadMode = Literal["all", "broadcast"]


class Checkpoint(NamedTuple):
    """One saved checkpoint; two are equal when they have one path and were saved at one time.

    A checkpoint may be deleted, and another saved under its name.

    Attributes:
        path: its directory.
        meta: what ``CKPT.yaml`` holds: ``unixtime`` (seconds), ``end-of-epoch`` and what the caller added.
        paramfiles: the file of each recoverable, by name.

    Ranks: local.

    Example:
        >>> path = Path("CKPT+a")
        >>> one, same, other = (Checkpoint(path, {"unixtime": time}, {}) for time in (1.0, 1.0, 2.0))
        >>> one == same, one == other
        (True, False)
    """

    path: Path
    meta: dict[str, Any]
    paramfiles: dict[str, Path]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint) or self.path != other.path:
            return False
        return as_number(self.meta.get("unixtime")) == as_number(other.meta.get("unixtime"))

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


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
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


def _checkpoint_in(path: Path, mode: VerifyMode) -> Checkpoint | None:
    """Read a checkpoint, whole or with files missing; return None for what is none."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except NotADirectoryError:
        return None
    if not any(name in {META_NAME, MANIFEST_NAME} or name.endswith(SUFFIX) for name in names):
        return None
    checkpoint, faults = read_checkpoint(path), verify(path, mode, only=META_NAME)
    if faults:
        raise CheckpointError("; ".join(faults))
    return checkpoint


class DamageLog:
    """Finds the checkpoints of a folder, and remembers which are damaged so that each is reported once.

    Attributes:
        reasons: for each damaged checkpoint, by path: what is damaged.
        latest: the greatest ``unixtime`` of all checkpoints seen, in seconds since 1970.
        used: names that checkpoints have had which may be gone. No new one is called so by itself.

    Ranks: local.

    State: its attributes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "CKPT+a").mkdir()
        >>> _ = (folder / "CKPT+a" / "CKPT.yaml").write_text("")
        >>> damage_log = DamageLog()
        >>> damage_log.scan(folder), [path.name for path in damage_log.reasons]
        ([], ['CKPT+a'])
    """

    def __init__(self) -> None:
        self.reasons: dict[Path, str] = {}
        self.latest = 0.0
        self.used: set[str] = set()

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
                checkpoint = _checkpoint_in(path, mode)
            except (CheckpointError, OSError) as error:
                if os.path.lexists(path):  # else another process has deleted it meanwhile
                    self.report(path, str(error))
                continue
            if checkpoint is not None:
                found.append(checkpoint)
                self.note_time(checkpoint)
        return found

    def is_whole(self, checkpoint: Checkpoint, mode: VerifyMode) -> bool:
        """Verify a checkpoint; report one that is damaged, forget what was reported of one that is whole."""
        faults = verify(checkpoint.path, mode)
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


# ---------------------------------------------------------------------------------------- saving, choosing, deleting


def checkpoint_work_on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function on the main process; every rank gets its value, or an error about checkpoints.

    Args:
        function: what to run.
        arguments: for it.

    Raises:
        CheckpointError: it failed on the main process.

    Ranks: all, or the main process alone.

    Example:
        >>> checkpoint_work_on_main(max, 1, 2)
        2
    """
    try:
        return cast("T", run_on_main(function, args=arguments))
    except MainProcessError as error:  # the main process shows its own traceback
        raise MainCheckpointError(str(error).partition("\n--- traceback of rank 0 ---")[0]) from None


def check_file_name(name: Any, what: str) -> None:
    """Refuse a name that cannot be a file's.

    Args:
        name: the intended file name.
        what: the named object, for the message.

    Raises:
        ConfigError: not a string, empty, too long, or a path out of the folder.

    Ranks: local.

    Example:
        >>> check_file_name("../model", "the name of a recoverable,")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: the name of a recoverable, '../model' cannot become a file name: give a text ...
    """
    is_name = isinstance(name, str) and not any(part in name for part in ("/", "\\", "\0", ".."))
    if not is_name or not 0 < len(os.fsencode(name)) <= LONGEST_NAME:
        raise ConfigError(
            f"{what} {str(name)[:40]!r} cannot become a file name: give a text of 1 to {LONGEST_NAME} bytes without a "
            "slash, a backslash and '..'."
        )


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """What one save is asked to do.

    Attributes:
        meta: what the caller adds to ``CKPT.yaml``.
        end_of_epoch: whether an epoch has ended.
        name: of the checkpoint, or None.
        verbosity: logging level of the lines that tell of it.
        objects: what is saved, by name.
        hooks: what saves each.
        retention: what to delete afterwards, or None.
        epoch: for the line that tells of it; None where it is not known.
        begun: when it was asked for, by ``time.monotonic``: training stands still from then on.
        tell: called with a :class:`SaveReport` once the checkpoint is complete, perhaps in a thread; or None.

    Ranks: local.

    Example:
        >>> SaveRequest({"loss": 0.5}, True, None, logging.INFO, {}, {}).all_meta()
        {'unixtime': ..., 'end-of-epoch': True, 'loss': 0.5}
    """

    meta: Mapping[str, Any]
    end_of_epoch: bool
    name: str | None
    verbosity: int
    objects: Mapping[str, Any]
    hooks: Mapping[str, SaveHook]
    retention: Retention | None = None
    epoch: int | None = None
    begun: float = field(default_factory=time.monotonic)
    tell: Callable[[SaveReport], object] | None = None

    def hooks_where(self, *, every_rank: bool) -> dict[str, SaveHook]:
        """Return the hooks that run on every rank, or on the main process alone."""
        return {name: hook for name, hook in self.hooks.items() if saves_on_every_rank(hook) == every_rank}

    def all_meta(self, after: float = 0.0) -> dict[str, Any]:
        """Return what ``CKPT.yaml`` says; a clock that was set back makes it no older than ``after``."""
        from ddpkit.base import to_plain

        now = max(time.time(), math.nextafter(after, math.inf))
        meta: dict[str, Any] = to_plain({"unixtime": now, "end-of-epoch": self.end_of_epoch, **self.meta})
        if as_number(meta["unixtime"]) is None:
            raise CheckpointError(f"meta has unixtime={meta['unixtime']!r}, which must be a number of seconds.")
        return meta


def run_savers(hooks: Mapping[str, SaveHook], objects: Mapping[str, Any], staging: Path) -> dict[str, Any]:
    """Run save hooks, but take the states of what :func:`torch_save` is to save.

    Args:
        hooks: by name.
        objects: what they save, by name.
        staging: where the files go.

    Returns:
        The states, by name, as ``torch.save`` would store them.

    Raises:
        CheckpointError: one could not be saved.

    Ranks: local.

    Example:
        >>> run_savers({"a": lambda obj, path: 1 / 0}, {"a": None}, Path("save"))
        Traceback (most recent call last):
        ddpkit.errors.CheckpointError: saving the recoverable 'a': ZeroDivisionError: division by zero
    """
    states = {}
    for name, hook in hooks.items():
        with _saving(name):
            if hook is torch_save:
                states[name] = saved_state(objects[name])
            else:
                hook(objects[name], staging / f"{name}{SUFFIX}")
    return states


@contextlib.contextmanager
def _saving(name: str) -> Iterator[None]:
    """Name the recoverable that could not be saved."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"saving the recoverable {name!r}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class CheckpointFolder:
    """A folder of checkpoints, and how it is treated.

    Attributes:
        damage_log: finds checkpoints, and remembers which are damaged.
        verify_mode: how a checkpoint is verified before it is used.
        on_error: "stop", or "warn": a save that fails is warned of, and training goes on.
        lock: of the folder, which it names; held while anything is saved or deleted.
        world_size: of the run that saves.
        background: writes what was copied.
        copy: copies states, so that they may change; where memory is too short for that, a warning says so. None: a
            save ends before training goes on.
        note_failure: called with an error that was only warned of.

    Ranks: main only.

    State: the folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> folder = CheckpointFolder(DamageLog(), FolderLock(path))
        >>> save = SaveRequest({"loss": 1.0}, True, "one", logging.INFO, {}, {})
        >>> folder.save(save).meta["loss"]
        1.0
    """

    damage_log: DamageLog
    lock: FolderLock
    verify_mode: VerifyMode = "full"
    on_error: Literal["stop", "warn"] = "stop"
    world_size: int = 1
    background: BackgroundSave = field(default_factory=BackgroundSave)
    copy: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    note_failure: Callable[[BaseException], object] = bool

    # ------------------------------------------------------------------------------------ saving

    def begin(self, save: SaveRequest) -> tuple[Path, Path]:
        """Make the directory in which a checkpoint is written, and choose the name that it will have.

        The lock is acquired, and is to be released when the save is done, which may be in a thread.

        Raises:
            CheckpointError: the directory cannot be made.
        """
        self.lock.acquire()
        try:
            self.lock.clean()
            final = self._new_path(save.name)
            return make_staging(final), final
        except BaseException:
            self.lock.release()
            raise

    def save(self, save: SaveRequest) -> Checkpoint:
        """Begin and finish a save in which no other rank takes part.

        Raises:
            CheckpointError: it could not be done, and nothing is left of it.
        """
        return self.finish(save, *self.begin(save))

    def finish(self, save: SaveRequest, staging: Path, final: Path, failures: str = "") -> Checkpoint:
        """Collect and commit what :meth:`begin` has begun, in the background if it can be copied; release the lock.

        Args:
            save: what to save.
            staging: the directory from :meth:`begin`.
            final: the path that it gets, also from there.
            failures: of the savers that run on every rank.

        Raises:
            CheckpointError: it could not be done, and nothing is left of it.
        """
        with contextlib.ExitStack() as releasing:
            releasing.callback(self.lock.release)
            with cleaned_on_error(staging, final):
                if failures:
                    raise CheckpointError(failures)
                checkpoint, states, is_copy = self._collect(save, staging, final)
            commit = functools.partial(self.commit, save, staging, checkpoint, states)
            if not is_copy:
                return commit()
            commit = functools.partial(commit, stood_still=time.monotonic() - save.begun)
            self.background.start(final, functools.partial(self._commit_and_release, commit))
            releasing.pop_all()  # the thread does it
            return checkpoint

    def _commit_and_release(self, commit: Callable[[], Checkpoint]) -> None:
        try:
            self.attempt(commit)
        finally:
            self.lock.release()

    def _collect(self, save: SaveRequest, staging: Path, final: Path) -> tuple[Checkpoint, Mapping[str, Any], bool]:
        """Write ``CKPT.yaml`` and what other hooks than :func:`torch_save` write, and take the states of the rest.

        Returns the checkpoint as it will be, the states that are still to be written, by name, and whether they are
        copies, so that training may go on.
        """
        from ddpkit.base import dump_plain_yaml

        meta = save.all_meta(self.damage_log.latest)
        text = (META_HEAD + META_MARK + dump_plain_yaml(meta)).encode()
        if len(text) > MOST_TEXT:  # a checkpoint that could not be read again
            raise CheckpointError(f"its meta takes {len(text)} bytes, of {MOST_TEXT}: save large values as files.")
        write_file(staging / META_NAME, operator.methodcaller("write", text))
        states: Mapping[str, Any] = run_savers(save.hooks_where(every_rank=False), save.objects, staging)
        is_copy = False
        if self.copy is not None:
            try:
                states, is_copy = self.copy(states), True
            except MemoryError as error:
                words = "Checkpoints are written while training waits, because the state cannot be copied first: %s"
                logger.warning_once(words, error)
        names = sorted({*states, *(path.name.removesuffix(SUFFIX) for path in staging.glob(f"*{SUFFIX}"))})
        return Checkpoint(final, meta, {name: final / f"{name}{SUFFIX}" for name in names}), states, is_copy

    def commit(
        self,
        save: SaveRequest,
        staging: Path,
        checkpoint: Checkpoint,
        states: Mapping[str, Any],
        stood_still: float | None = None,
    ) -> Checkpoint:
        """Write the states, give the checkpoint its name, apply the retention, and tell of it.

        Args:
            save: what to save.
            staging: the directory from :meth:`begin`.
            checkpoint: as it will be.
            states: what is still to be written, by name.
            stood_still: seconds that training waited, if it goes on already; None: it waits for this.

        Raises:
            CheckpointError: it could not be saved, and nothing is left of it; or the retention could not be applied,
                unless ``on_error`` is "warn".
        """
        final, digests = checkpoint.path, {}
        with cleaned_on_error(staging, final, state_bytes(states)):
            for name, state in states.items():
                path = staging / f"{name}{SUFFIX}"
                with _saving(name):
                    digests[path] = write_state(state, path)
            commit_staging(staging, final, digests, self.world_size, before_rename=self.lock.require)
        self.damage_log.reasons.pop(final, None)
        self.damage_log.note_time(checkpoint)
        kind = "an end-of-epoch" if save.end_of_epoch else "an intra-epoch"
        epoch = "" if save.epoch is None else f" of epoch {save.epoch}"
        logger.log(save.verbosity, "Saved %s checkpoint%s in %s", kind, epoch, shown_path(final))
        retained = None
        try:
            if save.retention is not None:
                retained = self.attempt(self.delete, save.retention, save.verbosity)
        finally:
            self._tell(save, checkpoint, stood_still, retained)
        return checkpoint

    @staticmethod
    def _tell(
        save: SaveRequest, checkpoint: Checkpoint, stood_still: float | None, retained: Retained | None
    ) -> None:
        if save.tell is None:
            return
        is_waiting = stood_still is None
        seconds = time.monotonic() - save.begun if stood_still is None else stood_still
        size, meta = size_of_files(checkpoint.path), checkpoint.meta
        save.tell(SaveReport(checkpoint.path, size, seconds, not is_waiting, save.end_of_epoch, meta, retained))

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Run a part of a save; if ``on_error`` is "warn", warn of its error and return None."""
        try:
            return function(*arguments)
        except (CheckpointError, OSError) as error:
            if self.on_error != "warn" or isinstance(error, FolderInUseError):
                raise
            logger.warning("%s Training goes on.", error)
            self.note_failure(error)
            return None

    def _new_path(self, name: str | None) -> Path:
        if name is not None:
            return self.lock.folder / f"{DIRECTORY_PREFIX}+{name}"
        start = f"{DIRECTORY_PREFIX}+{time.strftime('%Y-%m-%d+%H-%M-%S')}"
        used = self.damage_log.used
        names = (f"{start}+{number:02d}" for number in itertools.count())
        name = next(one for one in names if one not in used and not os.path.lexists(self.lock.folder / one))
        used.add(name)
        return self.lock.folder / name

    # ------------------------------------------------------------------------------------ choosing

    def find(self, selection: Selection, limit: int | None) -> list[Checkpoint]:
        """Return the checkpoints that are whole, best first, at most ``limit``.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        if any(self.lock.folder.glob(f"{REPLACED_PREFIX}*")):  # by a run that died
            with contextlib.suppress(CheckpointError), self.lock.hold():
                self.lock.clean()
        readable = self.damage_log.scan(self.lock.folder, self.verify_mode)
        order = ranked(readable, selection)
        whole = (checkpoint for checkpoint in order if self.damage_log.is_whole(checkpoint, self.verify_mode))
        found = list(itertools.islice(whole, limit))
        if not found and limit != 0 and (order or (self.damage_log.reasons and not readable)):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in sorted(self.damage_log.reasons.items()))
            raise CheckpointError(
                f"no checkpoint in {self.lock.folder} is whole: {reasons}. Repair one, or move them away "
                "to start from scratch."
            )
        return found

    def set_aside(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Move checkpoints into a new folder in this one, where no search finds them, and name it.

        Raises:
            OSError: one cannot be moved.
        """
        moved = list(checkpoints)
        with self.lock.hold():
            aside = earlier_folder(self.lock.folder, [one.path.name for one in moved])
            for checkpoint in moved:
                self.lock.require()
                storage.FILES.rename(checkpoint.path, aside / checkpoint.path.name)
        logger.warning("Checkpoints that this run does not continue were moved to %s.", shown_path(aside))

    def delete(self, retention: Retention, verbosity: int) -> Retained:
        """Delete what the retention does not keep. What is damaged neither counts nor is deleted.

        Returns:
            What it has deleted, and what is left.

        Raises:
            CheckpointError: one cannot be deleted.
        """
        log = self.damage_log
        readable = log.scan(self.lock.folder, self.verify_mode)
        counted = [each for each in readable if each.path not in log.reasons and log.is_whole(each, "size")]
        gone = deletable(counted, retention)
        for checkpoint in gone:
            self.lock.require()
            log.used.add(checkpoint.path.name)
            remove_directory(checkpoint.path)
            logger.log(min(verbosity, logging.DEBUG), "Deleted checkpoint in %s", shown_path(checkpoint.path))
        return _retained(counted, gone, retention)


def _retained(counted: Iterable[Checkpoint], gone: Sequence[Checkpoint], retention: Retention) -> Retained:
    """Say what a deletion has left in a folder, and what is the best of it by each key of the meta."""
    left = sorted((one for one in counted if one not in gone), key=ckpt_recency)
    best = {}
    for selection, _ in retention.selections():
        key = selection.max_key or selection.min_key
        order = ranked(left, selection) if key is not None else []
        if key is not None and order:
            best[key] = order[0].path.name
    return Retained(tuple(one.path.name for one in left), tuple(one.path.name for one in gone), best)


# ---------------------------------------------------------------------------------------- averaging


def average_state_dicts(state_dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the parameters of several states of one model.

    Args:
        state_dicts: states with the same names and shapes; none is changed, and one at a time is held.

    Returns:
        A state whose floating-point and complex tensors are the means, in their own dtype (summed in at least
        float32). All else (counters, masks) is taken from the first state.

    Raises:
        ConfigError: no state is given, names or shapes differ, or a floating-point tensor has 8 bits or less.

    Ranks: local.

    Example:
        >>> average_state_dicts([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        {'w': tensor([2.])}
    """
    first: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for count, state in enumerate(state_dicts, 1):
        if not isinstance(state, Mapping):
            raise ConfigError(f"{kind_of(state)} cannot be averaged: states of modules are needed, by name.")
        own = {name: _shape_to_average(name, value) for name, value in state.items()}
        if count == 1:
            first = {name: value.detach().clone() if _is_tensor(value) else value for name, value in state.items()}
            sums = {name: _wide_copy(first[name]) for name, shape in own.items() if shape is not None}
            shapes = own
            continue
        different = sorted({str(name) for name, _ in own.items() ^ shapes.items()})
        if different:
            raise ConfigError(f"the states differ in names or shapes: {different}. They are of other models.")
        for name, total in sums.items():
            total.add_(state[name].detach().to(total.device, total.dtype))
    if not count:
        raise ConfigError("average_state_dicts was given no state; at least one is needed.")
    return first | {name: (total / count).to(first[name].dtype) for name, total in sums.items()}


def _shape_to_average(name: str, value: Any) -> torch.Size | None:
    if is_code(value):
        raise ConfigError(f"{name} has 8 bits: such codes have no mean without their scales. Quantize the average.")
    return value.shape if _is_tensor(value) and (value.is_floating_point() or value.is_complex()) else None


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


# -------------------------------------------------------------------------------- loading, and ranks that come


def load_recoverables(
    hooks: Mapping[str, LoadHook], objects: Mapping[str, Any], checkpoint: Checkpoint, mode: LoadMode = "all"
) -> None:
    """Load objects from a checkpoint.

    Args:
        hooks: what loads each, by name.
        objects: by name.
        checkpoint: has a file for each of them.
        mode: ``"all"``: every rank reads. ``"broadcast"``: rank 0 reads, and the others load copies of its files from a
            temporary folder, one at a time: for folders that only rank 0 sees.

    Raises:
        CheckpointError: one cannot be loaded. With ``"broadcast"`` it is raised on every rank, whichever failed.

    Ranks: local; with ``"broadcast"`` collective. Ranks that do not come within half a minute are not waited for: then
        every rank reads. In main-only code the main process reads.

    State: the objects.

    Example:
        >>> load_recoverables({}, {}, Checkpoint(Path("CKPT+a"), {}, {}))
    """
    together = mode == "broadcast" and all_ranks_come("load", LOAD_WAIT_SECONDS)
    if together:
        _require_alike(list(hooks))
    end_of_epoch = bool(checkpoint.meta.get("end-of-epoch", True))
    for name, hook in hooks.items():
        path = checkpoint.paramfiles[name]
        if together:
            _load_on_all(name, path, functools.partial(_load_copy, hook, objects[name], path, end_of_epoch))
        else:
            _load_one(name, path, functools.partial(hook, objects[name], path, end_of_epoch))


def _load_one(name: str, path: Path, load: Callable[[], object]) -> None:
    try:
        load()
    except (CheckpointError, MemoryError):  # without memory for what is sent a rank must end: the others wait for it
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot load the recoverable {name!r} from {path}: {type(error).__name__}: {error}"
        ) from error


def _load_on_all(name: str, path: Path, load: Callable[[], object]) -> None:
    """Load on every rank; raise on every rank if it failed on one."""
    own, failures = failures_of(lambda: _load_one(name, path, load), CheckpointError)
    if failures:
        raise CheckpointError(
            f"{name!r} could not be loaded on every rank: {failures}. The other ranks have a copy of this "
            "one file, in TMPDIR: what saves a directory, or reads other files too, needs ckpt_load=all."
        ) from own


def _load_copy(hook: LoadHook, obj: Any, path: Path, end_of_epoch: bool) -> None:
    """Load rank 0's file: there the file itself, on other ranks a copy of it."""
    content = _bytes_of_main(path)
    if if_main_process():
        hook(obj, path, end_of_epoch)
        return
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        copy = Path(folder, path.parent.name, path.name)
        copy.parent.mkdir()
        copy.write_bytes(content.numpy().data)
        del content
        hook(obj, copy, end_of_epoch)


def _bytes_of_main(path: Path) -> torch.Tensor:
    """Read a file on rank 0 and give every rank its bytes."""
    read: list[torch.Tensor] = []

    def read_file() -> int:
        read.append(torch.from_numpy(np.fromfile(path, np.uint8)))
        return read[0].numel()

    size = checkpoint_work_on_main(read_file)
    content = read[0] if read else torch.from_numpy(np.empty(size or 0, np.uint8))  # MemoryError, and not torch's
    for start in range(0, len(content), SENT_BYTES):
        dist.broadcast(content[start : start + SENT_BYTES], src=0, group=control_group())
    return content


def _require_alike(own: list[str]) -> None:
    """Refuse to send files where the ranks would load different ones."""
    for rank, other in enumerate(exchange(own)):
        if other != own:
            raise CheckpointError(
                f"the ranks would load different recoverables: {own} here, {other} on rank {rank}. Add the same ones "
                "in the same order on every rank, or load with 'all'."
            )


def all_ranks_come(what: str, seconds: float) -> bool:
    """Find out whether every rank makes this call: the main process may be alone, and must not wait for ever.

    Args:
        what: is about to be done; in the key in the store.
        seconds: for which the main process waits.

    Returns:
        Whether all have come; False in main-only code and without a process group.

    Ranks: all, or the main process alone.

    Example:
        >>> all_ranks_come("load", 1.0)
        False
    """
    if ddp_prevent_block():
        return False
    key = f"ddpkit/{what}/{run_on_main(lambda: uuid.uuid4().hex)}"
    store = get_runtime().store
    if not if_main_process():
        store.add(key, 1)

    def wait() -> bool:
        begin = time.monotonic()
        while store.add(key, 0) < get_world_size() - 1:
            waited = time.monotonic() - begin
            if waited > TELL_SECONDS:
                logger.warning_once(ALONE, what, seconds)
            if waited > seconds:
                return False
            time.sleep(0.001)
        store.delete_key(key)
        return True

    return bool(run_on_main(wait))
