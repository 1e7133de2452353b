"""What an average of the weights costs: microseconds per step, and milliseconds to evaluate with
it.

    python benchmarks/ema.py
    python benchmarks/ema.py --device cuda

Two Brains train the same model on the same batch in turns, one with ``ema_decay``, so that a
machine that slows down slows both; reported are medians over the turns. "Update alone" is timed
without a step around it, and so is the update of torch's own ``AveragedModel``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddpkit.brain import Brain
from ddpkit.types import Stage

DECAY = 0.999
SIZES = {"small": (64, 2, 20), "25M": (1024, 24, 1)}  # width, layers, steps per turn
BATCH = 16
TURNS = 15


class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def make_brain(width: int, layers: int, device: str, **options: object) -> Regression:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers))
    )
    options = {"device": device, "noprogressbar": True, **options}
    brain = Regression(
        {"net": net},
        lambda those: torch.optim.AdamW(those, lr=1e-4),
        run_opts=options,
    )
    brain.fit([1], [torch.zeros(width)] * BATCH, train_loader_kwargs={"batch_size": BATCH})
    brain.modules.train()
    brain.progress.window.closes = True
    return brain


def seconds(work: Callable[[], object], number: int, device: str) -> float:
    """Time one call, of ``number`` in a row, with the device done at both ends."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(number):
        work()
    wait()
    return (time.perf_counter() - started) / number


def in_and_out(brain: Regression) -> None:
    with brain.ema.evaluated(Stage.VALID):
        pass


def measure(width: int, layers: int, steps: int, device: str) -> tuple[int, dict[str, float]]:
    """Return the number of parameters, and the median seconds of each piece of work."""
    without = make_brain(width, layers, device)
    averaged = make_brain(width, layers, device, ema_decay=DECAY)
    batch = torch.randn(BATCH, width, device=device)
    net = averaged.modules.net
    reference = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    works = {
        "step without": lambda: without.fit_batch(batch),
        "step with": lambda: averaged.fit_batch(batch),
        "update alone": averaged.ema.update,
        "AveragedModel": lambda: reference.update_parameters(net),
        "into evaluation and back": lambda: in_and_out(averaged),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(TURNS + 1):
        for name, work in works.items():
            took = seconds(work, steps, device)
            times[name] += [took] if turn else []  # the first warms up
    return sum(one.numel() for one in net.parameters()), {
        name: statistics.median(all_) for name, all_ in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    for size, (width, layers, steps) in SIZES.items():
        parameters, found = measure(width, layers, steps, device)
        print(
            f"{size}: {parameters} parameters in {4 * layers} tensors, {torch.get_num_threads()} "
            f"threads, {device}"
        )
        for name, took in found.items():
            print(f"  {name:26s} {1e6 * took:10.0f} us")


if __name__ == "__main__":
    main()
