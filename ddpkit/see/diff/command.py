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


def run_diff(
    runs: Sequence[str],
    say: Callable[[str], object],
    *,
    as_json: bool = False,
) -> int:
    """Compare two runs and say where they part.

    Args:
        runs: two folders of experiments, or their logs.
        say: is given the lines.
        as_json: write JSON, with all values.

    Returns:
        The exit status: 0 where all that both have recorded is equal and fits, else 1.

    Raises:
        ConfigError: a run is none, has no records of hashes, or they have no step in common.

    Ranks: local.
    """
    one, other = map(read_hashes, find_runs(runs))
    comparison = compare(one, other)
    if as_json:
        say(json.dumps(comparison.plain(), indent=2))
    else:
        for line in lines_of(comparison):
            say(line)
    is_equal = comparison.step is None
    fits = not (one.problems or other.problems)
    return 0 if is_equal and fits else 1
