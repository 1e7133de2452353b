"""A fault as data, and what becomes of a run that meets with it: real processes, from start until
nothing is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launching import Run, python, start_by_hand, torchrun, wait_until

RECIPE = str(Path(__file__).with_name("table_recipe.py"))
START_SECONDS = 60.0
LONGEST_SECONDS = 90.0
# before a rank that waits ends
TOLD = re.compile(r"has made no step for|no answer for \d+ s from the store")
SIGNALS_OF_TORCHRUN = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
Facts = list[Any]  # of a diary: time, pid, kind, and what belongs to it


@dataclass(frozen=True)
class Trial:
    """One run and the fault that it meets with.

    Attributes:
        row: of the table.
        kind: raise | oom | nan | kill | stop | sleep | deadlock | gil: what the rank does itself;
            or the name of a signal that is sent from outside; or nothing, for a run that only comes
            to its end.
        where: before | start | dataset | worker | forward | loss | backward | optimizer | hook |
            together | save | valid.
        rank: that meets with it.
        epoch: and
        step: the first moment at which it can happen there; counted from 1.
        world_size: number of ranks.
        launcher: torchrun | plain, which is none: only the variables that name a rank.
        target: of a signal: launcher | rank | all, which are all processes, those of the loaders
            too.
        delay: seconds from the moment to the signal.
        twice: whether the signal is sent a second time, to ranks of which one cannot obey; then
            seconds between.
        workers: of each loader.
        times: how often it happens.
        caught: whether the script catches what is raised, on all ranks.
        epochs: of the run, with so many
        steps: each.
        pause: seconds that a step takes.
        hang: the option ``hang_timeout``; 0 leaves it.
        options: more of them.
        warm: whether the processes are forked from one that has imported torch.
    """

    row: str
    kind: str = ""
    where: str = "forward"
    rank: int = 0
    epoch: int = 1
    step: int = 5
    world_size: int = 2
    launcher: str = "torchrun"
    target: str = "rank"
    delay: float = 0.0
    twice: float = 0.0
    workers: int = 0
    times: int = 1
    caught: bool = False
    epochs: int = 3
    steps: int = 16
    pause: float = 0.02
    hang: float = 0.0
    options: tuple[str, ...] = ()
    warm: bool = True

    @property
    def text(self) -> str:
        """JSON of all that is not as ever."""
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        default = {one.name: one.default for one in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in own.items() if value != default[name]})

    @classmethod
    def read(cls, text: str) -> Trial:
        facts = json.loads(text)
        return cls(**{**facts, "options": tuple(facts.get("options", ()))})

    @property
    def command(self) -> str:
        """What does it again."""
        return f"OMP_NUM_THREADS=1 python -m tests.faults.table --replay '{self.text}'"

    def words(self) -> list[str]:
        """The command line of a rank, after its folder."""
        hang = (
            [f"--hang_warning={self.hang / 2}", f"--hang_timeout={self.hang}"] if self.hang else []
        )
        return [json.dumps(dataclasses.asdict(self)), *hang, *self.options]


@dataclass
class Outcome:
    """What became of a trial.

    Attributes:
        problems: what was not as it should be; none: passed.
        seconds: from the fault until no process was left.
        other: other seconds that the row asks for, by name.
        before: how much each process had written on stderr when the first signal was sent.
    """

    trial: Trial
    folder: Path
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    other: dict[str, float] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What all processes wrote on stderr."""
        return "\n".join(run.err for run in self.runs)

    @property
    def codes(self) -> list[int]:
        return [run.code for run in self.runs]

    @property
    def ranks(self) -> range:
        return range(self.trial.world_size)

    def notes(self, rank: int, *kinds: str) -> list[Facts]:
        """What a rank has noted, of some kinds or of all, in order."""
        path = self.folder / "out" / f"diary.{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in notes if not kinds or one[2] in kinds]

    def pid(self, rank: int) -> int:
        return self.notes(rank, "started")[-1][1]

    def is_running(self) -> bool:
        return any(run.process.poll() is None for run in self.runs)

    def faults(self) -> list[Facts]:
        return sorted(one for rank in self.ranks for one in self.notes(rank, "fault"))

    def require(self, condition: object, words: str) -> bool:
        """Note a problem unless something is so."""
        if not condition:
            self.problems.append(words)
        return bool(condition)

    def require_said(self, pattern: str, text: str | None = None) -> None:
        found = re.search(pattern, self.text if text is None else text, re.MULTILINE)
        self.require(found, f"nowhere in what it said: {pattern}")


