"""How long a resumed run takes to its first batch in the middle of an epoch of a million samples.

Prints milliseconds from the moment that ``fit`` turns to the loader (the end of ``on_stage_start``)
to the first batch (``on_fit_batch_start``), for a fresh run and for one that goes on in the middle,
and checks that the batch is the right one. Exits with 1 if a resumed run takes the limit or more,
in the median; what a fresh run takes to start its loader's workers is allowed on top.

    OMP_NUM_THREADS=1 python benchmarks/resume.py [--samples 1000000] [--repeats 5] [--limit 100]
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import Sharding, shard
from ddpkit.epoch_loop import EpochCounter
from ddpkit.seed import seed_everything
from ddpkit.types import Stage

BATCH_SIZE = 8
SEED = 7


class Numbers(torch.utils.data.Dataset):
    """Cheap to load, so that what is timed is finding the place."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((4,), float(index % 97)), index


class StopError(Exception):
    """The first batch is there."""


class Timed(Brain):
    """Stops at its first batch, or saves after it as if it stood in the middle of the epoch."""

    pretend_step = None

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.started = time.perf_counter()

    def on_fit_batch_start(self, batch, should_step):
        self.milliseconds = 1000 * (time.perf_counter() - self.started)
        self.first = batch[1].tolist()
        if self.pretend_step is None:
            raise StopError

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.step = self.pretend_step
        self.checkpointer.save_checkpoint(end_of_epoch=False)
        raise StopError


def start(folder, size, workers, pretend_step=None):
    """Run as a script does, until the first batch."""
    seed_everything(SEED, verbose=False)
    net = torch.nn.Linear(4, 1)
    counter = EpochCounter(1)
    options = {"device": "cpu", "noprogressbar": True, "ckpt_async": False}
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Timed({"net": net}, lambda p: torch.optim.SGD(p, lr=0.1), None, options, checkpointer)
    brain.pretend_step = pretend_step
    try:
        arguments = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": workers}
        brain.fit(counter, Numbers(size), train_loader_kwargs=arguments)
    except StopError:
        return brain
    raise AssertionError("there was no batch")


def right_batch(size, step):
    """Find the batch the slow way: read the order from its beginning."""
    loader = shard(Numbers(size), Sharding(seed=SEED), batch_size=BATCH_SIZE, shuffle=True)
    loader.set_epoch(1)
    return next(itertools.islice(iter(loader.batch_sampler), step, None))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=100.0, help="milliseconds")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    step = options.samples // BATCH_SIZE // 2
    expected = right_batch(options.samples, step)
    too_slow = False
    print(
        f"{options.samples:,} samples, batch {BATCH_SIZE}, resumed after batch {step:,}; "
        "milliseconds, median (worst)"
    )
    for workers in (0, 2):
        with tempfile.TemporaryDirectory() as folder:
            start(Path(folder, "middle"), options.samples, workers, pretend_step=step)
            found = {"fresh": [], "resumed": []}
            for number in range(options.repeats):
                found["fresh"].append(
                    start(Path(folder, f"fresh{number}"), options.samples, workers).milliseconds
                )
                resumed = start(Path(folder, "middle"), options.samples, workers)
                assert resumed.first == expected, (resumed.first, expected)
                found["resumed"].append(resumed.milliseconds)
        shown = ", ".join(
            f"{name} {statistics.median(one):.1f} ({max(one):.1f})" for name, one in found.items()
        )
        print(f"{workers} workers: {shown}", flush=True)
        allowed = options.limit + (statistics.median(found["fresh"]) if workers else 0.0)
        too_slow |= statistics.median(found["resumed"]) >= allowed
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())
