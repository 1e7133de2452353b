"""The plot of ``python -m ddpkit scale``: the speed-up on the left, where a step's time goes on the
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpkit.base import replacing, writing
from ddpkit.see.plots import COLOURS, INK, MUTED, PHASE_COLOURS, clean
from ddpkit.see.scale.result_file import Measurement
from ddpkit.see.scale.summary import Row
from ddpkit.step_times import PHASES

INCHES = (10.0, 4.2)
DPI = 150
LEAST_SHARE = 0.005  # of the longest step: shorter phases of all sizes are no use in the legend
MILLI = 1000.0
# a label beside a point: its offset, and how it is aligned
BELOW = ((8, -4), "left", "top")
ABOVE = ((-8, 4), "right", "bottom")


def draw(measurement: Measurement, rows: Sequence[Row], path: Path) -> None:
    """Draw the plot into a file.

    Args:
        measurement: what was measured.
        rows: of it.
        path: of the file; its suffix says the format.

    Raises:
        ConfigError: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "text.color": INK, "svg.hashsalt": "ddpkit"}):
        figure = Figure(figsize=INCHES, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.3))
        kind = "strong" if measurement.is_strong else "weak"
        figure.suptitle(f"{measurement.recipe}  ({kind} scaling)", x=0.01, ha="left", fontsize=11)
        _draw_speed_up(left, rows)
        _draw_split(right, rows)
        with writing(f"--plot={str(path)!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                figure.savefig(
                    unfinished,
                    format=path.suffix[1:],
                    dpi=DPI,
                    metadata=_metadata(path),
                )


def _metadata(path: Path) -> dict[str, Any]:
    """Leave the time of the drawing out: the same results give the same file."""
    return {"Date": None} if path.suffix == ".svg" else {}


def _draw_speed_up(axes: Any, rows: Sequence[Row]) -> None:
    base = rows[0]
    sizes = sorted({row.slice.size for row in rows})
    ideal = [size / base.slice.size for size in sizes]
    axes.plot(
        sizes,
        ideal,
        color=MUTED,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        label="ideal",
    )
    ways = dict.fromkeys(row.slice.way for row in rows[1:] or [base])
    for number, way in enumerate(ways):
        points = [base, *(row for row in rows[1:] if row.slice.way == way)]
        _draw_way(
            axes,
            points,
            COLOURS[number % len(COLOURS)],
            way,
            is_below=number % 2 == 0,
        )
    clean(axes)
    axes.set_xticks(sizes)
    axes.set_xlabel("processes", color=MUTED)
    axes.set_title("speed-up", loc="left", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.legend(frameon=False, loc="upper left")


def _draw_way(
    axes: Any,
    points: Sequence[Row],
    colour: str,
    way: str,
    *,
    is_below: bool,
) -> None:
    sizes = [row.slice.size for row in points]
    ups = [row.speed_up for row in points]
    errors = [row.speed_up * row.spread for row in points]
    axes.errorbar(
        sizes,
        ups,
        yerr=errors,
        color=colour,
        marker="o",
        capsize=3,
        label=way,
    )
    for row in points[1:]:
        text = f"{row.speed_up:.2f}x\n{100 * row.efficiency:.0f} %"
        place = (row.slice.size, row.speed_up)
        # Right below or left above a point: a rising line passes through neither.
        offset, align, side = BELOW if is_below else ABOVE
        axes.annotate(
            text,
            place,
            offset,
            textcoords="offset points",
            ha=align,  # beside the error bar
            va=side,
            fontsize=9,
            color=colour,
        )


def _draw_split(axes: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.slice.way} x {row.slice.size}" for row in rows]
    longest = max(row.slice.step for row in rows)
    ends = [0.0] * len(rows)
    for phase in PHASES:
        times = [MILLI * row.slice.phase(phase) for row in rows]
        is_seen = max(times) > LEAST_SHARE * MILLI * longest
        label = phase if is_seen else None
        axes.barh(
            names,
            times,
            left=ends,
            color=PHASE_COLOURS[phase],
            label=label,
            height=0.6,
        )
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    for name, end, row in zip(names, ends, rows, strict=True):
        axes.annotate(
            f"{MILLI * row.slice.step:.3g} ms",
            (end, name),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    clean(axes)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel("milliseconds, mean of the processes", color=MUTED)
    axes.set_title("where the time of a step goes", loc="left", fontsize=10)
    axes.legend(
        frameon=False,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.45, -0.16),
        fontsize=9,
    )
