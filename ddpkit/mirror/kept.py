"""Checkpoints that are saved on this machine first (``ckpt_local``) and copied up later.

What is on this machine from an earlier start, and what is in the store, may differ: the store may
lack the last saves, or a run on another machine may have gone on from it. The training goes on from
the one that has come further, in optimizer steps, of one and the same run.
"""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.base import earlier_folder
from ddpkit.checkpointing import DIRECTORY_PREFIX, MANIFEST_NAME, ckpt_recency, read_checkpoint
from ddpkit.errors import CheckpointError, ConfigError, FolderInUseError
from ddpkit.logger import format_order_of_magnitude, get_logger
from ddpkit.mirror.checkpoints import MirrorRemote
from ddpkit.mirror.run_id import read_local
from ddpkit.mirror.uploads import PINNED, Uploads
from ddpkit.reporting import run_event

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddpkit.checkpointing import Checkpoint
    from ddpkit.mirror.uploads import Uploaded

logger = get_logger(__name__)

END_SECONDS = 1800.0  # that the end of a run waits for the store
FAILED_SECONDS = 20.0  # likewise, where it ends by an exception or a signal
_STEP = re.compile(rb"^optimizer_step: (\d+)\s*$", re.MULTILINE)
BRAIN_FILE = "brain.ckpt"


@dataclass(frozen=True)
class Standing:
    """How far a checkpoint has come.

    Attributes:
        step: optimizer steps; -1: it does not say.
        time: when it was saved, in seconds since 1970.
        name: of the checkpoint.
        is_here: whether it is on this machine.
    """

    step: int
    time: float
    name: str
    is_here: bool

    @property
    def order(self) -> tuple[int, float, bool]:
        """What is greater for a checkpoint that has come further."""
        return self.step, self.time, self.is_here


