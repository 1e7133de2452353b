"""A rank for which all others wait, and the phase in which it is late.

An average of gradients makes all ranks equally slow. Clocks of several machines need not agree, but
no clock is needed: the rank that waits least came last.

On a busy machine a rank without a fault comes last for seconds, because others have its core. So a
rank is called late only if it is late in nearly all stretches and in most of the single windows,
and by more than its lateness differs from stretch to stretch. Where all ranks of a machine wait for
its cores, a longer record has to say so.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ddpkit.step_times.phases import (
    BACKWARD,
    DATA,
    EXCHANGE,
    FORWARD,
    MOVE,
    OPTIMIZER,
    OTHER,
    PHASES,
)
from ddpkit.step_times.verdicts.history import AGREEING, LOOKED_AT, above_others
from ddpkit.step_times.verdicts.size_effect import SizeEffect
from ddpkit.step_times.verdicts.verdict import Verdict
from ddpkit.step_times.verdicts.wording import PHASE_WORDS, duration, percent, rank_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ddpkit.step_times.verdicts.history import History, Stretch

KIND = "late_rank"
#: Of a step, by which a rank is late in most stretches. Measured with `benchmarks.planted_delays`
#: on two cores that ten threads wanted: 18 clean runs of several ranks reached 0.06 at most, and a
#: delay of 30 % of a step alone at least 0.12.
SHARE = 0.1
#: Of a step, by which it is late in a single window: those differ more than stretches.
SHARE_OF_WINDOW = 0.05
#: Of the single windows, in which it has to be late.
MOST_WINDOWS = 0.5
#: Of its lateness, that the sizes of its batches may explain.
EXPLAINED = 0.5
#: Of its share of a step: with so much more waiting for cores, its machine is too busy.
BUSY = 0.5

ADVICE = {
    DATA: "Look at its loader and its disk: more workers, or data on a local disk.",
    MOVE: "Look at what compute_forward does before it calls the model: features, copies, prints.",
    FORWARD: "Look at its device (other jobs, clocks, heat), and for branches of its own.",
    BACKWARD: "Look at its device (other jobs, clocks, heat), and for hooks of its own.",
    OPTIMIZER: "Look at what only this rank does in its optimizer step, and at its device.",
    OTHER: "Look at hooks that run on this rank only: files, images and logs that it writes.",
}


def is_steadily_late(
    lateness: Sequence[float] | NDArray[np.float64],
    late_windows: Sequence[float],
) -> bool:
    """Say whether a rank is late all the time, and not by turns with the others.

    Args:
        lateness: of the rank in each stretch, as a share of a step.
        late_windows: the part of the single windows of each stretch in which it was late, 0 to 1.

    Example:
        >>> is_steadily_late([0.2, 0.3, 0.2], [1.0, 0.8, 0.9])
        True
        >>> is_steadily_late([0.9, -0.6, 0.4], [0.9, 0.1, 0.4])
        False
    """
    found = np.asarray(lateness)
    low, typical, high = np.quantile(found, (0.25, 0.5, 0.75))
    noise = (high - low) / 2.0
    is_much = typical >= max(SHARE, noise)
    nearly_always = np.mean(found > 0.0) >= AGREEING / LOOKED_AT
    in_most_windows = np.mean(late_windows) >= MOST_WINDOWS
    return bool(is_much and nearly_always and in_most_windows)


def _is_late(stretch: Stretch, *, rank: int) -> bool:
    return bool(stretch.lateness[rank] >= SHARE * stretch.step)


def _late_windows(stretch: Stretch, rank: int) -> float:
    return float(stretch.late_windows(SHARE_OF_WINDOW)[rank])


def _telling_stretches(history: History, rank: int) -> Sequence[Stretch]:
    """Return the stretches that can tell whether a rank is late; none where they are too few, or do
    not agree.
    """
    if history.is_crowded(rank):
        is_full = len(history.record) == history.record.maxlen
        return history.record if is_full else ()
    is_late = functools.partial(_is_late, rank=rank)
    return history.recent if history.agrees(is_late) else ()


class LateRank:
    """Finds ranks that are late by their own times, in most of the last seconds."""

    kind: ClassVar[str] = KIND

    def find(self, history: History) -> Iterator[Verdict]:
        """Yield a verdict for each of them."""
        if history.newest.last.world_size == 1:
            return
        lateness = history.typical(lambda stretch: stretch.lateness)
        step = history.step
        for rank in np.flatnonzero(lateness >= SHARE * step).tolist():
            stretches = _telling_stretches(history, rank)
            if not stretches:
                continue
            own = np.array([stretch.lateness[rank] for stretch in stretches])
            steps = np.array([stretch.step for stretch in stretches])
            windows = [_late_windows(stretch, rank) for stretch in stretches]
            if not is_steadily_late(own / steps, windows):
                continue
            late = float(np.median(own))
            if SizeEffect.of(history.recent).explains(rank) >= EXPLAINED * late:
                continue  # its batches are larger: a verdict of its own
            yield self._verdict(history, rank, late)

    def _verdict(
        self,
        history: History,
        rank: int,
        late: float,
    ) -> Verdict:
        phase = self._phase(history, rank)
        others = history.newest.last.world_size - 1
        who = "the other rank waits" if others == 1 else f"the other {others} ranks wait"
        share = late / history.step
        host = history.host(rank)
        return Verdict(
            kind=KIND,
            rank=rank,
            host=host,
            phase=phase,
            seconds=late,
            share=share,
            what=f"{rank_words(rank, host)} is late in {PHASE_WORDS[phase]}.",
            how_much=(
                f"It needs {duration(late)} more than the median of the others, "
                f"{percent(share)} of a step of {duration(history.step)}, and {who}."
            ),
            advice=self._advice(history, rank, phase, share),
        )

    def _advice(
        self,
        history: History,
        rank: int,
        phase: str,
        share: float,
    ) -> str:
        """Say what to try; a machine that others keep busy explains more than a phase."""
        waits = history.typical(lambda stretch: stretch.core_waits)
        advice = ADVICE[phase]
        if above_others(waits)[rank] >= BUSY * share:
            advice = (
                f"Its main thread waits for a core {percent(float(waits[rank]))} of the time: look "
                "for other processes on its machine, and for more threads than cores."
            )
        busy = history.newest.busy_words(rank)
        return f"{busy} {advice}" if busy else advice

    def _phase(self, history: History, rank: int) -> str:
        """Return the phase in which a rank loses most against the others."""
        own = [phase for phase in PHASES if phase != EXCHANGE]
        excess = history.typical(
            lambda stretch: [above_others(stretch.of_phase(phase))[rank] for phase in own]
        )
        return own[int(np.argmax(excess))]
