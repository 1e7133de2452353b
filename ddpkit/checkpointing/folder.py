"""What the main process does in a folder of checkpoints: begin one, commit it, find, delete.

Nothing here speaks to other ranks. A save has two parts, so that savers on every rank can come in between:
:meth:`CheckpointFolder.begin`, and either :meth:`CheckpointFolder.save` or, to write while training goes on,
:meth:`CheckpointFolder.prepare` and what that returns.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ddpkit.base.plain_yaml import dump_plain_yaml, is_plain
from ddpkit.checkpointing.hooks import SaveHook, saved_state, saves_on_every_rank, torch_save, write_state
from ddpkit.checkpointing.index import (
    DIRECTORY_PREFIX,
    META_MARK,
    META_NAME,
    SUFFIX,
    Checkpoint,
    DamageLedger,
    Retention,
    Selection,
    deletable,
    ranked,
    read_checkpoint,
)
from ddpkit.checkpointing.run_lock import FolderLock
from ddpkit.checkpointing.snapshot import Snapshot, SnapshotMemory, state_bytes
from ddpkit.checkpointing.storage import (
    REPLACED_PREFIX,
    VerifyMode,
    commit_staging,
    fill_staging,
    make_staging,
    restore_replaced,
    write_file,
)
from ddpkit.errors import CheckpointError, ConfigError, FolderInUseError
from ddpkit.logger import get_logger, shown_path

__all__ = ["CheckpointFolder", "PreparedSave", "SaveRequest", "check_file_name", "run_savers"]

logger = get_logger(__name__)

META_HEAD = "# yamllint disable\n"
LONGEST_NAME = 240  # bytes: file systems take 255, of which ".trash-of-CKPT+" needs 15

T = TypeVar("T")


def check_file_name(name: str, what: str) -> None:
    """Refuse a name that cannot be a file's.

    Args:
        name: what is to become a file name.
        what: what it names, for the message.

    Raises:
        ConfigError: it is no text, empty or too long, or leads elsewhere.

    Ranks: local.

    Example:
        >>> check_file_name("../model", "the name of a recoverable,")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: the name of a recoverable, '../model' cannot become a file name: it contains '/'.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{what} {name!r} cannot become a file name: it is a {type(name).__name__}. Give a text.")
    bad = [part for part in ("/", "\\", os.sep, "\0", "..") if part in name]
    if bad or not name:
        raise ConfigError(
            f"{what} {name!r} cannot become a file name: it {f'contains {bad[0]!r}' if bad else 'is empty'}."
        )
    length = len(os.fsencode(name))
    if length > LONGEST_NAME:
        raise ConfigError(
            f"{what} {name[:40]!r}... cannot become a file name: it has {length} bytes, and at most {LONGEST_NAME} fit."
        )


