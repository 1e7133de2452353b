"""Trains the model of ``test_brain.py`` as its words say, on any number of processes; not a test by itself.

Every rank writes down what it ended with: weights, steps, loss scale, and how often a step waited for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import ddp_init_group, get_rank, get_world_size
from ddpkit.epoch_loop import EpochCounter
from ddpkit.seed import seed_everything
from tests.gpu.test_brain import Classifier, Syncs, make_data, make_net


class Faulty(Classifier):
    """Fails on one rank, in the forward pass after so many optimizer steps."""

    fault: tuple[str, int, int] = ("", 0, 0)

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        kind, rank, after = self.fault
        if kind and (self.rank, self.optimizer_step) == (rank, after) and self.modules.training:
            if kind == "raise":
                raise RuntimeError("planted on purpose")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            self.fault = ("", 0, 0)
            return loss * float("inf")
        return loss


class Counting(Syncs, Faulty):
    """Counts how often a step waits for the GPU."""


def words():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", help="of every rank, with its number added")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dropout", action="store_true", help="random numbers of the GPU")
    parser.add_argument("--folder", help="of checkpoints")
    parser.add_argument("--fault", nargs=3, default=("", 0, 0), metavar=("KIND", "RANK", "AFTER"))
    parser.add_argument("--count_syncs", action="store_true")
    parser.add_argument("--fused", action="store_true", help="kernels of the optimizer")
    parser.add_argument("--options", type=json.loads, default={}, help="run options")
    return parser.parse_args()


def train(asked):
    net = make_net(getattr(torch, asked.dtype))
    if asked.dropout:
        seed_everything(5, verbose=False)
        net = nn.Sequential(nn.Dropout(0.3), net)
    counter = EpochCounter(3)
    brain = (Counting if asked.count_syncs else Faulty)(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=asked.fused or None),
        run_opts={"noprogressbar": True, **asked.options},
        checkpointer=None if asked.folder is None else Checkpointer(asked.folder, {"net": net, "counter": counter}),
    )
    kind, rank, after = asked.fault
    brain.fault = (kind, int(rank), int(after))
    data = make_data(asked.samples, dtype=getattr(torch, asked.dtype))
    loader = {"batch_size": 16 // get_world_size(), "shuffle": True}
    brain.fit(counter, data, data[:20], train_loader_kwargs=loader)
    return {
        "weights": {name: value.cpu() for name, value in brain.raw_modules.state_dict().items()},
        "steps": brain.optimizer_step,
        "scale": brain.scaler.get_scale(),
        "device": brain.device,
        "syncs": getattr(brain, "syncs", []),
    }


if __name__ == "__main__":
    asked = words()
    ddp_init_group(asked.options)
    result = train(asked)
    torch.save(result, f"{asked.out}.{get_rank() or 0}")
