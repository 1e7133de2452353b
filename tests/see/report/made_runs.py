"""Runs as ddpkit writes them, made of numbers: what a page is tested with where no training is
needed.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

PHASES = {
    "data": 0.004,
    "move": 0.002,
    "forward": 0.03,
    "backward": 0.05,
    "exchange": 0.02,
    "optimizer": 0.008,
    "other": 0.002,
}
STEPS_PER_EPOCH = 300
LATE = 2  # the rank that is the slowest in its forward pass


def spread(median, width=0.1, rank=0):
    return {
        "min": median * (1 - width),
        "median": median,
        "max": median * (1 + 2 * width),
        "max_rank": rank,
    }


class Writer:
    """Writes a run's log, event by event, with a clock of its own."""

    def __init__(self, folder, time=1_800_000_000.0, seed=0):
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = []
        self.time = time
        self.random = random.Random(seed)

    def event(self, event, **fields):
        self.lines.append(json.dumps({"event": event, "time": self.time, **fields}))

    def close(self, end=""):
        text = "".join(f"{line}\n" for line in self.lines)
        self.path.write_text(text + end, encoding="utf-8")
        return self.path.parent

    def start(self, world_size=4, **fields):
        facts = {
            "arguments": ["train.py", "hparams.yaml", "--lr=0.1"],
            "world_size": world_size,
            "torch": "2.13.0",
            **fields,
        }
        self.event("start", **facts)

    def second(self, epoch, steps, world_size=4, scale=1.0):
        """A ``speed`` event, after ten steps in a second."""
        self.time += 1.0
        wobble = 1 + 0.1 * math.sin(steps / 40) + self.random.uniform(-0.03, 0.03)
        late = {"forward": LATE}
        phases = {
            name: spread(scale * seconds * wobble, rank=late.get(name, self.random.randrange(4)))
            for name, seconds in PHASES.items()
        }
        self.event(
            "speed",
            epoch=epoch,
            step=steps % STEPS_PER_EPOCH,
            optimizer_step=steps,
            seconds=1.0,
            windows=10,
            batches_per_window=1.0,
            world_size=world_size,
            samples_per_second=2500 / (scale * wobble),
            step_seconds=spread(scale * 0.116 * wobble, rank=LATE),
            phases=phases,
            memory={"rss": spread(2.1e9 + 1e5 * steps), "allocated": spread(6e9 * wobble)},
            gradient_norm=3 / (1 + steps / 300) + self.random.random() * 0.3,
            learning_rate=0.1 * min(1, steps / 200) * 0.5 ** (steps / 900),
            loss=0.3 + 4 / (1 + steps / 120) + self.random.random() * 0.05,
        )

    def epoch(self, number, begin=0, scale=1.0, until=STEPS_PER_EPOCH):
        """Training of an epoch, all of it unless it is cut, and what follows."""
        first = (number - 1) * STEPS_PER_EPOCH
        for steps in range(first + begin + 10, first + until + 1, 10):
            self.second(number, steps, scale=scale)
        if until < STEPS_PER_EPOCH:
            return
        steps = first + until
        loss = 0.3 + 3 / number
        seconds = (until - begin) / 10
        facts = {"epoch": number, "optimizer_step": steps, "samples": 75_000}
        share = max(0.0, 0.4 - 0.1 * number)
        self.event("stage", stage="TRAIN", loss=loss, seconds=seconds, clipped_share=share, **facts)
        self.time += 2.0
        self.event("stage", stage="VALID", loss=loss * 1.1, seconds=2.0, **facts)
        valid = {"loss": loss * 1.1, "error": 0.5 / number}
        self.event("stats", meta={"epoch": number, "lr": 0.1}, train={"loss": loss}, valid=valid)
        self.time += 0.5
        self.event(
            "checkpoint",
            path=f"/results/save/CKPT+{number}",
            optimizer_step=steps,
            epoch=number,
            seconds=0.5,
            meta=valid,
            kept=[f"CKPT+{number}"],
            best={"error": f"CKPT+{number}"},
            deleted=[f"CKPT+{number - 1}"],
        )


def killed_and_resumed(folder, scale=1.0, seed=0, **start):
    """Two epochs and a half, a kill, a minute of nothing, and the rest from the last checkpoint.

    Steps 600 to 750 are done twice.
    """
    run = Writer(folder, seed=seed)
    run.start(**start)
    run.time += 20.0
    run.epoch(1, scale=scale)
    run.epoch(2, scale=scale)
    run.epoch(3, scale=scale, until=150)
    run.time += 60.0
    run.start(resumed_from="/results/save/CKPT+2", **start)
    run.time += 20.0
    run.epoch(3, scale=scale)
    run.event(
        "verdict",
        kind="late_rank",
        rank=LATE,
        what="Rank 2 is late in its forward pass.",
        how_much="12 ms of a step of 116 ms.",
        **{"try": "Try to look at what else runs on its machine."},
    )
    run.epoch(4, scale=scale)
    run.epoch(5, scale=scale)
    run.event("stage", stage="TEST", epoch=5, loss=0.9, seconds=3.0, optimizer_step=1500)
    run.event("fit_end", optimizer_step=1500)
    return run.close()
