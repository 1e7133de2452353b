"""The rows of the table whose faults come at random moments: how a trial is drawn, and when it has
passed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.launching import BIN

from .table_trials import Outcome, Trial, rerun, run_trial

GONE_SECONDS = 5.0
RAISED_SECONDS = 1.0
STOP_SECONDS = 2.0 + 0.3 + 0.02  # and a save, and a step
TWICE_SECONDS = 2.0
HANG_SECONDS = 5.0
TOLD_SECONDS = 2.0
TORCHRUN_SECONDS = 35.0
MOST_LINES = 15
PATIENCE = 3  # the option nonfinite_patience

# What nobody should have to read beside the reason itself.
SECOND_HAND = (
    "Connection closed", "Connection reset", "Connection refused", "Broken pipe", "Socket closed",
    "failed to recv",
    "terminate called", "Aborted", "Segmentation fault",
)  # fmt: skip
# What torch's store writes by itself, with all its frames, whenever it is asked after its end.
OF_STORE = re.compile(r"^(\[rank\d+\]:)?\[W[^\n]*TCPStore\.cpp.*?\n\n", re.MULTILINE | re.DOTALL)
# which may say how it was noticed
REASON = re.compile(r"^.*rank \d+ .* disappeared.*$", re.MULTILINE)
MOST_OF_STORE = 3  # of each rank
TRACE_OF_TORCHRUN = f'Traceback (most recent call last):\n  File "{BIN / "torchrun"}"'
OF_TORCHRUN = re.compile(r"[WE]\d{4} .*torch/distributed/elastic|\s*$")


@dataclass(frozen=True)
class Row:
    """A row whose trials are drawn.

    Attributes:
        fault: what is done.
        line: when it has passed.
        draw: makes a trial of dice and a number of ranks.
        judge: notes what was not as it should be.
        at_once: how many trials may run beside each other without harm, because they only wait.
        is_cold: whether its processes cannot be forked from one that has imported torch, so that
            fewer trials are made.
    """

    fault: str
    line: str
    draw: Callable[[Random, int], Trial]
    judge: Callable[[Outcome, Judge], None]
    at_once: int = 1
    is_cold: bool = False


class Judge:
    """What the judgment of a trial needs beside its outcome.

    Args:
        folder: where the uninterrupted runs are kept.
        slack: seconds that a slow machine has beyond each pass line.
    """

    def __init__(self, folder: Path, slack: float = 0.0) -> None:
        self.folder = folder
        self.slack = slack
        self._weights: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def in_time(
        self,
        outcome: Outcome,
        seconds: float,
        limit: float,
        what: str = "all gone",
    ) -> None:
        most = limit + self.slack
        outcome.require(seconds <= most, f"{what} after {seconds:.2f} s; {most:g} are allowed")

    def uninterrupted(self, trial: Trial) -> dict[str, torch.Tensor]:
        """Return the weights that a run ends with that meets with nothing."""
        key = (trial.world_size, trial.epochs, trial.steps)
        with self._lock:
            if key not in self._weights:
                folder = self.folder / "-".join(map(str, key))
                plain = Trial(
                    "whole",
                    times=0,
                    world_size=key[0],
                    epochs=key[1],
                    steps=key[2],
                    pause=0.0,
                )
                outcome = run_trial(plain, folder)
                if outcome.codes != [0]:
                    raise RuntimeError(f"a run fails without a fault: {outcome.text}")
                self._weights[key] = weights(outcome, 0)
        return self._weights[key]


def weights(outcome: Outcome, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(outcome.folder / "out" / f"final-{rank}.pt", weights_only=True)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


# ------------------------------------------------------------------------------------------ drawing


def drawn(dice: Random, row: str, world_size: int, where: str, **facts: Any) -> Trial:
    """Draw what all rows draw: the rank and the moment, the launcher, the loader's workers."""
    trial = Trial(
        row,
        where=where,
        rank=dice.randrange(world_size),
        epoch=dice.choice([1, 2]),
        step=dice.randint(1, {"worker": 8, "valid": 8}.get(where, 16)),
        world_size=world_size,
        launcher=dice.choice(["torchrun", "plain"]),
        workers=2 if where == "worker" else dice.choice([0, 0, 2]) * (where != "dataset"),
        options=("--ckpt_interval_steps=5",) if where == "save" or dice.random() < 0.3 else (),
    )
    early = {
        "before": {"epoch": 0, "step": 0},
        "start": {"epoch": 0, "step": 0},
        "worker": {"epoch": 0},
    }.get(where, {})
    return dataclasses.replace(trial, **early, **facts)


