"""GPUs that run below their clock: heat, power, or a brake of the machine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import percent, rank_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.step_times.verdicts.history import History, Stretch

KIND = "throttled"
#: Of its highest clock: at more of it, a GPU is not slow.
SHARE = 0.85

COOL = "Look at the fans and the air of this GPU; nvidia-smi -q -d PERFORMANCE tells more."
POWER = (
    "Look at its limit (nvidia-smi -q -d POWER); an administrator can raise it with nvidia-smi -pl."
)
SUPPLY = "Look at the power supply and the cables of this machine, or ask who runs it."

#: Bits of NVML (nvmlClocksEventReasons), in words, with what to do; of several the first counts.
REASONS = {
    0x40: ("its hardware is too hot", COOL),
    0x20: ("it is too hot", COOL),
    0x80: ("the machine's power brake is on", SUPPLY),
    0x08: ("its hardware slows it down, by heat or power", SUPPLY),
    0x04: ("it is at its power limit", POWER),
}


def reason(stretch: Stretch, rank: int) -> int:
    """Return why a GPU runs below its clock, the first of :data:`REASONS`; 0: it does not."""
    clocks = stretch.last.gpu_clocks
    if clocks is None or clocks[rank]["share"] > SHARE:
        return 0
    bits = int(clocks[rank]["reasons"])
    return next((bit for bit in REASONS if bits & bit), 0)


def _is_slow(stretch: Stretch, *, rank: int) -> bool:
    return reason(stretch, rank) > 0


class Throttling:
    """Finds GPUs that are slow in most of the last seconds."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict for each of them."""
        newest = history.newest
        for rank in range(newest.last.world_size):
            bit = reason(newest, rank)
            if bit and history.agrees(functools.partial(_is_slow, rank=rank)):
                yield self._verdict(history, rank, bit)

    def _verdict(
        self,
        history: History,
        rank: int,
        bit: int,
    ) -> Verdict:
        words, advice = REASONS[bit]
        share = float(
            history.typical(lambda stretch: (stretch.last.gpu_clocks or [])[rank]["share"])
        )
        host = history.host(rank)
        return Verdict(
            kind=KIND,
            rank=rank,
            host=host,
            share=share,
            what=f"{rank_words(rank, host)}: the GPU is throttled, because {words}.",
            how_much=f"It runs at {percent(share)} of its highest clock.",
            advice=advice,
        )
