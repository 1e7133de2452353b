"""Checkpoints on their way from this machine into the store, while the training goes on.

A save never waits for the store. A thread copies one checkpoint at a time, the oldest first; those
that the retention has deleted meanwhile are superseded, and are left out. What is being copied
cannot be deleted: the thread copies hard links of the files. A checkpoint is deleted in the store
once a later one is complete there, so that the store never has fewer than it had.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.errors import CheckpointError, FolderInUseError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

logger = get_logger(__name__)

PINNED = ".uploading"  # holds links of the files that are being copied
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
TELL_SECONDS = 30.0
PINS = 5  # attempts, where a save replaces a checkpoint meanwhile


@dataclass(frozen=True)
class Uploaded:
    """One checkpoint that is complete in the store now.

    Attributes:
        name: of the checkpoint.
        size: bytes.
        seconds: that copying took.
        late_seconds: from the end of the save until it was complete in the store.
        behind: how many saved checkpoints are not yet in the store.
    """

    name: str
    size: int
    seconds: float
    late_seconds: float
    behind: int


@dataclass
class _Queue:
    """What is still to be done.

    Attributes:
        saved: names and times of checkpoints to copy, the oldest first.
        doomed: the number of the save after which a name may be deleted in the store.
        numbers: of the saves, by name.
        count: of the saves.
        done: the number of the latest that is complete in the store.
        refused: names of those to delete that the store has refused to, until the next save.
    """

    saved: dict[str, float] = field(default_factory=dict)
    doomed: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    count: int = 0
    done: int = 0
    refused: set[str] = field(default_factory=set)

    def due(self) -> list[str]:
        """Return what is to be deleted now: a later save is complete in the store, or all that this
        machine has is.
        """
        return [
            name
            for name, number in self.doomed.items()
            if name not in self.refused and (not self.saved or number <= self.done)
        ]


class Uploads:
    """Copies checkpoints of a folder up in a thread.

    Args:
        folder: of the checkpoints.
        copy: copies a directory up, which has the name of its checkpoint.
        delete: deletes checkpoints in the store.
        tell: called with each that is complete there.

    Ranks: main only.

    State: a thread while there is something to copy.
    """

    def __init__(
        self,
        folder: Path,
        copy: Callable[[Path], object],
        delete: Callable[[Collection[str]], object],
        tell: Callable[[Uploaded], object],
    ) -> None:
        self._folder = folder
        self._copy = copy
        self._delete = delete
        self._tell = tell
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._in_flight: str | None = None
        self._is_stopped = False

    @property
    def doomed(self) -> set[str]:
        """Names of checkpoints that are deleted here, and in the store soon."""
        with self._changed:
            return set(self._queue.doomed)

    @property
    def behind(self) -> list[str]:
        """Names of checkpoints that are on their way."""
        with self._changed:
            return self._behind()

    # ------------------------------------------------------------------------ what a save tells

    def add(self, names: Iterable[str]) -> None:
        """Note checkpoints that have their names in the folder, in the order of their saves."""
        with self._changed:
            queue = self._queue
            queue.refused.clear()
            for name in names:
                queue.count += 1
                queue.numbers[name] = queue.count
                queue.saved.pop(name, None)
                queue.saved[name] = time.monotonic()
                queue.doomed.pop(name, None)
            self._start()

    def discard(self, names: Iterable[str]) -> None:
        """Note checkpoints that the retention has deleted in the folder."""
        with self._changed:
            for name in names:
                self._queue.saved.pop(name, None)
                self._queue.doomed[name] = self._queue.count
            self._start()

    def leave_out(self, names: Iterable[str]) -> None:
        """Note checkpoints that are about to be moved away, here and in the store; none of them is
        being copied then.
        """
        gone = set(names)
        with self._changed:
            for name in gone:
                self._queue.saved.pop(name, None)
            while self._in_flight in gone:
                self._changed.wait()

    def wait(self, seconds: float) -> None:
        """Wait until all is in the store.

        Args:
            seconds: at most.

        Raises:
            CheckpointError: it is not; the words say what is missing, and where it is.
        """
        end = time.monotonic() + seconds
        told = time.monotonic()
        with self._changed:
            while not self._is_done() and time.monotonic() < end and self._is_alive():
                self._changed.wait(min(1.0, max(0.01, end - time.monotonic())))
                if time.monotonic() > told + TELL_SECONDS:
                    told = time.monotonic()
                    logger.info(
                        "Waiting for %d checkpoint(s) on their way into the store, at most %.0f s "
                        "more.",
                        len(self._behind()),
                        end - told,
                    )
            left = self._behind()
            error = self._error
        if left:
            why = "" if error is None else f" The last attempt failed: {error}"
            raise CheckpointError(
                f"{len(left)} checkpoint(s) are not in the store yet: {', '.join(left)}. They are "
                f"in {self._folder}, and a run with the same --ckpt_local copies them up.{why}"
            )

    def stop(self) -> None:
        """Try no more; what is left is copied after the next :meth:`add`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _behind(self) -> list[str]:
        own = [] if self._in_flight is None else [self._in_flight]
        return [*own, *(name for name in self._queue.saved if name not in own)]

    def _is_done(self) -> bool:
        return not (self._behind() or self._queue.due())

    # ------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        self._changed.notify_all()
        has_work = bool(self._queue.saved or self._queue.due())
        self._is_stopped = False
        if has_work and not self._is_alive():
            self._thread = threading.Thread(
                target=self._run, name=f"ddpkit copies up {self._folder.name}", daemon=True
            )
            self._thread.start()

    def _is_alive(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                if pause:
                    self._changed.wait(pause)
                name = next(iter(self._queue.saved), None)
                due = self._queue.due()
                if self._is_stopped or (name is None and not due):
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._in_flight = name
            try:
                # first: a store that refuses to delete still gets what was saved
                if name is not None:
                    self._upload(name, self._queue.saved.get(name, time.monotonic()))
                    pause = 0.0
                    self._error = None
                self._delete_due(due)
            except FolderInUseError as error:
                self._give_up(error)
                return
            except Exception as error:  # noqa: BLE001 -- told now, tried again, raised by `wait`
                self._error = error
                pause = min(LONGEST_PAUSE_SECONDS, 2 * pause or FIRST_PAUSE_SECONDS)
                words = "%s: %s It is tried again in %.0f s."
                logger.warning(words, type(error).__name__, error, pause)
            finally:
                with self._changed:
                    self._in_flight = None
                    self._changed.notify_all()

    def _give_up(self, error: CheckpointError) -> None:
        """End the thread: the folder in the store is another run's."""
        logger.warning("%s", error)
        with self._changed:
            self._error = error
            self._thread = None
            self._changed.notify_all()

    def _upload(
        self,
        name: str,
        since: float,
    ) -> None:
        begun = time.monotonic()
        with contextlib.ExitStack() as removing:
            pinned = self._pin(name)
            removing.callback(shutil.rmtree, self._folder / PINNED, ignore_errors=True)
            if pinned is None:  # the retention has deleted it
                self._forget(name, since)
                return
            size = sum(path.stat().st_size for path in pinned.rglob("*") if path.is_file())
            self._copy(pinned)
        now = time.monotonic()
        self._forget(name, since)
        with self._changed:
            self._queue.done = max(self._queue.done, self._queue.numbers[name])
            behind = len(self._queue.saved)
        self._tell(Uploaded(name, size, now - begun, now - since, behind))

    def _delete_due(self, due: list[str]) -> None:
        """Delete in the store. What it refuses to delete is tried again with the next save: nothing
        waits for it.
        """
        if not due:
            return
        try:
            self._delete(due)
        except FolderInUseError:
            raise
        except Exception as error:  # noqa: BLE001 -- of a store's package; told, and tried again
            logger.warning(
                "%s cannot be deleted in the store, and count there until then: %s: %s It is tried "
                "again with the next save, or by a later run.",
                ", ".join(due),
                type(error).__name__,
                error,
            )
            with self._changed:
                self._queue.refused.update(due)
            return
        with self._changed:
            for other in due:
                self._queue.doomed.pop(other, None)

    def _forget(
        self,
        name: str,
        since: float,
    ) -> None:
        with self._changed:
            if self._queue.saved.get(name) == since:  # else it was saved anew meanwhile
                del self._queue.saved[name]

    def _pin(self, name: str) -> Path | None:
        """Return a directory with links of a checkpoint's files; None: it is gone."""
        source = self._folder / name
        pinned = self._folder / PINNED / name
        reason: Exception | None = None
        for _ in range(PINS):
            shutil.rmtree(pinned, ignore_errors=True)
            found = _identity(source)
            if found is None:
                return None
            try:
                shutil.copytree(source, pinned, copy_function=_link)
            except (FileNotFoundError, shutil.Error) as error:
                reason = error
                continue
            # a save may have put another directory of this name there: then these are files of both
            if _identity(source) == found:
                return pinned
        shutil.rmtree(pinned, ignore_errors=True)
        raise CheckpointError(
            f"{source} cannot be prepared for its copy into the store: "
            f"{reason or 'saves replace it all the time'}."
        )


def _identity(directory: Path) -> tuple[int, int, int] | None:
    """Return what tells a directory from another one that takes its name; None: it is gone."""
    try:
        status = directory.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _link(
    source: str,
    target: str,
) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
    return target
