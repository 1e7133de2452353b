"""Seconds of steps as a run would measure them, with noise: what verdicts are found in."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ddpkit.step_times import EXCHANGE, PHASES, STEP, SecondOfSteps

TYPICAL = {
    "data": 0.002,
    "move": 0.001,
    "forward": 0.030,
    "backward": 0.060,
    "optimizer": 0.005,
    "other": 0.002,
}


@dataclass
class Run:
    """A run whose ranks take typical times, with noise, but for what is planted.

    Attributes:
        late: extra seconds by rank and phase, in each window.
        exchange: seconds of the exchange itself.
        spread: of the sizes of batches, around 1, against the mean of the window; times follow.
        leak: bytes by rank, in each second.
        more: fields of each second.
    """

    world_size: int = 2
    noise: float = 0.03
    late: dict[tuple[int, str], float] = field(default_factory=dict)
    exchange: float = 0.004
    spread: float = 0.0
    leak: dict[int, float] = field(default_factory=dict)
    more: dict = field(default_factory=dict)
    windows: int = 8
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.number = 0

    def window(self):
        """Return the phases and the size of a batch, of each rank."""
        sizes = [
            1000.0 * self.random.uniform(1.0 - self.spread, 1.0 + self.spread)
            for _ in range(self.world_size)
        ]
        rows = []
        for rank, size in enumerate(sizes):
            row = {
                name: value * self.random.uniform(1.0, 1.0 + self.noise)
                for name, value in TYPICAL.items()
            }
            for name in ("forward", "backward"):
                row[name] *= size / 1000.0
            for (whose, name), extra in self.late.items():
                if whose == rank:
                    row[name] += extra
            rows.append(row)
        last = max(sum(row.values()) for row in rows)
        for row in rows:
            row[EXCHANGE] = last - sum(row.values()) + self.exchange * (self.world_size > 1)
            row[STEP] = sum(row[phase] for phase in PHASES)
        return rows, sizes

    def second(self):
        """Return the next second."""
        windows = [self.window() for _ in range(self.windows)]
        ranks = range(self.world_size)
        self.number += 1
        return SecondOfSteps(
            epoch=1,
            step=self.number * self.windows,
            optimizer_step=self.number * self.windows,
            seconds=1.0,
            windows=self.windows,
            world_size=self.world_size,
            phases=[
                {
                    name: median([rows[rank][name] for rows, _ in windows])
                    for name in (*PHASES, STEP)
                }
                for rank in ranks
            ],
            samples=[16.0] * self.world_size,
            sizes=[median([sizes[rank] for _, sizes in windows]) for rank in ranks],
            memory=[{"rss": 1e9 + self.leak.get(rank, 0.0) * self.number} for rank in ranks],
            exchanged_bytes=50_400_000 if self.world_size > 1 else 0,
            single_sizes=[[sizes[rank] for _, sizes in windows] for rank in ranks],
            single_own=[
                [rows[rank][STEP] - rows[rank][EXCHANGE] for rows, _ in windows] for rank in ranks
            ],
            single_exchange=[[rows[rank][EXCHANGE] for rows, _ in windows] for rank in ranks],
            **self.more,
        )

    def seconds(self, count):
        return [self.second() for _ in range(count)]


def median(values):
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def without_windows(second):
    """Return a second in which no single windows have travelled."""
    return replace(second, single_sizes=None, single_own=None, single_exchange=None)
