"""How much memory a training really takes on a rank, and what an estimate says of it."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.launch import SLICE, SlicePlan
from ddpkit.see.estimate.figures import MemoryEstimate
from tests.contract.test_predict import handlers_kept
from tests.recipes import Regression, make

WIDTH = 384
BLOCKS = 4
BATCH = 128
MEASURED = 3  # the step, from 0 on, that is compared: buckets and states are there


class Block(nn.Module):
    """Two linear layers and a norm, beside what goes in."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """Blocks that repeat, which FSDP gathers one at a time."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def rows(number):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, 16, generator=generator)
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


class Plain(Regression):
    """Keeps nothing of its batches."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])


class Statistics(ctypes.Structure):
    """What glibc says of its heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated():
    """Return the bytes that this process has allocated, by whichever thread they are freed."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Statistics
    found = ask()
    return found.uordblks + found.hblkhd


class Sampled(TorchDispatchMode):
    """Looks after each operation of torch how much is allocated, in the step that is compared."""

    def __init__(self):
        super().__init__()
        self.is_measuring = False
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.is_measuring:
            self.peak = max(self.peak, allocated())
        return result


def marked(sampled):
    """Return a recipe that says when the step that is compared begins and ends."""

    class Marked(Plain):
        def on_fit_batch_start(self, batch, should_step):
            sampled.is_measuring = self.optimizer_step == MEASURED

    return Marked


def fitted(cls, steps, **options):
    torch.manual_seed(1)
    brain = make(cls, net=Net(), opt=adamw, measure_steps="off", **options)
    factor = options.get("grad_accumulation_factor", 1)
    shards = options.get("virtual_ranks", 2)
    data = rows(steps * factor * BATCH * shards)
    brain.fit(range(1, 2), data, train_loader_kwargs={"batch_size": BATCH})
    return brain


def true_peak(options):
    """Train on this rank; return the most that it has allocated in one optimizer step."""
    torch.manual_seed(1)
    before = allocated()
    with Sampled() as sampled:
        brain = fitted(marked(sampled), MEASURED + 2, **options)
    del brain
    return sampled.peak - before


def estimated(folder, processes=(1, 2), assumed=None, memory=None, cls=Plain, **options):
    """Rehearse the same training in this process; return the estimate."""
    scratch = Path(folder, "scratch")
    scratch.mkdir(exist_ok=True)
    plan = SlicePlan(
        str(scratch),
        str(scratch / "result.json"),
        estimated_on=list(processes),
        assumed=assumed or {},
    )
    with pytest.MonkeyPatch.context() as patch, handlers_kept():
        patch.setenv(SLICE, plan.text())
        with pytest.raises(SystemExit) as ended:
            fitted(cls, 2, **options)
    assert ended.value.code == 0
    result = json.loads(Path(plan.result).read_text())
    return MemoryEstimate("train.py", result, list(processes), memory)


def row_of(found, strategy, processes):
    return next(
        row
        for row in found.rows
        if (row.row["strategy"], row.row["processes"]) == (strategy, processes)
    )
