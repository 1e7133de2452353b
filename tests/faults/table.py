"""The table of faults: what is done to a run, when that has passed, how often it was done, and the
measured seconds.

``python -m tests.faults.table --rows F1,F9 --trials 10 --world_sizes
2,3`` runs a part of it; ``make faults`` runs all. A trial is drawn from the seed, its number, its
row and its number of ranks; one that fails is printed with the command that does it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests import warm_starts

from .table_ends import END, run_end
from .table_rows import ROWS, Judge
from .table_shown import SHOWN, show
from .table_trials import Outcome, Trial, remove, run_trial, say, spread

# of the trials whose processes are not forked, and take ten times as long, one in so many is made
COLD_SHARE = 5
ALL = ("F1", "F2", "F3", "F4", "F4 kill", "F5", "F6", "F7", "F8", "F9", "F10", "F11", "F12", "F13",
    "F14", "F15", "F16",
       "F17", "F18", "F19", "F20", "F21", "F22", "F23", "exit")  # fmt: skip
WIDTHS = (8, 40, 40, 6, 6, 14, 30)
HEADS = (
    "row",
    "what is done",
    "passes when",
    "trials",
    "passed",
    "median / worst seconds",
    "verdict",
)


@dataclass
class Result:
    """A row of the table.

    Attributes:
        seconds: of each trial, where the row is about time.
        took: seconds for all of it.
        note: words for the verdict.
    """

    row: str
    fault: str
    line: str
    trials: int = 0
    passed: int = 0
    seconds: list[float] = field(default_factory=list)
    took: float = 0.0
    note: str = ""

    @property
    def verdict(self) -> str:
        if not self.trials:
            return self.note or "not shown"
        return "passed" if self.passed == self.trials else "FAILED"

    def line_of_log(self) -> str:
        return f"{self.row}: {self.passed} of {self.trials} passed in {self.took:.0f} s"

    def columns(self) -> list[str]:
        verdict = f"{self.verdict}; {self.note}" if self.note and self.trials else self.verdict
        seconds = spread(self.seconds) or f"({self.took:.0f} in all)"
        return [
            self.row,
            self.fault,
            self.line,
            str(self.trials),
            str(self.passed),
            seconds,
            verdict,
        ]


@dataclass
class Table:
    """Runs rows.

    Args:
        options: of the command line.
        folder: to work in.
        tell: takes a line of JSON for each trial and each row.
    """

    options: argparse.Namespace
    folder: Path
    tell: Callable[[dict], None]

    def __post_init__(self) -> None:
        self.judge = Judge(self.folder / "whole", self.options.slack)

    def run(self, name: str) -> Result:
        """Run one row."""
        began = time.monotonic()
        if name in ROWS or name == "exit":
            result = self._run_trials(name)
        else:
            result = Result(name, SHOWN[name].fault, SHOWN[name].line)
            result.trials, result.passed, result.note = show(name, self.options, self.folder)
        result.took = time.monotonic() - began
        self.tell({**dataclasses.asdict(result), "verdict": result.verdict})
        return result

    def _run_trials(self, name: str) -> Result:
        row = END if name == "exit" else ROWS[name]
        result = Result(name, row.fault, row.line)
        with ThreadPoolExecutor(self.options.jobs * row.at_once) as pool:
            for trial, outcome in zip(*self._start(pool, name), strict=True):
                self._take(result, trial, outcome.result())
        return result

    def _start(self, pool: ThreadPoolExecutor, name: str) -> tuple[list[Trial], list]:
        trials = list(self.drawn(name))
        return trials, [pool.submit(self.try_one, trial) for trial in trials]

    def drawn(self, name: str) -> Iterator[Trial]:
        """Draw the trials of a row."""
        if name == "exit":
            for number in range(self.options.ends):
                yield END.draw(Random(f"{self.options.seed}/exit/{number}"), 2)
            return
        share = COLD_SHARE if ROWS[name].is_cold else 1
        for world_size in self.options.world_sizes:
            for number in range(-(-self.options.trials // share)):
                yield ROWS[name].draw(
                    Random(f"{self.options.seed}/{name}/{world_size}/{number}"),
                    world_size,
                )

    def try_one(self, trial: Trial) -> Outcome:
        """Run a trial and judge it; a test that breaks is a trial that has failed."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            if trial.row == "exit":
                return run_end(trial, folder)
            outcome = run_trial(trial, folder)
            if not outcome.problems:
                row = next(row for name, row in ROWS.items() if name.split()[0] == trial.row)
                row.judge(outcome, self.judge)
        except Exception as error:  # noqa: BLE001 -- a trial more, or less
            outcome = Outcome(
                trial,
                folder,
                problems=[(f"the test itself: {type(error).__name__}: {error}")],
            )
        if not self.options.keep:
            remove(folder)
        return outcome

    def _take(self, result: Result, trial: Trial, outcome: Outcome) -> None:
        result.trials += 1
        result.passed += not outcome.problems
        if outcome.seconds:
            result.seconds.append(round(outcome.seconds, 3))
        if outcome.problems:
            say(f"{result.row} FAILED: {trial.command}")
            for problem in outcome.problems:
                say(textwrap.indent(problem[: self.options.longest], "    "))
        facts = {"row": result.row, "trial": dataclasses.asdict(trial), "seconds": outcome.seconds}
        self.tell({**facts, **outcome.other, "problems": outcome.problems})


