"""A recipe with a ``fit_batch`` of its own: ``save_signal_recipe.py FOLDER WAY [signal]``.

With ``signal``, rank 0 asks for a checkpoint in the middle of an accumulation window, between
forward and backward; and the run is killed in the middle of a window once that checkpoint is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ddpkit as sb
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter

# 61 micro-batches, or 31: the last window is short
FACTOR = 3
SAMPLES = 122
EPOCHS = 3


class Own(sb.Brain):
    """Accumulates in one of several ways, under dropout."""

    way = "named"
    asks = False

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch
        print(f"begins at epoch {epoch}, step {self.step}", flush=True)

    def fit_batch(self, batch):
        by_number = self.step % FACTOR == 0
        should_step = self.should_step if self.way == "named" else by_number
        with self.no_sync(self.way != "named" and not should_step):
            loss = self.compute_objectives(
                self.compute_forward(batch, sb.Stage.TRAIN),
                batch,
                sb.Stage.TRAIN,
            )
            if self.asks:
                self.in_the_window()
            if self.way == "named":
                self.backward(loss)
            elif self.way == "scale":
                (loss * self.progress.window.scale).backward()
            else:
                (loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach()

    def in_the_window(self):
        """Ask for a checkpoint in the second micro-batch of a window of epoch 2, and end in a later
        one.
        """
        # so that the ranks sync every ten batches, also in epoch 2, which keeps their distance
        time.sleep(0.1)
        if (self.epoch, self.step) == (2, 5) and self.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        is_later = (self.epoch, self.step) > (2, 5) and self.step % FACTOR == 2
        if is_later and any(Path(sys.argv[1]).glob("CKPT*/manifest.json")):
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 3, generator=generator),
        torch.randn(SAMPLES, 1, generator=generator),
    )
    counter = EpochCounter(EPOCHS)
    checkpointer = Checkpointer(sys.argv[1], {"net": net, "counter": counter})
    options = {"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": FACTOR}
    brain = Own({"net": net}, lambda p: torch.optim.Adam(p, lr=0.01), None, options, checkpointer)
    brain.way = sys.argv[2]
    brain.asks = "signal" in sys.argv
    brain.fit(counter, data, train_loader_kwargs={"batch_size": 2, "shuffle": True})
    if brain.rank == 0:
        weights = torch.cat(
            [parameter.detach().flatten() for parameter in brain.modules.parameters()]
        )
        print(f"ends with {weights.numpy().tobytes().hex()}", flush=True)


if __name__ == "__main__":
    main()
