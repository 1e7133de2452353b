"""How long a script takes from its start to the end of its first optimizer step, with ddpkit and by
hand.

Both import torch, make a model, a loader and an optimizer, and train on one batch with clipping and
a finite check. Each run is a fresh process with compiled bytecode; they take turns, so that a
machine that slows down slows both. Prints medians of seconds, and of the ratio within a turn.

    OMP_NUM_THREADS=1 python benchmarks/first_step.py [--turns 15] [--cpu_time]
"""

from __future__ import annotations

import os
import sys
import time

SAMPLES = 640
BATCH = 32
WIDTH = 256
CLASSES = 10


def make():
    """Make what both train: a dataset and a model."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, WIDTH),
        torch.randint(0, CLASSES, (SAMPLES,)),
    )
    return data, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def say_when():
    """Print the clock of all processes, and what this one has computed since its start."""
    print(time.monotonic(), time.process_time())


def by_hand():
    data, net = make()
    import torch

    optimizer = torch.optim.AdamW(net.parameters())
    for inputs, labels in torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True):
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)):
            optimizer.step()
        optimizer.zero_grad()
        say_when()
        return


def with_ddpkit():
    data, net = make()
    import torch

    import ddpkit

    class Classifier(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return torch.nn.functional.cross_entropy(predictions, batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            say_when()

    options = {
        "max_grad_norm": 1.0,
        "optimizer_step_limit": 1,
        "noprogressbar": True,
        "device": "cpu",
    }
    brain = Classifier({"net": net}, torch.optim.AdamW, run_opts=options)
    brain.fit(range(1), data, train_loader_kwargs={"batch_size": BATCH, "shuffle": True})


def seconds_of(name, cpu_time):
    """Run one of the two in a process of its own."""
    import subprocess

    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [sys.executable, __file__, name]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    ended, computed = map(float, done.stdout.split()[-2:])
    return computed if cpu_time else ended - begun


def main():
    import argparse
    import statistics

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--turns",
        type=int,
        default=15,
        help="of both, after those that are not counted",
    )
    parser.add_argument(
        "--not_counted",
        type=int,
        default=1,
        help="turns before: the first one reads files that are not in memory yet",
    )
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="processor time instead, for a busy machine",
    )
    options = parser.parse_args()
    names = ("by_hand", "with_ddpkit")
    turns = options.not_counted + options.turns
    pairs = [[seconds_of(name, options.cpu_time) for name in names] for _ in range(turns)]
    pairs = pairs[options.not_counted :]
    hand, mine = (statistics.median(one) for one in zip(*pairs, strict=True))
    ratios = sorted(mine / hand for hand, mine in pairs)
    print(
        f"by hand {hand:.3f} s, ddpkit {mine:.3f} s, ratio {statistics.median(ratios):.3f}",
        end=" ",
    )
    print(f"({ratios[len(ratios) // 4]:.3f} to {ratios[len(ratios) * 3 // 4]:.3f})")


if __name__ == "__main__":
    {"by_hand": by_hand, "with_ddpkit": with_ddpkit}.get(sys.argv[-1], main)()