def print_row(columns: Sequence[str]) -> None:
    """Print a row of the table, with its words broken into lines."""
    cells = [
        textwrap.wrap(text, width) or [""] for text, width in zip(columns, WIDTHS, strict=True)
    ]
    for number in range(max(map(len, cells))):
        line = [cell[number] if number < len(cell) else "" for cell in cells]
        say("  ".join(f"{text:{width}}" for text, width in zip(line, WIDTHS, strict=True)).rstrip())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.table",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=list(ALL),
        help="F1,F9 or exit; else all",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=50,
        help="of each row that is drawn, on each number of ranks",
    )
    parser.add_argument("--ends", type=int, default=100, help="starts and ends of the row exit")
    parser.add_argument("--kills", type=int, default=200, help="of the rows F4 and F20, each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--world_sizes",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[2, 3, 4],
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="trials at a time; more of them disturb each other's times",
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=0.0,
        help="seconds that are allowed beyond each pass line",
    )
    parser.add_argument("--json", type=Path, help="write a line for each trial and each row there")
    parser.add_argument(
        "--longest",
        type=int,
        default=3000,
        help="characters of a problem that are printed",
    )
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it all there")
    parser.add_argument("--replay", help="run this one trial, as printed, and show what it says")
    return parser.parse_args(words)


def replay(table: Table) -> int:
    table.options.keep = table.folder
    outcome = table.try_one(Trial.read(table.options.replay))
    say(outcome.text)
    say(f"{outcome.seconds:.2f} s, exit codes {outcome.codes}")
    say("\n".join(outcome.problems) or "passed")
    return int(bool(outcome.problems))


def prepare() -> None:
    """See to it that what is started hears SIGINT, which a shell's background commands do not."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before several threads want the process that is forked; and no trial's seconds are those of
    # its start.
    warm_starts.WarmProcess([sys.executable, "-c", ""]).wait()


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; say by the exit code whether all rows have passed that were run."""
    options = parse(words)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="ddpkit-table-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = options.json.open("w") if options.json else None
    try:
        table = Table(
            options,
            folder,
            lambda facts: lines and print(json.dumps(facts), file=lines, flush=True),
        )
        prepare()
        if options.replay:
            return replay(table)
        results = []
        for name in options.rows:
            results.append(table.run(name))
            say(results[-1].line_of_log())
        say()
        for columns in (HEADS, *(result.columns() for result in results)):
            print_row(columns)
            say()
    finally:
        if lines:
            lines.close()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return int(any(result.verdict == "FAILED" for result in results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
