"""Panels drawn with matplotlib: as small SVG whose colours the page decides, and as one PNG."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpkit.see.report import words
from ddpkit.see.report.columns import Numbers, means, thin
from ddpkit.see.report.panels import BYTES, SECONDS, SHARE, Line, Panel

# of a panel, in CSS pixels
WIDTH = 400
HEIGHT = 220
LEFT = 52
RIGHT = 10
TOP = 10
BOTTOM = 24
DPI = 72  # so that a point is a pixel
NUM_COLOURS = 8
LOG_FROM = 100.0  # times the smallest value
FEW_POINTS = 30  # that are drawn as dots, too
DASHES: tuple[Any, ...] = (
    "-",
    (0, (4, 2)),
    (0, (1, 1.5)),
    (0, (6, 2, 1, 2)),
)
CALM_ALPHA = 0.85

# Colours that stand for variables of the page's style sheet.
MUTED = "#0100f0"
GRID = "#0100f1"
_VARIABLES = {"f0": "muted", "f1": "grid"}
_STANDS_FOR = re.compile(r"#0100([0-9a-f]{2})")  # not black, which SVG leaves out
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}")

LIGHT = ("#2f6fd0", "#d9730d", "#2b8a5e", "#b3409b", "#8a6d1f", "#5b5bd6", "#c2403a", "#3b8ea5")
PICTURE_MUTED = "#6b7280"
PICTURE_GRID = "#e5e7eb"
PICTURE_INK = "#1f2933"


@dataclass(frozen=True)
class Palette:
    """Colours of a drawing.

    Attributes:
        lines: of the curves, in turn.
        muted: of numbers at the axes.
        grid: of the lines behind the curves.
        label_size: of numbers at the axes.
    """

    lines: tuple[str, ...]
    muted: str
    grid: str
    label_size: int = 10


def page_palette() -> Palette:
    """Return colours that the page's style sheet decides."""
    return Palette(tuple(f"#0100{number:02x}" for number in range(NUM_COLOURS)), MUTED, GRID)


def picture_palette() -> Palette:
    """Return the colours of a picture on white."""
    return Palette(LIGHT, PICTURE_MUTED, PICTURE_GRID, label_size=8)


@dataclass(frozen=True)
class Frame:
    """What a drawn panel is: its picture, and how its points are read back.

    Attributes:
        svg: the picture.
        x_limits: values at the left and the right.
        y_limits: values at the bottom and the top.
        is_log: whether the values to the top are logarithms.
    """

    svg: str
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    is_log: bool


def colour_of(line: Line, num_runs: int) -> int:
    """Return the number of a curve's colour: by run where there are several, else by stage."""
    return (line.run if num_runs > 1 else line.stage) % NUM_COLOURS


def dash_of(line: Line, num_runs: int) -> int:
    """Return the number of a curve's dashes: by stage where colours tell runs apart."""
    return line.stage % len(DASHES) if num_runs > 1 else 0


