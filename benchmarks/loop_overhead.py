"""What the loop costs per step, above a bare PyTorch loop that does the same work.

    python benchmarks/loop_overhead.py                    # one process, bar off and on
    python benchmarks/loop_overhead.py --processes 2      # two processes through torchrun (gloo)
    python benchmarks/loop_overhead.py --workers 2        # with loader workers
    python benchmarks/loop_overhead.py --accumulate 8     # an optimizer step every eight batches
    python benchmarks/loop_overhead.py --cpu_time         # processor time, where the machine is busy
    python benchmarks/loop_overhead.py --processes 2 --width 1450 --layers 7 --steps 20  # DDP of 12.7 M parameters

The two loops run in turns in one process, in every order, on the same model and the same batches,
so that a machine that slows down slows both. Reported are the medians over the turns, of times and
of ratios within a turn; Python calls per step, which do not depend on the machine at all; and
whether both end with the same weights, to the last bit.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import itertools
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

WIDTH = 64
CLASSES = 10
BATCH = 16
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


def make_net(width: int = WIDTH, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    hidden = [
        part
        for number in range(layers)
        for part in (nn.Linear(width if number else WIDTH, width), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


def over_ranks(total: torch.Tensor) -> float:
    """Add up a pass's loss over the ranks, as every loop must that reports one number: it waits for
    the slowest.
    """
    return sum_over_ranks([total.item()])[0]


class Bare:
    """The loop that one would write by hand, with the same safety: clipping, a finite check, one
    loss at the end.
    """

    def __init__(self, net: nn.Module, accumulate: int = 1) -> None:
        self.net = net
        self.accumulate = accumulate
        self.parameters = list(net.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)

    def train(self, loader: DataLoader) -> float:
        self.net.train()
        total = torch.zeros((), dtype=torch.float64)
        for number, (inputs, targets) in enumerate(loader, 1):
            steps = number % self.accumulate == 0
            waits = isinstance(self.net, DistributedDataParallel) and not steps
            with self.net.no_sync() if waits else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(self.net(inputs), targets)
                (loss / self.accumulate if self.accumulate > 1 else loss).backward()
            total += loss.detach()
            if not steps:
                continue
            norm = nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            if math.isfinite(norm.item()):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
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
    before = sys.stderr
    sys.stderr = os.fdopen(follower, "w", buffering=1)
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = before


def in_turns(
    turns: int,
    steps: int,
    clock: Callable[[], float],
    **runs: Callable[[], object],
) -> dict[str, list[float]]:
    """Return the microseconds per step of each run, in every turn.

    The order changes from turn to turn: a run takes up to 2 % longer after one of another kind.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    orders = itertools.cycle(itertools.permutations(runs))
    for _ in range(turns):
        for name in next(orders):
            start = clock()
            runs[name]()
            times[name].append((clock() - start) / steps * 1e6)
    return times


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


def make_brain(net: nn.Module | None = None, accumulate: int = 1) -> Classifier:
    return Classifier(
        {"net": make_net() if net is None else net},
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "max_grad_norm": MAX_NORM,
            "grad_accumulation_factor": accumulate,
        },
    )


def measure(arguments: argparse.Namespace) -> None:
    turns = arguments.turns
    steps = arguments.steps
    accumulate = arguments.accumulate
    brain = make_brain(make_net(arguments.width, arguments.layers), accumulate)
    distributed = brain.distributed_launch
    options = {"batch_size": BATCH, "collate_fn": OneBatch(), "num_workers": arguments.workers}
    world_size = get_world_size()
    warm = 8 * accumulate
    ours = brain.make_dataloader(range(steps * BATCH * world_size), Stage.TRAIN, **options)
    ours_valid = brain.make_dataloader(range(10 * steps * BATCH), Stage.VALID, **options)
    brain.fit([1], range(warm * BATCH * world_size), train_loader_kwargs=options)
    net = make_net(arguments.width, arguments.layers)
    bare = Bare(DistributedDataParallel(net) if distributed else net, accumulate)
    bare.train(DataLoader(range(warm * BATCH), **options))
    theirs = DataLoader(range(steps * BATCH), **options)
    theirs_valid = DataLoader(range(10 * steps * BATCH), **options)
    bare.train(theirs)
    brain._fit_train(ours, 1, enable=False)
    pairs = zip(brain.raw_modules.net.parameters(), net.parameters(), strict=True)
    same = all(torch.equal(own, by_hand) for own, by_hand in pairs)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    with terminal():
        train = in_turns(
            turns,
            steps,
            clock,
            bare=lambda: bare.train(theirs),
            ddpkit=lambda: brain._fit_train(ours, 1, enable=False),
            ddpkit_bar=lambda: brain._fit_train(ours, 1, enable=True),
        )
        valid = in_turns(
            turns,
            len(ours_valid),
            clock,
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
        report({"train": train, "valid": valid}, calls)
        size = sum(parameter.numel() for parameter in net.parameters())
        print(
            f"{size} parameters; weights after {warm + steps} steps: "
            f"{'the same bits' if same else 'DIFFERENT'}"
        )


def report(times: dict[str, dict[str, list[float]]], calls: dict[str, tuple[float, float]]) -> None:
    print(f"{'':22}{'bare':>9}{'ddpkit':>9}{'above':>8}{'ratio':>8}   us per step, medians")
    for stage, of_loops in times.items():
        bare = of_loops["bare"]
        for name, label in (("ddpkit", "bar off"), ("ddpkit_bar", "bar on")):
            ratio = statistics.median(
                own / by_hand for own, by_hand in zip(of_loops[name], bare, strict=True)
            )
            by_hand, own = statistics.median(bare), statistics.median(of_loops[name])
            print(
                f"{stage + ', ' + label:22}{by_hand:9.1f}{own:9.1f}{own - by_hand:8.1f}{ratio:8.3f}"
            )
    for stage, (by_hand, own) in calls.items():
        print(
            f"{stage + ', calls per step':22}{by_hand:9.1f}{own:9.1f}{own - by_hand:8.1f}{own / by_hand:8.3f}"  # noqa: E501
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=21, help="how often each loop runs")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--workers", type=int, default=0, help="loader workers")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="measure processor time instead of time",
    )
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=1, help="hidden ones")
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