PLACES = (
    "before",
    "start",
    "dataset",
    "worker",
    "forward",
    "backward",
    "optimizer",
    "hook",
    "save",
    "valid",
)


def draw_raise(dice: Random, world_size: int) -> Trial:
    return drawn(dice, "F1", world_size, dice.choice(PLACES), kind="raise")


def draw_main(dice: Random, world_size: int) -> Trial:
    return drawn(dice, "F2", world_size, "together", kind="raise", rank=0)


def draw_main_caught(dice: Random, world_size: int) -> Trial:
    facts = {"rank": 0, "caught": True, "times": dice.randint(1, 5)}
    return drawn(dice, "F3", world_size, "together", kind="raise", **facts)


def draw_kill(dice: Random, world_size: int) -> Trial:
    places = ("dataset", "forward", "backward", "optimizer", "hook", "save", "valid")
    return drawn(dice, "F4", world_size, dice.choice(places), kind="kill")


def _drawn_signal(
    dice: Random,
    row: str,
    world_size: int,
    kind: str,
    where: str,
    **facts: Any,
) -> Trial:
    trial = drawn(
        dice,
        row,
        world_size,
        where,
        kind=kind,
        delay=round(dice.uniform(0, 0.2), 3),
        epochs=16,
        **facts,
    )
    targets = ["rank", "all", *(["launcher"] if trial.launcher == "torchrun" else [])]
    return dataclasses.replace(trial, target=dice.choice(targets), workers=dice.choice([0, 2]))


def draw_stop(dice: Random, world_size: int) -> Trial:
    kind = dice.choice(["SIGTERM", "SIGTERM", "SIGUSR1", "SIGUSR2"])
    trial = _drawn_signal(dice, "F9", world_size, kind, dice.choice(["forward", "save", "valid"]))
    chosen = (
        ("--stop_signals", "SIGTERM", "SIGUSR2", "--save_signals", "SIGUSR1")
        if kind == "SIGUSR2"
        else ()
    )
    return dataclasses.replace(trial, options=(*trial.options, *chosen))


def draw_interrupt(dice: Random, world_size: int) -> Trial:
    if dice.random() < 0.5:
        return _drawn_signal(
            dice,
            "F10",
            world_size,
            "SIGINT",
            dice.choice(["forward", "save", "valid"]),
        )
    kind = dice.choice(["SIGINT", "SIGINT", "SIGTERM"])
    trial = _drawn_signal(
        dice,
        "F10",
        world_size,
        kind,
        "forward",
        twice=round(dice.uniform(1.3, 2.5), 3),
    )
    return dataclasses.replace(trial, target="launcher" if trial.launcher == "torchrun" else "all")


def draw_stuck(dice: Random, world_size: int) -> Trial:
    where = dice.choice(["dataset", "worker", "forward", "hook", "valid"])
    kind = dice.choice(["sleep", "deadlock", "stop", "gil"])
    trial = drawn(dice, "F11", world_size, where, kind=kind, hang=HANG_SECONDS)
    # A rank that was kept from talking to the store leaves a guard of its parent, which has to be
    # torchrun.
    return dataclasses.replace(trial, warm=not (kind == "gil" and trial.launcher == "torchrun"))


def draw_agent(dice: Random, world_size: int) -> Trial:
    where = dice.choice(["forward", "save", "valid"])
    facts = {"launcher": "torchrun", "target": "launcher", "epochs": 1000, "warm": False}
    return drawn(
        dice,
        "F12",
        world_size,
        where,
        kind="SIGKILL",
        delay=round(dice.uniform(0, 0.5), 3),
        **facts,
    )


def draw_nonfinite(dice: Random, world_size: int) -> Trial:
    kind = dice.choice(["nan", "nan", "oom"])
    where = "loss" if kind == "nan" else dice.choice(["forward", "backward", "hook"])
    return drawn(dice, "F15", world_size, where, kind=kind, times=dice.choice([1, 3, 1000]))


