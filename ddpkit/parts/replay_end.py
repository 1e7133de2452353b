"""Ends a replay: a run that makes some of its steps again, for ``python -m ddpkit diff --replay``.

The records go into a log in the scratch folder, and nowhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import replacing
from ddpkit.distributed import run_on_main
from ddpkit.errors import RunStopped
from ddpkit.parts.part import Part
from ddpkit.train_logger import set_run_log

if TYPE_CHECKING:
    from ddpkit.launch import SlicePlan


class ReplayEnd(Part):
    """Ends the process after the last step of a replay, once that step has its record.

    Args:
        plan: of the replay.

    Ranks: all; they have made the same optimizer steps, and end together.
    """

    def __init__(self, plan: SlicePlan) -> None:
        self._plan = plan

    def on_fit_start(self, brain: Any) -> None:
        """Let records go into the scratch folder."""
        # a slice has no run log: its experiment folder is left alone
        set_run_log(self._plan.replayed_log)

    def after_step(self, brain: Any) -> None:
        """End after the last step.

        Raises:
            RunStopped: with code 0.
        """
        step = brain.optimizer_step
        if step < self._plan.replayed_to:
            return
        # the result is complete before any rank ends: who waits takes its absence for a failure
        run_on_main(_write, args=(Path(self._plan.result), step))
        raise RunStopped(0, "slice")


def _write(path: Path, step: int) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
