"""What the same bits cost: a training step with --virtual_ranks against DDP with the same
micro-batches.

    python -m benchmarks.virtual_ranks [--processes 2] [--steps 150]

Both train the same network on as many gloo processes, in the same run. They take turns of some
steps each, with models made anew: where a process gets its memory can double the time of a step. A
step of DDP accumulates as many micro-batches of the same size as a step with virtual ranks has
shards on a process. Printed are the median of the ratios of the turns with its quartiles, the time
of a step, and how many gradients of the whole model exist at a time with virtual ranks: those that
wait in the tree, and what comes of the other processes'.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from ddpkit.brain import Brain
from tests.rank_pool import RankPool

FEATURES = 64
PER_SHARD = 8
STEPS_A_TURN = 5
# hidden layers of a width
SIZES = {
    "0.02 M parameters": (1, 128),
    "1.1 M parameters": (1, 1024),
    "4.2 M parameters": (1, 2048),
    "12.7 M parameters": (6, 1450),
}


class Regression(Brain):
    """Fits noise; tells how long its steps take, but for the first of each turn."""

    clock = time.perf_counter

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.times.append(self.clock())


def make(
    size: tuple[int, int], virtual_ranks: int | None, world_size: int, shards: int
) -> Regression:
    torch.manual_seed(1)
    layers, width = size
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, 1))
    options = {"device": "cpu", "noprogressbar": True, "max_grad_norm": 1.0}
    if virtual_ranks is None:
        options["grad_accumulation_factor"] = shards // world_size
    else:
        options["virtual_ranks"] = virtual_ranks
    return Regression(
        {"net": net},
        lambda those: torch.optim.AdamW(those, lr=1e-3),
        run_opts=options,
    )


def turns(
    size: tuple[int, int],
    shards: int,
    steps: int,
    is_cpu_time: bool,
) -> list[tuple[float, float]]:
    """Return the seconds of a step in each turn: with DDP, and with virtual ranks."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    samples = PER_SHARD * shards * (STEPS_A_TURN + 1)
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, FEATURES, generator=draw)
    data = list(zip(inputs, inputs[:, :1], strict=True))
    found = []
    for turn in range(steps // STEPS_A_TURN + 1):
        seconds = {}
        ways = (None, shards)
        for number in ways if turn % 2 else reversed(ways):
            brain = make(size, number, world_size, shards)
            brain.times = []
            if is_cpu_time:
                brain.clock = time.process_time
            brain.fit([1], data, train_loader_kwargs={"batch_size": PER_SHARD})
            seconds[number] = (brain.times[-1] - brain.times[0]) / (len(brain.times) - 1)
        found.append((seconds[None], seconds[shards]))
    return found[1:]


def gradients_held(shards: int, world_size: int) -> str:
    """Count the whole gradients of the model that exist at a time: those that wait in the tree, and
    what comes of the other processes'.
    """
    coming = (world_size - 1) / world_size
    return f"{(shards // world_size).bit_length() + coming:g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="each turn has five")
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="processor time instead of the clock's: on a machine with other work",
    )
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    given = parser.parse_args()
    head = f"{'':20}{'shards':>8}{'processes':>11}{'DDP, ms':>10}{'virtual, ms':>13}"
    print(f"{head}{'ratio (quartiles)':>24}{'memory':>20}")
    with RankPool(timeout=600) as pool:
        for name in given.sizes:
            for shards in (given.processes, 4 * given.processes):
                for world_size in sorted({1, given.processes}):
                    found = pool.run(
                        turns,
                        SIZES[name],
                        shards,
                        given.steps,
                        given.cpu_time,
                        world_size=world_size,
                    )[0]
                    low, ratio, high = statistics.quantiles(
                        [virtual / usual for usual, virtual in found],
                        n=4,
                    )
                    usual, virtual = (
                        1000 * statistics.median(one) for one in zip(*found, strict=True)
                    )
                    shown = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
                    memory = gradients_held(shards, world_size)
                    print(
                        f"{name:20}{shards:>8}{world_size:>11}{usual:>10.2f}{virtual:>13.2f}{shown:>24}{memory:>20}"
                    )


if __name__ == "__main__":
    main()
