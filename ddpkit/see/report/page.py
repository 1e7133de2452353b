"""The page: what stands on it, in which order, and that it stays small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.errors import MissingExtraError
from ddpkit.see.report import words
from ddpkit.see.report.checkpoint_rows import shown_rows
from ddpkit.see.report.comparison import differences
from ddpkit.see.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    colour_of,
    dash_of,
    draw_frame,
    draw_picture,
)
from ddpkit.see.report.goodput import PARTS
from ddpkit.see.report.late_ranks import late_phases, late_rows
from ddpkit.see.report.overview import overview_panels, tiles_of
from ddpkit.see.report.panels import SECTIONS, Panel, panels_of
from ddpkit.see.report.run_report import RunReport
from ddpkit.see.report.without_verdict import words_without_verdict

MOST_BYTES = 1_000_000  # of a page
MOST_POINTS = 800  # of a curve: the panels are 400 pixels wide
LEAST_POINTS = 50
MOST_PANELS = 60
TRIES = 6
PICTURE_POINTS = 800
TEMPLATES = Path(__file__).with_name("templates")
INSTALL = (
    "`python -m ddpkit report` needs {missing}, which is not installed. "
    "Run `pip install {packages}`, or install ddpkit with its extra `see`."
)


@dataclass(frozen=True)
class Drawn:
    """A panel with its picture.

    Attributes:
        panel: what is drawn.
        frame: its picture.
        name: begins the ids of its curves.
        keys: of the legend.
        notes: words below.
    """

    panel: Panel
    frame: Frame
    name: str
    keys: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def require_extra() -> None:
    """Refuse to begin where a package is missing.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            INSTALL.format(missing=" and ".join(missing), packages=" ".join(missing))
        )


def write_page(runs: Sequence[RunReport]) -> str:
    """Return the page about runs, of at most :data:`MOST_BYTES`."""
    panels = panels_of(runs)
    number = min(len(panels), MOST_PANELS)
    longest = max((len(line.x) for panel in panels for line in panel.lines), default=0)
    points = max(LEAST_POINTS, min(MOST_POINTS, longest))
    bare = len(_fill(runs, [], [], points).encode())
    for _ in range(TRIES):
        drawn = _draw(panels[:number], len(runs), points)
        left_out = [panel.title for panel in panels[number:]]
        page = _fill(runs, drawn, left_out, points)
        size = len(page.encode())
        if size <= MOST_BYTES or not drawn:
            return page
        share = 0.9 * max(0, MOST_BYTES - bare) / (size - bare)
        if points > LEAST_POINTS:
            points = max(LEAST_POINTS, int(points * share))
        else:
            number = int(number * share)
    return _fill(
        runs,
        [],
        [panel.title for panel in panels],
        points,
    )


def write_picture(runs: Sequence[RunReport]) -> bytes:
    """Return the overview of runs as PNG."""
    title = " against ".join(run.label for run in runs)
    if len(runs) == 1:
        state = runs[0].state
        goodput = words.share(runs[0].goodput.share)
        steps = words.count(runs[0].optimizer_steps)
        title = f"{title}: {state}, {steps} optimizer steps, goodput {goodput}"
    labels = [run.label for run in runs]
    return draw_picture(overview_panels(panels_of(runs)), title, labels, PICTURE_POINTS)


# ---------------------------------------------------------------------------- the panels


def _draw(panels: Sequence[Panel], num_runs: int, points: int) -> list[Drawn]:
    found = []
    for number, panel in enumerate(panels):
        name = f"p{number}"
        frame = draw_frame(panel, name, num_runs, points)
        found.append(
            Drawn(
                panel,
                frame,
                name,
                _keys(panel, name, num_runs),
                _notes(panel, frame),
            )
        )
    return found


def _keys(
    panel: Panel,
    name: str,
    num_runs: int,
) -> tuple[Mapping[str, Any], ...]:
    own_runs = 1 if panel.is_stack else num_runs
    return tuple(
        {
            "id": f"{name}-{number}",
            "label": line.label,
            "run": line.run,
            "colour": colour_of(line, own_runs),
            "dash": dash_of(line, own_runs),
        }
        for number, line in enumerate(panel.lines)
    )


def _notes(panel: Panel, frame: Frame) -> tuple[str, ...]:
    bad = panel.not_numbers + sum(line.num_not_finite for line in panel.lines)
    found = [panel.note] if panel.note else []
    if frame.is_log:
        found.append("Logarithmic scale.")
    if bad:
        found.append(f"{bad} value{'s are' if bad > 1 else ' is'} NaN or infinite, and not drawn.")
    return tuple(found)


# ---------------------------------------------------------------------------- the template


def _fill(
    runs: Sequence[RunReport],
    drawn: Sequence[Drawn],
    left_out: Sequence[str],
    points: int,
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=words.visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": words.duration,
        "number": words.number,
        "size": words.size,
        "share": words.share,
        "count": words.count,
        "clock": words.clock,
    }
    sections = {
        name: [curve for curve in drawn if curve.panel.section == name] for name in SECTIONS
    }
    return environment.get_template("page.html").render(
        runs=runs,
        title=" · ".join(run.label for run in runs),
        sections={name: found for name, found in sections.items() if found},
        box={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": RIGHT,
            "top": TOP,
            "bottom": BOTTOM,
        },
        points=points,
        is_thinned=_is_thinned(drawn, points),
        left_out=left_out,
        parts=PARTS,
        tiles=[tiles_of(run) for run in runs],
        late=[{"phases": late_phases(), "rows": late_rows(run.history)} for run in runs],
        shown_rows=shown_rows,
        words_without_verdict=words_without_verdict,
        compared=_compared(runs) if len(runs) > 1 else {},
    )


def _is_thinned(drawn: Sequence[Drawn], points: int) -> bool:
    return any(len(line.x) > points for curve in drawn for line in curve.panel.lines)


def _compared(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Return what differs between runs, by what it is."""
    numbers = [run.results() for run in runs]
    results = [{name: words.number(value) for name, value in found.items()} for found in numbers]
    tables = {
        "Results": differences(results),
        "Options": differences([run.options for run in runs]),
        "Hyperparameters": differences([run.hyperparameters for run in runs]),
        "Environment": differences([run.environment for run in runs]),
        "Packages": differences([run.packages for run in runs]),
    }
    return {name: rows for name, rows in tables.items() if rows}
