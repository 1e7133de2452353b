"""What ``--audit_every`` costs: the same steps without it and with it, on one process or several.

    python benchmarks/rank_audit.py
    torchrun --standalone --nproc_per_node=2 benchmarks/rank_audit.py

A model of linear layers with AdamW, float32, with one thread, and one virtual rank for each
process. The runs take turns. Reported is processor time of rank 0, which a busy machine changes
little: a step without audits, what an audit adds, and the ratio that this makes at N = 100.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size
from ddpkit.run_opts import RunOptions

BATCH = 16
#: Width and number of layers of each model.
MODELS = ((64, 2), (512, 4), (1450, 2))


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
    ranks = get_world_size()
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "virtual_ranks": ranks,
        "audit_every": every,
        "measure_steps": "off",
    }
    brain = Timed({"net": net}, torch.optim.AdamW, run_opts=options)
    brain.ends = []
    data = torch.ones(steps * BATCH * ranks, width)
    brain.fit([1], data, train_loader_kwargs={"batch_size": BATCH})
    times = [after - before for before, after in zip(brain.ends, brain.ends[1:], strict=False)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ddp_init_group(RunOptions(device="cpu"))
    rows = [
        "| processes | parameters | a step | an audit adds | a run with N = 100 |",
        "|---|---|---|---|---|",
    ]
    for width, layers in MODELS:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        numbers = sum(parameter.numel() for parameter in net.parameters())
        plain, audited = [], []
        for _ in range(options.turns):
            plain.append(seconds_per_step(net, width, options.steps, 0))
            audited.append(seconds_per_step(net, width, options.steps, 1))
        step = statistics.median(plain)
        more = statistics.median(audited) - step
        ratio = 1 + more / step / 100
        rows.append(
            f"| {get_world_size()} | {numbers:,} | {step * 1e3:.1f} ms | {more * 1e3:.1f} ms "
            f"| {ratio:.4f} of the time |"
        )
    if not get_rank():
        print("\n".join(rows))


if __name__ == "__main__":
    main()
