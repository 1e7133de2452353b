"""What a run costs on many ranks, by simulation: one rank of a group whose collectives do nothing.

    python benchmarks/scale.py                  # the table of docs/explanation/scale.md, in two minutes
    python benchmarks/scale.py --ranks 2 256    # other numbers

The collectives of torch's ``fake`` process group return at once, whatever the number of ranks. So
one process makes the steps of one rank, with ddpkit's own strategy, step and loop, and what it asks
of the group is counted: collectives, bytes, and the memory around them. Bytes sent are those of the
ring algorithms. The heartbeats of a machine with eight ranks talk to a store in this process, and
what one of them asks is counted. The plan is the real one.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.base import FailureReport
from ddpkit.comm import agreement
from ddpkit.control import PeriodicSync
from ddpkit.control.heartbeat import BEAT_SECONDS
from ddpkit.control.watchdog import Watchdog
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.run_opts import RunOptions
from ddpkit.strategies import choose_strategy
from ddpkit.strategies.fsdp import FIRST_STEPS
from ddpkit.training import Accumulation, Feed, Recipe, RunContext, TrainStep, train_epoch

RANKS = (2, 64, 1024, 16384)
# a weight of fewer rows than ranks is padded: at 16,384 it takes 13 GB and more than four minutes
FSDP_UP_TO = 1024
FORMULA = "{} (formula)"
WIDTH = 1024
LAYERS = 12
ROWS = 8
STEPS = 4
WARM = 3
PER_MACHINE = 8
OWN_RANK = 5
SAMPLES = 10**9
BATCH = 32
MB = 1e6


class Collectives(TorchDispatchMode):
    """A context in which collectives are counted, and the bytes that a ring sends for them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.counts = Counter()
        self.sent = 0.0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.partition("::")[2].strip("_")
            self.counts[name] += 1
            self.sent += sent_by_ring(name, args, self.ranks)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and name.startswith(("alltoall", "recv")):
            came = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            came.view(torch.float32).fill_(1.0)  # the fake group writes nothing there
        elif function.namespace == "c10d" and name in {
            "broadcast",
            "allgather_base",
            "reduce_scatter_base",
        }:
            written = args[0][0] if name == "broadcast" else args[0]
            if written.is_floating_point():
                # likewise: what is in new memory
                written.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1.0, 1.0)
        return result


def size_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of some tensors, or lists of them."""
    return sum(one.nbytes if isinstance(one, torch.Tensor) else size_of(one) for one in tensors)


def sent_by_ring(name: str, args: Any, ranks: int) -> float:
    """Return the bytes that each rank sends."""
    if name.startswith("allreduce"):
        return 2 * size_of(args[0]) * (ranks - 1) / ranks
    if name == "allgather":
        return size_of(args[1]) * (ranks - 1)
    if name == "allgather_base":
        return size_of([args[1]]) * (ranks - 1)
    if name.startswith(("alltoall", "reduce_scatter")):
        return size_of([args[1]]) * (ranks - 1) / ranks
    if name in {"broadcast", "send"}:  # the first is handed on; the last one sends nothing
        return size_of(args[0])
    if name == "recv":
        return 0.0
    raise NotImplementedError(name)


def all_reduce_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients in DDP's place, which wants a result that the fake group has
    not.
    """
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


all_reduce_bucket.__annotations__.clear()  # DDP compares them with types, and here they are strings


def exchange_with_nobody(value: Any, _site: str | None = None) -> list[Any]:
    """Answer for all ranks what this one says: there are no others to compare with, and no store
    between them.
    """
    return [value] * dist.get_world_size()


