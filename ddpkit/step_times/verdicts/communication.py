"""The exchange of gradients takes much of a step, though no rank is late."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import percent, rate, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.step_times.verdicts.history import History, Stretch

KIND = "communication"
#: Of a step, in which the last rank to come waits.
SHARE = 0.25
#: Of gradients in a step. Below it a slow exchange tells of busy cores, not of many bytes.
FEWEST_BYTES = 1_000_000

ADVICE = (
    "Try --ddp_comm_hook=bf16 (half the bytes), larger batches, or --grad_accumulation_factor "
    "(one exchange for several batches)."
)


def pure_exchange(stretch: Stretch) -> float:
    """Return the seconds of a window in which the last rank to come waits: no one is late any more.

    Ranks: local.
    """
    return float(np.median(stretch.exchange.min(axis=0)))


class Communication:
    """Finds that the exchange itself takes a large share of most of the last seconds."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict if it is so."""
        sent = history.newest.last.exchanged_bytes
        if history.newest.last.world_size == 1 or sent < FEWEST_BYTES:
            return
        if not history.agrees(lambda stretch: pure_exchange(stretch) >= SHARE * stretch.step):
            return
        seconds = float(history.typical(pure_exchange))
        share = seconds / history.step
        yield Verdict(
            kind=KIND,
            seconds=seconds,
            share=share,
            what="The exchange of gradients is the limit.",
            how_much=(
                f"{percent(share)} of a step waits for gradients, though no rank is late: "
                f"{size(sent)} a step at {rate(sent / seconds / 1e9)} GB/s."
            ),
            advice=ADVICE,
        )
