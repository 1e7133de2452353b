"""Small trainings, each of which is a trace: the loss of every batch and the weights at the end, to the last bit.

They are what a change that is not meant to change numbers leaves alone. ``python -m tests.golden.record`` writes them
down; ``tests/golden/test_golden.py`` compares. A trace depends on the processor's kernels, too: it is compared bit for
bit on the kind of machine that wrote it, and to rounding elsewhere.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter

SAMPLES, FEATURES, EPOCHS = 41, 6, 4


class Table(Dataset):
    """Rows of a table; with ``noisy`` each is augmented by Python's, numpy's and torch's random numbers."""

    def __init__(self, dtype, *, noisy=False):
        numbers = torch.arange(SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES)
        self.inputs = torch.sin(numbers * 0.37).to(dtype)
        self.targets = self.inputs.sum(1, keepdim=True).mul(0.3)
        self.noisy = noisy

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = self.inputs[index]
        if self.noisy:
            row = row + torch.rand(FEATURES, dtype=row.dtype) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1  # noqa: NPY002 -- as recipes do
        return row, self.targets[index]


class Stream(IterableDataset):
    def __init__(self, dtype):
        self.table = Table(dtype)

    def __iter__(self):
        return (self.table[index] for index in range(SAMPLES))


class Golden(ddpkit.Brain):
    """Writes down every loss; can be killed after so many optimizer steps."""

    kill_at = None
    counted = False

    def on_fit_start(self):
        super().on_fit_start()
        self.trace = []

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch[1]).square()
        return (losses.sum(), len(losses)) if self.counted else losses.mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.trace.append(float(loss.detach()))
        if self.kill_at is not None and self.optimizer_step >= self.kill_at:
            raise KeyboardInterrupt

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.trace.append(float(stage_loss))
        if stage is ddpkit.Stage.VALID and self.checkpointer is not None:
            self.checkpointer.save_and_keep_only(meta={"loss": float(stage_loss)}, min_keys=["loss"], num_to_keep=1)


@dataclass(frozen=True)
class Case:
    """One training; everything else is the same in all of them."""

    dtype: torch.dtype = torch.float32
    data: str = "table"
    norm: bool = False
    dropout: float = 0.0
    optimizer: str = "sgd"
    counted: bool = False
    workers: int = 0
    options: dict = field(default_factory=dict)

    def dataset(self):
        return Stream(self.dtype) if self.data == "stream" else Table(self.dtype, noisy=self.data == "noisy")

    def net(self):
        torch.manual_seed(5)
        norm = [nn.BatchNorm1d(8)] if self.norm else []
        layers = [nn.Linear(FEATURES, 8), *norm, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1)]
        return nn.Sequential(*layers).to(self.dtype)

    def optimize(self, parameters):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


CASES = {
    "plain": Case(),
    "norm-dropout-clipping": Case(norm=True, dropout=0.2, options={"max_grad_norm": 0.1}),
    "float64-accumulation": Case(
        torch.float64, norm=True, optimizer="adamw", options={"grad_accumulation_factor": 3, "ema_decay": 0.9}
    ),
    "global-batch": Case(torch.float64, dropout=0.1, options={"global_batch_size": 7, "micro_batch_size": 2}),
    "sum-and-count": Case(torch.float64, counted=True, options={"grad_accumulation_factor": 2}),
    "stream": Case(torch.float64, data="stream", options={"grad_accumulation_factor": 2}),
    "augmentation-in-workers": Case(data="noisy", workers=2, optimizer="adamw"),
}


def train(name, folder=None, kill_at=None):
    """Train a case, from the newest checkpoint of a folder where one is given; return its trace."""
    case = CASES[name]
    ddpkit.seed_everything(17, verbose=False)
    net, counter = case.net(), EpochCounter(EPOCHS)
    options = {"device": "cpu", "noprogressbar": True, "shard_evaluation": True, "ckpt_async": False, **case.options}
    checkpointer = None
    if folder is not None:
        options |= {"ckpt_interval_steps": 3}
        checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Golden({"net": net}, case.optimize, None, options, checkpointer)
    brain.kill_at, brain.counted = kill_at, case.counted
    kwargs = {"num_workers": case.workers}
    if "global_batch_size" not in case.options:
        kwargs["batch_size"] = 3
    if case.data != "stream":
        kwargs["shuffle"] = True
    valid = Table(case.dtype)
    try:
        brain.fit(counter, case.dataset(), valid, train_loader_kwargs=kwargs, valid_loader_kwargs={"batch_size": 5})
    except KeyboardInterrupt:
        if kill_at is None:
            raise
    return facts(brain)


def facts(brain):
    """Return what is compared: hashes of the bits, and numbers for a machine with other kernels."""
    weights = torch.cat([one.detach().flatten().double() for one in brain.raw_modules.parameters()])
    buffers = [one.detach().flatten().double() for one in brain.raw_modules.buffers()]
    everything = torch.cat([weights, *buffers]).numpy()
    trace = np.array(brain.trace, dtype=np.float64)
    return {
        "steps": brain.optimizer_step,
        "losses": len(brain.trace),
        "trace": hashlib.sha256(trace.tobytes()).hexdigest(),
        "weights": hashlib.sha256(everything.tobytes()).hexdigest(),
        "last_losses": trace[-3:].tolist(),
        "norm": float(weights.norm()),
    }


def fresh(name):
    return train(name)


def killed(name, folder, kill_at):
    return train(name, folder, kill_at)


def resumed(name, folder):
    return train(name, folder)
