"""The steps of the command: check, measure, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ddpkit.launch import find_launch
from ddpkit.see.orderly_end import ended_in_order
from ddpkit.see.scale.request import ScaleRequest, require_outputs
from ddpkit.see.scale.result_file import Measurement, joined, read_measurement, write_measurement
from ddpkit.see.scale.rounds import measured
from ddpkit.see.scale.summary import rows_of
from ddpkit.see.scale.table import report
from ddpkit.see.scale.this_launch import measure_this_launch


def run_scale(
    request: ScaleRequest,
    say: Callable[[str], object],
    tell: Callable[[str], object],
) -> int:
    """Measure a recipe, and say what was found.

    Args:
        request: what to measure, and what to write.
        say: is given the answer.
        tell: is given a line for each slice.

    Returns:
        1 if a size has failed, 0 else.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.

    Ranks: one process; or every rank of a launch.
    """
    request.check_files()
    info = find_launch()
    if info.is_distributed:
        with ended_in_order():
            found = measure_this_launch(request, info)
        if found is not None:
            _answer(found, request.plot, None, say)
        return 0
    with ended_in_order():
        measurement = measured(request, tell)
        _answer(measurement, request.plot, request.json, say)
    return 1 if measurement.failed else 0


def join_results(
    files: Sequence[Path],
    plot: Path | None,
    json: Path | None,
    say: Callable[[str], object],
) -> int:
    """Make one answer of result files.

    Args:
        files: that ``--json`` has written.
        plot: file for the plot, or None.
        json: file for the joined results, or None.
        say: is given the answer.

    Returns:
        0.

    Raises:
        ConfigError: a file cannot be used, or the files do not go together.

    Ranks: local.
    """
    require_outputs(plot, json)
    measurement = joined([read_measurement(path) for path in files])
    _answer(measurement, plot, json, say)
    return 0


def _answer(
    measurement: Measurement,
    plot: Path | None,
    json: Path | None,
    say: Callable[[str], object],
) -> None:
    """Say what was found, and then write it: a full disk must not take minutes of measuring."""
    rows = rows_of(measurement.slices)
    say(report(measurement, rows))
    if json is not None:
        write_measurement(json, measurement, [row.as_dict() for row in rows])
    if plot is not None:
        from ddpkit.see.scale.plot import draw  # loads matplotlib

        draw(measurement, rows, plot)
