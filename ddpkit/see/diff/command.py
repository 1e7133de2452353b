"""The command ``diff``: reads the records of two runs, compares them and says what differs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddpkit.see.diff.first_difference import compare
from ddpkit.see.diff.hashed_run import read_hashes
from ddpkit.see.diff.report import lines_of
from ddpkit.see.report.run_files import find_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpkit.see.diff.first_difference import Comparison
    from ddpkit.see.diff.replay import Replay


SAME_LOG = "it is the very log that A is, which tells nothing"
NOTHING_TO_REPLAY = "No step differs, so there is nothing to make again."


def run_diff(
    runs: Sequence[str],
    say: Callable[[str], object],
    *,
    as_json: bool = False,
    tell: Callable[[str], object] | None = None,
) -> int:
    """Compare two runs and say where they part.

    Args:
        runs: two folders of experiments, or their logs.
        say: is given the lines.
        as_json: write JSON, with all values.
        tell: is told what is done while both runs make the steps again in which they part; None:
            they do not.

    Returns:
        The exit status: 0 where all that both have recorded is equal and fits, else 1.

    Raises:
        ConfigError: a run is none, has no records of hashes, or they have no step in common; or one
            cannot make its steps again here.
        LaunchError: a run was to make its steps again, and has failed.

    Ranks: local; with ``tell`` one process, outside of a launch.
    """
    files = find_runs(runs)
    one, other = map(read_hashes, files)
    if files[0].metrics.samefile(files[1].metrics):
        other.notes.append(SAME_LOG)
    comparison = compare(one, other)
    replayed = None
    if tell is not None and comparison.step is None:
        tell(NOTHING_TO_REPLAY)
    elif tell is not None:
        from ddpkit.see.diff.replay import replay  # loads torch

        replayed = replay(comparison, tell)
    if as_json:
        again = {} if replayed is None else {"replay": replayed.plain()}
        say(json.dumps({**comparison.plain(), **again}, indent=2))
    else:
        _say_all(comparison, replayed, say)
    is_equal = comparison.step is None
    fits = not (one.problems or other.problems)
    return 0 if is_equal and fits else 1


def _say_all(
    comparison: Comparison,
    replayed: Replay | None,
    say: Callable[[str], object],
) -> None:
    lines = lines_of(comparison)
    if replayed is not None:
        from ddpkit.see.diff.replay_report import replay_lines

        lines += replay_lines(replayed)
    for line in lines:
        say(line)