def draw_frame(
    panel: Panel,
    name: str,
    num_runs: int,
    points: int,
) -> Frame:
    """Draw a panel as SVG.

    Args:
        panel: what to draw.
        name: begins the ids of its curves, ``<name>-0`` and so on.
        num_runs: on the page.
        points: of each curve at most.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        FigureCanvasSVG(figure)
        wide = WIDTH - LEFT - RIGHT
        high = HEIGHT - TOP - BOTTOM
        axes = figure.add_axes(
            (
                LEFT / WIDTH,
                BOTTOM / HEIGHT,
                wide / WIDTH,
                high / HEIGHT,
            )
        )
        is_log = draw_panel(axes, panel, page_palette(), num_runs, points, name)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata={"Date": None},
        )
        return Frame(
            small_svg(file.getvalue()),
            axes.get_xlim(),
            axes.get_ylim(),
            is_log,
        )


def draw_panel(
    axes: Any,
    panel: Panel,
    palette: Palette,
    num_runs: int,
    points: int,
    name: str = "",
) -> bool:
    """Draw a panel into axes of matplotlib; return whether its values have a logarithmic scale."""
    if panel.is_stack:
        _stack(axes, panel.lines, palette, points, name)
    else:
        for number, line in enumerate(panel.lines):
            _curve(axes, line, palette, num_runs, points, f"{name}-{number}")
    is_log = not panel.is_stack and _is_wide(panel.lines)
    if is_log:
        axes.set_yscale("log")
    _limit(axes, panel, is_log=is_log)
    _tick(axes, panel, is_log=is_log)
    _calm(axes, palette)
    return is_log


def _curve(
    axes: Any,
    line: Line,
    palette: Palette,
    num_runs: int,
    points: int,
    name: str,
) -> None:
    x, y = thin(
        line.x,
        np.where(
            np.isfinite(line.y),
            line.y,
            np.nan,
        ),
        points,
    )
    colour = palette.lines[colour_of(line, num_runs)]
    dash = DASHES[dash_of(line, num_runs)]
    marker = {"marker": "o", "markersize": 3} if len(x) <= FEW_POINTS else {}
    axes.plot(
        x,
        y,
        color=colour,
        linestyle=dash,
        linewidth=1.5,
        gid=name,
        **marker,
    )
    alone = _alone(y) if not marker else np.array([], dtype=int)
    if len(alone):  # a point between two gaps is no line
        axes.plot(
            x[alone],
            y[alone],
            ".",
            color=colour,
            markersize=3,
        )


def _alone(y: Numbers) -> Any:
    """Return the places of numbers between two gaps."""
    is_there = np.isfinite(y)
    padded = np.concatenate([[False], is_there, [False]])
    return np.flatnonzero(is_there & ~padded[:-2] & ~padded[2:])


def _stack(
    axes: Any,
    lines: Sequence[Line],
    palette: Palette,
    points: int,
    name: str,
) -> None:
    if not lines:
        return
    x, columns = means(
        lines[0].x,
        [line.y for line in lines],
        max(2, points // 2),
    )
    if len(x) == 1:  # a second alone has no width
        x = np.array([x[0] - 0.5, x[0] + 0.5])
        columns = [np.repeat(column, 2) for column in columns]
    below = np.zeros(len(x))
    for number, (line, column) in enumerate(zip(lines, columns, strict=True)):
        above = below + column
        # along the upper edge, and back along the lower one
        outline_x = np.concatenate([x, x[::-1]])
        outline_y = np.concatenate([above, below[::-1]])
        colour = palette.lines[line.stage % NUM_COLOURS]
        axes.fill(
            outline_x,
            outline_y,
            facecolor=colour,
            alpha=CALM_ALPHA,
            linewidth=0,
            gid=f"{name}-{number}",
        )
        below = above


# ---------------------------------------------------------------------------- scales


def _finite(lines: Sequence[Line], is_y: bool) -> Numbers:
    values = [line.y if is_y else line.x for line in lines]
    joined: Numbers = np.concatenate(values) if values else np.array([])
    finite: Numbers = joined[np.isfinite(joined)]
    return finite


def _is_wide(lines: Sequence[Line]) -> bool:
    values = _finite(lines, is_y=True)
    if not len(values):
        return False
    low = values.min()
    return bool(low > 0 and values.max() / low >= LOG_FROM)


def _limit(
    axes: Any,
    panel: Panel,
    *,
    is_log: bool,
) -> None:
    x = _finite(panel.lines, is_y=False)
    low, high = _range_of(x)
    room = (high - low) * 0.02 or 1.0
    axes.set_xlim(low - room, high + room)
    if panel.is_stack:
        axes.set_ylim(bottom=0)
    elif not is_log:
        _limit_height(axes, panel)


def _range_of(values: Numbers) -> tuple[float, float]:
    if not len(values):
        return 0.0, 1.0
    return float(values.min()), float(values.max())


def _limit_height(axes: Any, panel: Panel) -> None:
    y = _finite(panel.lines, is_y=True)
    low, high = _range_of(y)
    if panel.unit in {BYTES, SHARE} or 0 <= low <= 0.4 * high:
        low = min(low, 0.0)  # a height that can be compared
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    if not math.isfinite(room):  # numbers at the end of what floats hold
        return
    axes.set_ylim(low if low == 0 else low - room, high + room)


def _tick(
    axes: Any,
    panel: Panel,
    *,
    is_log: bool,
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(
        MaxNLocator(
            5,
            integer=True,
            steps=[1, 2, 5, 10],
        )
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.number(value)))
    if is_log:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5), numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        if high / low < 1e3:  # noqa: PLR2004 -- fewer than four powers of ten: some between them are named
            axes.yaxis.set_minor_formatter(
                FuncFormatter(lambda value, _: tick_text(value, panel.unit))
            )
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    step = _tick_step(axes) if not is_log else 0.0
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: tick_text(value, panel.unit, step))
    )


def _tick_step(axes: Any) -> float:
    ticks = axes.yaxis.get_majorticklocs()
    return float(ticks[1] - ticks[0]) if len(ticks) > 1 else 0.0


def tick_text(value: float, unit: str, step: float = 0.0) -> str:
    """Return the text of a tick: short, and unlike its neighbour's.

    Args:
        value: of the tick.
        unit: of the panel.
        step: to the next tick; 0: it does not matter.

    Example:
        >>> (
        ...     tick_text(0.98125, "", 0.00005),
        ...     tick_text(0.5, "%"),
        ...     tick_text(2e9, "B"),
        ...     tick_text(0.02, "s"),
        ... )
        ('0.98125', '50 %', '2 GB', '20 ms')
    """
    if unit == SHARE:
        return words.share(value)
    if unit == BYTES:
        return words.size(value)
    if unit == SECONDS:
        return words.short_duration(value)
    digits = math.ceil(-math.log10(step)) + 1 if 0 < step < 1 else 0
    if step and abs(value) > 100 * step and digits:  # three digits would not tell them apart
        return f"{value:.{digits}f}".rstrip("0")
    return words.number(0.0 if abs(value) < step * 1e-6 else value)


def _calm(axes: Any, palette: Palette) -> None:
    axes.grid(visible=True, color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(
        which="both",
        length=0,
        colors=palette.muted,
        labelsize=palette.label_size,
        pad=4,
    )
    for side in axes.spines.values():
        side.set_visible(False)


# ---------------------------------------------------------------------------- small SVG


@contextmanager
def _settings() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ddpkit", "path.simplify": False}):
        yield


def small_svg(text: str) -> str:
    """Return matplotlib's SVG as a part of a page: without head, with short numbers and the page's
    colours.

    Example:
        >>> small_svg('<?xml?><svg width="9pt"><path d="M1.23456 2" stroke="#010002"/>0.12</svg>')
        '<svg><path d="M1.2 2" stroke="var(--c2)"/>0.12</svg>'
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    text = re.sub(r' (?:xmlns(?::xlink)?|version)="[^"]*"', "", text)
    text = re.sub(r"font: [^;\"]*;?", "", text)
    text = re.sub(r"(?:stroke-linecap|stroke-linejoin): \w+;? ?", "", text)
    text = re.sub(
        r"<[^>]*>",
        lambda tag: _LONG_NUMBER.sub(_short, tag[0]),
        text,
    )
    text = _STANDS_FOR.sub(
        lambda found: f"var(--{_VARIABLES.get(found[1], f'c{int(found[1], 16)}')})",
        text,
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(r"<defs>\s*</defs>", "", text)
    return re.sub(r"\s*\n\s*", " ", text).replace("> <", "><").strip()


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


# ---------------------------------------------------------------------------- one picture


def draw_picture(
    panels: Sequence[Panel],
    title: str,
    labels: Sequence[str],
    points: int,
) -> bytes:
    """Draw panels as one PNG.

    Args:
        panels: at most nine.
        title: over them.
        labels: of the runs.
        points: of each curve at most.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, min(3, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(
        figsize=(4.6 * columns, 0.7 + 2.9 * rows),
        dpi=130,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        words.visible(title),
        fontsize=12,
        color=PICTURE_INK,
        parse_math=False,
    )
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        draw_panel(axes, panel, picture_palette(), len(labels), points)
        axes.set_title(
            words.visible(panel.title),
            fontsize=10,
            color=PICTURE_INK,
            loc="left",
            parse_math=False,
        )
        axes.set_xlabel(panel.axis, fontsize=8, color=PICTURE_MUTED)
        _name_lines(axes, panel, labels)
    if not panels:
        figure.text(0.5, 0.4, "nothing measured yet", ha="center", color=PICTURE_MUTED)
    file = io.BytesIO()
    with warnings.catch_warnings():  # letters that matplotlib's font lacks become boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="png", facecolor="white")
    return file.getvalue()


def _name_lines(axes: Any, panel: Panel, labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if len(panel.lines) <= 1:  # the title says what it is
        return
    num_runs = 1 if panel.is_stack else len(labels)
    handles: list[Any] = []
    texts = []
    for line in panel.lines:
        colour = LIGHT[colour_of(line, num_runs)]
        dash = DASHES[dash_of(line, num_runs)]
        handle = (
            Patch(color=colour) if panel.is_stack else Line2D([], [], color=colour, linestyle=dash)
        )
        handles.append(handle)
        text = line.label if num_runs == 1 else f"{labels[line.run]} {line.label}"
        texts.append(words.visible(text))
    where: dict[str, Any] = {"loc": "best", "framealpha": 0.8}
    if panel.is_stack:
        where = {"loc": "upper left", "bbox_to_anchor": (1, 1), "reverse": True}
    legend = axes.legend(
        handles,
        texts,
        fontsize=7,
        edgecolor="none",
        **where,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
        text.set_color(PICTURE_MUTED)
