"""A GPU that waits for the host: the processor does not send work fast enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ddpkit.step_times.medians import median
from ddpkit.step_times.verdicts.slow_data import SHARE as DATA_SHARE, typical_wait
from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import duration, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpkit.step_times.verdicts.history import History, Stretch

KIND = "host_bound"
#: Of the measured windows, that the GPU had done when the host came to their end.
SHARE = 0.5

ADVICE = (
    "Try larger batches or --compile. Look for .item(), .cpu() and prints of tensors in the step."
)


def idle_share(stretch: Stretch) -> float:
    """Return the share of the windows in which the GPU was done first, on a typical rank."""
    shares = stretch.last.is_host_bound
    return median(shares) if shares else 0.0


class HostBound:
    """Finds that the GPU is done first in most windows, though batches are there."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict if it is so."""
        if not history.agrees(
            lambda stretch: (
                idle_share(stretch) >= SHARE and typical_wait(stretch) < DATA_SHARE * stretch.step
            )
        ):
            return
        share = float(history.typical(idle_share))
        yield Verdict(
            kind=KIND,
            seconds=history.step,
            share=share,
            what="The GPU waits for the host, which does not send work fast enough.",
            how_much=(
                f"In {percent(share)} of the steps the GPU was done when the host came to their "
                f"end; a step takes {duration(history.step)}."
            ),
            advice=ADVICE,
        )