# ------------------------------------------------------------------------------------------ judging


def judge_raise(
    outcome: Outcome,
    judge: Judge,
    error: str = "ValueError: boom from the fault",
) -> None:
    """All gone, and the last thing one reads is which rank has failed, where and why."""
    trial = outcome.trial
    text = outcome.text
    judge.in_time(outcome, outcome.seconds, GONE_SECONDS)
    require_failure(outcome)
    where = trial.where
    (*_, epoch, step) = outcome.faults()[0]
    place = rf" in {'VALID' if where == 'valid' else 'TRAIN'} of epoch {epoch} at step "
    anywhere = r" in TRAIN of epoch \d+ at step \d+"
    place = {"before": "", "start": r".*", "dataset": anywhere, "worker": anywhere}.get(
        where,
        f"{place}{step}",
    )
    outcome.require_said(
        rf"rank {trial.rank} \([^ ]+, pid {outcome.pid(trial.rank)}\) failed "
        rf"first,?{place}, at "
    )
    outcome.require("in happen" in text, "the traceback of the rank that failed is not told")
    if trial.launcher == "torchrun":
        root = text.partition("Root Cause")[2]
        outcome.require(error in root, "torchrun's root cause is not what was raised")
        outcome.require_said(rf"rank +: {trial.rank} |rank {trial.rank}\b", root)
    for rank, run in enumerate(outcome.runs if trial.launcher == "plain" else []):
        outcome.require(error in run.tail(15), f"not in the last lines of rank {rank}: {error}")
        # torch puts the worker's traceback in the message
        last = run.tail(15) if trial.where != "worker" else run.err
        outcome.require_said(rf"rank ?{trial.rank}\b", last)
    for rank in outcome.ranks:
        for *_, kind, words in outcome.notes(rank, "ended"):
            told = rank == trial.rank or (f"rank {trial.rank}" in words and error in words)
            outcome.require(told, f"rank {rank} raises {kind}: {words}")


def require_failure(outcome: Outcome) -> None:
    """No process says that it has ended well, and none complains of the loss of another."""
    outcome.require(all(outcome.codes), f"exit codes {outcome.codes}")
    text, warnings = OF_STORE.subn("", outcome.text)
    outcome.require(
        warnings <= MOST_OF_STORE * len(outcome.ranks),
        f"{warnings} warnings of torch's store",
    )
    text = REASON.sub("", text)
    for words in SECOND_HAND:
        outcome.require(words not in text, f"it says {words!r}: {text[-2000:]}")


def _raised(outcome: Outcome, judge: Judge, times: int) -> None:
    """Every rank raises, rank 0 the original, at once."""
    longest = 0.0
    for rank in outcome.ranks:
        raised = outcome.notes(rank, "raised")
        outcome.require(
            len(raised) == times,
            f"rank {rank} raised {len(raised)} times instead of {times}",
        )
        expected = "MainProcessError" if rank else "ValueError"
        for *_, seconds, kind, words in raised:
            longest = max(longest, seconds)
            outcome.require(
                kind == expected and "boom from the fault" in words,
                f"rank {rank} raises {kind}: {words}",
            )
    outcome.other["gone"] = outcome.seconds
    outcome.seconds = longest
    judge.in_time(outcome, longest, RAISED_SECONDS, "every rank has raised")


def judge_main(outcome: Outcome, judge: Judge) -> None:
    judge_raise(outcome, judge)
    _raised(outcome, judge, 1)


def judge_main_caught(outcome: Outcome, judge: Judge) -> None:
    _raised(outcome, judge, outcome.trial.times)
    if outcome.require(not any(outcome.codes), f"exit codes {outcome.codes}: {outcome.text}"):
        expected = judge.uninterrupted(outcome.trial)
        for rank in outcome.ranks:
            outcome.require(
                same(weights(outcome, rank), expected),
                f"rank {rank} ends with other weights",
            )


