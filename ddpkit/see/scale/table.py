"""The answer of ``python -m ddpkit scale`` as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ddpkit.see.scale.losses import CORE_WAIT
from ddpkit.see.scale.reasons import reason_of, waits_for_data
from ddpkit.see.scale.result_file import Measurement
from ddpkit.see.scale.slice_process import short_reason
from ddpkit.see.scale.summary import FAIR, GOOD, POOR, Row
from ddpkit.step_times import PHASES

WIDTH = 80
LONGEST_FAILURE = 300
#: Slices of one size that differ by more than this part of their median tell little.
UNSTEADY = 0.15


def report(measurement: Measurement, rows: Sequence[Row]) -> str:
    """Return the tables and the reasons.

    Args:
        measurement: what was measured.
        rows: of it.
    """
    parts = [
        _heading(measurement, rows),
        _rates(rows),
        _split(rows),
    ]
    reasons = [reason_of(row) for row in rows]
    told = [
        *filter(None, reasons),
        *_loader_command(measurement, rows),
        *_failures(measurement),
        *_unsteady(rows),
        *_busy(rows),
    ]
    parts += ["\n".join(map(_wrapped, told))] if told else []
    if len(rows) > 1:
        parts.append(_legend())
    return "\n\n".join(parts)


def _heading(measurement: Measurement, rows: Sequence[Row]) -> str:
    base = rows[0].slice
    machine = f"{base.cores} cores" if base.device == "cpu" else base.device
    slices = max(len(row.rates) for row in rows)
    measured = "1 slice" if slices == 1 else f"the median of {slices} slices"
    return "\n".join(
        [
            f"{measurement.recipe}, on {machine}, {measured} of each size.",
            _wrapped(_scaling(measurement, rows)),
        ]
    )


def _scaling(measurement: Measurement, rows: Sequence[Row]) -> str:
    base = rows[0].slice
    samples = base.samples_per_step or base.samples_of_step
    if measurement.is_strong:
        number = f"{samples:.4g}"
        return f"Strong scaling: a step has {number} samples on any number of processes."
    number = f"{samples / base.size:.4g}"
    return f"Weak scaling: a step has {number} samples for each process."


def _rates(rows: Sequence[Row]) -> str:
    lines = [f"{'':20}{'samples/s':>12}{'spread':>9}{'speed-up':>11}{'efficiency':>14}"]
    for row in rows:
        spread = f"±{100 * row.spread:.0f} %" if len(row.rates) > 1 else ""
        efficiency = "" if row.is_base else f"  {100 * row.efficiency:.0f} % {row.word}"
        lines.append(
            f"{row.name:20}{row.rate:>12,.0f}{spread:>9}{row.speed_up:>10.2f}x{efficiency:>14}".rstrip()
        )
    return "\n".join(lines)


def _split(rows: Sequence[Row]) -> str:
    """Return where the time of a step goes: milliseconds, means over the ranks."""
    heads = "".join(f"{phase:>{_width(phase)}}" for phase in PHASES)
    lines = [f"{'ms of a step':12}{'all':>7}{heads}"]
    for row in rows:
        cells = "".join(f"{_shown(row.slice.phase(phase)):>{_width(phase)}}" for phase in PHASES)
        lines.append(f"{_short_name(row):12}{_shown(row.slice.step):>7}{cells}")
    return "\n".join(lines)


def _width(phase: str) -> int:
    """Return the width of a column: its heading, and two blanks."""
    return max(len(phase) + 2, 7)


def _short_name(row: Row) -> str:
    result = row.slice
    return f"{result.way} x {result.size}"


def _shown(seconds: float) -> str:
    """Return milliseconds with about three digits.

    Example:
        >>> _shown(0.0000312), _shown(0.00314159), _shown(0.0314159), _shown(3.14159)
        ('0.03', '3.14', '31.4', '3142')
    """
    milliseconds = 1000 * seconds
    for digits, bound in ((2, 10.0), (1, 100.0)):
        if milliseconds < bound:
            return f"{milliseconds:.{digits}f}"
    return f"{milliseconds:.0f}"


def _loader_command(measurement: Measurement, rows: Sequence[Row]) -> list[str]:
    """Say with which command the loader alone is measured, if a size waits for data."""
    waiting = [row.slice for row in rows if waits_for_data(row)]
    script, *words = measurement.recipe.split()
    if not waiting or script.startswith("-"):  # `doctor` starts scripts, and no modules
        return []
    command = ["python -m ddpkit doctor"]
    largest = waiting[-1]
    if largest.world_size > 1 and largest.nodes == 1:
        command.append(f"--nproc {largest.world_size}")
    command.append(f"--recipe {script}")
    if words and not words[0].startswith("-"):
        command.append(words.pop(0))
    if words:
        command += ["--", *words]
    told = (
        "This command measures the loader alone, and says how many workers would do: "
        f"`{' '.join(command)}`."
    )
    return [told]


def _failures(measurement: Measurement) -> list[str]:
    return [
        f"{name}: failed. {textwrap.shorten(short_reason(why), LONGEST_FAILURE)}"
        for name, why in measurement.failed.items()
    ]


def _unsteady(rows: Sequence[Row]) -> list[str]:
    unsteady = [row.name for row in rows if row.spread > UNSTEADY]
    if not unsteady:
        return []
    names = " and ".join(unsteady)
    return [f"The slices of {names} differ much. Other programs run here? More --rounds tell more."]


def _busy(rows: Sequence[Row]) -> list[str]:
    """Say that other programs have taken the cores, if one process alone had to wait for one."""
    waits = max(rows[0].slice.core_waits, default=0.0)
    if rows[0].slice.world_size > 1 or waits < CORE_WAIT:
        return []
    told = (
        f"One process alone waited {_as_percent(waits)} of the time for a core: other programs use "
        "them. Measure again when the machine is idle."
    )
    return [told]


def _legend() -> str:
    return _wrapped(
        f"Efficiency is the speed-up as a part of the ideal: {_as_percent(GOOD)} and more is "
        f"good, from {_as_percent(FAIR)} fair, from {_as_percent(POOR)} poor; below, more "
        "processes hardly pay."
    )


def _as_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
