"""What the loop costs per step, above a bare PyTorch loop that does the same work.

    python benchmarks/loop_overhead.py                    # one process, bar off and on
    python benchmarks/loop_overhead.py --processes 2      # two processes through torchrun (gloo)

The two loops run in turns in one process, on the same model and the same batches, so that a machine that
slows down slows both. Reported are the medians over the turns, and Python calls per step, which do not depend on the
machine at all.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pty
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddpkit.brain import Brain
from ddpkit.distributed import get_world_size, if_main_process, sum_over_ranks
from ddpkit.types import Stage

WIDTH, CLASSES, BATCH = 64, 10, 16
MAX_NORM = 5.0


class OneBatch:
    """Collates to a ready-made batch, so that loading costs little and does not hide the loop."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )

    def __call__(self, _samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


def over_ranks(total: torch.Tensor) -> float:
    """Add up a pass's loss over the ranks, as every loop must that reports one number: it waits for the slowest."""
    return sum_over_ranks([total.item()])[0]


class Bare:
    """The loop that one would write by hand, with the same safety: clipping, a finite check, one loss at the end."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.parameters = list(net.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)

    def train(self, loader: DataLoader) -> float:
        self.net.train()
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(self.net(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            if math.isfinite(norm.item()):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        return over_ranks(total)

    def evaluate(self, loader: DataLoader) -> float:
        self.net.eval()
        net = self.net.module if isinstance(self.net, DistributedDataParallel) else self.net
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for inputs, targets in loader:
                total += nn.functional.cross_entropy(net(inputs), targets)
        return over_ranks(total)


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Give the progress bar a terminal that somebody reads."""
    leader, follower = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(leader, 65536):
                pass

    threading.Thread(target=drain, daemon=True).start()
    before, sys.stderr = sys.stderr, os.fdopen(follower, "w", buffering=1)
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = before


def in_turns(turns: int, steps: int, **runs: Callable[[], object]) -> dict[str, float]:
    """Return the median microseconds per step of each run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / steps * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def count_calls(run: Callable[[], object], steps: int) -> float:
    """Return Python and C calls per step, made by Python code."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        if event in {"call", "c_call"}:
            calls += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls / steps


def measure(turns: int, steps: int) -> None:
    brain = Classifier(
        {"net": make_net()},
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        run_opts={"device": "cpu", "noprogressbar": True, "max_grad_norm": MAX_NORM},
    )
    distributed = brain.distributed_launch
    options = {"batch_size": BATCH, "collate_fn": OneBatch()}
    world_size = get_world_size()
    ours = brain.make_dataloader(range(steps * BATCH * world_size), Stage.TRAIN, **options)
    ours_valid = brain.make_dataloader(range(10 * steps * BATCH), Stage.VALID, **options)
    brain.fit([1], range(8 * BATCH * world_size), train_loader_kwargs=options)
    net = make_net()
    bare = Bare(DistributedDataParallel(net, forward_sync_buffers=False) if distributed else net)
    theirs = DataLoader(range(steps * BATCH), **options)
    theirs_valid = DataLoader(range(10 * steps * BATCH), **options)
    with terminal():
        train = in_turns(
            turns,
            steps,
            bare=lambda: bare.train(theirs),
            ddpkit=lambda: brain._fit_train(ours, 1, enable=False),
            ddpkit_bar=lambda: brain._fit_train(ours, 1, enable=True),
        )
        valid = in_turns(
            turns,
            len(ours_valid),
            bare=lambda: bare.evaluate(theirs_valid),
            ddpkit=lambda: brain._fit_valid(ours_valid, 1, enable=False),
            ddpkit_bar=lambda: brain._fit_valid(ours_valid, 1, enable=True),
        )
    calls = {
        "train": (
            count_calls(lambda: bare.train(theirs), steps),
            count_calls(lambda: brain._fit_train(ours, 1, enable=False), steps),
        ),
        "valid": (
            count_calls(lambda: bare.evaluate(theirs_valid), len(ours_valid)),
            count_calls(lambda: brain._fit_valid(ours_valid, 1, enable=False), len(ours_valid)),
        ),
    }
    if if_main_process():
        report(train, valid, calls)


def report(train: dict[str, float], valid: dict[str, float], calls: dict[str, tuple[float, float]]) -> None:
    print(f"{'':22}{'bare':>9}{'ddpkit':>9}{'above':>8}{'ratio':>8}   us per step")
    for stage, times in (("train", train), ("valid", valid)):
        for name, label in (("ddpkit", "bar off"), ("ddpkit_bar", "bar on")):
            above = times[name] - times["bare"]
            print(
                f"{stage + ', ' + label:22}{times['bare']:9.1f}{times[name]:9.1f}{above:8.1f}"
                f"{times[name] / times['bare']:8.3f}"
            )
    for stage, (bare, ours) in calls.items():
        print(f"{stage + ', calls per step':22}{bare:9.1f}{ours:9.1f}{ours - bare:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=21, help="how often each loop runs")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    arguments = parser.parse_args()
    if arguments.processes > 1 and "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.processes}", *sys.argv]
        raise SystemExit(subprocess.call([sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}))
    torch.set_num_threads(1)
    measure(arguments.turns, arguments.steps)


if __name__ == "__main__":
    main()
