"""What the page says of a run that has no verdict."""

from __future__ import annotations

import numpy as np

from ddpkit.see.report.run_report import RunReport
from ddpkit.step_times import DATA, EXCHANGE, words_of_no_verdict

#: Reports of measured steps, one a second, below which a run can have no verdict.
FEWEST_REPORTS = 5

NOTHING_MEASURED = (
    "No verdict: no steps of a training were measured. A training measures some from its first "
    "second on, unless it has --measure_steps=off."
)


def words_without_verdict(run: RunReport) -> str:
    """Return why a run has no verdict, and on what figures that rests.

    Args:
        run: that has none.
    """
    step = run.median("step.median")
    if step is None:
        return NOTHING_MEASURED
    reports = run.speed["step.median"]
    lengths = run.speed.get("seconds", np.ones(len(reports)))
    seconds = float(np.nansum(lengths))
    if len(reports) < FEWEST_REPORTS:
        return (
            f"No verdict: {seconds:.0f} s of training were measured, which is too little for one. "
            "It needs about five."
        )
    is_alone = (run.median("world_size") or 1) == 1
    return words_of_no_verdict(
        seconds,
        step,
        run.median(f"phases.{DATA}.median") or 0.0,
        None if is_alone else run.median(f"phases.{EXCHANGE}.median"),
    )
