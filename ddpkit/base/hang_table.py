"""Where the ranks are, as the table that a hang or a failure prints."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ddpkit.base.rank_status import RankStatus

if TYPE_CHECKING:
    from collections.abc import Iterable


def table(ranks: Iterable[RankStatus], silent: dict[int, float] | None = None) -> str:
    """Format the positions of the ranks as a table. Ranks that only wait for others come last.

    Args:
        ranks: their reports.
        silent: for ranks without heartbeats: seconds since the last one.

    Returns:
        A line per rank; of many that wait at the same place only one.

    Example:
        >>> stuck = RankStatus(2, "a", 7, "TRAIN", 1, 30, 31.0, "data.py:12 in __getitem__")
        >>> waiting = [
        ...     RankStatus(n, "a", n + 5, "TRAIN", 1, 30, 30.0, "train.py:3", True)
        ...     for n in range(2)
        ... ]
        >>> print(table([*waiting, stuck]))
        rank 2 (a, pid 7): in TRAIN of epoch 1 at step 30, for 31 s at data.py:12 in __getitem__
        rank 0-1: in TRAIN of epoch 1 at step 30, for 30 s waiting for other ranks at train.py:3
    """
    silent = silent or {}
    guilty: list[str] = []
    waiting: dict[tuple[str, str], list[RankStatus]] = {}
    for status in ranks:
        place = status.place() or "outside of fit and evaluate"
        if status.rank in silent:
            guilty.append(f"{status.name()}: silent for {silent[status.rank]:.0f} s, last {place}")
        elif status.waits:
            waiting.setdefault((place, status.where), []).append(status)
        else:
            guilty.append(
                f"{status.name()}: {place}, for {status.seconds:.0f} s"
                f"{status.where and f' at {status.where}'}"
            )
    for (place, where), members in waiting.items():
        seconds = max(member.seconds for member in members)
        numbers = spans(member.rank for member in members)
        guilty.append(
            f"rank {numbers}: {place}, for {seconds:.0f} s waiting for other ranks at {where}"
        )
    return "\n".join(guilty)


def spans(numbers: Iterable[int]) -> str:
    """Write numbers in few words.

    Example:
        >>> spans([7, 0, 1, 2, 3])
        '0-3, 7'
    """
    pairs = enumerate(sorted(numbers))  # in a run of numbers each is as far from its place
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(pairs, lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