@dataclass(frozen=True)
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

    def hooks_where(self, *, every_rank: bool) -> dict[str, SaveHook]:
        """Return the hooks that run on every rank, or on the main process alone."""
        return {name: hook for name, hook in self.hooks.items() if saves_on_every_rank(hook) == every_rank}

    def all_meta(self, after: float = 0.0) -> dict[str, Any]:
        """Return what ``CKPT.yaml`` says; a clock that was set back makes it no older than ``after``."""
        now = max(time.time(), math.nextafter(after, math.inf))
        return {"unixtime": now, "end-of-epoch": self.end_of_epoch, **self.meta}

    def states(self, hooks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the objects that some hooks would save with ``torch.save``."""
        states = {}
        for name in hooks:
            try:
                states[name] = saved_state(self.objects[name])
            except Exception as error:
                raise _saver_error(name, error) from error
        return states


@dataclass(frozen=True)
class PreparedSave:
    """A checkpoint of which only the slow part remains to be done.

    Attributes:
        checkpoint: as it will be.
        finish: writes what is missing and commits, in any thread; returns the checkpoint.
        refusal: why the states could not be copied, so that ``finish`` must be called before they change; or empty.

    Ranks: main only.

    Example:
        >>> PreparedSave(Checkpoint(Path("CKPT+a"), {}, {}), lambda: None).refusal
        ''
    """

    checkpoint: Checkpoint
    finish: Callable[[], Checkpoint]
    refusal: str = ""


def run_savers(hooks: Mapping[str, SaveHook], objects: Mapping[str, Any], staging: Path) -> CheckpointError | None:
    """Run save hooks.

    Args:
        hooks: by name.
        objects: what they save, by name.
        staging: where the files go.

    Returns:
        What went wrong, so that the ranks can agree on it before anybody raises.

    Ranks: local.

    Example:
        >>> run_savers({"a": lambda obj, path: 1 / 0}, {"a": None}, Path("save"))
        CheckpointError("saving the recoverable 'a': ZeroDivisionError: division by zero")
    """
    for name, hook in hooks.items():
        try:
            hook(objects[name], staging / f"{name}{SUFFIX}")
        except Exception as error:  # noqa: BLE001 -- raised by the caller, on every rank
            return _saver_error(name, error)
    return None


def _raise(failure: CheckpointError | None) -> None:
    if failure is not None:
        raise failure


def _with_states(hooks: Mapping[str, SaveHook]) -> dict[str, SaveHook]:
    """Return those that store a state with ``torch.save``; of what the others store, nothing is known."""
    return {name: hook for name, hook in hooks.items() if hook is torch_save}


def _write_text(text: str, staging: Path) -> None:
    """Write ``CKPT.yaml``, unless its text is empty because it is there already."""
    if text:
        write_file(staging / META_NAME, lambda handle: handle.write(text.encode()))


def _run_all(hooks: Mapping[str, SaveHook], objects: Mapping[str, Any], staging: Path, text: str) -> None:
    _write_text(text, staging)
    _raise(run_savers(hooks, objects, staging))


def _write_snapshot(snapshot: Snapshot, owners: Mapping[str, str], staging: Path, text: str) -> None:
    _write_text(text, staging)
    for name, owner in owners.items():
        try:
            write_state(snapshot.state(name), staging / f"{name}{SUFFIX}", owner)
        except Exception as error:
            raise _saver_error(name, error) from error


def _needed(save: SaveRequest, hooks: Mapping[str, SaveHook]) -> int | None:
    """Return about how much is written for some objects; None if their states cannot be had (any more)."""
    try:
        return state_bytes(save.states(hooks))
    except Exception as error:  # noqa: BLE001 -- asked for while another error is being told
        logger.debug("The size of the states is not known: %s", error)
        return None


def _saver_error(name: str, error: Exception) -> CheckpointError:
    failure = CheckpointError(f"saving the recoverable {name!r}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, and how it is treated.

    Attributes:
        path: the folder.
        ledger: finds checkpoints, and remembers which are damaged.
        verify_mode: how a checkpoint is verified before it is used.
        warns: a save that fails is warned of and training goes on.
        world_size: number of processes of the run; goes into the manifest.
        lock: of the folder; held while anything is saved or deleted.
        apart: directories of checkpoints that are another run's: not counted and not deleted.

    Ranks: main only.

    State: the folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> folder = CheckpointFolder(path, DamageLedger(), FolderLock(path))
        >>> save = SaveRequest({"loss": 1.0}, True, "one", logging.INFO, {}, {})
        >>> with folder.lock.hold():
        ...     folder.save(save, *folder.begin(save)).meta["loss"]
        1.0
    """

    path: Path
    ledger: DamageLedger
    lock: FolderLock
    verify_mode: VerifyMode = "full"
    warns: bool = False
    world_size: int = 1
    apart: set[Path] = field(default_factory=set)

    # ------------------------------------------------------------------------------------ saving

    def begin(self, save: SaveRequest) -> tuple[Path, Path]:
        """Make the directory in which a checkpoint is written, and choose the name that it will have.

        Raises:
            CheckpointError: the directory cannot be made.
        """
        self.lock.clean()
        final = self._new_path(save.name)
        return make_staging(final), final

    def save(self, save: SaveRequest, staging: Path, final: Path) -> Checkpoint:
        """Write what the main process writes, commit, and apply the retention.

        Raises:
            CheckpointError: it could not be saved, and nothing is left of it; or, without ``warns``, the retention
                could not be applied.
        """
        hooks = save.hooks_where(every_rank=False)

        def write() -> None:
            self._write_meta(save, staging)
            _raise(run_savers(hooks, save.objects, staging))

        return self._commit(save, staging, final, write, functools.partial(_needed, save, _with_states(hooks)))

    def prepare(self, save: SaveRequest, staging: Path, final: Path, memory: SnapshotMemory) -> PreparedSave:
        """Write what others have to say, copy the states that ``torch.save`` stores, and leave the rest for later.

        Raises:
            CheckpointError: it could not be done, and nothing is left of it.
        """
        hooks = save.hooks_where(every_rank=False)
        later = _with_states(hooks)
        owners = {name: type(save.objects[name]).__name__ for name in later}
        meta: dict[str, Any] = {}
        snapshot: Snapshot | None = None
        refusal = ""
        text = ""

        def copy_states() -> None:
            nonlocal snapshot, refusal, text
            text = self._meta_for_later(save, meta)
            if not text:
                meta.update(self._write_meta(save, staging))
            _raise(run_savers({name: hook for name, hook in hooks.items() if name not in later}, save.objects, staging))
            states = save.states(later)
            try:
                snapshot = memory.take(states)
            except MemoryError as error:
                refusal = str(error)
            except Exception as error:
                raise _saver_error(", ".join(later), error) from error

        fill_staging(staging, final, copy_states)
        files = sorted({*(f"{name}{SUFFIX}" for name in later), *(path.name for path in staging.glob(f"*{SUFFIX}"))})
        coming = Checkpoint(final, meta, {name.removesuffix(SUFFIX): final / name for name in files})
        if snapshot is None:
            rest = save
            write = functools.partial(_run_all, later, save.objects, staging, text)
            needed = functools.partial(_needed, save, later)
        else:
            rest = replace(save, objects={}, hooks={}, meta={})  # a thread must not keep the training's objects
            write = functools.partial(_write_snapshot, snapshot, owners, staging, text)
            needed = functools.partial(getattr, snapshot, "nbytes")
        return PreparedSave(coming, functools.partial(self._commit, rest, staging, final, write, needed), refusal)

    def _write_meta(self, save: SaveRequest, staging: Path) -> dict[str, Any]:
        meta = save.all_meta(self.ledger.latest)
        _write_text(META_HEAD + META_MARK + dump_plain_yaml(meta), staging)
        return read_checkpoint(staging).meta  # what could not be found again is not saved

    def _meta_for_later(self, save: SaveRequest, meta: dict[str, Any]) -> str:
        """Return the text of a ``CKPT.yaml`` that can only be found again as it is, and fill ``meta``; or nothing."""
        found = save.all_meta(self.ledger.latest)
        if "unixtime" in save.meta or not is_plain(found):
            return ""
        meta.update(copy.deepcopy(found))
        return META_HEAD + META_MARK + dump_plain_yaml(found)

    def _commit(
        self,
        save: SaveRequest,
        staging: Path,
        final: Path,
        write: Callable[[], object],
        bytes_needed: Callable[[], int | None],
    ) -> Checkpoint:
        commit_staging(
            staging, final, write, self.world_size, before_rename=self.lock.require, bytes_needed=bytes_needed
        )
        self.ledger.reasons.pop(final, None)
        self.apart.discard(final)  # whose name this run has taken
        kind = "an end-of-epoch" if save.end_of_epoch else "an intra-epoch"
        epoch = "" if save.epoch is None else f" of epoch {save.epoch}"
        logger.log(save.verbosity, "Saved %s checkpoint%s in %s", kind, epoch, shown_path(final))
        checkpoint = read_checkpoint(final)
        self.ledger.note_time(checkpoint)
        if save.retention is not None:
            self.attempt(self.delete, save.retention, save.verbosity)
        return checkpoint

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Run a part of a save; with ``warns``, warn of a ``CheckpointError`` and return None."""
        try:
            return function(*arguments)
        except CheckpointError as error:
            if not self.warns or isinstance(error, FolderInUseError):
                raise
            self.warn(error)
            return None

    def warn(self, error: Exception) -> None:
        """Say that a save has failed, that training goes on, and which checkpoint is the newest."""
        try:
            newest = ranked(self.ledger.scan(self.path, self.verify_mode), Selection())
        except CheckpointError:
            newest = []
        words = f"the newest checkpoint is {newest[0].path.name}" if newest else "there is no checkpoint"
        logger.warning("%s Training goes on; %s.", error, words)

    def _new_path(self, name: str | None) -> Path:
        if name is not None:
            return self.path / f"{DIRECTORY_PREFIX}+{name}"
        stamp = time.strftime("%Y-%m-%d+%H-%M-%S")
        same_second = [path.name.rpartition("+")[2] for path in self.path.glob(f"{DIRECTORY_PREFIX}+{stamp}+*")]
        number = max((int(text) for text in same_second if text.isdigit()), default=-1) + 1  # names stay in time order
        return self.path / f"{DIRECTORY_PREFIX}+{stamp}+{number:02d}"

    # ------------------------------------------------------------------------------------ choosing

    def find(self, selection: Selection, limit: int | None) -> list[Checkpoint]:
        """Return the checkpoints that are whole, best first, at most ``limit``.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        self._put_back()
        readable = self.ledger.scan(self.path, self.verify_mode)
        order = ranked(readable, selection)
        whole = (checkpoint for checkpoint in order if self.ledger.is_whole(checkpoint, self.verify_mode))
        found = list(itertools.islice(whole, limit))
        if not found and limit != 0 and (order or (self.ledger.reasons and not readable)):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in sorted(self.ledger.reasons.items()))
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole: {reasons}. Repair one, or move them away "
                "to start from scratch."
            )
        return found

    def _put_back(self) -> None:
        """Put back what a run that died was replacing; not under the hands of one that lives, or where nothing is."""
        if not any(self.path.glob(f"{REPLACED_PREFIX}*")):
            return
        try:
            with self.lock.hold():
                restore_replaced(self.path)
        except CheckpointError as error:
            logger.debug("What was being replaced in %s is left as it is: %s", self.path, error)

    def delete(self, retention: Retention, verbosity: int) -> None:
        """Delete what the retention does not keep. What is damaged neither counts nor is deleted.

        Raises:
            CheckpointError: one cannot be deleted.
        """
        ledger = self.ledger
        mode: VerifyMode = "off" if self.verify_mode == "off" else "size"
        readable = [each for each in ledger.scan(self.path, self.verify_mode) if each.path not in self.apart]
        counted = [each for each in readable if each.path not in ledger.reasons and ledger.is_whole(each, mode)]
        for checkpoint in deletable(counted, retention):
            self.lock.remove(checkpoint.path)
            logger.log(min(verbosity, logging.DEBUG), "Deleted checkpoint in %s", shown_path(checkpoint.path))
