"""Trains a small network for some seconds, with the fault of a case planted in it.

    python -m benchmarks.planted.recipe CASE FOLDER SECONDS

CASE is a case as JSON. What is measured goes to FOLDER: metrics.jsonl, and seconds.jsonl with all
that the ranks have told each other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from benchmarks.planted.cases import Case
from ddpkit.brain import Brain
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size, sum_over_ranks
from ddpkit.errors import RunStopped
from ddpkit.run.process_age import seconds_since_start
from ddpkit.step_times.verdicts import VerdictFinder
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage

CLASSES = 10
LEAKED = 250_000  # numbers of 4 bytes
ENDLESS = 10_000_000


class DelayedBackward(torch.autograd.Function):
    """Does nothing, late."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Network(nn.Module):
    """Linear layers over the frames of a sample, with the delays of a case."""

    def __init__(self, case: Case, planted: dict[str, float]) -> None:
        super().__init__()
        self.planted = planted
        layers: list[nn.Module] = []
        for _ in range(case.layers):
            layers += [nn.Linear(case.width, case.width), nn.ReLU()]
        self.first = nn.Sequential(*layers[: len(layers) // 2])
        self.norm = nn.BatchNorm1d(case.width) if case.batch_norm else None
        self.rest = nn.Sequential(*layers[len(layers) // 2 :])
        self.last = nn.Linear(case.width, CLASSES)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        if "forward" in self.planted:
            time.sleep(self.planted["forward"])
        values = self.first(frames)
        if self.norm is not None:
            values = self.norm(values.transpose(1, 2)).transpose(1, 2)
        if "backward" in self.planted:
            values = DelayedBackward.apply(values, self.planted["backward"])
        return self.last(self.rest(values).mean(dim=1))


class DelayedSGD(torch.optim.SGD):
    """Steps late."""

    planted: dict[str, float] = {}  # noqa: RUF012 -- of the process, which has one optimizer

    def step(self, closure: Any = None) -> Any:
        if "optimizer" in self.planted:
            time.sleep(self.planted["optimizer"])
        return super().step(closure)


class Collation:
    """Makes batches of random frames, late and of uneven lengths as a case wants."""

    def __init__(self, case: Case, planted: dict[str, float]) -> None:
        self.case = case
        self.planted = planted
        self.random = random.Random(get_rank())
        self.frames = torch.randn(case.batch, 2 * case.length, case.width)
        self.targets = torch.randint(0, CLASSES, (case.batch,))

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if "data" in self.planted:
            time.sleep(self.planted["data"])
        factor = self.random.uniform(1.0 - self.case.spread, 1.0 + self.case.spread)
        length = max(1, int(self.case.length * factor))
        return self.frames[: len(samples), :length], self.targets[: len(samples)]


class Stream(IterableDataset[int]):
    """Samples in shards of uneven length."""

    def __init__(self, case: Case) -> None:
        self.samples = case.epoch * case.batch

    def shard(self, num_shards: int, index: int) -> Iterator[int]:
        return iter(range(self.samples // num_shards + 17 * index))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class Classifier(Brain):
    """Classifies noise."""

    planted: dict[str, float] = {}  # noqa: RUF012 -- of the process, which has one recipe
    leak: list[torch.Tensor] = []  # noqa: RUF012 -- likewise

    def compute_forward(self, batch: Any, stage: Stage) -> torch.Tensor:
        if "move" in self.planted:
            time.sleep(self.planted["move"])
        if "memory" in self.planted:
            self.leak.append(torch.ones(LEAKED))
        return self.modules.network(batch[0])

    def compute_objectives(
        self,
        predictions: torch.Tensor,
        batch: Any,
        stage: Stage,
    ) -> torch.Tensor:
        return nn.functional.cross_entropy(predictions, batch[1])


def own_step_seconds(case: Case) -> float:
    """Return how long a rank takes for a step, while all others try the same."""
    network = Network(case, {})
    collate = Collation(case, {})
    times = []
    for _ in range(12):
        start = time.perf_counter()
        frames, targets = collate([0] * case.batch)
        nn.functional.cross_entropy(network(frames), targets).backward()
        times.append(time.perf_counter() - start)
    return sum_over_ranks([sorted(times)[6]])[0] / get_world_size()


def planted_here(case: Case) -> dict[str, float]:
    """Return the delays of this rank, by phase."""
    delay = case.delay or case.steps * own_step_seconds(case)
    phase = "data" if case.phase == "loader" else case.phase
    is_here = bool(phase) and case.rank in {None, get_rank()}
    return {phase: delay} if is_here else {}


def record_seconds(folder: Path) -> None:
    """Write down all that the ranks tell each other, for a search of thresholds."""
    note = VerdictFinder.note
    file = folder / "seconds.jsonl"

    @functools.wraps(note)
    def noted(finder: VerdictFinder, second: Any) -> Any:
        if not get_rank():
            with file.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(second)) + "\n")
        return note(finder, second)

    VerdictFinder.note = noted  # type: ignore[method-assign]


def train(case: Case, folder: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    set_run_log(folder / "metrics.jsonl")
    record_seconds(folder)
    planted = planted_here(case)
    DelayedSGD.planted = Classifier.planted = planted
    limit = sum_over_ranks([0.0 if get_rank() else seconds_since_start() + seconds])[0]
    brain = Classifier(
        {"network": Network(case, planted)},
        functools.partial(DelayedSGD, lr=1e-4),
        run_opts={
            "device": "cpu",
            "noprogressbar": True,
            "time_limit": f"{limit:.1f}",
            **case.options,
        },
    )
    samples = (case.epoch or ENDLESS) * case.batch * case.processes
    loader = {
        "batch_size": case.batch,
        "collate_fn": Collation(case, planted),
        "num_workers": case.num_workers,
    }
    data: Any = Stream(case) if case.stream else range(samples)
    valid: Callable[[], Any] = functools.partial(range, 4 * case.batch)
    try:
        brain.fit(range(1, ENDLESS), data, valid() if case.epoch else None, None, loader, loader)
    except RunStopped:
        return
    raise AssertionError("the run has ended before its time")


def main() -> None:
    case, folder, seconds = sys.argv[1:]
    if "RANK" in os.environ:
        ddp_init_group({"distributed_launch": True, "distributed_backend": "gloo"})
    train(Case(**json.loads(case)), Path(folder), float(seconds))


if __name__ == "__main__":
    main()
