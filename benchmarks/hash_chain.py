"""What a record of ``--hash_every`` costs: the same steps without it and with one in each step.

    python benchmarks/hash_chain.py

Models of 0.01, 1 and 13 million parameters with AdamW, float32, on one process with one thread. The
runs take turns. Reported is processor time, which a busy machine changes little: medians of a step
without a record, and of what a record adds to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from ddpkit.brain import Brain

BATCH = 16
#: Width and number of layers of each model.
MODELS = ((64, 2), (512, 4), (1450, 6))


class Timed(Brain):
    """Notes the processor time when each step ends."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules["net"](batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.square().mean()

    def on_fit_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())


def seconds_per_step(net: nn.Module, width: int, steps: int, every: int) -> float:
    """Train for some steps; return the median processor time of one."""
    options = {"device": "cpu", "noprogressbar": True, "hash_every": every, "measure_steps": "off"}
    brain = Timed({"net": net}, torch.optim.AdamW, run_opts=options)
    brain.ends = []
    brain.fit([1], torch.ones(steps * BATCH, width), train_loader_kwargs={"batch_size": BATCH})
    times = [after - before for before, after in zip(brain.ends, brain.ends[1:], strict=False)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| parameters | a step | a record adds |")
    print("|---|---|---|")
    for width, layers in MODELS:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        numbers = sum(parameter.numel() for parameter in net.parameters())
        plain, hashed = [], []
        for _ in range(options.turns):
            plain.append(seconds_per_step(net, width, options.steps, 0))
            hashed.append(seconds_per_step(net, width, options.steps, 1))
        step = statistics.median(plain)
        more = statistics.median(hashed) - step
        print(f"| {numbers:,} | {step * 1e3:.1f} ms | {more * 1e3:.1f} ms |")


if __name__ == "__main__":
    main()