class KeptRemote(MirrorRemote):
    """The checkpoints of a folder that stays on this machine, in the store.

    Ranks: main only, but for :meth:`fetch_same` and :meth:`fetch_same_file`.
    """

    @functools.cached_property
    def _uploads(self) -> Uploads:
        return Uploads(self._folder, self._copy_up, self._delete_there, self._tell)

    # ---------------------------------------------------------------------------------- finding

    def others(
        self,
        present: Collection[str],
        report: Callable[[Path, str], object],
    ) -> list[Checkpoint]:
        """Return the checkpoints that are in the store alone, but for what was deleted here."""
        return super().others({*present, *self._uploads.doomed}, report)

    def offer(self, name: str) -> None:
        """Have a checkpoint of this machine copied up, if it is neither there nor on its way."""
        manifest = self._folder / name / MANIFEST_NAME
        if name in self._uploads.behind or not manifest.exists():
            return
        if self._store.manifest_now(name) != manifest.read_bytes():
            self._uploads.add([name])

    # ----------------------------------------------------------------------------------- saving

    def put(
        self,
        staging: Path,
        name: str,
    ) -> None:
        """Do nothing: it is copied up once it has its name."""

    def saved(self, name: str) -> None:
        """Have a checkpoint copied up."""
        self._uploads.add([name])

    def deleted(self, names: Collection[str]) -> None:
        """Have checkpoints deleted in the store, once a later one is there."""
        self._uploads.discard(names)

    def set_aside(
        self,
        names: Collection[str],
        aside: str,
    ) -> None:
        """Move checkpoints aside in the store, too."""
        self._uploads.leave_out(names)
        super().set_aside(names, aside)

    def clean(self) -> None:
        """Do nothing: no save waits for the store."""

    def _copy_up(self, directory: Path) -> None:
        self.lock.acquire()  # shared with the run's own, while that lasts
        try:
            with self._changing:
                super().clean()  # what an attempt before this has left
                self._is_clean = False
                self._mirror.push(self.lock)
                self._store.put(directory, lock=self.lock)
                self._is_clean = True
            self._all_names().add(directory.name)
            self._copy_links()
        finally:
            self.lock.release()

    def _delete_there(self, names: Collection[str]) -> None:
        self.lock.acquire()
        try:
            for name in names:
                self.lock.require()
                with self._changing:
                    self._store.delete(name)
                self._all_names().discard(name)
        finally:
            self.lock.release()

    def _tell(self, uploaded: Uploaded) -> None:
        behind = f"; {uploaded.behind} more on their way" if uploaded.behind else ""
        logger.info(
            "%s is in %s: %sB in %.1f s, %.1f s after its save%s",
            uploaded.name,
            self.shown,
            format_order_of_magnitude(uploaded.size),
            uploaded.seconds,
            uploaded.late_seconds,
            behind,
        )
        try:
            run_event(
                "checkpoint_uploaded",
                path=f"{self.shown}/{uploaded.name}",
                bytes=uploaded.size,
                seconds=round(uploaded.seconds, 4),
                late_seconds=round(uploaded.late_seconds, 4),
                behind=uploaded.behind,
            )
        except ConfigError as error:
            logger.warning("%s", error)

    # ------------------------------------------------------------------------------------- runs

    def begin(self) -> None:
        """Decide what of this machine and of the store the run goes on from."""
        shutil.rmtree(self._folder / PINNED, ignore_errors=True)
        self._mirror.begin()
        if self.is_of_another_run():
            self._move_away([one.name for one in self._here()])
        here = self._here()
        there = self._there()
        furthest = max([*here, *there], key=lambda one: one.order, default=None)
        if furthest is not None:
            self._leave_branch(furthest, here, there)
        self.note_run()
        there_names = {one.name: one.time for one in self._there()}
        late = [one for one in self._here() if there_names.get(one.name) != one.time]
        self._uploads.add(one.name for one in sorted(late, key=lambda one: one.time))

    def finish(
        self,
        *,
        failed: bool = False,
    ) -> None:
        """Wait until all is in the store, and copy the last files up."""
        try:
            self._uploads.wait(FAILED_SECONDS if failed else END_SECONDS)
        finally:
            self._uploads.stop()
            super().finish(failed=failed)

    def is_of_another_run(self) -> bool:
        """Return whether what is on this machine is of another run than what is in the store."""
        own = read_local(self._folder)
        there = self.run_there()
        return own is not None and there is not None and own != there

    def is_ahead(self) -> bool:
        """Return whether this machine has come further than the store, in the same run."""
        if self.is_of_another_run():
            return False
        here = max((one.order for one in self._here()), default=None)
        there = max((one.order for one in self._there()), default=None)
        return here is not None and (there is None or here > there)

    def _leave_branch(
        self,
        furthest: Standing,
        here: list[Standing],
        there: list[Standing],
    ) -> None:
        """Move away what was saved later than the furthest, by a run that has not come so far; and
        what has the name of another. The furthest itself stays where it is.
        """
        both = [*here, *there]
        later = {one for one in both if one.time > furthest.time and one != furthest}
        times = {one.name: one.time for one in there}
        other = {
            one for one in here if one != furthest and times.get(one.name, one.time) != one.time
        }
        leaving = later | other
        if not leaving:
            return
        logger.warning(
            "The training goes on from %s at optimizer step %d, %s. Checkpoints of a run that "
            "had not come so far are moved away: %s.",
            furthest.name,
            furthest.step,
            "which is on this machine" if furthest.is_here else f"which is in {self.shown}",
            ", ".join(sorted({one.name for one in leaving})),
        )
        self._move_away(
            {one.name for one in leaving if one.is_here},
            {one.name for one in leaving if not one.is_here},
        )

    def _move_away(
        self,
        here: Collection[str],
        there: Collection[str] = (),
    ) -> None:
        """Move checkpoints of this machine, and others of the store, into a subfolder. What is in
        the store is copied down first; where the two of a name differ, into a subfolder of its own.
        """
        names = {*here, *there}
        if not names:
            return
        aside = earlier_folder(self._folder, names)
        for name in sorted(there):
            own = self._folder / name
            if name in here and self._is_as_there(own):
                self._move_there(own, aside.name)
                continue
            taken = name in here
            into = earlier_folder(self._folder, [name], other_than=aside) if taken else aside
            self._move_there(self._store.get(name, into), aside.name)
        for name in sorted(here):
            if (self._folder / name).exists():
                (self._folder / name).rename(aside / name)

    def _here(self) -> list[Standing]:
        found = []
        for path in sorted(self._folder.glob(f"{DIRECTORY_PREFIX}*")):
            try:
                checkpoint = read_checkpoint(path)
                state = (path / BRAIN_FILE).read_bytes() if (path / BRAIN_FILE).exists() else b""
            except (CheckpointError, OSError):  # reported by the search
                continue
            found.append(Standing(_step_in(state), ckpt_recency(checkpoint), path.name, True))
        return found

    def _there(self) -> list[Standing]:
        found = []
        for name in sorted(self._all_names()):
            try:
                checkpoint = self._read(name)
                state = self._store.read_entry(name, BRAIN_FILE)
            except FileNotFoundError:
                state = b""
            except FolderInUseError:
                raise
            except CheckpointError as error:
                logger.warning("%s", error)
                continue
            found.append(Standing(_step_in(state), ckpt_recency(checkpoint), name, False))
        return found


def _step_in(state: bytes) -> int:
    found = _STEP.search(state)
    return int(found[1]) if found else -1
