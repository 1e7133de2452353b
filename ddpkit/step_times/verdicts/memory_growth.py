"""Memory that grows from step to step, long after the beginning."""

from __future__ import annotations

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
FEWEST_POINTS = 16
FEWEST_SECONDS = 15.0
#: Of the points, that are left out at the beginning: caches fill, allocators warm up.
WARM_UP = 0.25
PARTS = 4
#: Of the points of a part, that lie below its level: an allocator takes more for a while, and
#: gives it back.
LOWER = 10.0
#: Of the memory, that it has to grow by over all parts. torch counts what it allocates exactly;
#: a process may keep what it has given back. A loop by hand with weights of 17 MB came and went
#: by 16 % on two ranks.
SHARES = {"allocated": 0.03, "rss": 0.2}
FEWEST_BYTES = 64e6
#: What each part has to grow by, against the mean. What warms up grows less and less, and what
#: an allocator keeps comes at once.
EVEN_RISE = 0.5
#: Of the growth of the fastest rank: with so much, another one grows alike.
ALIKE = 0.5

NAMES = {"allocated": "GPU memory", "rss": "memory of the process"}
ADVICE = (
    "Look for what each batch leaves: losses in a list or a sum without .detach() or .item(), "
    "outputs, a cache without a limit, retain_graph."
)


class MemoryGrowth:
    """Finds ranks whose memory grows evenly."""

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
        self,
        history: History,
        name: str,
        points: list[MemoryPoint],
    ) -> Iterator[Verdict]:
        used = np.array([[rank[name] for rank in point.used] for point in points])
        if (used.max(axis=0) - used.min(axis=0)).max() < FEWEST_BYTES:
            return  # mostly so, and known without percentiles, which take long
        steps = np.array([point.optimizer_step for point in points], dtype=np.float64)
        per_step = growth_per_step(steps, used, SHARES[name])
        rank = int(per_step.argmax())
        fastest = float(per_step[rank])
        if not fastest:
            return
        is_of_all = len(per_step) > 1 and bool((per_step >= ALIKE * fastest).all())
        host = None if is_of_all else history.host(rank)
        who = "All ranks" if is_of_all else rank_words(rank, host)
        end = float(used[-1, rank])
        grown = fastest * float(steps[-1] - steps[0])
        yield Verdict(
            kind=KIND,
            rank=None if is_of_all else rank,
            host=host,
            what=f"{who}: the {NAMES[name]} grows from step to step.",
            how_much=(
                f"It grew by {size(fastest)} a step, about {size(grown)} in "
                f"{steps[-1] - steps[0]:.0f} steps, and is {size(end)} now."
            ),
            advice=ADVICE,
        )


def growth_per_step(
    steps: NDArray[np.float64],
    used: NDArray[np.float64],
    share: float,
) -> NDArray[np.float64]:
    """Return how much the memory of each rank grows; 0 where it stands still, or slows down.

    Args:
        steps: optimizer steps at each point.
        used: bytes, shape ``(points, ranks)``.
        share: of the memory, that it has to grow by.

    Example:
        >>> steps = np.arange(16.0)
        >>> used = np.stack([1e9 + 1e8 * steps, np.full(16, 1e9)], axis=1)
        >>> growth_per_step(steps, used, share=0.2).tolist()
        [100000000.0, 0.0]
    """
    parts = np.array_split(used, PARTS)
    levels = np.stack([np.percentile(part, LOWER, axis=0) for part in parts])
    middles = [float(np.median(part)) for part in np.array_split(steps, PARTS)]
    rises = np.diff(levels, axis=0)
    begin, *_, end = (np.median(part, axis=0) for part in parts)
    total = end - begin
    least = rises.min(axis=0)
    is_even = (least > 0) & (least >= EVEN_RISE * rises.mean(axis=0))
    is_much = total >= np.maximum(FEWEST_BYTES, share * levels[0])
    return np.where(
        is_even & is_much,
        total / max(middles[-1] - middles[0], 1.0),
        0.0,
    )