def judge_kill(outcome: Outcome, judge: Judge) -> None:
    trial = outcome.trial
    judge.in_time(outcome, outcome.seconds, GONE_SECONDS)
    require_failure(outcome)
    where = trial.where
    (*_, epoch, step) = outcome.faults()[0]
    stage = "VALID" if where == "valid" else "TRAIN"
    place = rf"{stage} of epoch {epoch} at step ({step}|{step - 1}|{step + 1})\b"
    if where == "dataset":
        place = r"TRAIN of epoch \d+"
    elif where == "valid":  # where ranks do not wait for each other
        place = rf"(VALID of epoch {epoch}|TRAIN of epoch {epoch + 1})"
    who = rf"rank {trial.rank} \([^ ]+, pid {outcome.pid(trial.rank)}\)"
    outcome.require_said(rf"{who} disappeared in {place}")


def judge_stop(outcome: Outcome, judge: Judge) -> None:
    """One checkpoint, at the same step on all ranks; word of it; and the run goes on from there to
    the same end.
    """
    trial = outcome.trial
    number = signal.Signals[outcome.trial.kind]
    judge.in_time(outcome, outcome.seconds, STOP_SECONDS)
    require_failure(outcome)
    if trial.launcher == "plain":
        outcome.require(set(outcome.codes) == {128 + number}, f"exit codes {outcome.codes}")
    path = outcome.folder / "out" / "stopped.json"
    if not outcome.require(path.exists(), "there is no stopped.json"):
        return
    marker = json.loads(path.read_text())
    told = (marker["reason"], marker["exit_code"])
    outcome.require(told == (trial.kind, 128 + number), f"stopped.json says {told}")
    places = set()
    saves = []
    for rank in outcome.ranks:
        steps = outcome.notes(rank, "TRAIN", "VALID")
        places.add(tuple(steps[-1][2:]))
        saves.append(sum(one[0] > steps[-1][0] for one in outcome.notes(rank, "save")))
    outcome.require(len(places) == 1, f"the ranks stopped at {sorted(places)}")
    outcome.require(places <= {(marker["stage"], marker["epoch"], marker["step"],
        one[-1]) for one in places},
                    f"the ranks stopped at {sorted(places)}, and stopped.json says {marker}")  # fmt: skip  # noqa: E501
    outcome.require(set(saves) == {1}, f"after the last step the ranks have saved {saves} times")
    outcome.require(
        Path(marker["checkpoint"] or "/nowhere").is_dir(),
        f"no checkpoint: {marker['checkpoint']}",
    )
    if not outcome.problems:
        require_goes_on(outcome, judge)


def require_goes_on(outcome: Outcome, judge: Judge) -> None:
    """Start it again: every step is made once, and the weights are those of the run that was not
    stopped.
    """
    trial = outcome.trial
    again = rerun(trial, outcome.folder, "again")
    if not outcome.require(not any(again.codes), f"started again: {again.codes} {again.text}"):
        return
    steps = [one[-1] for one in outcome.notes(0, "TRAIN")]
    every = list(range(trial.epochs * trial.steps))
    outcome.require(steps == every, f"started again, the steps are {steps}")
    outcome.require(
        same(weights(outcome, 0), judge.uninterrupted(trial)),
        "started again, it ends with other weights",
    )


def judge_interrupt(outcome: Outcome, judge: Judge) -> None:
    if not outcome.trial.twice:
        judge_stop(outcome, judge)
        return
    judge.in_time(outcome, outcome.seconds, TWICE_SECONDS)
    require_failure(outcome)
    text = "".join(
        run.err[before:] for run, before in zip(outcome.runs, outcome.before, strict=True)
    )
    said = OF_STORE.sub("a warning of torch's store\n", text.partition(TRACE_OF_TORCHRUN)[0])
    lines = [line for line in said.splitlines() if not OF_TORCHRUN.match(line)]
    outcome.require(len(lines) <= MOST_LINES, f"it says {len(lines)} lines: {said}")


def judge_stuck(outcome: Outcome, judge: Judge) -> None:
    """The others say which rank keeps them waiting, and where it is; then all end."""
    trial = outcome.trial
    told = outcome.other.get("told")
    if outcome.require(told is not None, "nobody has said that no step was made"):
        judge.in_time(outcome, told, trial.hang + TOLD_SECONDS, "told")
    end = GONE_SECONDS if trial.launcher == "plain" else TORCHRUN_SECONDS
    judge.in_time(outcome, outcome.seconds - trial.hang, end, f"all gone {trial.hang:g} s and then")
    outcome.require(all(outcome.codes), f"exit codes {outcome.codes}")
    silent = trial.kind in {"stop", "gil"}
    here = r"table_recipe\.py:\d+ in happen"
    if trial.where == "worker":
        here = "waiting for its loader"
        stack = "" if silent else r'(?s:.*)table_recipe\.py", line \d+ in happen'
        outcome.require_said(rf"^A worker of the loader \(pid \d+\) is here:{stack}")
    elif silent:
        here = "silent for"
    place = rf"^rank {trial.rank} \(.*{here}"
    if trial.kind == "stop" and trial.launcher == "plain" and trial.rank == 0:
        # the store it keeps
        place = rf"{place}|: rank 0 \([^ ]+, pid {outcome.pid(0)}\), which keeps it, .*is silent"
    outcome.require_said(place)


