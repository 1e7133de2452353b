"""Makes some steps of two runs again, each run from a copy of its nearest checkpoint before they
part.

What is recorded is rare, and does not tell whether a difference comes again. A replay has a record
of each step, and is held against what the run had recorded. Nothing of the runs is written to.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.checkpointing import verify
from ddpkit.errors import ConfigError
from ddpkit.launch import SlicePlan
from ddpkit.see.diff.first_difference import compare
from ddpkit.see.diff.hashed_run import differing, read_hashes
from ddpkit.see.diff.recorded_start import BY_HAND, recorded_start
from ddpkit.see.orderly_end import ended_in_order
from ddpkit.see.report.run_files import RunFiles
from ddpkit.see.scale.cells import Cell
from ddpkit.see.scale.rounds import scratch_folder
from ddpkit.see.scale.slice_process import run_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.see.diff.first_difference import Comparison
    from ddpkit.see.diff.hashed_run import HashedRun

NO_START = (
    "{}: no checkpoint from before step {} is there any more, and the run itself has not begun at "
    "the first step. {}"
)
BEGINS = "{}: makes steps {} to {} again, {}"
FROM_CHECKPOINT = "from {} (step {})"
FROM_BEGINNING = "from the beginning"


@dataclass(frozen=True)
class ReplayedRun:
    """What came of the steps that a run has made again.

    Attributes:
        run: the records of the replay.
        after: the optimizer step that it went on from; 0: the beginning.
        source: the checkpoint, or None.
        compared: the steps of which both the run and its replay have a record.
        other: of these, which fields the replay has otherwise.
        notes: what is other now, in words.

    Ranks: local.
    """

    run: HashedRun
    after: int
    source: str | None
    compared: list[int]
    other: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "after": self.after,
            "checkpoint": self.source,
            "compared_steps": self.compared,
            "other_than_recorded": self.other,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Replay:
    """What came of the steps that both runs have made again.

    Attributes:
        runs: of each.
        comparison: of the two replays.

    Ranks: local.
    """

    runs: tuple[ReplayedRun, ReplayedRun]
    comparison: Comparison

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "runs": [run.plain() for run in self.runs],
            "comparison": self.comparison.plain(),
        }


def replay(comparison: Comparison, tell: Callable[[str], object]) -> Replay:
    """Make the steps again in which two runs part, and compare what comes of them.

    Args:
        comparison: of the two runs, which differ.
        tell: is told what is done.

    Raises:
        ConfigError: a run cannot be started again here.
        LaunchError: it was, and has failed.

    Ranks: one process, outside of a launch.
    """
    if comparison.step is None:
        raise ConfigError("the two runs do not differ, so there is no step to make again.")
    last = comparison.step
    # All that may be missing is told before anything runs: the first replay may take an hour.
    begins = []
    for run in comparison.runs:
        after, source = _source(run, comparison.equal_before or 0)
        begins.append((recorded_start(run, after, last), after, source))
    replayed = []
    with ended_in_order():
        for run, (start, after, source) in zip(comparison.runs, begins, strict=True):
            origin = FROM_BEGINNING if source is None else FROM_CHECKPOINT.format(source, after)
            tell(BEGINS.format(run.label, after + 1, last, origin))
            # a folder for each: what the first recipe has left there is not for the second one
            with scratch_folder() as folder:
                plan = _plan(folder, source, last, start.options)
                cell = Cell("", start.processes)
                run_plan(start.command, cell, plan, tell)
                # read here, as the folder goes at the end of the block
                found = read_hashes(RunFiles(plan.replayed_log, folder, run.label))
            replayed.append(_held_against(run, found, after, source, start.notes))
    one, other = replayed
    return Replay((one, other), _with_known(compare(one.run, other.run), comparison))


def _with_known(found: Comparison, before: Comparison) -> Comparison:
    """Return a comparison of replays that knows which step of the runs was equal, too."""
    equal = before.equal_before
    # The replays may begin right after the equal step, and then have no record of it.
    if found.equal_before is None and equal is not None and found.step == equal + 1:
        return dataclasses.replace(found, equal_before=equal)
    return found


def _plan(
    folder: Path,
    source: Path | None,
    last: int,
    options: dict[str, Any],
) -> SlicePlan:
    """Return the plan of a replay, whose folder has a copy of the checkpoint."""
    plan = SlicePlan(
        str(folder),
        str(folder / "result.json"),
        options={**options, "hash_every": 1, "measure_steps": "off"},
        replayed_to=last,
    )
    plan.checkpoints_folder.mkdir()
    # A copy, and no link: the recipe may delete old checkpoints of its folder, which this one is.
    if source is not None:
        shutil.copytree(source, plan.checkpoints_folder / source.name)
    return plan


def _source(run: HashedRun, equal_before: int) -> tuple[int, Path | None]:
    """Return the step to go on from, and the checkpoint; None: the beginning."""
    # one of later on may have the difference in it
    for step, folder in run.checkpoints_up_to(equal_before):
        if not verify(folder):
            return step, folder
    if not run.begins_anew:
        raise ConfigError(NO_START.format(run.label, equal_before + 1, BY_HAND))
    return 0, None


def _held_against(
    run: HashedRun,
    found: HashedRun,
    after: int,
    source: Path | None,
    notes: list[str],
) -> ReplayedRun:
    """Compare a replay with what the run had recorded."""
    compared = sorted(run.steps.keys() & found.steps.keys())
    other = {}
    for step in compared:
        fields = differing(run.steps[step], found.steps[step])
        if fields:
            other[step] = fields
    return ReplayedRun(
        found,
        after,
        None if source is None else str(source),
        compared,
        other,
        notes,
    )
