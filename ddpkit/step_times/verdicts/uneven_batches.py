"""Batches of one step that differ in size from rank to rank, so that all wait for the largest.

Lengths that are padded, or numbers of tokens, differ from batch to batch: each step another rank
may be the last. Medians hide it, so windows are compared one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ddpkit.step_times.verdicts.size_effect import SizeEffect
from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import duration, percent, rank_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.step_times.verdicts.history import History

KIND = "uneven_batches"
#: Of a step, that an average rank waits for the largest batch.
SHARE = 0.08
#: By how much the largest batch is above the mean, as a share of it.
LARGER = 0.1
#: Of sizes and times, at least.
CORRELATION = 0.5
#: Of the windows in which a rank has the largest batch, if it is named.
ALWAYS = 0.8
FEWEST_WINDOWS = 10

ADVICE = (
    "Give all ranks batches of like size in a step: group samples by length "
    "(DynamicBatchSampler, or sorting='ascending' with shuffled batches), and cut very long ones."
)


class UnevenBatches:
    """Finds that the sizes of the batches explain much of the ranks' waiting for each other."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict if it is so."""
        if history.newest.last.world_size == 1:
            return
        effect = SizeEffect.of(history.recent)
        if effect.relative.shape[1] < FEWEST_WINDOWS:
            return
        if effect.largest < LARGER or effect.correlation < CORRELATION:
            return
        if effect.lost < SHARE * history.step:
            return
        yield self._verdict(history, effect)

    def _verdict(self, history: History, effect: SizeEffect) -> Verdict:
        rank = effect.always_largest(ALWAYS)
        host = None if rank is None else history.host(rank)
        whose = "" if rank is None else f" {rank_words(rank, host)} has it in nearly all steps."
        return Verdict(
            kind=KIND,
            rank=rank,
            host=host,
            seconds=effect.lost,
            share=effect.lost / history.step,
            what=f"The ranks have batches of uneven size, and all wait for the largest.{whose}",
            how_much=(
                f"The largest of a step is {percent(effect.largest)} above the mean; an average "
                f"rank waits {duration(effect.lost)} of {duration(history.step)} for it "
                f"({percent(effect.lost / history.step)}); sizes and times correlate by "
                f"{effect.correlation:.2f}."
            ),
            advice=ADVICE,
        )