def judge_agent(outcome: Outcome, judge: Judge) -> None:
    judge.in_time(outcome, outcome.seconds, GONE_SECONDS)
    outcome.require_said("the launcher")


def judge_nonfinite(outcome: Outcome, judge: Judge) -> None:
    """All ranks decide the same: they leave the steps out, or give up."""
    trial = outcome.trial
    if trial.kind == "oom":
        judge_raise(outcome, judge, "can't allocate memory")
        return
    ends = {tuple(outcome.notes(rank, "finished", "ended")[-1][2:4]) for rank in outcome.ranks}
    goes_on = trial.times <= PATIENCE
    expected = (
        ("finished", trial.epochs * trial.steps - trial.times)
        if goes_on
        else ("ended", "NonFiniteLossError")
    )
    outcome.require(ends == {expected}, f"the ranks ended with {ends} instead of {expected}")
    steps = {
        tuple(map(tuple, (one[2:] for one in outcome.notes(rank, "TRAIN", "VALID"))))
        for rank in outcome.ranks
    }
    outcome.require(len(steps) == 1, "the ranks have not made the same steps")
    outcome.require(
        all(bool(code) != goes_on for code in outcome.codes),
        f"exit codes {outcome.codes}",
    )
    if not goes_on:
        judge.in_time(outcome, outcome.seconds, GONE_SECONDS)
    else:
        outcome.seconds = 0.0  # it goes on
        first = weights(outcome, 0)
        outcome.require(
            all(same(weights(outcome, rank), first) for rank in outcome.ranks),
            "other weights on a rank",
        )


ROWS = {
    "F1": Row(
        "an exception on one rank: dataset, loader worker, forward, backward, optimizer, hook, "
        "saver, validation, before the first step",
        "all gone in 5 s; the last lines are the rank, its place and its traceback",
        draw_raise, judge_raise,
    ),
    "F2": Row("run_on_main fails, uncaught", "every rank raises in 1 s, with the reason", draw_main,
    judge_main),
    "F3": Row(
        "run_on_main fails, caught on all ranks",
        "every rank raises in 1 s; in step, the same weights",
        draw_main_caught, judge_main_caught,
    ),
    "F4 kill": Row(
        "SIGKILL of a rank", 'all gone in 5 s; "rank 2 (host, pid) disappeared in ... at step ..."',
        draw_kill, judge_kill,
    ),
    "F9": Row(
        "SIGTERM, SIGUSR1, SIGUSR2 to the launcher, one rank, all; in a step, a save, "
        "validation; 0 and 2 workers",
        "one checkpoint, the same step, stopped.json, in 2.3 s; goes on to the same weights",
        draw_stop, judge_stop,
    ),
    "F10": Row(
        "SIGINT once; twice", "as F9; gone in 2 s, 15 lines but for torchrun's", draw_interrupt,
        judge_interrupt,
    ),
    "F11": Row(
        "a rank or a worker sleeps, is in a deadlock, holds the GIL, is stopped",
        "told in T + 2 s with rank and line; gone in T + 5 s, T + 35 s under torchrun; without "
        f"a launcher one that holds the GIL or is stopped stays; T = {HANG_SECONDS:g} s",
        draw_stuck, judge_stuck, at_once=3,
    ),
    "F12": Row("SIGKILL of torchrun", "all gone in 5 s", draw_agent, judge_agent, is_cold=True),
    "F15": Row(
        "NaN loss, and no memory, on one rank",
        "the same decision on all ranks; all gone in 5 s if it is the end",
        draw_nonfinite, judge_nonfinite,
    ),
}  # fmt: skip
