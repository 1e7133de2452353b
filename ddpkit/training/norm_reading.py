"""When the host reads the norm of the gradients on a GPU: before the optimizers step, or one step
later.

Both have the same bits. Which is quicker depends on whether the GPU or the host is the slower one,
so that a run tries both in its first steps and keeps the quicker one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpkit.distributed import sum_over_ranks
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

SETTLING_STEPS = 24  # in which kernels are chosen or compiled, and loaders begin
STEPS_OF_A_TURN = 16
TURNS = (True, False, False, True, True, False)  # later or first: a drift counts for both
CHANGING_STEPS = 2  # at the beginning of a turn: the GPU still has what the turn before has queued
TRIED_STEPS = SETTLING_STEPS + STEPS_OF_A_TURN * len(TURNS)
COUNTED_SHARE = 0.75  # of a way's steps, the quickest: a save or a validation is in few of them

CHOSEN = (
    "The gradients' norm is read %s: a step has taken %.3f ms where it is read one step later, and "
    "%.3f ms where it is read before the optimizers step."
)
IN_WORDS = {True: "one step later", False: "before the optimizers step"}


class NormReading:
    """Tries both ways in the first optimizer steps of a run, and keeps the quicker one.

    Args:
        clock: returns seconds.

    Attributes:
        is_later: whether the present step is read later, where it can be.
        is_chosen: whether the run has chosen; up to then it tries.
        has_read_later: whether any step was read later, which not each optimizer can do.

    Ranks: all; they agree once, in the step that ends the trial.

    Example:
        >>> reading = NormReading()
        >>> reading.begin_step(), reading.is_chosen
        (True, False)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_later = True
        self.is_chosen = False
        self.has_read_later = False
        self._clock = clock
        self._step = 0
        self._began = 0.0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def begin_step(self) -> bool:
        """Begin an optimizer step; return whether its norm may be read later."""
        if not self.is_chosen:
            self._try_step()
        return self.is_later

    def _try_step(self) -> None:
        """Note how long the step before has taken, and say how this one is read."""
        now = self._clock()
        number = self._step - SETTLING_STEPS  # of the step before, in the turns
        if number > 0 and (number - 1) % STEPS_OF_A_TURN >= CHANGING_STEPS:
            self._seconds[self.is_later].append(now - self._began)
        self._began = now
        turn = max(number, 0) // STEPS_OF_A_TURN
        if turn < len(TURNS):
            self.is_later = TURNS[turn]
            self._step += 1
        else:
            self._choose()

    def _choose(self) -> None:
        """Keep what was quicker on all ranks together.

        The way of the first steps stays where a rank could never read later: what is compared
        there is not the two ways.
        """
        own = [_typical(self._seconds[is_later]) for is_later in (True, False)]
        later, first, missing = sum_over_ranks([*own, float(not self.has_read_later)], "norm")
        self.is_later = later <= first or missing > 0
        self.is_chosen = True
        self._seconds = {}
        if not missing:
            logger.debug(CHOSEN, IN_WORDS[self.is_later], 1e3 * own[0], 1e3 * own[1])


def _typical(seconds: list[float]) -> float:
    """Return the mean of the quickest: steps of several kinds, as those of two optimizers, all
    count.
    """
    quickest = sorted(seconds)[: int(COUNTED_SHARE * len(seconds))]
    return sum(quickest) / len(quickest)
