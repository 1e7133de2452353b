"""What this process knows of the data of the present stage: for metrics and gathered tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class StageData:
    """Whether the data of the present stage is divided over the ranks, and which stage was the last
    of that kind.

    Attributes:
        divided: whether each rank has a part of the data of the present stage.
        steps_together: whether each rank has as many batches as the others: in training.
        number: of stages so far.
        last_divided: the number of the last one whose data was divided; -1: there was none.
        may_repeat: whether a step of the training may be made again in smaller parts.
        window: its ``count`` is 0 for a batch that a rank repeats to keep step.

    Ranks: local; alike on all ranks, but for ``window``.
    """

    divided = False
    steps_together = False
    number = 0
    last_divided = -1
    may_repeat = False
    window: Any = SimpleNamespace(count=1)
