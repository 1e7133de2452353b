"""A run of very many steps, and a folder of very many checkpoints: nothing grows.

``ENDURANCE_STEPS`` and ``ENDURANCE_CHECKPOINTS`` set how many; the table of faults runs the full
numbers.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import torch

import ddpkit as sb
from ddpkit.checkpoints import Checkpointer

STEPS = int(os.environ.get("ENDURANCE_STEPS", "10000"))
CHECKPOINTS = int(os.environ.get("ENDURANCE_CHECKPOINTS", "100"))
# the interpreter keeps the names of files, and makes room for more of them at a stroke
GROWTH_MB = 8.0


def memory_mb():
    """Return what this process holds in memory, without files; also what it shares with processes
    that it has forked, whose end would else look like growth.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def handles():
    """Return the numbers of open files and of threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


class Endless(sb.Brain):
    """Looks at the process after a tenth of the steps, and after all."""

    first: tuple
    last: tuple

    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == STEPS // 10:
            self.first = (memory_mb(), handles(), time.monotonic())
        elif self.optimizer_step == STEPS:
            self.last = (memory_mb(), handles(), time.monotonic())


def test_many_steps_leave_nothing_behind(tmp_path):
    gc.collect()  # what earlier tests have left may have files open
    options = {"device": "cpu", "noprogressbar": True, "optimizer_step_limit": STEPS}
    brain = Endless(
        {"net": torch.nn.Linear(1, 1)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts=options,
        checkpointer=Checkpointer(tmp_path),
    )
    brain.fit(range(1, 10**9), [torch.ones(1, 1)] * 1000)
    assert brain.optimizer_step == STEPS
    (before, held, began) = brain.first
    (after, holding, ended) = brain.last
    print(
        f"{STEPS} steps: {after - before:+.2f} MB, {(ended - began) / (0.9 * STEPS) * 1e6:.0f} us "
        "each"
    )
    assert after - before < GROWTH_MB
    assert holding == held


def test_many_checkpoints_are_kept_and_found(tmp_path):
    gc.collect()
    net = torch.nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, {"net": net})
    first = None
    for number in range(CHECKPOINTS):
        checkpointer.save_checkpoint(meta={"number": number}, verbosity=0)
        if number == CHECKPOINTS // 10:
            first = memory_mb(), handles()
    assert memory_mb() - first[0] < GROWTH_MB
    assert handles() == first[1]
    assert len(checkpointer.list_checkpoints()) == CHECKPOINTS
    assert checkpointer.find_checkpoint().meta["number"] == CHECKPOINTS - 1
