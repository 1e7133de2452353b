"""Memory that grows from step to step, long after the beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import rank_words, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ddpkit.step_times.verdicts.history import History
    from ddpkit.step_times.verdicts.memory_record import MemoryPoint

KIND = "memory_grows"
#: Points and seconds that have to be there.
FEWEST_POINTS = 12
FEWEST_SECONDS = 8.0
#: Of the points, that are left out at the beginning: caches fill, allocators warm up.
WARM_UP = 0.25
PARTS = 4
#: Of the memory, and in bytes, that it has to grow by over all parts.
SHARE = 0.03
FEWEST_BYTES = 32e6
#: What the last part has to grow by, against the mean: what warms up grows less and less.
LAST_RISE = 0.5
#: Of the growth of the fastest rank: with so much, another one grows alike.
ALIKE = 0.5

NAMES = {"allocated": "GPU memory", "rss": "memory of the process"}
ADVICE = (
    "Look for what each batch leaves: losses in a list or a sum without .detach() or .item(), "
    "outputs, a cache without a limit, retain_graph."
)


@dataclass(frozen=True)
class _Growth:
    """Of one rank: bytes in all, per optimizer step, and at the end."""

    total: float
    per_step: float
    end: float


class MemoryGrowth:
    """Finds ranks whose memory grows evenly.

    Ranks: local.
    """

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict for the rank that grows fastest; for all together, if they grow alike."""
        points = history.memory.points
        if len(points) < FEWEST_POINTS or points[-1].at < FEWEST_SECONDS:
            return
        late = points[int(WARM_UP * len(points)) :]
        for name in NAMES:
            if name in late[-1].used[0]:
                yield from self._of_memory(history, name, late)
                return  # on a GPU the memory of the process tells little

    def _of_memory(
        self, history: History, name: str, points: list[MemoryPoint]
    ) -> Iterator[Verdict]:
        used = np.array([[rank[name] for rank in point.used] for point in points])
        steps = np.array([point.optimizer_step for point in points], dtype=np.float64)
        found = {rank: growth_of(steps, used[:, rank]) for rank in range(used.shape[1])}
        growing = {rank: growth for rank, growth in found.items() if growth is not None}
        if not growing:
            return
        rank = max(growing, key=lambda one: growing[one].per_step)
        fast = growing[rank]
        alike = sum(one.per_step >= ALIKE * fast.per_step for one in growing.values())
        is_of_all = alike == used.shape[1] and alike > 1
        host = None if is_of_all else history.host(rank)
        who = "All ranks" if is_of_all else rank_words(rank, host)
        yield Verdict(
            kind=KIND,
            rank=None if is_of_all else rank,
            host=host,
            what=f"{who}: the {NAMES[name]} grows from step to step.",
            how_much=(
                f"It grew by {size(fast.per_step)} a step, {size(fast.total)} in "
                f"{steps[-1] - steps[0]:.0f} steps, and is {size(fast.end)} now."
            ),
            advice=ADVICE,
        )


def growth_of(steps: NDArray[np.float64], used: NDArray[np.float64]) -> _Growth | None:
    """Return how much memory grows, if it does so in each part of the time, and does not slow down.

    Args:
        steps: optimizer steps at each point.
        used: bytes at each point.

    Ranks: local.

    Example:
        >>> growth_of(np.arange(16.0), 1e9 + 1e8 * np.arange(16.0)).per_step
        100000000.0
        >>> growth_of(np.arange(16.0), np.full(16, 1e9)) is None
        True
    """
    levels = np.array([np.median(part) for part in np.array_split(used, PARTS)])
    middles = np.array([np.median(part) for part in np.array_split(steps, PARTS)])
    rises = np.diff(levels)
    total = float(levels[-1] - levels[0])
    is_even = rises.min() > 0 and rises[-1] >= LAST_RISE * rises.mean()
    if not is_even or total < max(FEWEST_BYTES, SHARE * float(levels[0])):
        return None
    per_step = total / max(float(middles[-1] - middles[0]), 1.0)
    return _Growth(total=float(used[-1] - used[0]), per_step=per_step, end=float(used[-1]))