class Step:
    """What the loop asks of a Brain, for a model without data."""

    def __init__(self, strategy: str, ranks: int) -> None:
        torch.manual_seed(1)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.modules = nn.ModuleDict({"net": nn.Sequential(*layers)})
        chosen: dict[str, Any] = (
            {"virtual_ranks": ranks} if strategy == "virtual_ranks" else {"strategy": strategy}
        )
        if strategy == "fsdp":
            chosen["fsdp_blocks"] = ["Linear"]
        options = RunOptions(device="cpu", **chosen)
        self.strategy = choose_strategy(options)
        context = RunContext(
            Recipe("Step"),
            options,
            Accumulation(options),
            self.modules,
            SimpleNamespace(),
            self.strategy,
        )
        self.progress = context.progress
        self.strategy.wrap(self.modules)
        for module in getattr(self.strategy, "wrapped", ()):
            module.register_comm_hook(None, all_reduce_bucket)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.train_step = TrainStep(context, scaler)
        optimizer = self.train_step.optimizer = torch.optim.AdamW(
            self.modules.parameters(),
            lr=1e-4,
        )
        self.strategy.prepare_optimizers(self.modules, {"optimizer": optimizer})
        if strategy == "zero1":
            for divided in self.strategy.optimizers.divided:
                divided._is_compared = True  # there are no others to compare the groups with
        if strategy == "fsdp":
            self.strategy._compared = FIRST_STEPS  # nor the order of blocks
        self.ranks = ranks

    def fit_batch(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.modules["net"](batch).square().mean()
        self.train_step.backward(loss)
        self.train_step.step_optimizers(self)
        return loss.detach()

    def check_gradients(self) -> None:
        """Nothing is looked at."""

    def train(self, steps: int) -> None:
        batches = [torch.ones(ROWS, WIDTH)] * steps
        self.progress.restart()
        feed = self.strategy.feed(Feed(batches, steps, world_size=self.ranks), self.progress, 0)
        train_epoch(self, feed, PeriodicSync(list, 1, is_main=True), lambda *_: None, float("inf"))


def memory(profiler: profile) -> tuple[int, int]:
    """Return the bytes that were allocated and not freed in a profiled piece of a run, and the most
    at a time.
    """
    most = now = 0
    events = (
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most


def one_step(strategy: str, ranks: int) -> dict[str, str]:
    """Return the cost of a training step on one of so many ranks."""
    gc.collect()  # what is freed below was also made below
    dist.init_process_group("fake", rank=OWN_RANK % ranks, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(agreement, "exchange", exchange_with_nobody),
            profile(profile_memory=True, acc_events=False) as profiler,
            Collectives(ranks) as counted,
        ):
            step = Step(strategy, ranks)
            step.train(WARM)
        held, most = memory(profiler)
        counted.counts.clear()
        counted.sent = 0.0
        began = time.process_time()
        with counted:
            step.train(STEPS)
        seconds = (time.process_time() - began) / STEPS
        if step.progress.optimizer_step != WARM + STEPS:
            raise RuntimeError(
                f"only {step.progress.optimizer_step} of {WARM + STEPS} steps were made"
            )
        collectives = ", ".join(
            f"{count / STEPS:g} {name}" for name, count in sorted(counted.counts.items())
        )
        return {
            "collectives": collectives,
            "MB sent": f"{counted.sent / STEPS / MB:.1f}",
            "MB held between steps": f"{held / MB:.0f}",
            "MB at the peak": f"{most / MB:.0f}",
            "ms of processor time, the model's too": f"{seconds * 1e3:.0f}",
        }
    finally:
        dist.destroy_process_group()


def fsdp_step(ranks: int) -> dict[str, str]:
    """Return the cost of a step of FSDP: by simulation, and beyond that by a formula which agrees
    with it.

    A weight of fewer rows than ranks is padded to a row for each rank, and is gathered and reduced
    so.
    """
    layer = 4 * ranks * -(-WIDTH // ranks) * (WIDTH + 1)  # bytes of a weight and a bias, padded
    own = 4 * -(-WIDTH // ranks) * (WIDTH + 1)
    formula = {
        "collectives": f"{2 * LAYERS} allgather_base, 1 allreduce, {LAYERS} reduce_scatter_base",
        "MB sent": f"{3 * LAYERS * layer * (ranks - 1) / ranks / MB:.1f}",
        # the weights, and AdamW's two states
        "MB held between steps": f"{3 * LAYERS * own / MB:.0f}",
    }
    if ranks > FSDP_UP_TO:
        # Two layers are gathered, the gradient of one is about to be sent, and one is without its
        # padding.
        formula["MB at the peak"] = f"{(3 * layer + 4 * WIDTH * (WIDTH + 1)) / MB:.0f}"
        return {name: FORMULA.format(figure) for name, figure in formula.items()}
    found = one_step("fsdp", ranks)
    if formula.items() - found.items():
        raise RuntimeError(f"on {ranks} ranks {found}, and the formula gives {formula}")
    return found


class CountedStore:
    """Passes on to a store; counts calls and bytes."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls = 0
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            answer = method(*arguments)
            self.bytes += sum(map(len, texts((arguments, answer))))
            return answer

        return counted


def texts(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts(one)


def heartbeats(ranks: int) -> dict[str, str]:
    """Return what a rank asks of the launcher's store in a second; and the lowest rank, while a
    step is late.
    """
    store = dist.HashStore()
    near = range(min(PER_MACHINE, ranks))
    watches = {rank: Watchdog(FailureReport(store, rank, ranks), near) for rank in near}
    for _ in range(3):
        for watch in watches.values():
            watch.heartbeat.beat(store)
    usual = CountedStore(store)
    late = CountedStore(store)
    watches[OWN_RANK % ranks].heartbeat.beat(usual)
    watches[0].is_in_trouble = lambda: True
    watches[0].heartbeat.beat(late)
    return {
        "calls": f"{usual.calls / BEAT_SECONDS:.0f}",
        "kB": f"{usual.bytes / BEAT_SECONDS / 1e3:.1f}",
        "calls of all ranks": f"{ranks * usual.calls / BEAT_SECONDS:,.0f}",
        "calls of the lowest rank while a step is late": f"{late.calls / BEAT_SECONDS:,.0f}",
    }


def plan(ranks: int) -> dict[str, str]:
    """Return the cost of knowing which samples one of so many ranks gets."""

    def batches() -> Iterator[list[int]]:
        return iter(
            PlannedBatchSampler(SAMPLES, BATCH, OWN_RANK % ranks, ranks, shuffle=True, seed=1)
        )

    began = time.process_time()
    next(batches())
    first = time.process_time() - began
    source = batches()
    taken = 0
    began = time.process_time()
    for _ in range(1000):
        taken += len(next(source))
    each = (time.process_time() - began) / taken
    tracemalloc.start()
    for _, _batch in zip(range(1000), batches(), strict=False):
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "ms to the first batch": f"{first * 1e3:.1f}",
        "ns per sample": f"{each * 1e9:.0f}",
        "MB at the peak": f"{most / MB:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    columns: dict[str, dict[int, str]] = {}
    for number in ranks:
        found = {
            "DDP, per step": one_step("ddp", number),
            "ZeRO-1, per step": one_step("zero1", number),
            "FSDP, each layer a block, per step": fsdp_step(number),
            "virtual ranks, a shard on each rank, per step": one_step("virtual_ranks", number),
            "store, per second": heartbeats(number),
            f"plan of {SAMPLES:.0e} samples": plan(number),
        }
        for what, figures in found.items():
            for name, figure in figures.items():
                columns.setdefault(f"{what}: {name}", {})[number] = figure
    print(f"| of one rank | {' | '.join(f'{number:,}' for number in ranks)} |")
    print("|---|" + "---|" * len(ranks))
    for name, row in columns.items():
        print(f"| {name} | {' | '.join(row.get(number, '') for number in ranks)} |")


if __name__ == "__main__":
    main()
