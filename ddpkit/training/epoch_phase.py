"""How far the current epoch of a call of ``fit`` is: what a checkpoint that is made now has to say
of it.
"""

from __future__ import annotations

import enum


class EpochPhase(enum.Enum):
    """The phases of an epoch. Which stage runs, and in which hook, does not matter for a
    checkpoint.

    Ranks: local; equal on all ranks.

    Example:
        >>> EpochPhase.TRAINED in BETWEEN_PASSES, EpochPhase.IN_PASS in BETWEEN_PASSES
        (True, False)
    """

    #: No epoch of this call has begun, and the run stands between two epochs.
    OUTSIDE = enum.auto()
    #: A checkpoint from the middle of an epoch was recovered, and that epoch has not begun again.
    RECOVERED = enum.auto()
    #: The loop has asked for an epoch; its training stage has not begun, or the recipe trains in a
    #: way of its own.
    ASKED = enum.auto()
    #: ``on_stage_start`` of the training stage.
    BEGUN = enum.auto()
    #: The training stage reads its batches.
    IN_PASS = enum.auto()
    #: The pass is over; the hook after it, or the validation, runs.
    TRAINED = enum.auto()
    #: Its validation is over, too.
    OVER = enum.auto()


#: Phases with a training position of their own: the end of the last pass, or what was recovered.
BETWEEN_PASSES = frozenset(
    {EpochPhase.RECOVERED, EpochPhase.BEGUN, EpochPhase.TRAINED, EpochPhase.OVER}
)
