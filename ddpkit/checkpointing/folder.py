"""A folder of checkpoints, and what is done there: save, find, delete.

Savers that run on every rank come between :meth:`CheckpointFolder.begin` and
:meth:`CheckpointFolder.finish`; :meth:`CheckpointFolder.commit` may run in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ddpkit.base import SaveHook, do_nothing, earlier_folder
from ddpkit.checkpointing import links, storage
from ddpkit.checkpointing.async_save import WITHOUT_COPY, BackgroundSave, state_bytes
from ddpkit.checkpointing.checkpoint import DIRECTORY_PREFIX, SUFFIX, Checkpoint, ckpt_recency
from ddpkit.checkpointing.hooks import saved_state, torch_save, write_state
from ddpkit.checkpointing.reading import DamageLog
from ddpkit.checkpointing.remote import Remote
from ddpkit.checkpointing.save_report import Retained, SaveReport, size_of_files
from ddpkit.checkpointing.save_request import SaveRequest
from ddpkit.checkpointing.selection import Retention, Selection, deletable, ranked
from ddpkit.checkpointing.shard_writing import NOT_SHARED_BY_SAVERS, await_path
from ddpkit.checkpointing.storage import (
    META_MARK,
    META_NAME,
    MOST_TEXT,
    REPLACED_PREFIX,
    FolderLock,
    VerifyMode,
    cleaned_on_error,
    commit_staging,
    make_staging,
    remove_directory,
    write_file,
)
from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.logger import get_logger, shown_path

logger = get_logger(__name__)

T = TypeVar("T")

# beside the states of recoverables, which have no slash in their names: what is in shards
SKELETONS = "/skeletons"
ROWS = "/rows"
META_HEAD = "# yamllint disable\n"


def run_savers(
    hooks: Mapping[str, SaveHook],
    objects: Mapping[str, Any],
    staging: Path,
    *,
    made_by_another_rank: bool = False,
) -> dict[str, Any]:
    """Run save hooks, but take the states of what :func:`torch_save` is to save.

    Args:
        hooks: by name.
        objects: what they save, by name.
        staging: where the files go.
        made_by_another_rank: whether that directory may be seen late here, or never.

    Returns:
        The states, by name, as ``torch.save`` would store them.

    Raises:
        CheckpointError: one could not be saved.

    Ranks: local.

    Example:
        >>> run_savers({"a": lambda obj, path: 1 / 0}, {"a": None}, Path("save"))
        Traceback (most recent call last):
        ddpkit.errors.CheckpointError: saving the recoverable 'a': ZeroDivisionError: division by
        zero
    """
    states = {}
    for name, hook in hooks.items():
        with _saving(name):
            if made_by_another_rank:  # a hook may make it, where nobody looks for it
                await_path(staging, NOT_SHARED_BY_SAVERS)
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
        raise CheckpointError(
            f"saving the recoverable {name!r}: {type(error).__name__}: {error}"
        ) from error


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
        copy: copies states, so that they may change; where memory is too short for that, a warning
            says so. None: a save ends before training goes on.
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
    note_failure: Callable[[BaseException], object] = do_nothing

    @property
    def remote(self) -> Remote:
        """Where checkpoints of the folder are besides."""
        return self.damage_log.remote

    # ------------------------------------------------------------------------------------ saving

    def begin(self, save: SaveRequest) -> tuple[Path, Path]:
        """Make the directory in which a checkpoint is written, and choose the name that it will
        have.

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

    def finish(
        self,
        save: SaveRequest,
        staging: Path,
        final: Path,
        failures: str = "",
    ) -> Checkpoint:
        """Collect and commit what :meth:`begin` has begun, in the background if it can be copied;
        release the lock.

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
            with self._cleaned(save, staging, final):
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

    def _collect(
        self,
        save: SaveRequest,
        staging: Path,
        final: Path,
    ) -> tuple[Checkpoint, Mapping[str, Any], bool]:
        """Write ``CKPT.yaml`` and what other hooks than :func:`torch_save` write, and take the
        states of the rest.

        Returns the checkpoint as it will be, the states that are still to be written, by name, and
        whether they are copies, so that training may go on.
        """
        from ddpkit.base import dump_plain_yaml

        meta = save.all_meta(self.damage_log.latest)
        text = (META_HEAD + META_MARK + dump_plain_yaml(meta)).encode()
        if len(text) > MOST_TEXT:  # a checkpoint that could not be read again
            raise CheckpointError(
                f"its meta takes {len(text)} bytes, of {MOST_TEXT}: save large values as files."
            )
        write_file(staging / META_NAME, operator.methodcaller("write", text))
        states: Mapping[str, Any] = run_savers(
            save.hooks_where(every_rank=False),
            save.objects,
            staging,
        )
        sharded: dict[str, Any] = {} if save.shards is None else save.shards.skeletons()
        if save.shards is not None:
            states = {**states, SKELETONS: sharded, ROWS: save.shards.rows()}
        is_copy = False
        if self.copy is not None:
            try:
                states = self.copy(states)
                is_copy = True
            except MemoryError as error:
                logger.warning_once(WITHOUT_COPY, error)
        written = [path.name.removesuffix(SUFFIX) for path in staging.glob(f"*{SUFFIX}")]
        names = sorted({*states, *sharded, *written} - {SKELETONS, ROWS})
        return (
            Checkpoint(final, meta, {name: final / f"{name}{SUFFIX}" for name in names}),
            states,
            is_copy,
        )

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
            stood_still: seconds that training waited, if it goes on already; None: it waits for
                this.

        Raises:
            CheckpointError: it could not be saved, and nothing is left of it; or the retention
                could not be applied, unless ``on_error`` is "warn".
        """
        final = checkpoint.path
        digests = {}
        with self._cleaned(save, staging, final, state_bytes(states)):
            for name, state in states.items():
                if name in {SKELETONS, ROWS}:
                    continue
                path = staging / f"{name}{SUFFIX}"
                with _saving(name):
                    digests[path] = write_state(state, path)
            if save.shards is not None:
                digests |= save.shards.finish(staging, states[SKELETONS], states[ROWS])
            commit_staging(
                staging,
                final,
                digests,
                self.world_size,
                before_rename=functools.partial(self._before_rename, staging, final.name),
            )
        self.damage_log.reasons.pop(final, None)
        self.damage_log.note_time(checkpoint)
        links.point(self.lock.folder, links.LATEST, final.name)
        self.remote.saved(final.name)
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
    @contextlib.contextmanager
    def _cleaned(
        save: SaveRequest,
        staging: Path,
        final: Path,
        bytes_needed: int = 0,
    ) -> Iterator[None]:
        """Remove the directory if the block raises; first the ranks are told that look for it."""
        with cleaned_on_error(staging, final, bytes_needed):
            try:
                yield
            except BaseException as error:
                if save.shards is not None:
                    save.shards.give_up(staging, error)
                raise

    def _before_rename(self, staging: Path, name: str) -> None:
        self.lock.require()
        self.remote.put(staging, name)

    @staticmethod
    def _tell(
        save: SaveRequest,
        checkpoint: Checkpoint,
        stood_still: float | None,
        retained: Retained | None,
    ) -> None:
        if save.tell is None:
            return
        is_waiting = stood_still is None
        seconds = time.monotonic() - save.begun if stood_still is None else stood_still
        size = size_of_files(checkpoint.path)
        meta = checkpoint.meta
        save.tell(
            SaveReport(
                checkpoint.path,
                size,
                seconds,
                not is_waiting,
                save.end_of_epoch,
                meta,
                retained,
            )
        )

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
        name = next(
            name
            for name in names
            if name not in used
            and not os.path.lexists(self.lock.folder / name)
            and not self.remote.has(name)
        )
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
        whole = (
            checkpoint
            for checkpoint in order
            if self.damage_log.is_usable(checkpoint, self.verify_mode)
        )
        found = list(itertools.islice(whole, limit))
        if not found and limit != 0 and (order or (self.damage_log.reasons and not readable)):
            reasons = "; ".join(
                f"{path.name}: {reason}" for path, reason in sorted(self.damage_log.reasons.items())
            )
            raise CheckpointError(
                f"no checkpoint in {self.lock.folder} is whole: {reasons}. Repair one, or move "
                "them away to start from scratch."
            )
        return found

    def set_aside(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Move checkpoints into a new folder in this one, where no search finds them, and name it.

        Raises:
            OSError: one cannot be moved.
        """
        # the newest goes last: after a kill in between it is the newest of those that are left
        moved = sorted(checkpoints, key=ckpt_recency)
        with self.lock.hold():
            names = [checkpoint.path.name for checkpoint in moved]
            aside = earlier_folder(self.lock.folder, names)
            links.copy(self.lock.folder, names, aside)
            links.drop(self.lock.folder, names)
            self.lock.require()
            self.remote.set_aside(names, aside.name)
            for checkpoint in moved:
                self.lock.require()
                if checkpoint.path.exists():  # else it is elsewhere alone
                    storage.FILES.rename(checkpoint.path, aside / checkpoint.path.name)
        logger.warning(
            "Checkpoints that this run does not continue were moved to %s.",
            shown_path(aside),
        )

    def delete(self, retention: Retention, verbosity: int) -> Retained:
        """Delete what the retention does not keep. What is damaged neither counts nor is deleted.

        Returns:
            What it has deleted, and what is left.

        Raises:
            CheckpointError: one cannot be deleted.
        """
        log = self.damage_log
        readable = log.scan(self.lock.folder, self.verify_mode)
        counted = [
            each for each in readable if each.path not in log.reasons and log.is_whole(each, "size")
        ]
        gone = deletable(counted, retention)
        retained = _retained(counted, gone, retention)
        self._update_links(retained)
        for checkpoint in gone:
            self.lock.require()
            log.used.add(checkpoint.path.name)
            remove_directory(checkpoint.path)
            logger.log(
                min(verbosity, logging.DEBUG),
                "Deleted checkpoint in %s",
                shown_path(checkpoint.path),
            )
        self.remote.deleted(retained.deleted)
        return retained

    def _update_links(self, retained: Retained) -> None:
        """Have the links stand for what is left, before the rest is deleted."""
        folder = self.lock.folder
        if retained.kept:
            links.point(folder, links.LATEST, retained.kept[-1])
        for name in list(retained.best.values())[:1]:  # by the first key that was given
            links.point(folder, links.BEST, name)
        links.drop(folder, retained.deleted)


def _retained(
    counted: Iterable[Checkpoint],
    gone: Sequence[Checkpoint],
    retention: Retention,
) -> Retained:
    """Say what a deletion has left in a folder, and what is the best of it by each key of the
    meta.
    """
    left = sorted(
        (checkpoint for checkpoint in counted if checkpoint not in gone), key=ckpt_recency
    )
    best = {}
    for selection, _ in retention.selections():
        key = selection.max_key or selection.min_key
        order = ranked(left, selection) if key is not None else []
        if key is not None and order:
            best[key] = order[0].path.name
    return Retained(
        tuple(checkpoint.path.name for checkpoint in left),
        tuple(checkpoint.path.name for checkpoint in gone),
        best,
    )
