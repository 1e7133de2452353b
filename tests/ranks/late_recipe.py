"""A recipe in which one rank sleeps in a phase of its steps, for the tests of what is measured."""

from __future__ import annotations

import json
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from ddpkit.brain import Brain
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage

WIDTH = 8
BATCH = 4


class Plan:
    """Where this process sleeps, and how long."""

    phase = ""
    seconds = 0.0

    @classmethod
    def sleep(cls, phase):
        if phase == cls.phase:
            time.sleep(cls.seconds)


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Plan.sleep("backward")
        return gradient


class Net(nn.Module):
    """With BatchNorm, whose statistics are shared in the middle of both passes."""

    def __init__(self, width=WIDTH, hidden=16):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        Plan.sleep("forward")
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(SleepsInBackward.apply(hidden))


class Samples(Dataset):
    def __init__(self, number):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(number, WIDTH, generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    Plan.sleep("data")
    return torch.stack(rows)


class Slow(Brain):
    def compute_forward(self, batch, stage):
        Plan.sleep("move")
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions.squeeze(1) - batch.sum(1)).square().mean()


class Counted(Slow):
    def compute_objectives(self, predictions, batch, stage):
        return (predictions.squeeze(1) - batch.sum(1)).square().sum(), len(batch)


class Own(Slow):
    """With a fit_batch of its own, which goes forwards and backwards twice, as a GAN does."""

    def fit_batch(self, batch):
        losses = []
        for part in batch.chunk(2):
            loss = self.compute_objectives(
                self.compute_forward(part, Stage.TRAIN),
                part,
                Stage.TRAIN,
            )
            self.backward(loss)
            losses.append(loss.detach())
            if self.should_step:
                self.optimizers_step()
        return torch.stack(losses).mean()


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        Plan.sleep("optimizer")
        return super().step(closure)


def train(
    log,
    phase="",
    late=0,
    seconds=0.0,
    *,
    steps=24,
    cls=Slow,
    epochs=1,
    hidden=16,
    **options,
):
    """Train, and return the weights; only one rank is late."""
    rank = get_rank() or 0
    Plan.phase = phase if rank == late else ""
    Plan.seconds = seconds
    torch.manual_seed(5)
    brain = cls(
        {"net": Net(hidden=hidden)},
        lambda parameters: SlowSGD(parameters, lr=0.01, momentum=0.9),
        run_opts={"device": "cpu", "noprogressbar": True, **options},
    )
    set_run_log(log)
    try:
        data = Samples(steps * BATCH * get_world_size())
        loader = {"batch_size": BATCH, "collate_fn": collate}
        if "global_batch_size" in options:
            loader.pop("batch_size")
        brain.fit(range(1, epochs + 1), data, train_loader_kwargs=loader)
    finally:
        set_run_log(None)
        Plan.phase = ""
    state = brain.raw_modules.state_dict()
    whole = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in state.items()
    }
    return {name: one.double().tolist() for name, one in whole.items()}


def events(log, kind="speed"):
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines()) if log.exists() else ()
    return [line for line in lines if line["event"] == kind]
