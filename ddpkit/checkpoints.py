"""Checkpoints: save all that a run needs, find the best or newest that is whole, load it, delete
the rest.

A checkpoint is a directory::

    <checkpoints_dir>/CKPT+2026-01-31+12-00-00+00/     or CKPT+<name>/
        CKPT.yaml           unixtime, end-of-epoch, and what the caller adds
        <recoverable>.ckpt  one file (or directory) per recoverable
        manifest.json       sizes and checksums of all files; missing in a checkpoint made by SpeechBrain

It appears under its name only when it is complete (:mod:`ddpkit.checkpointing.storage`), and is
verified before it is used. One that is damaged is reported, passed over and never deleted.

With several ranks the main process saves, chooses and deletes; the others get its result. Any call
may be made by all ranks, or by the main process alone under ``if if_main_process():``. But where a
saver is registered with ``saveon_main_only=False``, every rank must take part in a save.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ddpkit.base import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    POSITION,
    LoadHook,
    SaveHook,
    TransferHook,
    kind_of,
    mark_as_loader,
    mark_as_saver,
    mark_as_transfer,
    register_checkpoint_hooks,
    writing,
)
from ddpkit.checkpointing import (
    DIRECTORY_PREFIX,
    META_NAME,
    REMOTES,
    SUFFIX,
    BackgroundSave,
    Checkpoint,
    CheckpointFolder,
    DamageLog,
    ImportanceKey,
    LoadMode,
    Predicate,
    Remote,
    Retention,
    SaveListener,
    SaveRequest,
    Selection,
    ShardedState,
    ShardSaving,
    SnapshotMemory,
    TrainedOnly,
    VerifyMode,
    average_checkpoints,
    average_state_dicts,
    behind_link,
    check_checkpoint_name,
    check_recoverable_name,
    checkpoint_work_on_main,
    ckpt_recency,
    fetch_on_each_machine,
    find_load_hook,
    find_save_hook,
    find_transfer_hook,
    gathered_states,
    get_default_hook,
    load_recoverables,
    lock_of,
    map_old_state_dict_weights,
    read_checkpoint,
    recover,
    run_savers,
    safe_load,
    saves_on_every_rank,
    torch_parameter_transfer,
    torch_recovery,
    torch_save,
    whole_state_dict,
    words_of_keys,
)
from ddpkit.comm import failures_of
from ddpkit.distributed import get_world_size, if_main_process
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError
from ddpkit.launch import find_slice
from ddpkit.logger import get_logger, shown_path
from ddpkit.object_store import is_url

__all__ = [
    "DEFAULT_LOAD_HOOKS",
    "DEFAULT_SAVE_HOOKS",
    "DEFAULT_TRANSFER_HOOKS",
    "METAFNAME",
    "PARAMFILE_EXT",
    "Checkpoint",
    "Checkpointer",
    "LoadHook",
    "SaveHook",
    "TransferHook",
    "average_checkpoints",
    "average_state_dicts",
    "ckpt_recency",
    "convert_torch_save_hooks_to_once_per_node",
    "find_load_hook",
    "find_save_hook",
    "find_transfer_hook",
    "get_default_hook",
    "map_old_state_dict_weights",
    "mark_as_loader",
    "mark_as_saver",
    "mark_as_transfer",
    "register_checkpoint_hooks",
    "safe_load",
    "saves_on_every_rank",
    "torch_parameter_transfer",
    "torch_recovery",
    "torch_save",
    "whole_state_dict",
]

logger = get_logger(__name__)

T = TypeVar("T")

#: The file of a checkpoint that holds its meta, and what the names of the recoverables' files end
#: in.
METAFNAME = META_NAME
PARAMFILE_EXT = SUFFIX


def convert_torch_save_hooks_to_once_per_node() -> None:
    """Say that the nodes do not share the folder of checkpoints.

    SpeechBrain's function of this name has every node write files of its own. Here the main process
    goes on to write them all, and whatever any Checkpointer loads from then on is read by rank 0
    and sent to the others, as with the option ``ckpt_load=broadcast``. So a run of several nodes
    can go on where only rank 0's has the folder.

    Ranks: local; call it on every rank. Afterwards all ranks must load together.

    State: for the whole process.
    """
    Checkpointer.load_mode = "broadcast"


# --------------------------------------------------------------------------------- the checkpointer


class Checkpointer:
    """Saves objects as checkpoints in one folder, and finds, loads and deletes these.

    Args:
        checkpoints_dir: the folder; made by the main process if it does not exist.
        recoverables: the objects to save and load, by name; the name becomes the file's name.
        custom_load_hooks: what loads a recoverable instead of its class's hook, by name.
        custom_save_hooks: what saves it instead, by name.
        allow_partial_load: load what a checkpoint has and skip recoverables that it does not have.
        trained_only: names of modules of which a checkpoint holds what is trained, or once was, and
            the buffers. The frozen rest, the base, stands in it by fingerprint: whoever loads the
            checkpoint has to have loaded the same base before.

    Attributes:
        checkpoints_dir: as given, an absolute ``Path``: the working directory may change. May be
            set.
        recoverables: as given; may be changed. What is put in here by hand is looked at when
            ``fit`` begins, and at every save.
        optional_recoverables: whether a checkpoint may lack a recoverable, by name.
        custom_load_hooks: as given.
        custom_save_hooks: as given.
        allow_partial_load: as given.
        trained_only: as given, a set.
        verify_mode: ``"full"`` (every byte is read before a checkpoint is used), ``"size"`` or
            ``"off"``.
        asynchronous: a save copies the states and returns; a thread writes them and applies the
            retention. Every later call waits for that first, and raises its error. Set it alike on
            all ranks, and call :meth:`wait` before relying on what is on the disk. Where memory is
            short, the save waits for the disk, and a warning says so.
        on_error: ``"stop"``: a save that fails raises. ``"warn"``: it is warned of on the main
            process, and training goes on with the checkpoints that were there before; what could
            never be saved is an error all the same.
        resume: what :meth:`recover_if_possible` loads if it is not asked for anything else:
            ``"auto"`` (the newest that is whole), ``"never"`` (none), the path of a checkpoint, in
            whatever folder, or what :meth:`named` has returned. The Brain sets it from the option
            while ``fit`` begins.
        last_loaded: the directory of the last load; None: none yet.
        not_taken: names of its entries that no recoverable has loaded, sorted.
        around_save: returns a context for every save; called with whether an epoch has ended, by
            the call. If the context's value is a bool, that is what the checkpoint says.
        tell_epoch: returns the epoch of a save.
        divided_states: None, or a function that says how states are saved that are divided over
            the ranks: called with the objects that :func:`torch_save` saves, by name, it returns
            what is saved instead of some: an object with a whole ``state_dict`` on rank 0, or a
            :class:`~ddpkit.checkpointing.shard_states.ShardedState`, of which each rank writes its
            own part. Every rank must save then.
        listener: None, or a :class:`~ddpkit.checkpointing.save_report.SaveListener`, which the main
            process tells of every save and deletion. The Brain sets it, for the run's log.
        passes_over: called with the name and the object of each recoverable: whether a load leaves
            it as it is. The Brain sets it, for ``resume_with_new``.
        load_mode: ``"all"``: every rank reads the files. ``"broadcast"``: rank 0 reads and sends,
            and all ranks must load together; the main process alone reads by itself, after half a
            minute.

    Raises:
        OSError: the folder cannot be made.
        CheckpointError: a recoverable cannot be saved, or cannot be loaded.
        ConfigError: the name of a recoverable cannot be a file name.

    Ranks: every rank makes its own, of the same recoverables; the methods say more.

    State: saves nothing of itself.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> checkpointer = Checkpointer(tempfile.mkdtemp(), {"model": model})
        >>> saved = checkpointer.save_checkpoint(meta={"loss": 0.5})
        >>> checkpointer.recover_if_possible(min_key="loss") == saved
        True
    """

    load_mode: LoadMode = "all"  # of all, until one is set for a checkpointer

    def __init__(
        self,
        checkpoints_dir: str | os.PathLike[str],
        recoverables: Mapping[str, Any] | None = None,
        custom_load_hooks: Mapping[str, LoadHook] | None = None,
        custom_save_hooks: Mapping[str, SaveHook] | None = None,
        allow_partial_load: bool = False,
        trained_only: Iterable[str] = (),
    ) -> None:
        self._damage_log = DamageLog()
        self.checkpoints_dir = checkpoints_dir
        self.trained_only = set(_names(trained_only))
        self.recoverables: dict[str, Any] = {}
        self.optional_recoverables: dict[str, bool] = {}
        self.custom_load_hooks = dict(custom_load_hooks or {})
        self.custom_save_hooks = dict(custom_save_hooks or {})
        self.allow_partial_load = allow_partial_load
        self.verify_mode: VerifyMode = "full"
        self.asynchronous = False
        self.on_error: Literal["stop", "warn"] = "stop"
        self.resume: str | Checkpoint = "auto"
        self.last_loaded: Path | None = None
        self.not_taken: tuple[str, ...] = ()
        self.around_save: Callable[[bool], AbstractContextManager[bool | None]] = lambda _: (
            contextlib.nullcontext()
        )
        self.tell_epoch: Callable[[], int | None] = lambda: None
        self.divided_states: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
        self.listener: SaveListener | None = None
        self.passes_over: Callable[[str, Any], bool] = lambda *_: False
        self._trained: dict[str, TrainedOnly] = {}
        self._memory = SnapshotMemory()
        self._background = BackgroundSave()
        weakref.finalize(self, self._background.close)
        if recoverables is not None:
            self.add_recoverables(recoverables)
        plan = find_slice()  # a measured slice makes no folder of the user's
        if if_main_process() and (plan is None or plan.holds(self.checkpoints_dir)):
            with writing(f"checkpoints_dir={os.fspath(checkpoints_dir)!r}"):
                self.checkpoints_dir.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder. An absolute path, wherever the working directory is by now."""
        return self._lock.folder

    @checkpoints_dir.setter
    def checkpoints_dir(self, folder: str | os.PathLike[str]) -> None:
        path = _local_folder(folder)
        self._damage_log.remote = REMOTES.of(path)
        # links stay, and ".." too, which may follow one
        self._lock = lock_of(path)

    def _refuse_whole_states(self, _: object) -> None:
        raise ConfigError(
            "Checkpointer.whole_states is not read any more. Assign the function to "
            "divided_states: for each state it returns it whole on rank 0, as before, or each "
            "rank's rows of it."
        )

    whole_states = property(fset=_refuse_whole_states, doc="Former name of ``divided_states``.")

    def add_recoverable(
        self,
        name: str,
        obj: Any,
        custom_load_hook: LoadHook | None = None,
        custom_save_hook: SaveHook | None = None,
        optional_load: bool = False,
    ) -> None:
        """Add an object to what is saved and loaded; one of the same name and kind is replaced.

        Args:
            name: becomes the file's name.
            obj: a module, optimizer, scheduler, scaler, an object of a class with checkpoint hooks,
                ddpkit's or SpeechBrain's, or anything with ``state_dict`` and ``load_state_dict``.
            custom_load_hook: called with ``(obj, path, end_of_epoch)`` instead of the class's hook.
            custom_save_hook: called with ``(obj, path)`` instead of the class's hook, on the main
                process.
            optional_load: a checkpoint without it can be loaded, with a warning.

        Raises:
            CheckpointError: nothing can save it, or nothing can load it.
            ConfigError: the name cannot be a file name, or it is a module's and is given to an
                optimizer, or the other way round.

        Ranks: local; do it on every rank.
        """
        check_recoverable_name(name)
        kinds = (torch.optim.Optimizer, torch.nn.Module)
        before = self.recoverables.get(name)
        if {
            kind for recoverable in (before, obj) for kind in kinds if isinstance(recoverable, kind)
        } == {*kinds}:
            raise ConfigError(
                f"The recoverable {name!r} is {kind_of(before)}: with {kind_of(obj)} in its place "
                "it is not saved. A module and an optimizer need two names, such as 'model' and "
                "'optimizer'."
            )
        if custom_load_hook is not None:
            self.custom_load_hooks[name] = custom_load_hook
        if custom_save_hook is not None:
            self.custom_save_hooks[name] = custom_save_hook
        self._hooks_of(name, obj)
        self.recoverables[name] = obj
        self.optional_recoverables[name] = optional_load

    def add_recoverables(self, recoverables: Mapping[str, Any]) -> None:
        """Add several objects by name, each as :meth:`add_recoverable` does.

        Args:
            recoverables: objects by name.

        Raises:
            AttributeError: ``recoverables`` is not a mapping.
            CheckpointError: a recoverable has no way to be saved, or to be loaded.
            ConfigError: as :meth:`add_recoverable`.

        Ranks: local; do it on every rank.
        """
        if not isinstance(recoverables, Mapping):
            raise AttributeError(  # noqa: TRY004 -- the recipe contract's type
                f"recoverables={recoverables!r}: a mapping from names to objects is needed."
            )
        for name, obj in recoverables.items():
            self.add_recoverable(name, obj)

    def save_checkpoint(
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        verbosity: int = logging.INFO,
    ) -> Checkpoint | None:
        """Save all recoverables as one checkpoint, which appears when it is complete and on the
        disk.

        With ``asynchronous`` the states are copied when this returns, and the objects may change;
        the checkpoint appears later. Savers of other kinds than :func:`torch_save` have written
        their files by then.

        Args:
            meta: plain values to store with it, such as metrics. Numbers of numpy are converted,
                and tensors are kept; of other objects the text is stored.
            end_of_epoch: handed to every loader when the checkpoint is loaded.
            name: the directory becomes ``CKPT+<name>``, in place of one of this name; default: the
                time.
            verbosity: logging level of the line that says so.

        Returns:
            The checkpoint (as it will be, if ``asynchronous``), on every rank; None if it could not
            be saved and ``on_error`` is ``"warn"``.

        Raises:
            CheckpointError: it, or the one before it if that was ``asynchronous``, could not be
                saved, or there is no way to save or load some recoverable; on every rank that made
                the call. What was there before is untouched.
            ConfigError: ``name``, or a recoverable's name, cannot be a file name.

        Ranks: all, or the main process alone. All, if a saver is registered with
        ``saveon_main_only=False``.
        """
        return self._save(meta, end_of_epoch, name, verbosity)

    def save_and_keep_only(  # noqa: PLR0913, PLR0917 -- the recipe contract fixes these ten
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        num_to_keep: int = 1,
        keep_recent: bool | int = True,
        importance_keys: Sequence[ImportanceKey] = (),
        max_keys: Sequence[str] = (),
        min_keys: Sequence[str] = (),
        ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.INFO,
    ) -> None:
        """Save a checkpoint, then delete all but the best by each key.

        Args:
            meta: as in :meth:`save_checkpoint`.
            end_of_epoch: as in :meth:`save_checkpoint`.
            name: as in :meth:`save_checkpoint`.
            num_to_keep: as in :meth:`delete_checkpoints`.
            keep_recent: True keeps the newest ``num_to_keep`` as well; a number keeps so many of
                the newest, whatever ``num_to_keep`` is. With False or 0, and without keys, nothing
                is deleted; and what was just saved may be, if it is not among the best.
            importance_keys: as in :meth:`delete_checkpoints`.
            max_keys: as in :meth:`delete_checkpoints`.
            min_keys: as in :meth:`delete_checkpoints`.
            ckpt_predicate: as in :meth:`delete_checkpoints`.
            verbosity: logging level of the lines that say so.

        Raises:
            CheckpointError: as :meth:`save_checkpoint`.
            ConfigError: as :meth:`save_checkpoint`; ``num_to_keep`` or ``keep_recent`` is negative
                or no whole number.

        Ranks: as :meth:`save_checkpoint`; one hand-over for all of it.
        """
        retention = Retention(
            num_to_keep,
            importance_keys,
            max_keys,
            min_keys,
            ckpt_predicate,
            keep_recent,
        )
        keys = {*(max_keys or ()), *(min_keys or ())}
        for key in sorted(keys.difference(meta or ())):
            logger.warning_once(
                "No %r in the meta: by this key the checkpoint is not one of the best to keep.",
                key,
            )
        self._save(meta, end_of_epoch, name, verbosity, retention)

    def find_checkpoint(
        self,
        importance_key: ImportanceKey | None = None,
        max_key: str | None = None,
        min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> Checkpoint | None:
        """Find the best checkpoint that is whole; by default the newest.

        Args:
            importance_key: gives a checkpoint's importance; the greatest is best.
            max_key: a key of the meta whose greatest value is best. Checkpoints without it do not
                count.
            min_key: a key of the meta whose smallest value is best. Checkpoints without it do not
                count.
            ckpt_predicate: says whether a checkpoint counts.

        Returns:
            The best one, the newest among equals, or None if none counts. A value that is NaN, or
            no number, ranks worst.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
            ConfigError: more than one kind of key is given.

        Ranks: all, or the main process alone; the main process searches, all get its result.
        """
        found = self.find_checkpoints(
            importance_key,
            max_key,
            min_key,
            ckpt_predicate,
            max_num_checkpoints=1,
        )
        return found[0] if found else None

    def find_checkpoints(
        self,
        importance_key: ImportanceKey | None = None,
        max_key: str | None = None,
        min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
        max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """Find the checkpoints that are whole, best first.

        Args:
            importance_key: as in :meth:`find_checkpoint`.
            max_key: as in :meth:`find_checkpoint`.
            min_key: as in :meth:`find_checkpoint`.
            ckpt_predicate: as in :meth:`find_checkpoint`.
            max_num_checkpoints: at most so many; default: all.

        Returns:
            The ranked list.

        Raises:
            CheckpointError: as :meth:`find_checkpoint`.
            ConfigError: as :meth:`find_checkpoint`.

        Ranks: as :meth:`find_checkpoint`.
        """
        selection = Selection(importance_key, max_key, min_key, ckpt_predicate)
        found = self._on_main(self._folder().find, selection, max_num_checkpoints)
        for checkpoint in found:
            self._have_here(checkpoint)
        return found

    def _have_here(self, checkpoint: Checkpoint) -> None:
        fetch_on_each_machine(checkpoint.path, self.load_mode, self.verify_mode)

    @POSITION.at("recovering a checkpoint")
    def recover_if_possible(
        self,
        importance_key: ImportanceKey | None = None,
        max_key: str | None = None,
        min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> Checkpoint | None:
        """Load the best checkpoint that is whole, by default the newest, if there is any.

        Args:
            importance_key: as in :meth:`find_checkpoint`.
            max_key: as in :meth:`find_checkpoint`.
            min_key: as in :meth:`find_checkpoint`.
            ckpt_predicate: as in :meth:`find_checkpoint`.

        Returns:
            What was loaded, or None if no checkpoint counts.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole (a run never starts from
                scratch without a word), or loading fails.
            ConfigError: as :meth:`find_checkpoint`.

        Ranks: all, or the main process alone. The main process chooses; every rank loads that one.
        """
        asked = (importance_key, max_key, min_key, ckpt_predicate)
        if self.resume == "never" and not any(asked):
            logger.info("resume='never': nothing is loaded from %s.", self.checkpoints_dir)
            return None
        if self.resume == "auto" or any(asked):
            checkpoint = self.find_checkpoint(*asked)
        else:
            checkpoint = self.named(self.resume) if isinstance(self.resume, str) else self.resume
        if checkpoint is not None:
            self._load(checkpoint)
        elif key := max_key or min_key:
            self._warn_of_unknown(key)
        else:
            logger.info(
                "No checkpoint to load in %s: starting from scratch.",
                shown_path(self.checkpoints_dir),
            )
        return checkpoint

    def _warn_of_unknown(self, key: str) -> None:
        """Warn that no checkpoint has a key, and name those that there are."""
        if not if_main_process():
            return
        there = self._damage_log.scan(self.checkpoints_dir)
        logger.warning(
            "No checkpoint in %s has %r in its meta: nothing is loaded, and all stays as it is. %s",
            shown_path(self.checkpoints_dir),
            key,
            words_of_keys(there, key) if there else "There are no checkpoints.",
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Verify a checkpoint and load every recoverable from it.

        Args:
            checkpoint: what to load.

        Raises:
            CheckpointError: it is damaged, lacks a recoverable that is not optional, or one cannot
                be loaded.

        Ranks: local; do it on every rank. With ``asynchronous`` as :meth:`wait`.
        """
        if self.asynchronous:
            self.wait()
        self._have_here(checkpoint)
        if self.load_mode == "broadcast":
            checkpoint_work_on_main(self._require_whole, checkpoint)
        else:
            self._require_whole(checkpoint)
        self._load(checkpoint)

    def named(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint that a path names, in whatever folder.

        Args:
            path: of its directory, or one of the links ``latest`` and ``best``.

        Raises:
            CheckpointError: there is none, or it is damaged.

        Ranks: as :meth:`find_checkpoint`.
        """
        own = self.local_path(path)
        return self._on_main(lambda: self._named(own))

    @staticmethod
    def local_path(path: str | os.PathLike[str]) -> Path:
        """Return where a checkpoint that is given by its URL stands on this machine, once it is
        copied there; another path as it is, absolute.

        Args:
            path: of a checkpoint, or its URL.

        Ranks: local; where URLs are given, do it on every rank.
        """
        text = os.fspath(path)
        if not is_url(text):
            return Path(path).absolute()
        folder, _, name = text.rstrip("/").rpartition("/")
        return Path(_local_folder(folder)) / name

    def list_checkpoints(self) -> list[Checkpoint]:
        """List all checkpoints that can be read, in no order of merit and without verifying their
        files.

        Returns:
            The list. What cannot be read is reported and left out.

        Raises:
            CheckpointError: the folder cannot be read.

        Ranks: local; with ``asynchronous`` as :meth:`wait`.
        """
        if self.asynchronous:
            self.wait()
        return self._damage_log.scan(self.checkpoints_dir)

    def delete_checkpoints(
        self,
        *,
        num_to_keep: int = 1,
        min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None,
        importance_keys: Sequence[ImportanceKey] = (ckpt_recency,),
        ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.INFO,
        keep_recent: bool | int = False,
    ) -> None:
        """Delete all checkpoints but the best by each key. Damaged ones are neither counted nor
        deleted.

        Args:
            num_to_keep: how many to keep for each key; 0 deletes all that count.
            min_keys: keys of the meta whose smallest values are best.
            max_keys: keys of the meta whose greatest values are best.
            importance_keys: functions of a checkpoint whose greatest values are best; by default
                the newest.
            ckpt_predicate: only checkpoints for which it is true may be deleted, or count as kept.
            verbosity: logging level of the lines that say so.
            keep_recent: a number keeps so many of the newest, whatever ``num_to_keep`` is and in
                place of what ``importance_keys`` say of them by default. True keeps the newest
                ``num_to_keep``; with False or 0 the keys alone decide.

        Raises:
            CheckpointError: one cannot be deleted.
            ConfigError: ``num_to_keep`` or ``keep_recent`` is negative or no whole number.

        Ranks: all, or the main process alone; the main process chooses and deletes.
        """
        retention = Retention(
            num_to_keep,
            importance_keys,
            max_keys,
            min_keys,
            ckpt_predicate,
            keep_recent,
        )
        self._on_main(self._delete, retention, verbosity)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete and on the
        disk.

        Raises:
            CheckpointError: it could not be saved; on every rank that makes the call, and once.

        Ranks: all, or the main process alone.

        State: where ``asynchronous`` is off, the memory of the copies is given back.
        """
        self._on_main(lambda: None)

    @contextlib.contextmanager
    def hold_folder(self) -> Iterator[None]:
        """Keep the folder for this run: until the end of the block no other one can save or delete
        in it.

        Without it, every save and every deletion takes the lock for itself.

        Raises:
            FolderInUseError: another run has it and lives; on every rank.
            CheckpointError: the folder cannot be written; on every rank, but not with
                ``on_error="warn"``.

        Ranks: all.

        State: ``.lock`` in the folder.
        """
        # of its own: a save in the background may hold the other one longer
        remote = self._damage_log.remote
        lock = lock_of(self.checkpoints_dir)
        checkpoint_work_on_main(self._folder().attempt, lock.acquire)
        try:
            try:
                checkpoint_work_on_main(remote.begin)
                yield
            except BaseException:
                if lock.held:
                    self._finish_after_failure(remote)
                raise
            self._on_main(self._folder().attempt, remote.finish)
        finally:
            lock.release()

    @staticmethod
    def _finish_after_failure(remote: Remote) -> None:
        """Give what is still to be stored some time, where the run ends by an exception."""
        try:
            remote.finish(failed=True)
        except Exception as failure:  # noqa: BLE001 -- what ended the run must not be hidden
            logger.warning("%s: %s", type(failure).__name__, failure)

    def set_aside(self, start: Checkpoint | None) -> None:
        """Move the checkpoints that do not belong to a run that begins at ``start`` into a
        subfolder, and name it.

        Args:
            start: a checkpoint; if it is in this folder, what was saved before stays too. None: all
                is moved.

        Raises:
            CheckpointError: another run holds the folder.
            OSError: one cannot be moved.

        Ranks: main only.
        """
        found = self.list_checkpoints()
        # whatever it was called
        if start is not None and any(_is_same(checkpoint, start) for checkpoint in found):
            found = [
                checkpoint for checkpoint in found if ckpt_recency(checkpoint) > ckpt_recency(start)
            ]
        if found:
            self.set_these_aside(found)

    def set_these_aside(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Move checkpoints of this folder into a subfolder, where no search finds them, and name
        it.

        Args:
            checkpoints: which.

        Raises:
            CheckpointError: another run holds the folder.
            OSError: one cannot be moved.

        Ranks: main only.
        """
        self._folder().set_aside(checkpoints)

    def require_hooks(self) -> dict[str, SaveHook]:
        """Make sure that all recoverables can be saved and loaded, those too that were put in by
        hand.

        Returns:
            The save hook of each, by name.

        Raises:
            CheckpointError: a recoverable cannot be saved or loaded.
            ConfigError: the name of a recoverable cannot be a file name.

        Ranks: local.
        """
        hooks = {}
        for name, obj in self.recoverables.items():
            check_recoverable_name(name)
            hooks[name] = self._hooks_of(name, obj)[0]
        for name in self.trained_only:
            obj = self.recoverables.get(name)
            if not isinstance(obj, torch.nn.Module) or hooks[name] is not torch_save:
                raise ConfigError(
                    f"trained_only={sorted(self.trained_only)}: {name!r} is "
                    f"{'no recoverable' if obj is None else kind_of(obj)}. Name recoverables that "
                    "are modules and are saved by their state_dict."
                )
        return hooks

    def saved_by_each_rank(self) -> list[str]:
        """Return the names of recoverables whose savers run on every rank, as the main process has
        them; none where that is the only one.

        Ranks: collective.
        """
        if get_world_size() == 1:
            return []
        return checkpoint_work_on_main(self._names_saved_by_each_rank)

    def _names_saved_by_each_rank(self) -> list[str]:
        hooks = {
            name: self.custom_save_hooks.get(name) or find_save_hook(obj)
            for name, obj in self.recoverables.items()
        }
        return [name for name, hook in hooks.items() if hook and saves_on_every_rank(hook)]

    def frozen_apart(self) -> list[torch.Tensor]:
        """Return the frozen parameters of the modules of ``trained_only``, as they are now.

        Ranks: local.
        """
        return [
            parameter
            for trained in self._parts_trained().values()
            for parameter in trained.module.parameters()
            if not parameter.requires_grad
        ]

    def bases_of_save(self) -> dict[int, str]:
        """Return the fingerprints of the base weights that the last save, or the present one, has
        left out, by the ids of their parameters.

        Ranks: local.
        """
        return {key: text for one in self._trained.values() for key, text in one.by_id.items()}

    def _parts_trained(self) -> dict[str, TrainedOnly]:
        """Return what is saved of the modules of ``trained_only``, by name."""
        known = self._trained
        self._trained = {}
        for name in sorted(self.trained_only):
            module = self.recoverables.get(name)
            if isinstance(module, torch.nn.Module):
                is_known = name in known and known[name].module is module
                self._trained[name] = known[name] if is_known else TrainedOnly(module)
        return dict(self._trained)

    def find_bases(self, *, begins: bool = False) -> list[TrainedOnly]:
        """Find out which parameters of the modules of ``trained_only`` are of their base.

        Args:
            begins: note only what is frozen, as a training begins.

        Returns:
            For each module what is saved of it.

        Ranks: all, where parameters are divided over the ranks; else any.
        """
        found = list(self._parts_trained().values())
        for trained in found:
            if begins:
                trained.begin()
            else:
                trained.refresh()
        return found

    def _hooks_of(self, name: str, obj: Any) -> tuple[SaveHook, LoadHook]:
        save = self.custom_save_hooks.get(name) or find_save_hook(obj)
        load = self.custom_load_hooks.get(name) or find_load_hook(obj)
        if save is torch_save and get_world_size() > 1 and getattr(obj, "is_of_each_rank", False):
            raise CheckpointError(
                f"the recoverable {name!r} is {kind_of(obj)}, whose totals are of each rank, and "
                "the main process saves its own alone. Keep it as an attribute of the Brain or in "
                "hparams: fit saves it."
            )
        if save is None or load is None:  # a checkpoint that nothing can load is of no use
            raise CheckpointError(
                f"the recoverable {name!r}, of type {type(obj).__name__}, cannot be "
                f"{'loaded' if save else 'saved'}. Give its class state_dict and load_state_dict, "
                "or mark two of its methods with mark_as_saver and mark_as_loader and the class "
                "with register_checkpoint_hooks, or pass custom_save_hook and custom_load_hook to "
                "add_recoverable."
            )
        return save, load

    # ------------------------------------------------------------------------------------ saving

    def _save(
        self,
        meta: Mapping[str, Any] | None,
        end_of_epoch: bool,
        name: str | None,
        verbosity: int,
        retention: Retention | None = None,
    ) -> Checkpoint | None:
        begun = time.monotonic()
        tell = self.listener.begin() if self.listener is not None and if_main_process() else None
        with self.around_save(end_of_epoch) as known:
            end_of_epoch = end_of_epoch if known is None else known
            if name is not None:
                check_checkpoint_name(name)
            hooks, epoch = self.require_hooks(), self.tell_epoch()
            trained = self._parts_trained()
            objects = {**self.recoverables, **trained}
            shards: dict[str, ShardedState] = {}
            if self.divided_states is None:
                self.find_bases()
            else:
                stored = {name: obj for name, obj in objects.items() if hooks[name] is torch_save}
                divided = self._loadable_by_hooks(objects, self.divided_states(stored))
                shards = {
                    name: state
                    for name, state in divided.items()
                    if isinstance(state, ShardedState)
                }
                objects = {**objects, **divided}
                hooks = {name: hook for name, hook in hooks.items() if name not in shards}
            save = SaveRequest(
                meta or {},
                end_of_epoch,
                name,
                verbosity,
                objects,
                hooks,
                retention,
                epoch,
                begun,
                tell,
                ShardSaving(shards) if shards else None,
            )
            folder = self._folder()
            everywhere = save.hooks_where(every_rank=True)
            if everywhere or save.shards is not None:
                return self._save_on_every_rank(folder, save, everywhere)
            return self._on_main(folder.attempt, folder.save, save)

    def _loadable_by_hooks(
        self,
        objects: Mapping[str, Any],
        divided: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Gather whole what is loaded by a hook of its own, which knows nothing of shards."""
        own = {
            name: state
            for name, state in divided.items()
            if isinstance(state, ShardedState)
            and self._hooks_of(name, self.recoverables[name])[1] is not torch_recovery
        }
        gathered = gathered_states(own)
        if missing := sorted(own.keys() - gathered.keys()):
            raise CheckpointError(
                f"the recoverable {missing[0]!r} has a loader of its own, which cannot read "
                "shards, and the strategy gives its state in shards that cannot be gathered. "
                "Leave its loader to ddpkit, or let divided_states return it whole."
            )
        return {**divided, **gathered}

    def _save_on_every_rank(
        self,
        folder: CheckpointFolder,
        save: SaveRequest,
        hooks: Mapping[str, SaveHook],
    ) -> Checkpoint | None:
        begun = self._on_main(folder.attempt, folder.begin, save)
        if begun is None:
            return None
        staging, final = begun
        failures = ""
        if hooks:
            _, failures = failures_of(
                lambda: run_savers(hooks, self.recoverables, staging, made_by_another_rank=True),
                waits=self.on_error == "warn",
            )
        if save.shards is not None and not (failures or if_main_process()):
            copy = self._memory.take if self.asynchronous else None
            save.shards.write(staging, final, self._background, copy)
        # what was begun before is done; the shards that are being written keep no rank waiting
        return checkpoint_work_on_main(
            folder.attempt,
            folder.finish,
            save,
            staging,
            final,
            failures,
        )

    def _await_own_thread(self) -> None:
        """Wait for what this process writes in the background."""
        if BackgroundSave.threads:  # else it has written nothing there
            self._background.wait(self.checkpoints_dir)
        if not self.asynchronous:
            self._memory.clear()

    # ------------------------------------------------------------------- what the main process does

    def _folder(self) -> CheckpointFolder:
        return CheckpointFolder(
            self._damage_log,
            self._lock,
            self.verify_mode,
            self.on_error,
            get_world_size(),
            self._background,
            self._memory.take if self.asynchronous else None,
            bool if self.listener is None else self.listener.failed,
        )

    def _on_main(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the main process, once the save that goes on in the background is
        done.
        """

        def work() -> T:
            self._await_own_thread()
            return function(*arguments)

        if not if_main_process():
            self._await_own_thread()
        return checkpoint_work_on_main(work)

    def _named(self, given: Path) -> Checkpoint:
        remote = REMOTES.of(given.parent)
        path = behind_link(remote.behind_link(given))
        if remote.has(path.name):
            remote.fetch(path)
        if not os.path.lexists(path / META_NAME):
            raise CheckpointUsageError(
                f"resume={str(path)!r} is not a checkpoint: it has no {META_NAME}. Give the path "
                f"of one ({DIRECTORY_PREFIX}+...), 'auto' for the newest in "
                f"{self.checkpoints_dir}, or 'never'."
            )
        checkpoint = read_checkpoint(path)
        self._require_whole(checkpoint)
        return checkpoint

    def _delete(self, retention: Retention, verbosity: int) -> None:
        folder = self._folder()
        with folder.lock.hold():
            folder.lock.clean()
            retained = folder.delete(retention, verbosity)
        if self.listener is not None and retained.deleted:
            self.listener.deleted(retained)

    # ------------------------------------------------------------------------------------ loading

    def _require_whole(self, checkpoint: Checkpoint) -> None:
        if not self._damage_log.is_usable(checkpoint, self.verify_mode):
            reason = self._damage_log.reasons[checkpoint.path]
            raise CheckpointError(
                f"{checkpoint.path} is damaged: {reason}. Load another checkpoint."
            )

    def _load_hook(self, name: str, obj: Any) -> LoadHook:
        hook = self._hooks_of(name, obj)[1]
        if hook is not torch_recovery:
            return hook
        return self._parts_trained()[name].load if name in self.trained_only else recover

    def _load(self, checkpoint: Checkpoint) -> None:
        logger.info("Loading a checkpoint from %s", shown_path(checkpoint.path))
        self._have_here(checkpoint)
        hooks: dict[str, LoadHook] = {}
        ended = bool(checkpoint.meta.get("end-of-epoch", True))
        kept = {name for name, obj in self.recoverables.items() if self.passes_over(name, obj)}
        for name, obj in self.recoverables.items():
            if name in kept:
                continue
            if name in checkpoint.paramfiles:
                hooks[name] = self._load_hook(name, obj)
            elif not self.allow_partial_load and not (
                ended and getattr(obj, "is_of_inside_an_epoch", False)
            ):
                _accept_missing(
                    name,
                    checkpoint,
                    optional=self.optional_recoverables.get(name, False),
                )
        load_recoverables(hooks, self.recoverables, checkpoint, self.load_mode)
        left = checkpoint.paramfiles.keys() - hooks.keys() - kept
        if checkpoint.path == self.last_loaded:  # once more, for what was not there the first time
            left &= set(self.not_taken)
        self.last_loaded = checkpoint.path
        self.not_taken = tuple(sorted(left))


def _local_folder(folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder of this machine that stands for a URL; a folder as it is."""
    if not is_url(folder):
        return folder
    from ddpkit.mirror import mirror_of  # nothing else needs it

    return mirror_of(os.fspath(folder))


def _is_same(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two paths are of one checkpoint, whatever they are called."""
    if not (one.path.exists() and other.path.exists()):
        return one.path == other.path
    return one.path.samefile(other.path)


def _names(given: Any) -> list[str]:
    """Read a list of names; one name alone is not a list of letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            f"trained_only={given!r} is no list of names. Give trained_only=[{given!r}]."
        )
    return list(given)


def _accept_missing(
    name: str,
    checkpoint: Checkpoint,
    *,
    optional: bool,
) -> None:
    if optional or "dataloader" in name:
        logger.warning("%s has no file for %r: it keeps its present state.", checkpoint.path, name)
        return
    raise CheckpointError(
        f"{checkpoint.path} has no file for the recoverable {name!r}; only "
        f"{sorted(checkpoint.paramfiles)}. To go on without it, add the recoverable with "
        "optional_load=True, or set allow_partial_load."
    )
