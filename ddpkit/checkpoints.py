"""Checkpoints: save all that a run needs, find the best or newest that is whole, load it, delete the rest.

A checkpoint is a directory::

    <checkpoints_dir>/CKPT+2026-01-31+12-00-00+00/     or CKPT+<name>/
        CKPT.yaml           unixtime, end-of-epoch, and what the caller adds
        <recoverable>.ckpt  one file (or directory) per recoverable
        manifest.json       sizes and checksums of all files; missing in a checkpoint made by SpeechBrain

It appears under its name only when it is complete (:mod:`ddpkit.storage`), and is verified before it is used.
One that is damaged is reported, passed over and never deleted.

With several ranks the main process saves, chooses and deletes; the others get its result. Any call may be
made by all ranks, or by the main process alone under ``if if_main_process():``. But where a saver is
registered with ``save_on_main_only=False``, every rank must take part in a save.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ddpkit.checkpoint_hooks import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    LoadHook,
    SaveHook,
    TransferHook,
    find_load_hook,
    find_save_hook,
    find_transfer_hook,
    mark_as_loader,
    mark_as_saver,
    mark_as_transfer,
    register_checkpoint_hooks,
    safe_load,
    saves_on_every_rank,
    torch_parameter_transfer,
    torch_recovery,
    torch_save,
)
from ddpkit.checkpoint_records import (
    DIRECTORY_PREFIX,
    META_MARK,
    META_NAME,
    SUFFIX,
    Checkpoint,
    DamageLedger,
    ImportanceKey,
    Predicate,
    Retention,
    Selection,
    average_checkpoints,
    average_state_dicts,
    ckpt_recency,
    deletable,
    ranked,
    read_checkpoint,
)
from ddpkit.distributed import exchange, get_world_size, if_main_process, run_on_main
from ddpkit.errors import CheckpointError, ConfigError, MainProcessError
from ddpkit.logger import get_logger
from ddpkit.plain_yaml import dump_plain_yaml
from ddpkit.storage import (
    VerifyMode,
    clean_leftovers,
    commit_staging,
    discard_staging,
    make_staging,
    remove_directory,
    restore_replaced,
    write_file,
)

__all__ = [
    "DEFAULT_LOAD_HOOKS",
    "DEFAULT_SAVE_HOOKS",
    "DEFAULT_TRANSFER_HOOKS",
    "Checkpoint",
    "Checkpointer",
    "LoadHook",
    "SaveHook",
    "TransferHook",
    "average_checkpoints",
    "average_state_dicts",
    "ckpt_recency",
    "find_load_hook",
    "find_save_hook",
    "find_transfer_hook",
    "mark_as_loader",
    "mark_as_saver",
    "mark_as_transfer",
    "register_checkpoint_hooks",
    "safe_load",
    "saves_on_every_rank",
    "torch_parameter_transfer",
    "torch_recovery",
    "torch_save",
]

logger = get_logger(__name__)

META_HEAD = "# yamllint disable\n"

T = TypeVar("T")
HookT = TypeVar("HookT", bound=Callable[..., object])


# ---------------------------------------------------------------------------------------- reading and naming


def _check_file_name(name: str, what: str) -> None:
    bad = [part for part in ("/", "\\", os.sep, "\0", "..") if part in name]
    if bad or not name:
        raise ConfigError(
            f"{what} {name!r} cannot become a file name: it {f'contains {bad[0]!r}' if bad else 'is empty'}."
        )


def _new_path(folder: Path, name: str | None) -> Path:
    if name is not None:
        return folder / f"{DIRECTORY_PREFIX}+{name}"
    stamp = time.strftime("%Y-%m-%d+%H-%M-%S")
    same_second = [path.name.rpartition("+")[2] for path in folder.glob(f"{DIRECTORY_PREFIX}+{stamp}+*")]
    number = max((int(text) for text in same_second if text.isdigit()), default=-1) + 1  # names stay in time order
    return folder / f"{DIRECTORY_PREFIX}+{stamp}+{number:02d}"


@dataclass(frozen=True)
class _Save:
    """What one save is asked to do."""

    meta: Mapping[str, Any]
    end_of_epoch: bool
    name: str | None
    verbosity: int
    hooks: Mapping[str, SaveHook]
    retention: Retention | None

    def hooks_where(self, *, every_rank: bool) -> dict[str, SaveHook]:
        return {name: hook for name, hook in self.hooks.items() if saves_on_every_rank(hook) == every_rank}

    def meta_text(self) -> str:
        meta = {"unixtime": time.time(), "end-of-epoch": self.end_of_epoch, **self.meta}
        return META_HEAD + META_MARK + dump_plain_yaml(meta)


# ---------------------------------------------------------------------------------------- the checkpointer


class Checkpointer:
    """Saves objects as checkpoints in one folder, and finds, loads and deletes these.

    Args:
        checkpoints_dir: the folder; made by the main process if it does not exist.
        recoverables: the objects to save and load, by name; the name becomes the file's name.
        custom_load_hooks: what loads a recoverable instead of its class's hook, by name.
        custom_save_hooks: what saves it instead, by name.
        allow_partial_load: load what a checkpoint has and skip recoverables that it does not have.

    Attributes:
        checkpoints_dir: as given, a ``Path``; may be changed.
        recoverables: as given; may be changed.
        optional_recoverables: whether a checkpoint may lack a recoverable, by name.
        custom_load_hooks: as given.
        custom_save_hooks: as given.
        allow_partial_load: as given.
        verify_mode: ``"full"`` (every byte is read before a checkpoint is used), ``"size"`` or ``"off"``.

    Raises:
        CheckpointError: the folder cannot be made.
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

    def __init__(
        self,
        checkpoints_dir: str | os.PathLike[str],
        recoverables: Mapping[str, Any] | None = None,
        custom_load_hooks: Mapping[str, LoadHook] | None = None,
        custom_save_hooks: Mapping[str, SaveHook] | None = None,
        allow_partial_load: bool = False,
    ) -> None:
        self.checkpoints_dir = Path(checkpoints_dir)
        self.recoverables: dict[str, Any] = {}
        self.optional_recoverables: dict[str, bool] = {}
        self.custom_load_hooks = dict(custom_load_hooks or {})
        self.custom_save_hooks = dict(custom_save_hooks or {})
        self.allow_partial_load = allow_partial_load
        self.verify_mode: VerifyMode = "full"
        self._ledger = DamageLedger()
        if recoverables is not None:
            self.add_recoverables(recoverables)
        if if_main_process():
            _make_folder(self.checkpoints_dir)

    def add_recoverable(
        self,
        name: str,
        obj: Any,
        custom_load_hook: LoadHook | None = None,
        custom_save_hook: SaveHook | None = None,
        optional_load: bool = False,
    ) -> None:
        """Add an object to what is saved and loaded; one of the same name is replaced.

        Args:
            name: becomes the file's name.
            obj: a module, optimizer, scheduler, scaler, an object of a class with checkpoint hooks, or
                anything with ``state_dict`` and ``load_state_dict``.
            custom_load_hook: called with ``(obj, path, end_of_epoch)`` instead of the class's hook.
            custom_save_hook: called with ``(obj, path)`` instead of the class's hook, on the main process.
            optional_load: a checkpoint without it can be loaded, with a warning.

        Raises:
            ConfigError: the name cannot be a file name.

        Ranks: local; do it on every rank.
        """
        _check_file_name(name, "the name of a recoverable,")
        self.recoverables[name] = obj
        self.optional_recoverables[name] = optional_load
        if custom_load_hook is not None:
            self.custom_load_hooks[name] = custom_load_hook
        if custom_save_hook is not None:
            self.custom_save_hooks[name] = custom_save_hook

    def add_recoverables(self, recoverables: Mapping[str, Any]) -> None:
        """Add several objects by name, each as :meth:`add_recoverable` does.

        Args:
            recoverables: objects by name.

        Raises:
            AttributeError: ``recoverables`` is no mapping.
            ConfigError: a name cannot be a file name.

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
    ) -> Checkpoint:
        """Save all recoverables as one checkpoint, which appears when it is complete and on the disk.

        Args:
            meta: plain values to store with it, such as metrics. Values that are not plain are converted.
            end_of_epoch: handed to every loader when the checkpoint is loaded.
            name: the directory becomes ``CKPT+<name>``, in place of one of this name; default: the time.
            verbosity: logging level of the line that says so.

        Returns:
            The checkpoint, on every rank.

        Raises:
            CheckpointError: it could not be saved, or there is no way to save some recoverable; on every rank
                that made the call. What was there before is untouched.
            ConfigError: ``name``, or that of a recoverable, cannot be a file name.

        Ranks: all, or the main process alone. All, if a saver is registered with ``save_on_main_only=False``.
        """
        return self._save(meta, end_of_epoch, name, verbosity)

    def save_and_keep_only(  # noqa: PLR0913, PLR0917 -- the recipe contract fixes these ten
        self,
        meta: Mapping[str, Any] | None = None,
        end_of_epoch: bool = True,
        name: str | None = None,
        num_to_keep: int = 1,
        keep_recent: bool = True,
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
            keep_recent: the newest ``num_to_keep`` are among the best. Without it and without keys nothing is
                deleted.
            importance_keys: as in :meth:`delete_checkpoints`.
            max_keys: as in :meth:`delete_checkpoints`.
            min_keys: as in :meth:`delete_checkpoints`.
            ckpt_predicate: as in :meth:`delete_checkpoints`.
            verbosity: logging level of the lines that say so.

        Raises:
            CheckpointError: as :meth:`save_checkpoint`.
            ConfigError: as :meth:`save_checkpoint`; ``num_to_keep`` is negative.

        Ranks: as :meth:`save_checkpoint`; one hand-over for all of it.
        """
        keys = (*importance_keys, ckpt_recency) if keep_recent else tuple(importance_keys)
        retention = Retention(num_to_keep, keys, tuple(max_keys or ()), tuple(min_keys or ()), ckpt_predicate)
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
            max_key: a key of the meta whose greatest value is best. Checkpoints without it do not count.
            min_key: a key of the meta whose smallest value is best. Checkpoints without it do not count.
            ckpt_predicate: says whether a checkpoint counts.

        Returns:
            The best one, the newest among equals, or None if none counts. A value that is NaN, or no number,
            ranks worst.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
            ConfigError: more than one kind of key is given.

        Ranks: all, or the main process alone; the main process looks, all get what it found.
        """
        found = self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate, max_num_checkpoints=1)
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
        if max_num_checkpoints is not None and max_num_checkpoints < 0:
            raise ConfigError(f"max_num_checkpoints={max_num_checkpoints!r} cannot be negative.")
        return _on_main(self._find, selection, max_num_checkpoints)

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
            CheckpointError: there are checkpoints, but none that is whole (a run never starts from scratch
                without a word), or loading fails.
            ConfigError: as :meth:`find_checkpoint`.

        Ranks: all, or the main process alone. The main process chooses; every rank loads that one.
        """
        checkpoint = self.find_checkpoint(importance_key, max_key, min_key, ckpt_predicate)
        if checkpoint is not None:
            self._load(checkpoint)
        elif key := max_key or min_key:
            logger.warning(
                "No checkpoint in %s has %r in its meta: nothing is loaded, and all stays as it is.",
                self.checkpoints_dir,
                key,
            )
        else:
            logger.info("No checkpoint to load in %s: starting from scratch.", self.checkpoints_dir)
        return checkpoint

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Verify a checkpoint and load every recoverable from it.

        Args:
            checkpoint: what to load.

        Raises:
            CheckpointError: it is damaged, lacks a recoverable that is not optional, or one cannot be loaded.

        Ranks: local; do it on every rank.
        """
        if not self._ledger.is_whole(checkpoint, self.verify_mode):
            reason = self._ledger.reasons[checkpoint.path]
            raise CheckpointError(f"{checkpoint.path} is damaged: {reason}. Load another checkpoint.")
        self._load(checkpoint)

    def list_checkpoints(self) -> list[Checkpoint]:
        """List all checkpoints that can be read, in no order of merit and without verifying their files.

        Returns:
            The list. What cannot be read is reported and left out.

        Raises:
            CheckpointError: the folder cannot be read.

        Ranks: local.
        """
        return self._ledger.scan(self.checkpoints_dir)

    def delete_checkpoints(
        self,
        *,
        num_to_keep: int = 1,
        min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None,
        importance_keys: Sequence[ImportanceKey] = (ckpt_recency,),
        ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.INFO,
    ) -> None:
        """Delete all checkpoints but the best by each key. Damaged ones are neither counted nor deleted.

        Args:
            num_to_keep: how many to keep for each key; 0 deletes all that count.
            min_keys: keys of the meta whose smallest values are best.
            max_keys: keys of the meta whose greatest values are best.
            importance_keys: functions of a checkpoint whose greatest values are best; by default the newest.
            ckpt_predicate: only checkpoints for which it is true may be deleted, or count as kept.
            verbosity: logging level of the lines that say so.

        Raises:
            CheckpointError: one cannot be deleted.
            ConfigError: ``num_to_keep`` is negative.

        Ranks: all, or the main process alone; the main process chooses and deletes.
        """
        keys = tuple(importance_keys or ())
        retention = Retention(num_to_keep, keys, tuple(max_keys or ()), tuple(min_keys or ()), ckpt_predicate)
        _on_main(self._delete, retention, verbosity)

    # ------------------------------------------------------------------------------------ saving

    def _save(
        self,
        meta: Mapping[str, Any] | None,
        end_of_epoch: bool,
        name: str | None,
        verbosity: int,
        retention: Retention | None = None,
    ) -> Checkpoint:
        if name is not None:
            _check_file_name(name, "the name of a checkpoint,")
        save = _Save(meta or {}, end_of_epoch, name, verbosity, self._save_hooks(), retention)
        everywhere = save.hooks_where(every_rank=True)
        if not everywhere:
            return _on_main(self._save_on_main, save)
        staging, final = _on_main(self._begin, save)
        own = _run_savers(everywhere, self.recoverables, staging)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(own and str(own))) if text]
        if failures:
            if if_main_process():
                discard_staging(staging)
            raise CheckpointError(f"cannot save {final}: {'; '.join(failures)}.") from own
        return _on_main(self._finish, save, staging, final)

    def _save_hooks(self) -> dict[str, SaveHook]:
        hooks = {}
        for name, obj in self.recoverables.items():
            _check_file_name(name, "the name of a recoverable,")
            hooks[name] = _hook_for(name, obj, self.custom_save_hooks.get(name) or find_save_hook(obj))
        return hooks

    def _save_on_main(self, save: _Save) -> Checkpoint:
        return self._finish(save, *self._begin(save))

    def _begin(self, save: _Save) -> tuple[Path, Path]:
        clean_leftovers(self.checkpoints_dir)
        final = _new_path(self.checkpoints_dir, save.name)
        return make_staging(final), final

    def _finish(self, save: _Save, staging: Path, final: Path) -> Checkpoint:
        def write() -> None:
            write_file(staging / META_NAME, lambda handle: handle.write(save.meta_text().encode()))
            read_checkpoint(staging)  # what could not be found again is not saved
            failure = _run_savers(save.hooks_where(every_rank=False), self.recoverables, staging)
            if failure is not None:
                raise failure

        commit_staging(staging, final, write, get_world_size())
        self._ledger.reasons.pop(final, None)
        kind = "an end-of-epoch" if save.end_of_epoch else "an intra-epoch"
        logger.log(save.verbosity, "Saved %s checkpoint in %s", kind, final)
        checkpoint = read_checkpoint(final)
        if save.retention is not None:
            self._delete(save.retention, save.verbosity)
        return checkpoint

    # ------------------------------------------------------------------------------------ choosing, on main

    def _find(self, selection: Selection, limit: int | None) -> list[Checkpoint]:
        restore_replaced(self.checkpoints_dir)
        readable = self._ledger.scan(self.checkpoints_dir)
        order = ranked(readable, selection)
        whole = (checkpoint for checkpoint in order if self._ledger.is_whole(checkpoint, self.verify_mode))
        found = list(itertools.islice(whole, limit))
        if not found and limit != 0 and (order or (self._ledger.reasons and not readable)):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in sorted(self._ledger.reasons.items()))
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints_dir} is whole: {reasons}. Repair one, or move them away "
                "to start from scratch."
            )
        return found

    def _delete(self, retention: Retention, verbosity: int) -> None:
        ledger = self._ledger
        mode: VerifyMode = "off" if self.verify_mode == "off" else "size"
        readable = ledger.scan(self.checkpoints_dir)
        counted = [each for each in readable if each.path not in ledger.reasons and ledger.is_whole(each, mode)]
        for checkpoint in deletable(counted, retention):
            remove_directory(checkpoint.path)
            logger.log(min(verbosity, logging.DEBUG), "Deleted checkpoint in %s", checkpoint.path)

    # ------------------------------------------------------------------------------------ loading

    def _load(self, checkpoint: Checkpoint) -> None:
        logger.info("Loading a checkpoint from %s", checkpoint.path)
        hooks: dict[str, LoadHook] = {}
        for name, obj in self.recoverables.items():
            if name in checkpoint.paramfiles:
                hooks[name] = _hook_for(name, obj, self.custom_load_hooks.get(name) or find_load_hook(obj))
            elif not self.allow_partial_load:
                _accept_missing(name, checkpoint, optional=self.optional_recoverables.get(name, False))
        _run_loaders(hooks, self.recoverables, checkpoint)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"checkpoints_dir={str(folder)!r} cannot be made: {error}. Name one that this user can write."
        ) from error


def _on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Run ``function`` on the main process; every rank gets its value or a ``CheckpointError``."""
    try:
        return cast("T", run_on_main(function, args=arguments))
    except MainProcessError as error:
        raise CheckpointError(str(error)) from error