def start(trial: Trial, folder: Path) -> list[Run]:
    """Start the processes of a trial."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [RECIPE, str(folder / "out"), *trial.words()]
    if trial.launcher == "plain":
        return start_by_hand(python(*words), folder, trial.world_size, warm=trial.warm)
    launcher = [SIGNALS_OF_TORCHRUN] if trial.kind in {"SIGUSR1", "SIGUSR2"} else []
    return [Run(torchrun(trial.world_size, *launcher, *words), folder, warm=trial.warm)]


def run_trial(trial: Trial, folder: Path) -> Outcome:
    """Run a trial until nothing is left of it; what is still there after very long is killed, and a
    problem.
    """
    outcome = Outcome(trial, folder, start(trial, folder))
    try:
        if trial.kind:
            wait_until(lambda: outcome.faults() or not outcome.is_running(), START_SECONDS)
            if not outcome.require(outcome.faults(), "the fault did not happen. What it said:"):
                outcome.problems.append(outcome.text[-2000:])
                return outcome
        began = outcome.faults()[0][0] if trial.kind else time.time()
        if trial.kind.startswith("SIG"):
            began = send(outcome)
        await_end(outcome)
        outcome.seconds = time.time() - began
    finally:
        end_all(outcome)
    return outcome


def send(outcome: Outcome) -> float:
    """Send the signal, once or twice; return when."""
    trial = outcome.trial
    number = signal.Signals[trial.kind]
    time.sleep(trial.delay)
    outcome.before = [len(run.err) for run in outcome.runs]
    if trial.twice:
        _send_to(outcome, number)
        time.sleep(trial.twice)
    began = time.time()
    outcome.require(
        _send_to(outcome, number),
        f"no process was left when {trial.kind} was to be sent",
    )
    return began


def _send_to(outcome: Outcome, number: signal.Signals) -> int:
    """Send a signal to the processes that are meant; say to how many."""
    trial = outcome.trial
    runs = outcome.runs
    if trial.target == "launcher":
        pids = [run.process.pid for run in runs if run.process.poll() is None]
    elif trial.target == "rank":
        pids = [outcome.pid(trial.rank)]
    else:
        pids = sorted({pid for run in runs for pid in run.alive()})
    sent = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            sent += 1
        except ProcessLookupError:
            continue
    return sent


def await_end(outcome: Outcome) -> None:
    """Wait until no process is left but those that are stopped or hold the GIL, and that nobody is
    there to end.
    """
    trial = outcome.trial
    stopped = trial.kind in {"stop", "gil"} and trial.launcher == "plain"

    began = time.time()

    def left() -> bool:
        if trial.hang and "told" not in outcome.other and TOLD.search(outcome.text):
            outcome.other["told"] = time.time() - began
        runs = [
            run for rank, run in enumerate(outcome.runs) if not (stopped and rank == trial.rank)
        ]
        return any(run.process.poll() is None for run in runs) or any(run.alive() for run in runs)

    if not wait_until(lambda: not left(), LONGEST_SECONDS):
        outcome.problems.append(
            f"still there after {LONGEST_SECONDS:.0f} s: {[run.alive() for run in outcome.runs]}"
        )


def end_all(outcome: Outcome) -> None:
    """Kill what is left."""
    for run in outcome.runs:
        for pid in run.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for run in outcome.runs:
        run.wait(START_SECONDS)


def rerun(trial: Trial, folder: Path, name: str) -> Outcome:
    """Start the command of a trial again, in its folder, without its fault."""
    again = dataclasses.replace(trial, kind="", times=0, pause=0.0, warm=True)
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "out").symlink_to(folder / "out")
    return run_trial(again, folder / name)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def spread(seconds: list[float]) -> str:
    """Write the median and the worst."""
    return f"{statistics.median(seconds):.1f} / {max(seconds):.1f}" if seconds else ""


def say(line: str = "") -> None:
    print(line, flush=True)
    sys.stdout.flush()
