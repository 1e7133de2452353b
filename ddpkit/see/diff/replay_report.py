"""What ``diff --replay`` says of the steps that two runs have made again, in lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.see.diff.replay import FROM_BEGINNING, FROM_CHECKPOINT
from ddpkit.see.diff.report import WORDS, difference_lines

if TYPE_CHECKING:
    from ddpkit.see.diff.replay import Replay, ReplayedRun

HEADING = "Made again, with a record of each step:"
MADE = "  {}: steps {} to {}, {}: {}"
AS_RECORDED = "as recorded"
NOT_COMPARED = "nothing was recorded of them"
OTHERWISE = "step {} is other than recorded ({})"
EQUAL = "Now both are equal, up to step {}: the difference has not come again."
ONE_IS_OTHER = (
    "{0} has not done again what it had recorded, and {1} has. So look at {0}: a bit that was "
    "changed on its machine, or code, data, versions or another device since then."
)
BOTH_ARE_OTHER = (
    "Neither run has done again what it had recorded: code, data, versions or the device are "
    "others than then, or the recipe is not deterministic."
)
COMES_AGAIN = "Both runs have done again what they had recorded: the difference comes again."


def replay_lines(replay: Replay) -> list[str]:
    """Return what is said of a replay.

    Args:
        replay: of two runs.

    Ranks: local.
    """
    lines = ["", HEADING]
    for name, run in zip("AB", replay.runs, strict=True):
        lines.append(_made(name, run))
        lines += [f"  {name}: {note}." for note in run.notes]
    lines.append("")
    found = replay.comparison
    if found.step is None:
        lines.append(EQUAL.format(found.common[-1]))
    else:
        lines += difference_lines(found, found.step)
    return [*lines, "", _verdict(replay)]


def _made(name: str, run: ReplayedRun) -> str:
    origin = FROM_BEGINNING if run.source is None else FROM_CHECKPOINT.format(run.source, run.after)
    steps = run.run.steps
    return MADE.format(name, min(steps), max(steps), origin, _state(run))


def _state(run: ReplayedRun) -> str:
    if not run.compared:
        return NOT_COMPARED
    if not run.other:
        return AS_RECORDED
    first = min(run.other)
    fields = [WORDS[name] for name in run.other[first]]
    return OTHERWISE.format(first, ", ".join(fields))


def _verdict(replay: Replay) -> str:
    """Return what follows from what each run has done again."""
    others = [name for name, run in zip("AB", replay.runs, strict=True) if run.other]
    if not others:
        return COMES_AGAIN
    if len(others) == 1:
        right = "B" if others[0] == "A" else "A"
        return ONE_IS_OTHER.format(others[0], right)
    return BOTH_ARE_OTHER
