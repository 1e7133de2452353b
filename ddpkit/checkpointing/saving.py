"""How the checkpointer works in its folder: on the main process, now or in the background, for all ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ddpkit.checkpointing.async_save import BackgroundSave, wait_for_folder
from ddpkit.checkpointing.folder import CheckpointFolder, PreparedSave, SaveRequest, check_file_name, run_savers
from ddpkit.checkpointing.hooks import LoadHook, SaveHook, find_load_hook, find_save_hook, saved_state, torch_save
from ddpkit.checkpointing.index import (
    DIRECTORY_PREFIX,
    META_NAME,
    Checkpoint,
    DamageLedger,
    Retention,
    Selection,
    ranked,
    read_checkpoint,
)
from ddpkit.checkpointing.run_lock import FolderLock
from ddpkit.checkpointing.snapshot import SnapshotMemory
from ddpkit.checkpointing.storage import VerifyMode, discard_staging
from ddpkit.distributed import exchange, get_world_size, if_main_process, run_on_main
from ddpkit.errors import CheckpointError, MainCheckpointError, MainProcessError, RankCheckpointError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
HookT = TypeVar("HookT", bound=Callable[..., object])


class CheckpointSaving:
    """The half of the checkpointer that works in its folder: it saves, now or in the background, finds and deletes.

    Ranks: the methods say.

    Example:
        >>> CheckpointSaving().asynchronous
        False
    """

    _given_dir: Path
    _lock: FolderLock | None
    recoverables: dict[str, Any]
    custom_save_hooks: dict[str, SaveHook]
    custom_load_hooks: dict[str, LoadHook]
    around_save: Callable[[bool], AbstractContextManager[None]] | None = None  # told whether an epoch has ended
    tell_epoch: Callable[[], int | None] | None = None  # says of which epoch a save is

    def __init__(self) -> None:
        self.verify_mode: VerifyMode = "full"
        self.asynchronous = False
        self.on_error: Literal["stop", "warn"] = "stop"
        self._lock = None
        self._ledger = DamageLedger()
        self._memory = SnapshotMemory()
        self._background = BackgroundSave()
        self._finalizer: weakref.finalize[..., CheckpointSaving] | None = None
        self._told_refusal = False
        self._apart: set[Path] = set()
        self._has_prepared = False
        self._rankings: list[Selection] = []  # of the last retention that had a key

    @property
    def checkpoints_dir(self) -> Path:
        """The folder. An absolute path, wherever the working directory is by now."""
        return self._absolute_dir

    @checkpoints_dir.setter
    def checkpoints_dir(self, folder: str | os.PathLike[str]) -> None:
        self._given_dir = Path(folder)
        try:
            self._absolute_dir = self._given_dir.absolute()  # links stay, and ".." too, which may follow one
        except OSError as error:
            raise CheckpointError(
                f"checkpoints_dir={str(folder)!r} is nowhere: the working directory is gone ({error}). Give an "
                "absolute path."
            ) from error

    def _path_here(self, path: Path) -> Path:
        """Return where this process has what the main process has in its folder.

        A relative folder is that of the own working directory, and hosts may have the same one in different places.
        """
        given = self._given_dir
        if given.is_absolute() or path.parent.parts[-len(given.parts) :] != given.parts or path.exists():
            return path
        return self.checkpoints_dir / path.name

    def _here(self, checkpoint: Checkpoint) -> Checkpoint:
        path = self._path_here(checkpoint.path).absolute()
        if path == checkpoint.path:
            return checkpoint
        files = {name: path / file.name for name, file in checkpoint.paramfiles.items()}
        return Checkpoint(path, checkpoint.meta, files)

    def _save(
        self,
        meta: Mapping[str, Any] | None,
        end_of_epoch: bool,
        name: str | None,
        verbosity: int,
        retention: Retention | None = None,
    ) -> Checkpoint | None:
        if retention is not None:
            self._rankings = retention.rankings() or self._rankings
        with contextlib.nullcontext() if self.around_save is None else self.around_save(end_of_epoch):
            return self._save_all(meta, end_of_epoch, name, verbosity, retention)

    def _save_all(
        self,
        meta: Mapping[str, Any] | None,
        end_of_epoch: bool,
        name: str | None,
        verbosity: int,
        retention: Retention | None,
    ) -> Checkpoint | None:
        if name is not None:
            check_file_name(name, "the name of a checkpoint,")
        objects, hooks = self.recoverables, self._save_hooks()
        epoch = None if self.tell_epoch is None else self.tell_epoch()
        save = SaveRequest(meta or {}, end_of_epoch, name, verbosity, objects, hooks, retention, epoch)
        everywhere = save.hooks_where(every_rank=True)
        if not everywhere:
            return on_main(self._folder().attempt, self._save_on_main, save)
        begun = on_main(self._folder().attempt, self._begin, save)
        if begun is None:
            return None
        staging, final = begun
        own = run_savers(everywhere, self.recoverables, self._path_here(staging))
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(own and str(own))) if text]
        if failures:
            if if_main_process():
                discard_staging(staging)
                self._folder_lock().release()
            kind = RankCheckpointError if own is None else CheckpointError
            self._give_up(kind(f"cannot save {final}: {'; '.join(failures)}."), own)
            return None
        return on_main(self._folder().attempt, self._finish, save, staging, final)

    def require_hooks(self) -> None:
        """Make sure that all recoverables can be saved and loaded, those too that were put in by hand.

        Raises:
            CheckpointError: one cannot.
            ConfigError: the name of one cannot be a file name.

        Ranks: local.

        Example:
            >>> from ddpkit.checkpoints import Checkpointer
            >>> import tempfile
            >>> checkpointer = Checkpointer(tempfile.mkdtemp())
            >>> checkpointer.recoverables["a"] = object()
            >>> checkpointer.require_hooks()
            Traceback (most recent call last):
            ddpkit.errors.CheckpointError: the recoverable 'a', of type object, cannot be saved. ...
        """
        self._save_hooks()

    def _save_hooks(self) -> dict[str, SaveHook]:
        hooks = {}
        for name, obj in self.recoverables.items():
            check_file_name(name, "the name of a recoverable,")
            hooks[name] = self._save_hook(name, obj)
            self._load_hook(name, obj)  # a checkpoint that nothing can load is of no use
        return hooks

    def _save_hook(self, name: str, obj: Any) -> SaveHook:
        return _known(name, obj, self.custom_save_hooks.get(name) or find_save_hook(obj), "saved")

    def _load_hook(self, name: str, obj: Any) -> LoadHook:
        return _known(name, obj, self.custom_load_hooks.get(name) or find_load_hook(obj), "loaded")

    def _give_up(self, error: CheckpointError, cause: CheckpointError | None) -> None:
        if self.on_error != "warn":
            raise error from cause
        if if_main_process():
            self._folder().warn(error)

    # What the main process does. Each waits first for the save that goes on in the background.

    def _folder(self) -> CheckpointFolder:
        warns = self.on_error == "warn"
        folder, mode = self.checkpoints_dir, self.verify_mode
        return CheckpointFolder(folder, self._ledger, self._folder_lock(), mode, warns, get_world_size(), self._apart)

    def leave_alone(self, paths: Iterable[Path]) -> None:
        """Name the checkpoints of other runs: retention does not count them, and does not delete them.

        Args:
            paths: their directories; those that were named before are not meant any more.

        Ranks: main only.
        """
        self._apart = set(paths)

    def _folder_lock(self) -> FolderLock:
        lock: FolderLock | None = self._lock
        if lock is None or lock.folder != self.checkpoints_dir:
            lock = self._lock = FolderLock(self.checkpoints_dir)
        return lock

    @contextlib.contextmanager
    def hold_folder(self) -> Iterator[None]:
        """Keep the folder for this run: until the end of the block no other one can save or delete in it.

        Without it, every save and every deletion takes the lock for itself.

        Raises:
            FolderInUseError: another run has it and lives; on every rank.
            CheckpointError: the folder cannot be written; on every rank, but not with ``on_error="warn"``.

        Ranks: all.

        State: ``.lock`` in the folder, and a thread of the main process that renews it.
        """
        lock = self._folder_lock()
        is_held = on_main(self._folder().attempt, self._acquire, lock)
        try:
            yield
        finally:
            if is_held and if_main_process():  # else it is a save in the background that holds it
                lock.release()

    @staticmethod
    def _acquire(lock: FolderLock) -> bool:
        lock.acquire()
        return True

    def prepare_copies(self) -> None:
        """Make room for the copies of the first save in the background, if saves are to be ``asynchronous``.

        To be called once the optimizers have stepped, so that their states are there; later calls do nothing. Where
        there is no room, or a state cannot be had, nothing is done: the save will tell.

        Ranks: local; only the main process does anything.

        State: memory of the size of the states, and a thread until it is touched.

        Example:
            >>> CheckpointSaving().prepare_copies()
        """
        if self._has_prepared or not self.asynchronous or not if_main_process():
            return
        self._has_prepared = True
        try:
            hooks = self._save_hooks()
            objects = {name: obj for name, obj in self.recoverables.items() if hooks[name] is torch_save}
            self._memory.prepare({name: saved_state(obj) for name, obj in objects.items()})
        except Exception as error:  # noqa: BLE001 -- asked for by nobody
            logger.debug("No room is made for the copies of a save: %s: %s", type(error).__name__, error)

    def _settle(self) -> None:
        try:
            self._background.wait()
        except CheckpointError:
            raise
        except BaseException as error:
            raise CheckpointError(
                f"saving {self._background.path} in the background: {type(error).__name__}: {error}"
            ) from error
        wait_for_folder(self.checkpoints_dir)

    def _settle_and_forget(self) -> None:
        self._settle()
        if not self.asynchronous:
            self._memory.clear()

    def _save_on_main(self, save: SaveRequest) -> Checkpoint:
        return self._finish(save, *self._begin(save))

    def _begin(self, save: SaveRequest) -> tuple[Path, Path]:
        self._settle()
        folder = self._folder()
        folder.lock.acquire()  # until the save is done, which may be in a thread
        try:
            return folder.begin(save)
        except BaseException:
            folder.lock.release()
            raise

    def _finish(self, save: SaveRequest, staging: Path, final: Path) -> Checkpoint:
        folder = self._folder()
        with contextlib.ExitStack() as releasing:
            releasing.callback(folder.lock.release)
            if not self.asynchronous:
                self._memory.clear()
                return folder.save(save, staging, final)
            prepared = folder.prepare(save, staging, final, self._memory)
            if prepared.refusal:
                return self._finish_now(prepared)
            if self._finalizer is None:
                self._finalizer = weakref.finalize(self, self._background.close)
            work = functools.partial(_do_and_release, releasing.pop_all(), folder, prepared)
        self._background.start(final, work)
        return prepared.checkpoint

    def _finish_now(self, prepared: PreparedSave) -> Checkpoint:
        if not self._told_refusal:
            logger.warning(
                "Checkpoints are written while training waits, because the state cannot be copied first: %s.",
                prepared.refusal,
            )
        self._told_refusal = True
        return prepared.finish()

    def _find(self, selection: Selection, limit: int | None) -> list[Checkpoint]:
        self._settle()
        return self._folder().find(selection, limit)

    def _named(self, path: Path) -> Checkpoint:
        """Return the checkpoint that ``resume`` names; it must be whole."""
        self._settle()
        problem = None
        if not path.is_dir():
            problem = "it is a file; give its directory" if path.is_file() else "there is no such directory"
        elif not (path / META_NAME).exists() and any(path.glob(f"{DIRECTORY_PREFIX}*")):
            problem = "it is a folder of checkpoints; give one of them, such as the newest"
        if problem is not None:
            raise CheckpointError(
                f"resume={str(path)!r} is no checkpoint: {problem}. Give the path of one ({DIRECTORY_PREFIX}+...), "
                f"'auto' for the newest in {self.checkpoints_dir}, or 'never'."
            )
        checkpoint = read_checkpoint(path)
        if not self._ledger.is_whole(checkpoint, self.verify_mode):
            raise CheckpointError(f"resume={str(path)!r} is damaged: {self._ledger.reasons[path]}. Name another one.")
        return checkpoint

    def best_of(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """Return the best checkpoint by the keys of the last retention that had any.

        Args:
            checkpoints: in any order.

        Returns:
            None where no retention had a key in this process, no checkpoint has a number under it, or the keys differ.

        Ranks: main only.
        """
        found = list(checkpoints)
        best = [(one, ranked(found, one)[:1]) for one in self._rankings]
        paths = {first.path: first for one, firsts in best for first in firsts if one.importance(first) is not None}
        return next(iter(paths.values())) if len(paths) == 1 else None

    def _delete(self, retention: Retention, verbosity: int) -> None:
        self._rankings = retention.rankings() or self._rankings
        self._settle()
        folder = self._folder()
        with folder.lock.hold():
            folder.delete(retention, verbosity)


def on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function on the main process; every rank gets its value, or an error about checkpoints.

    Args:
        function: what to run.
        arguments: for it.

    Raises:
        CheckpointError: it failed on the main process.

    Ranks: all, or the main process alone.

    Example:
        >>> on_main(max, 1, 2)
        2
    """
    try:
        return cast("T", run_on_main(function, args=arguments))
    except MainProcessError as error:  # the main process shows its own traceback
        raise MainCheckpointError(str(error).partition("\n--- traceback of rank 0 ---")[0]) from None


def _known(name: str, obj: Any, hook: HookT | None, done: str) -> HookT:
    """Return the hook of a recoverable, or say that there is none."""
    if hook is None:
        raise CheckpointError(
            f"the recoverable {name!r}, of type {type(obj).__name__}, cannot be {done}. Give its class state_dict and "
            "load_state_dict, or mark two of its methods with mark_as_saver and mark_as_loader and the class with "
            "register_checkpoint_hooks, or pass custom_save_hook and custom_load_hook to add_recoverable."
        )
    return hook


def _do_and_release(release: contextlib.ExitStack, folder: CheckpointFolder, prepared: PreparedSave) -> None:
    """Write what was prepared, in a thread; then give back what was held for it."""
    with release:
        folder.attempt(prepared.finish)
