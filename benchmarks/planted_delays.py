"""Are faults of real runs named, and are runs without one left alone?

    python -m benchmarks.planted_delays                     # 20 planted faults, 20 clean runs
    python -m benchmarks.planted_delays --short             # a few of each
    python -m benchmarks.planted_delays --only "backward"   # those with such a name
    python -m benchmarks.planted_delays --keep DIR          # keep what was measured

Each run is a training of real processes (torchrun, gloo); all of them take 20 minutes and more. A
fault counts as named if the run's log has a verdict of its kind with its rank and phase, and no
other verdict; a clean run may have none. While the clean runs train, other processes keep the
machine busy (``--load``, by default one for each core; 0: none). The exit code is 1 after a miss.

``--keep`` leaves a folder for each run, with what the ranks have told each other in each second
(``seconds.jsonl``). ``--replay DIR`` looks at these again, with the thresholds of today, and trains
nothing: thresholds were chosen so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.planted.cases import CLEAN, FAULTS, SHORT_CLEAN, SHORT_FAULTS, Case
from benchmarks.planted.load import busy_machine
from ddpkit.step_times import SecondOfSteps
from ddpkit.step_times.verdicts import VerdictFinder

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 25.0  # of training: verdicts need ten of steps, and memory more
LONGER = 3.0  # times, with --short, where nothing was named
START_SECONDS = 240.0  # at most, on a busy machine

Verdicts = list[dict[str, Any]]


def folder_of(case: Case, keep: Path) -> Path:
    folder = keep / re.sub(r"\W+", "_", case.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def events_of(folder: Path) -> Verdicts:
    log = folder / "metrics.jsonl"
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def trained(case: Case, keep: Path, seconds: float) -> Verdicts:
    """Train a case, and return the verdicts in its log."""
    folder = folder_of(case, keep)
    for old in folder.iterdir():
        old.unlink()
    words = [
        "-m",
        "benchmarks.planted.recipe",
        json.dumps(dataclasses.asdict(case)),
        str(folder),
        str(seconds),
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.processes}"]
    command = [sys.executable, *(launcher if case.processes > 1 else []), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            command,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=ROOT,
            timeout=START_SECONDS + seconds,
            check=False,
        ).check_returncode()
    events = events_of(folder)
    if not any(event["event"] == "speed" for event in events):
        raise AssertionError(f"{case.name}: nothing was measured, see {folder}")
    return [event for event in events if event["event"] == "verdict"]


def trained_longer(case: Case, keep: Path, seconds: float) -> Verdicts:
    """Train a case; if a fault is not named, once more and longer.

    On a machine that is busy with much else few steps are made, and the same rank must be late in
    several seconds of them.
    """
    verdicts = trained(case, keep, seconds)
    if verdicts or not case.kind:
        return verdicts
    return trained(case, keep, LONGER * seconds)


def replayed(case: Case, keep: Path) -> Verdicts:
    """Return the verdicts on what a run has told before."""
    finder = VerdictFinder(num_workers=case.num_workers)
    lines = (folder_of(case, keep) / "seconds.jsonl").read_text().splitlines()
    seconds = [SecondOfSteps(**json.loads(line)) for line in lines]
    return [verdict.event() for second in seconds for verdict in finder.note(second)]


def is_right(case: Case, verdicts: Verdicts) -> bool:
    found = [(one["kind"], one.get("rank"), one.get("phase")) for one in verdicts]
    if not case.kind:
        return not found
    if case.kind == "uneven_batches":
        return [kind for kind, *_ in found] == [case.kind]
    return found == [(case.kind, case.rank, case.verdict_phase)]


def in_words(verdict: dict[str, Any]) -> str:
    where = "".join(f" {name} {verdict[name]}" for name in ("rank", "phase") if name in verdict)
    seconds = f" {verdict['seconds'] * 1e3:.0f} ms" if "seconds" in verdict else ""
    share = f" {verdict['share']:.0%}" if "share" in verdict else ""
    return f"{verdict['kind']}{where}{seconds}{share}"


def show(title: str, cases: Sequence[Case], verdicts_of: Callable[[Case], Verdicts]) -> int:
    """Print a table of some cases; return how many are wrong."""
    print(f"\n{title}\n{'':2}{'run':46}{'verdicts':60}", flush=True)
    wrong = 0
    for case in cases:
        verdicts = verdicts_of(case)
        right = is_right(case, verdicts)
        wrong += not right
        words = "; ".join(map(in_words, verdicts)) or "none"
        print(f"{'  ' if right else 'X '}{case.name:46}{words}", flush=True)
    return wrong


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="a few of each, and longer if need be")
    parser.add_argument("--which", choices=["both", "faults", "clean"], default="both")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that each run trains for")
    parser.add_argument(
        "--load",
        type=int,
        default=os.cpu_count(),
        help="busy processes beside the clean runs",
    )
    parser.add_argument(
        "--fault_load",
        type=int,
        default=0,
        help="busy processes beside the planted faults",
    )
    parser.add_argument("--keep", type=Path, help="leave what was measured here")
    parser.add_argument("--replay", type=Path, help="look again at what was left there")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Return the planted faults and the clean runs that were asked for."""
    faults, clean = (SHORT_FAULTS, SHORT_CLEAN) if arguments.short else (FAULTS, CLEAN)
    return (
        [one for one in faults if arguments.only in one.name and arguments.which != "clean"],
        [one for one in clean if arguments.only in one.name and arguments.which != "faults"],
    )


def main() -> None:
    arguments = parse()
    faults, clean = chosen(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        keep = arguments.replay or arguments.keep or Path(temporary)

        def verdicts_of(case: Case) -> Verdicts:
            if arguments.replay:
                return replayed(case, keep)
            train = trained_longer if arguments.short else trained
            return train(case, keep, arguments.seconds)

        def beside(processes: int) -> Any:
            return nullcontext() if arguments.replay else busy_machine(processes)

        with beside(arguments.fault_load if faults else 0):
            missed = show("Planted faults", faults, verdicts_of)
        with beside(arguments.load if clean else 0):
            false = show("Clean runs", clean, verdicts_of)
    named = f"{len(faults) - missed} of {len(faults)} faults named"
    print(f"\n{named}; {false} of {len(clean)} clean runs had a verdict")
    raise SystemExit(1 if missed or false else 0)


if __name__ == "__main__":
    main()
