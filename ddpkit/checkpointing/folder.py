"""What the main process does in a folder of checkpoints: begin one, collect its states, commit it, find, delete.

Only :func:`checkpoint_work_on_main` speaks to other ranks: it has the main process do the work for all. Savers that run
on every rank come between :meth:`CheckpointFolder.begin` and :meth:`CheckpointFolder.collect`;
:meth:`CheckpointFolder.commit` may run in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ddpkit.base import SaveHook
from ddpkit.checkpointing import storage
from ddpkit.checkpointing.async_save import BackgroundSave, state_bytes
from ddpkit.checkpointing.hooks import saved_state, saves_on_every_rank, torch_save, write_state
from ddpkit.checkpointing.index import (
    DIRECTORY_PREFIX,
    META_MARK,
    META_NAME,
    SUFFIX,
    Checkpoint,
    DamageLedger,
    Retention,
    Selection,
    as_number,
    deletable,
    ranked,
)
from ddpkit.checkpointing.run_lock import FolderLock
from ddpkit.checkpointing.storage import (
    MOST_TEXT,
    REPLACED_PREFIX,
    VerifyMode,
    cleaned_on_error,
    commit_staging,
    make_staging,
    restore_replaced,
    write_file,
)
from ddpkit.distributed import run_on_main
from ddpkit.errors import CheckpointError, ConfigError, FolderInUseError, MainCheckpointError, MainProcessError
from ddpkit.logger import get_logger, shown_path

logger = get_logger(__name__)

META_HEAD = "# yamllint disable\n"
ASIDE_PREFIX = "earlier-"  # followed by the time: a folder of checkpoints that do not count any more
LONGEST_NAME = 240  # bytes: file systems allow 255, and ".trash-of-CKPT+" takes 15

T = TypeVar("T")


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


def check_file_name(name: str, what: str) -> None:
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
        ddpkit.errors.ConfigError: the name of a recoverable, '../model' cannot become a file name: it contains '/'.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{what} {name!r} cannot become a file name: it is a {type(name).__name__}. Give a text.")
    bad = [part for part in ("/", "\\", "\0", "..") if part in name]
    length = len(os.fsencode(name))
    if bad or not 0 < length <= LONGEST_NAME:
        reason = f"contains {bad[0]!r}" if bad else f"has {length} bytes; 1 to {LONGEST_NAME} fit"
        raise ConfigError(f"{what} {name[:40]!r} cannot become a file name: it {reason}.")


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


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, and how it is treated.

    Attributes:
        ledger: finds checkpoints, and remembers which are damaged.
        verify_mode: how a checkpoint is verified before it is used.
        on_error: "stop", or "warn": a save that fails is warned of, and training goes on.
        lock: of the folder, which it names; held while anything is saved or deleted.
        world_size: of the run that saves.
        background: writes what was copied.
        copy: copies states, so that they may change; where memory is too short for that, a warning says so. None: a
            save ends before training goes on.

    Ranks: main only.

    State: the folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> folder = CheckpointFolder(DamageLedger(), FolderLock(path))
        >>> save = SaveRequest({"loss": 1.0}, True, "one", logging.INFO, {}, {})
        >>> folder.save(save).meta["loss"]
        1.0
    """

    ledger: DamageLedger
    lock: FolderLock
    verify_mode: VerifyMode = "full"
    on_error: Literal["stop", "warn"] = "stop"
    world_size: int = 1
    background: BackgroundSave = field(default_factory=BackgroundSave)
    copy: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

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

    def finish(self, save: SaveRequest, staging: Path, final: Path) -> Checkpoint:
        """Collect and commit what :meth:`begin` has begun, in the background if it can be copied; release the lock.

        Args:
            save: what to save.
            staging: the directory from :meth:`begin`.
            final: the path that it gets, also from there.

        Raises:
            CheckpointError: it could not be done, and nothing is left of it.
        """
        with contextlib.ExitStack() as releasing:
            releasing.callback(self.lock.release)
            checkpoint, states, is_copy = self.collect(save, staging, final)
            commit = functools.partial(self.commit, save, staging, checkpoint, states)
            if not is_copy:
                return commit()
            self.background.start(final, functools.partial(self._commit_and_release, commit))
            releasing.pop_all()  # the thread does it
            return checkpoint

    def _commit_and_release(self, commit: Callable[[], Checkpoint]) -> None:
        try:
            self.attempt(commit)
        finally:
            self.lock.release()

    def collect(self, save: SaveRequest, staging: Path, final: Path) -> tuple[Checkpoint, Mapping[str, Any], bool]:
        """Write ``CKPT.yaml`` and what other hooks than :func:`torch_save` write, and take the states of the rest.

        Args:
            save: what to save.
            staging: the directory from :meth:`begin`.
            final: the path that it gets, also from there.

        Returns:
            The checkpoint as it will be, the states that are still to be written, by name, and whether they are copies,
            so that training may go on.

        Raises:
            CheckpointError: it could not be done, and nothing is left of it.
        """
        from ddpkit.base import dump_plain_yaml

        states: Mapping[str, Any] = {}
        is_copy = False
        with cleaned_on_error(staging, final):
            meta = save.all_meta(self.ledger.latest)
            text = (META_HEAD + META_MARK + dump_plain_yaml(meta)).encode()
            if len(text) > MOST_TEXT:  # a checkpoint that could not be read again
                raise CheckpointError(f"its meta takes {len(text)} bytes, of {MOST_TEXT}: save large values as files.")
            write_file(staging / META_NAME, operator.methodcaller("write", text))
            states = run_savers(save.hooks_where(every_rank=False), save.objects, staging)
            if self.copy is not None:
                try:
                    states, is_copy = self.copy(states), True
                except MemoryError as error:
                    words = "Checkpoints are written while training waits, because the state cannot be copied first: %s"
                    logger.warning_once(words, error)
        names = sorted({*states, *(path.name.removesuffix(SUFFIX) for path in staging.glob(f"*{SUFFIX}"))})
        return Checkpoint(final, meta, {name: final / f"{name}{SUFFIX}" for name in names}), states, is_copy

    def commit(self, save: SaveRequest, staging: Path, checkpoint: Checkpoint, states: Mapping[str, Any]) -> Checkpoint:
        """Write the states, give the checkpoint its name, and apply the retention.

        Args:
            save: what to save.
            staging: the directory from :meth:`begin`.
            checkpoint: from :meth:`collect`.
            states: also from there.

        Raises:
            CheckpointError: it could not be saved, and nothing is left of it; or the retention could not be applied,
                unless ``on_error`` is "warn".
        """
        final, digests, needed = checkpoint.path, {}, functools.partial(state_bytes, states)
        with cleaned_on_error(staging, final, needed):
            for name, state in states.items():
                path = staging / f"{name}{SUFFIX}"
                with _saving(name):
                    digests[path] = write_state(state, path)
        commit_staging(staging, final, digests, self.world_size, before_rename=self.lock.require, bytes_needed=needed)
        self.ledger.reasons.pop(final, None)
        self.ledger.note_time(checkpoint)
        kind = "an end-of-epoch" if save.end_of_epoch else "an intra-epoch"
        epoch = "" if save.epoch is None else f" of epoch {save.epoch}"
        logger.log(save.verbosity, "Saved %s checkpoint%s in %s", kind, epoch, shown_path(final))
        if save.retention is not None:
            self.attempt(self.delete, save.retention, save.verbosity)
        return checkpoint

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Run a part of a save; if ``on_error`` is "warn", warn of a ``CheckpointError`` and return None."""
        try:
            return function(*arguments)
        except CheckpointError as error:
            if self.on_error != "warn" or isinstance(error, FolderInUseError):
                raise
            self.warn(error)
            return None

    def warn(self, error: Exception) -> None:
        """Say that a save has failed, at length the first time, and which checkpoint is the newest."""
        try:
            newest = ranked(self.ledger.scan(self.lock.folder, self.verify_mode), Selection())
        except CheckpointError:
            newest = []
        words = f"the newest checkpoint is {newest[0].path.name}" if newest else "there is no checkpoint"
        self.ledger.failures += 1
        count, text = self.ledger.failures, str(error)
        if count > 1:  # what is to be done has been said
            text = f"Failure {count}: {text.partition('. ')[0].removesuffix('.')}."
        logger.warning("%s Training goes on; %s.", text, words)

    def _new_path(self, name: str | None) -> Path:
        if name is not None:
            return self.lock.folder / f"{DIRECTORY_PREFIX}+{name}"
        stamp = time.strftime("%Y-%m-%d+%H-%M-%S")
        same_second = [path.name.rpartition("+")[2] for path in self.lock.folder.glob(f"{DIRECTORY_PREFIX}+{stamp}+*")]
        number = max((int(text) for text in same_second if text.isdigit()), default=-1) + 1  # names stay in time order
        return self.lock.folder / f"{DIRECTORY_PREFIX}+{stamp}+{number:02d}"

    # ------------------------------------------------------------------------------------ choosing

    def find(self, selection: Selection, limit: int | None) -> list[Checkpoint]:
        """Return the checkpoints that are whole, best first, at most ``limit``.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        self._put_back()
        readable = self.ledger.scan(self.lock.folder, self.verify_mode)
        order = ranked(readable, selection)
        whole = (checkpoint for checkpoint in order if self.ledger.is_whole(checkpoint, self.verify_mode))
        found = list(itertools.islice(whole, limit))
        if not found and limit != 0 and (order or (self.ledger.reasons and not readable)):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in sorted(self.ledger.reasons.items()))
            raise CheckpointError(
                f"no checkpoint in {self.lock.folder} is whole: {reasons}. Repair one, or move them away "
                "to start from scratch."
            )
        return found

    def _put_back(self) -> None:
        """Put back what a run that died was replacing, if there is something, and no other run holds the lock."""
        if any(self.lock.folder.glob(f"{REPLACED_PREFIX}*")):
            try:
                with self.lock.hold():
                    restore_replaced(self.lock.folder)
            except CheckpointError as error:
                logger.debug("What was being replaced in %s is left as it is: %s", self.lock.folder, error)

    def set_aside(self, checkpoints: Iterable[Checkpoint]) -> Path:
        """Move checkpoints into a new folder in this one, where no search finds them; return that folder.

        Raises:
            CheckpointError: one cannot be moved.
        """
        aside = self.lock.folder / f"{ASIDE_PREFIX}{time.strftime('%Y-%m-%d+%H-%M-%S')}"
        try:
            aside.mkdir(exist_ok=True)
            for checkpoint in checkpoints:
                self.lock.require()
                storage.FILES.rename(checkpoint.path, aside / checkpoint.path.name)
        except OSError as error:
            raise CheckpointError(f"cannot move what is in {self.lock.folder} to {aside.name}: {error}.") from error
        return aside

    def delete(self, retention: Retention, verbosity: int) -> None:
        """Delete what the retention does not keep. What is damaged neither counts nor is deleted.

        Raises:
            CheckpointError: one cannot be deleted.
        """
        ledger = self.ledger
        mode: VerifyMode = "off" if self.verify_mode == "off" else "size"
        readable = ledger.scan(self.lock.folder, self.verify_mode)
        counted = [each for each in readable if each.path not in ledger.reasons and ledger.is_whole(each, mode)]
        for checkpoint in deletable(counted, retention):
            self.lock.remove(checkpoint.path)
            logger.log(min(verbosity, logging.DEBUG), "Deleted checkpoint in %s", shown_path(checkpoint.path))
