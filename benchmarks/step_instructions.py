"""What it costs to measure steps, in instructions: ``--measure_steps=sampled`` and ``all`` against ``off``.

    python benchmarks/step_instructions.py                   # a tiny model, one process; about ten minutes
    python benchmarks/step_instructions.py --steps 1000      # shorter, less exact

Times of two runs differ by more than what is measured here; the instructions of a run hardly do, on
a busy machine either. Valgrind counts them (it must be installed): each mode trains a short and a
long run, and what the long one has more is of its steps.

Under Valgrind a step takes far longer, and what is done so many times in a second would weigh too
little or too much. So the clocks of the process count its processor time, slowed down as much as
its steps are. The kernel's own instructions are not counted.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ddpkit.brain import Brain, run_of
from ddpkit.types import Stage

MODES = ("off", "sampled", "all")
LOOPS = runpy.run_path(str(Path(__file__).with_name("loop_overhead.py")), run_name="loaded")
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
SHORT = 1000  # steps of a short run, which has the start and the first syncs


def make_brain() -> Brain:
    """Make the Brain of a tiny model that has trained a few steps."""
    torch.set_num_threads(1)
    brain: Brain = LOOPS["make_brain"](LOOPS["make_net"]())
    batch = LOOPS["BATCH"]
    options = {"batch_size": batch, "collate_fn": LOOPS["OneBatch"]()}
    brain.fit([1], range(8 * batch), train_loader_kwargs=options)
    return brain


def train(brain: Brain, mode: str, steps: int) -> float:
    """Train an epoch of so many steps; return the processor time of a step, in seconds."""
    batch = LOOPS["BATCH"]
    loader = brain.make_dataloader(
        range(steps * batch),
        Stage.TRAIN,
        batch_size=batch,
        collate_fn=LOOPS["OneBatch"](),
    )
    brain.run_opts["measure_steps"] = mode
    run_of(brain).stages.speed.prepare()
    began = time.process_time()
    brain._fit_train(loader, 1, enable=False)
    return (time.process_time() - began) / steps


def slow_clocks(factor: float) -> None:
    """Have the clocks of this process count its processor time, divided by a factor."""
    processor_time = time.process_time
    time.monotonic = time.perf_counter = lambda: processor_time() / factor


def run_alone(*words: str, counts: bool) -> str:
    """Run this script for one training, under Valgrind or not; return what it prints."""
    command = [*(VALGRIND if counts else ()), sys.executable, __file__, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\n{command} has failed.")
    return done.stdout + done.stderr


def seconds_of_step(output: str) -> float:
    found = re.search(r"^seconds of a step: (\S+)$", output, re.MULTILINE)
    if found is None:
        sys.exit(f"{output}\nThe training has not said how long a step takes.")
    return float(found[1])


def instructions(output: str) -> int:
    found = re.search(r"I\s+refs:\s+([\d,]+)", output)
    if found is None:
        sys.exit(f"{output}\nValgrind has not said how many instructions there were.")
    return int(found[1].replace(",", ""))


def compare(steps: int) -> None:
    """Count the instructions of each mode, and print what a step has more than with ``off``."""
    if shutil.which(VALGRIND[0]) is None:
        sys.exit("Instructions are counted by Valgrind, which is not installed.")
    usual = seconds_of_step(run_alone("--train", "off", "--steps", str(SHORT), counts=False))
    slow = seconds_of_step(run_alone("--train", "off", "--steps", str(SHORT), counts=True))
    factor = slow / usual
    print(f"a step takes {usual * 1e6:.0f} us, and {factor:.0f} times that under Valgrind")
    print(f"{'':10}{'instructions of a step':>24}{'ratio':>9}")
    per_step: dict[str, float] = {}
    for mode in MODES:
        short, long = (
            instructions(
                run_alone(
                    *("--train", mode, "--steps", str(number), "--slower", str(factor)),
                    counts=True,
                )
            )
            for number in (SHORT, SHORT + steps)
        )
        per_step[mode] = (long - short) / steps
        print(
            f"{mode:10}{per_step[mode]:24,.0f}{per_step[mode] / per_step['off']:9.4f}", flush=True
        )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=6000, help="that a long run has more")
    parser.add_argument("--train", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--slower", type=float, default=1.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.train is None:
        compare(arguments.steps)
        return
    if arguments.slower != 1.0:
        slow_clocks(arguments.slower)
    seconds = train(make_brain(), arguments.train, arguments.steps)
    print(f"seconds of a step: {seconds}", flush=True)


if __name__ == "__main__":
    main()
