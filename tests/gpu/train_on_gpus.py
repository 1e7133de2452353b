"""Trains the model of ``test_brain.py`` as its words say, on any number of processes; not a test by
itself.

Every rank writes down what each training ended with: weights, steps, loss scale, sizes of batches,
and how often a step waited for the GPU.

Ranks that have no GPU of their own share one, each as if it were alone on a machine: NCCL refuses
two ranks of one machine on one GPU. So one GPU shows what NCCL does between ranks, over sockets and
slowly.
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
from tests.gpu.test_brain import Classifier, Syncs, group_norm, make_data, make_net


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


class Hungry(Faulty):
    """Needs memory in proportion to its batch in training; the last rank has enough for 15
    samples.
    """

    per_sample = 2**26  # bytes
    room = 15 * per_sample + per_sample // 2

    def on_fit_start(self):
        super().on_fit_start()
        self.sizes = []
        if self.rank == get_world_size() - 1:
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + self.room) / whole
            )

    def compute_forward(self, batch, stage):
        self.held = None
        if self.modules.training:
            self.sizes.append(len(batch[0]))
            self.held = torch.empty(
                len(batch[0]) * self.per_sample,
                dtype=torch.uint8,
                device=self.device,
            )
        return super().compute_forward(batch, stage)


class Unrepeatable(nn.Module):
    """Has a backward pass for which CUDA has no deterministic kernel."""

    def __init__(self):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, x):
        return self.pool(x.unflatten(1, (1, 4, 6)).expand(-1, 2, -1, -1)).flatten(1)


def words():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", help="of every rank, with its number added")
    parser.add_argument("--folder", help="of checkpoints")
    parser.add_argument("--fault", nargs=3, default=("", 0, 0), metavar=("KIND", "RANK", "AFTER"))
    parser.add_argument("--count_syncs", action="store_true")
    parser.add_argument(
        "--trainings",
        type=json.loads,
        default=[{}],
        help="run options, and arguments of train()",
    )
    return parser.parse_args()


def model(kind, dtype, norm, *, dropout):
    if kind == "unrepeatable":
        return nn.Sequential(nn.Linear(6, 24), Unrepeatable(), nn.Linear(8, 3)).to(dtype)
    if norm == "none":  # with a gradient of 9 MB, which is sent by itself
        layers = nn.Linear(6, 1500), nn.Tanh(), nn.Linear(1500, 1500), nn.Linear(1500, 3)
        return nn.Sequential(*layers).to(dtype)
    net = make_net(dtype, group_norm) if norm == "group" else make_net(dtype)
    return nn.Sequential(nn.Dropout(0.3), net) if dropout else net


def train(
    asked,
    *,
    samples=64,
    dtype="float32",
    epochs=3,
    kind="faulty",
    dropout=False,
    optimizer="SGD",
    **options,
):
    if dropout:
        seed_everything(5, verbose=False)
    dtype = getattr(torch, dtype)
    net = model(kind, dtype, options.pop("norm", None), dropout=dropout)
    counter = EpochCounter(epochs)
    classes = {
        "hungry": Hungry,
        "unrepeatable": Faulty,
        "faulty": Counting if asked.count_syncs else Faulty,
    }
    settings = {"SGD": {"momentum": 0.9, "lr": 0.1}, "AdamW": {"lr": 0.01}}[optimizer]
    fused = options.pop("fused", None)
    scale = options.pop("scale", None)
    brain = classes[kind](
        {"net": net},
        lambda parameters: getattr(torch.optim, optimizer)(parameters, fused=fused, **settings),
        run_opts={"noprogressbar": True, **options},
        checkpointer=None
        if asked.folder is None
        else Checkpointer(asked.folder, {"net": net, "counter": counter}),
    )
    if scale is not None and brain.scaler.is_enabled():
        brain.scaler = torch.amp.GradScaler("cuda", init_scale=scale)
    failing, rank, after = asked.fault
    brain.fault = (failing, int(rank), int(after))
    data = make_data(samples, dtype=dtype)
    loader = {"shuffle": True}
    if "global_batch_size" not in options:
        loader["batch_size"] = 16 // get_world_size()
    brain.fit(counter, data, data[:20], train_loader_kwargs=loader)
    state = brain.raw_modules.state_dict()
    return {
        "weights": {
            name: (one.full_tensor() if hasattr(one, "full_tensor") else one).cpu()
            for name, one in state.items()
        },
        "steps": brain.optimizer_step,
        "scale": brain.scaler.get_scale(),
        "device": brain.device,
        "syncs": getattr(brain, "syncs", []),
        "sizes": getattr(brain, "sizes", []),
    }


def share_one_gpu():
    """Let each rank say that it is alone on a machine, which it must before NCCL starts."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    os.environ.update(NCCL_HOSTID=f"machine {rank}", NCCL_SOCKET_IFNAME="lo")


if __name__ == "__main__":
    asked = words()
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        share_one_gpu()
    ddp_init_group(asked.trainings[0])
    results = [train(asked, **one) for one in asked.trainings]
    torch.save(results, f"{asked.out}.{get_rank() or 0}")
