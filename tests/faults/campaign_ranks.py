"""Starts the ranks of one attempt by forking a process that has imported everything, and kills them
as planned.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.launching import free_port

from .campaign_moments import ALL, Diary, Kill
from .recipes_for_faults import Setting, train

PATIENCE_SECONDS = 15.0  # torchrun gives the ranks that are left 30 s
LIMIT_SECONDS = 60.0  # without a note of any rank: on a busy machine an attempt takes longer


@dataclass
class Attempt:
    """What became of one attempt.

    Attributes:
        killed: whether the kill really ended a rank that had not come to its end.
        where: what the rank that was killed, or one of them, did last.
        hung: ranks that had to be killed because they neither ended nor noticed that another one
            was gone.
        error: what a rank that was not killed died of; empty where no rank did.
    """

    killed: bool = False
    where: str = ""
    hung: list[int] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    diaries: list[list[list]] = field(default_factory=list)


class Ranks:
    """The processes of one attempt: a process group of their own, one rank each."""

    def __init__(self, setting: Setting, folder: Path, number: int, kill: Kill | None) -> None:
        self.setting = setting
        self.folder = folder
        self.number = number
        self.kill = kill
        self.started = time.monotonic()
        self.statuses: dict[int, int] = {}
        port = free_port()
        group = 0
        self.pids: list[int] = []
        for rank in range(setting.world_size):
            pid = os.fork()
            if not pid:
                self._be(rank, port, group)
            group = group or pid
            with contextlib.suppress(OSError):  # the child does the same, and may have ended
                os.setpgid(pid, group)
            self.pids.append(pid)
        self.group = group
        (folder / "pids.part").write_text(json.dumps(self.pids))
        (folder / "pids.part").rename(folder / "pids")
        self.handles = {rank: os.pidfd_open(pid) for rank, pid in enumerate(self.pids)}

    def _be(self, rank: int, port: int, group: int) -> None:
        """Be a rank, from its start to its end; does not return."""
        code = 1
        try:
            os.setpgid(0, group)
            gc.enable()
            log = os.open(
                self.folder / f"log.{self.number}.{rank}",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                0o644,
            )
            for stream in (1, 2):
                os.dup2(log, stream)
            size = self.setting.world_size
            if size > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
            while not (self.folder / "pids").exists():
                time.sleep(0.001)
            train(self.setting, self.folder, self.number, self.kill)
            code = 0
        except BaseException:  # noqa: BLE001 -- the end of a process
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def watch(self) -> Attempt:
        """Wait for the end; do what is planned."""
        try:
            return self._watch()
        finally:
            self._end_all()

    def _watch(self) -> Attempt:
        attempt = Attempt()
        due = self.kill.delay if self.kill is not None and self.kill.place == "time" else None
        if due is not None:
            self._wait_for_an_end(self.started + due, how_many=self.setting.world_size)
            self._kill()
        self._wait_while_they_go_on()
        if self._is_killed():
            attempt.hung = self._end_survivors()
        else:
            self._wait_while_they_go_on(how_many=self.setting.world_size)
            attempt.hung = sorted(set(range(self.setting.world_size)) - set(self.statuses))
        attempt.seconds = time.monotonic() - self.started
        ended = [
            (self.folder / f"result.{self.number}.{rank}").exists()
            for rank in range(self.setting.world_size)
        ]
        attempt.killed = self._is_killed() and not all(ended)
        attempt.diaries = [
            Diary.read(self.folder, rank, self.number) for rank in range(self.setting.world_size)
        ]
        if attempt.killed:
            attempt.where = self._where(attempt)
            if ["joined"] not in attempt.diaries[max(self.kill.who, 0)]:
                # who waits for a rank that never came cannot know that it is dead: launchers do
                attempt.hung = []
        elif not self._is_killed() and (attempt.hung or any(self.statuses.values())):
            attempt.error = self._words()
        return attempt

    def _is_killed(self) -> bool:
        return any(
            os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            for status in self.statuses.values()
        )

    def _kill(self) -> None:
        if self.kill.who == ALL:
            self._signal_all(signal.SIGKILL)
        elif self.kill.who not in self.statuses:
            os.kill(self.pids[self.kill.who], signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _end_survivors(self) -> list[int]:
        """Do to the ranks that are left what a launcher does, or nothing; return those that did not
        go.
        """
        if self.kill is None or self.kill.survivors == "kill":
            self._signal_all(signal.SIGKILL)
        elif self.kill.survivors == "term":
            self._signal_all(signal.SIGTERM)
        self._wait_for_an_end(time.monotonic() + PATIENCE_SECONDS, how_many=self.setting.world_size)
        return sorted(set(range(self.setting.world_size)) - set(self.statuses))

    def _wait_while_they_go_on(self, how_many: int = 1) -> None:
        """Wait until so many ranks have ended, or none of them notes anything any more."""
        before = None
        while len(self.statuses) < how_many and (noted := self._noted()) != before:
            before = noted
            self._wait_for_an_end(time.monotonic() + LIMIT_SECONDS, how_many)

    def _noted(self) -> dict[str, int]:
        """Return how much each rank has noted."""
        return {path.name: path.stat().st_size for path in self.folder.glob("diary.*")}

    def _wait_for_an_end(self, deadline: float, how_many: int = 1) -> None:
        """Wait until so many ranks have ended."""
        while len(self.statuses) < how_many and time.monotonic() < deadline:
            poll = select.poll()
            for handle in self.handles.values():
                poll.register(handle, select.POLLIN)
            poll.poll(max(1.0, 1000 * (deadline - time.monotonic())))
            for rank in list(self.handles):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.statuses[rank] = status
                    os.close(self.handles.pop(rank))

    def _end_all(self) -> None:
        """Leave nothing behind: ranks that hang, and loader workers of ranks that were killed."""
        self._signal_all(signal.SIGKILL)
        self._wait_for_an_end(time.monotonic() + PATIENCE_SECONDS, how_many=self.setting.world_size)
        (self.folder / "pids").unlink(missing_ok=True)

    def _where(self, attempt: Attempt) -> str:
        for diary in attempt.diaries:
            for entry in diary:
                if entry[0] == "kill":
                    return f"{self.kill.place}: {entry[1]}"
        victim = 0 if self.kill.who == ALL else self.kill.who
        return f"time: {_doing(attempt.diaries[victim])}"

    def _words(self) -> str:
        """Return the last words of the ranks that ended badly."""
        said = [f"hung: {sorted(set(range(self.setting.world_size)) - set(self.statuses))}"]
        for rank, status in sorted(self.statuses.items()):
            if status:
                log = (self.folder / f"log.{self.number}.{rank}").read_text(errors="replace")
                said.append(
                    f"rank {rank}: status {os.waitstatus_to_exitcode(status)}\n{log[-3000:]}"
                )
        return "\n".join(said)


def _doing(diary: list[list]) -> str:
    """Say what a rank did when it was killed from outside, by its last words."""
    last = diary[-1][0] if diary else "begin"
    if last == "stage":
        return f"after {diary[-1][1].lower()}"
    return {
        "begin": "start",
        "joined": "start",
        "step": "train",
        "TRAIN": "train",
        "VALID": "valid",
        "TEST": "test",
        "file": "save",
    }.get(last, last)


def run_attempt(setting: Setting, folder: Path, number: int, kill: Kill | None = None) -> Attempt:
    """Run one attempt, from the start of the ranks until nothing of them is left."""
    folder.mkdir(parents=True, exist_ok=True)
    return Ranks(setting, folder, number, kill).watch()


@contextlib.contextmanager
def zygote() -> Iterator[None]:
    """Make this process fit to be forked: one thread, a heap that is not touched by its
    children.
    """
    torch.set_num_threads(1)
    # the first optimizer imports two seconds' worth
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        raise RuntimeError(
            f"{len(threads)} threads: a forked process would have one of them. Set "
            "OMP_NUM_THREADS=1."
        )
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
