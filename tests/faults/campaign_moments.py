"""When and whom to kill, and the diary in which every rank writes what it does, so that a kill
loses none of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALL = -1

# The places of a run, in the order in which an epoch comes to them.
TRAIN_START, TRAIN, TRAIN_END, VALID, VALID_END, SAVED = range(6)
PHASE_NAMES = ("train start", "train", "train end", "valid", "valid end", "saved")
BETWEEN = (TRAIN_START, TRAIN_END, VALID_END, SAVED)
AFTER_ALL = 10**6  # the "epoch" of what follows the last one

# The points of a training step.
BATCH_START, FORWARD, STEPPING, STEPPED = range(4)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        place: start | train | save | valid | between | first (step after the start) | time; or
            stop, which does not kill but stands still, for a launcher to be killed.
        who: a rank, or ALL.
        at: (epoch, phase, step, point): fires there, or at the first later place that the run comes
            to.
        operation: in a save, the k-th file operation after ``at``.
        after: whether that has been done already.
        delay: seconds after the start, where the place is "time".
        survivors: kill | term | alone: what becomes of the ranks that are left, if they do not end
            by themselves.
    """

    place: str
    who: int = ALL
    at: tuple[int, int, int, int] = (0, 0, 0, 0)
    operation: int = 0
    after: bool = False
    delay: float = 0.0
    survivors: str = "kill"


class Diary:
    """A file of one rank that outlives it, and all attempts: one line of JSON for all that
    happens.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.attempt = attempt
        self._file = os.open(
            folder / f"diary.{rank}",
            os.O_APPEND | os.O_CREAT | os.O_WRONLY,
            0o644,
        )

    def note(self, kind: str, *facts: Any) -> None:
        os.write(self._file, (json.dumps([self.attempt, kind, *facts]) + "\n").encode())

    @staticmethod
    def read(folder: Path, rank: int, attempt: int) -> list[list[Any]]:
        """Return what a rank noted in one attempt, in order."""
        with contextlib.suppress(FileNotFoundError):
            lines = [
                json.loads(line) for line in (folder / f"diary.{rank}").read_text().splitlines()
            ]
            return [facts for number, *facts in lines if number == attempt]
        return []


class Trigger:
    """Watches where a rank is, and fires once when it is where the kill is planned."""

    def __init__(self, folder: Path, rank: int, diary: Diary, kill: Kill | None) -> None:
        self.folder = folder
        self.rank = rank
        self.diary = diary
        self.kill = kill
        self.here: tuple[int, int, int, int] = (0, 0, 0, 0)
        self.began = False
        self.operations = 0
        self._spent = kill is None or kill.place == "time"
        self._lock = threading.Lock()

    def start(self, *, ready: bool) -> None:
        """Before or after the checkpoint is recovered."""
        if (
            not self._spent
            and self.kill.place == "start"
            and ready == self.kill.after
            and self._is_mine()
        ):
            self._fire("start")

    def reach(self, epoch: int | None, phase: int, step: int = 0, point: int = 0) -> None:
        self.here = (AFTER_ALL if epoch is None else epoch, phase, step, point)
        if self._spent or self.kill.place in {"save", "start"}:
            return
        if self.kill.place == "first":
            due = phase == TRAIN and point >= self.kill.at[3]
        else:
            due = self.here >= tuple(self.kill.at)
        if due and self._is_mine():
            self._fire(PHASE_NAMES[phase])

    def operate(self, name: str, *, done: bool) -> None:
        """Before and after every file operation of a save, in whatever thread it is done."""
        if not done:
            self.diary.note("file", name)
        if self._spent or self.kill.place != "save" or self.here < tuple(self.kill.at):
            return
        with self._lock:
            self.operations += not done
            if (
                self.operations >= self.kill.operation
                and done == self.kill.after
                and not self._spent
            ):
                self._fire(f"save: {name}")

    def _is_mine(self) -> bool:
        return self.kill.who in {ALL, self.rank}

    def _fire(self, where: str) -> None:
        self._spent = True
        self.diary.note("kill", where, self.here)
        if self.kill.place == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if self.kill.who == ALL:
            os.killpg(0, signal.SIGKILL)
        elif self.kill.who == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            pids = json.loads((self.folder / "pids").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[self.kill.who], signal.SIGKILL)
