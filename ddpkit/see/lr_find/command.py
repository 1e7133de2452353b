"""The steps of the command: train with rising rates, read the curve, print."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from ddpkit.launch import SlicePlan
from ddpkit.run import rates_between
from ddpkit.see.amounts import counted
from ddpkit.see.json_file import write_json
from ddpkit.see.lr_find.curve import LrCurve, Suggestion, smoothed
from ddpkit.see.lr_find.request import LrFindRequest
from ddpkit.see.orderly_end import ended_in_order
from ddpkit.see.scale.rounds import scratch_folder
from ddpkit.see.scale.slice_process import run_plan

ROWS = 12  # of the table
BAR = 40  # characters, of the highest loss that is shown

ENDED = {
    "all tried": "",
    "not finite": "The next step had a loss that is not finite, and the training ended there.",
    "diverged": "There the loss had left its course, and the training ended.",
    "time over": "There the time was over (--seconds), and the training ended.",
}


def run_lr_find(
    request: LrFindRequest,
    say: Callable[[str], object],
    tell: Callable[[str], object],
) -> int:
    """Train a recipe with rising learning rates, and say which one the losses suggest.

    Args:
        request: what to try, and what to write.
        say: is given the answer.
        tell: is told what the recipe says, if it takes long.

    Returns:
        0; 1 if the curve suggests no rate.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.

    Ranks: one process, outside of a launch.
    """
    request.check()
    with ended_in_order(), scratch_folder() as folder:
        plan = SlicePlan(
            str(folder),
            str(folder / "result.json"),
            max_seconds=request.max_seconds,
            learning_rates=rates_between(request.first, request.last, request.steps),
        )
        found = run_plan(request.recipe, request.cell, plan, tell)
        curve = LrCurve(recipe=request.recipe.shown, **found)
        say(report(curve))
        _write(curve, request)
    return 0 if curve.suggestion.rate is not None else 1


def _write(curve: LrCurve, request: LrFindRequest) -> None:
    write_json(request.json, curve.as_dict())
    if request.plot is not None and curve.losses:
        from ddpkit.see.lr_find.plot import draw  # loads matplotlib

        draw(curve, Path(request.plot))


def report(curve: LrCurve) -> str:
    """Return the curve as a table of its smoothed losses, and the suggestion.

    Args:
        curve: as measured.
    """
    found = curve.suggestion
    number = len(curve.losses)
    who = counted(curve.world_size, "process")
    lines = [f"{curve.recipe}, {counted(number, 'step')} on {who}.", ""]
    if number:
        lines += [*_table(curve, found), ""]
    if ENDED[curve.ended]:
        lines += [ENDED[curve.ended]]
    lines += [
        f"No learning rate is suggested: {found.why}."
        if found.rate is None
        else f"Learning rate {found.rate:.1e}: {found.why}."
    ]
    return "\n".join(lines)


def _table(curve: LrCurve, found: Suggestion) -> list[str]:
    means = smoothed(curve.losses)
    last = len(means) - 1
    shown = {round(row * last / (ROWS - 1)) for row in range(ROWS)}
    marks = {found.lowest: "lowest"}
    if found.position is not None:
        marks[found.position] = "steepest"
    at = sorted(shown | marks.keys())
    least = min(means[row] for row in at)
    # a loss that explodes would leave nothing of the others
    most = min(max(means[row] for row in at), max(means[0], least) * 2)
    width = (most - least) or 1.0
    lines = ["learning rate       loss"]
    for row in at:
        share = min(max((means[row] - least) / width, 0.0), 1.0)
        bar = "#" * math.ceil(BAR * share)
        mark = f"  <- {marks[row]}" if row in marks else ""
        lines.append(f"{curve.rates[row]:13.2e} {means[row]:10.4g}  {bar}{mark}".rstrip())
    return lines
