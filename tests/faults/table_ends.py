"""The row of starts and ends: whatever way a run comes to its end, nothing of it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from pathlib import Path
from random import Random

from .table_rows import SECOND_HAND, Row
from .table_trials import Outcome, Trial, run_trial

SHARED = Path("/dev/shm")
LINGER_SECONDS = 2.0
# What torch calls a segment: torch_PID_RANDOM_NUMBER.
OWNER = re.compile(r"torch_(\d+)_")
COLD_SHARE = 10  # one start in so many is not forked
# What torchrun itself says when it was signalled, or a rank has ended by a stop.
OF_TORCHRUN = re.compile(
    r"^Traceback \(most recent call last\):\n  File \"[^\"]*/torchrun\".*?"
    r"^torch\.distributed\.elastic[^\n]*(\n=+\n.*?^=+$)?",
    re.MULTILINE | re.DOTALL,
)


def draw_end(dice: Random, world_size: int) -> Trial:
    """A run that ends by itself, or by a signal; on two ranks, with workers."""
    trial = Trial(
        "exit", world_size=world_size, workers=2, epochs=1, steps=8, pause=0.005,
        launcher=dice.choice(["torchrun", "torchrun", "plain"]),
        warm=dice.randrange(COLD_SHARE) > 0,
    )  # fmt: skip
    if dice.random() < 0.5:
        return trial
    targets = ["launcher", "all"] if trial.launcher == "torchrun" else ["rank", "all"]
    return dataclasses.replace(
        trial, kind=dice.choice(["SIGTERM", "SIGINT"]), epochs=1000, step=dice.randint(1, 8),
        delay=round(dice.uniform(0, 0.5), 3), target=dice.choice(targets),
        rank=dice.randrange(world_size),
    )  # fmt: skip


def mapped() -> set[int]:
    """Return the inodes in shared memory that living processes have mapped: a semaphore's name
    tells no owner.
    """
    inodes = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = folder.joinpath("maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return inodes


def segments() -> dict[str, float]:
    """Return the names in shared memory and when they were made, without those of processes that
    live.
    """
    found = {}
    in_use = mapped()
    for path in SHARED.iterdir():
        owner = OWNER.match(path.name)
        if owner and Path(f"/proc/{owner[1]}").exists():
            continue
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_ino not in in_use:
                found[path.name] = status.st_ctime
    return found


def run_end(trial: Trial, folder: Path) -> Outcome:
    """Run it, and look at what is left of it."""
    before = segments()
    outcome = run_trial(trial, folder)
    if not trial.kind:
        outcome.seconds = 0.0  # of all of it
    end = time.monotonic() + LINGER_SECONDS  # another run's, which is at work
    while (left := set(segments()) - set(before)) and time.monotonic() < end:
        time.sleep(0.1)
    outcome.require(not left, f"shared memory: {sorted(left)}")
    text = OF_TORCHRUN.sub("", outcome.text)
    for words in (*SECOND_HAND, "Traceback", "leaked", "Exception ignored", "abort"):
        outcome.require(words not in text, f"it says {words!r}: {text}")
    expected = {0} if not trial.kind else {1} if trial.launcher == "torchrun" else None
    if expected:
        outcome.require(set(outcome.codes) == expected, f"exit codes {outcome.codes}")
    else:
        outcome.require(all(outcome.codes), f"exit codes {outcome.codes}")
    own = [os.fspath(path) for path in (folder / "out").glob("save/*") if "tmp" in path.name]
    outcome.require(not own, f"left in the folder: {own}")
    return outcome


END = Row(
    "starts and ends of two ranks with loader workers: by themselves, by SIGTERM, by SIGINT",
    "no process left, nothing in /dev/shm, no traceback and no abort",
    draw_end,
    lambda outcome, judge: None,
)
