"""The loader is the limit: ranks wait for their batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ddpkit.step_times.phases import DATA
from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import duration, percent, rank_words, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.step_times.verdicts.history import History, Stretch

KIND = "slow_data"
#: Of a step, in which a typical rank waits for its batch.
SHARE = 0.25
#: Seconds of that wait for a batch, at least: shorter ones are no fault of a loader.
FEWEST_SECONDS = 0.001


MEASURE = (
    "`python -m ddpkit doctor --recipe SCRIPT [YAML]` measures the loader alone, and says how many "
    "workers would do."
)


def typical_wait(stretch: Stretch) -> float:
    """Return the seconds in which a typical rank waits for its batches; of two ranks, the quicker.

    One slow rank is a late rank, not a slow loader.
    """
    waits = np.sort(stretch.of_phase(DATA))
    return float(waits[(len(waits) - 1) // 2])


class SlowData:
    """Finds that waiting for batches takes much of most of the last seconds, on most ranks."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict if it is so."""
        batches = max(history.newest.last.batches_per_window, 1.0)
        if not history.agrees(
            lambda stretch: (
                typical_wait(stretch) >= max(SHARE * stretch.step, FEWEST_SECONDS * batches)
            )
        ):
            return
        waits = history.typical(lambda stretch: stretch.of_phase(DATA))
        rank = int(waits.argmax())
        seconds = float(waits[rank])
        yield Verdict(
            kind=KIND,
            phase=DATA,
            seconds=seconds,
            share=seconds / history.step,
            what="The loader is the limit: the step waits for its batches.",
            how_much=self._how_much(history, rank, seconds),
            advice=self._advice(history.num_workers),
        )

    def _how_much(
        self,
        history: History,
        rank: int,
        seconds: float,
    ) -> str:
        """Say what the slowest loader delivers, and what the step could take without a wait."""
        samples = float(history.typical(lambda stretch: stretch.samples)[rank])
        step = history.step
        # With workers the loader works all the time; without, in the wait alone.
        loader = samples / (step if history.num_workers else seconds)
        without_wait = samples / max(step - seconds, 1e-9)
        workers = ""
        if history.num_workers is not None:
            workers = f" with num_workers={history.num_workers}"
        who = rank_words(rank, history.host(rank))
        return (
            f"{who} waits {duration(seconds)} of a step of {duration(step)} "
            f"({percent(seconds / step)}); its loader delivers {rate(loader)} samples/s{workers}, "
            f"and the step alone could take {rate(without_wait)}."
        )

    def _advice(self, num_workers: int | None) -> str:
        if num_workers:
            advice = (
                f"Try more than num_workers={num_workers} if there are cores for them, a larger "
                "prefetch_factor, less work for a sample, or data in larger files on a nearer disk."
            )
        else:
            advice = (
                "Try num_workers=2 or more in the loader's options: batches are then made beside "
                "the step. Or do less work for a sample."
            )
        return f"{advice} {MEASURE}"
