"""What it costs to measure steps: ``--measure_steps=sampled`` and ``all`` against ``off``.

    python benchmarks/step_times.py                          # a tiny model, one process
    python benchmarks/step_times.py --processes 2            # two processes through torchrun (gloo)
    python benchmarks/step_times.py --width 512 --layers 8   # steps of some 10 ms
    python benchmarks/step_times.py --cpu_time               # processor time, where the machine is busy

The three run in turns in one process, in every order, on one model and the same batches, so that a
machine that slows down slows all. Reported are the median ratio to ``off`` within a turn, and its
quartiles.
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ddpkit.brain import Brain
from ddpkit.distributed import get_world_size, if_main_process, sum_over_ranks
from ddpkit.types import Stage

MODES = ("off", "sampled", "all")
LOOPS = runpy.run_path(str(Path(__file__).with_name("loop_overhead.py")), run_name="loaded")


def choose(brain: Brain, mode: str) -> None:
    """Have the next passes measured as a call of ``fit`` with this option would."""
    brain.run_opts["measure_steps"] = mode
    brain._Brain__run.stages.speed.prepare()


def in_turns(turns: int, run: Callable[[str], float]) -> dict[str, list[float]]:
    """Return the seconds of each mode, turn by turn."""
    orders = list(itertools.permutations(MODES))
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(turns):
        for mode in orders[turn % len(orders)]:
            found[mode].append(run(mode))
    return found


def measure(arguments: argparse.Namespace) -> None:
    batch = LOOPS["BATCH"]
    world_size = get_world_size()
    brain = LOOPS["make_brain"](LOOPS["make_net"](arguments.width, arguments.layers))
    options = {"batch_size": batch, "collate_fn": LOOPS["OneBatch"]()}
    brain.fit([1], range(8 * batch * world_size), train_loader_kwargs=options)
    loader = brain.make_dataloader(
        range(arguments.steps * batch * world_size),
        Stage.TRAIN,
        **options,
    )
    clock = time.process_time if arguments.cpu_time else time.perf_counter

    def run(mode: str) -> float:
        choose(brain, mode)
        began = clock()
        brain._fit_train(loader, 1, enable=False)
        seconds = clock() - began
        return sum_over_ranks([seconds])[0] / world_size

    for mode in MODES:
        run(mode)
    found = in_turns(arguments.turns, run)
    if if_main_process():
        report(found, arguments.steps)


def report(found: dict[str, list[float]], steps: int) -> None:
    usual = found["off"]
    print(f"{'':10}{'us per step':>12}{'ratio':>8}{'quartiles':>17}")
    for mode in MODES:
        ratios = sorted(own / other for own, other in zip(found[mode], usual, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        micro = statistics.median(found[mode]) / steps * 1e6
        print(f"{mode:10}{micro:12.1f}{middle:8.4f}{low:9.4f}{high:8.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=18, help="how often each mode runs")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each run")
    parser.add_argument("--width", type=int, default=LOOPS["WIDTH"])
    parser.add_argument("--layers", type=int, default=1, help="hidden ones")
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="measure processor time instead of time",
    )
    arguments = parser.parse_args()
    if arguments.processes > 1 and "RANK" not in os.environ:
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={arguments.processes}",
            *sys.argv,
        ]
        raise SystemExit(
            subprocess.call([sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
        )
    torch.set_num_threads(1)
    measure(arguments)


if __name__ == "__main__":
    main()