def _hook_for(name: str, obj: Any, hook: HookT | None) -> HookT:
    if hook is None:
        raise CheckpointError(
            f"the recoverable {name!r}, a {type(obj).__name__}, can be neither saved nor loaded. Give it "
            "state_dict and load_state_dict, or mark its methods with register_checkpoint_hooks, or pass "
            "custom hooks."
        )
    return hook


def _run_savers(hooks: Mapping[str, SaveHook], objects: Mapping[str, Any], staging: Path) -> CheckpointError | None:
    """Run save hooks; return what went wrong, so that the ranks can agree on it before anybody raises."""
    for name, hook in hooks.items():
        try:
            hook(objects[name], staging / f"{name}{SUFFIX}")
        except Exception as error:  # noqa: BLE001 -- raised by the caller, on every rank
            failure = CheckpointError(f"saving the recoverable {name!r}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
    return None


def _run_loaders(hooks: Mapping[str, LoadHook], objects: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    end_of_epoch = bool(checkpoint.meta.get("end-of-epoch", True))
    for name, hook in hooks.items():
        path = checkpoint.paramfiles[name]
        try:
            hook(objects[name], path, end_of_epoch)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"cannot load the recoverable {name!r} from {path}: {type(error).__name__}: {error}"
            ) from error


def _accept_missing(name: str, checkpoint: Checkpoint, *, optional: bool) -> None:
    if optional or "dataloader" in name:
        logger.warning("%s has no file for %r: it keeps its present state.", checkpoint.path, name)
        return
    raise CheckpointError(
        f"{checkpoint.path} has no file for the recoverable {name!r}; only {sorted(checkpoint.paramfiles)}. To "
        "go on without it, add the recoverable with optional_load=True, or set allow_partial_load."
    )
