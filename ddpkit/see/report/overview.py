"""The first things that a reader wants to know of a run: tiles of numbers, and the panels of the
picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpkit.see.report import words
from ddpkit.see.report.panels import Panel
from ddpkit.see.report.run_report import RunReport

MOST_RESULTS = 4
MOST_PANELS = 6
FIRST = (  # titles of the picture's panels
    "loss",
    "samples per second",
    "split of a step",
    "learning rate",
    "gradient norm",
    "time of a step",
    "mean training loss of the epoch",
)


@dataclass(frozen=True)
class Tile:
    """A number with a name.

    Attributes:
        name: what it is.
        value: as text.
        note: a few words below.
    """

    name: str
    value: str
    note: str = ""


def tiles_of(run: RunReport) -> list[Tile]:
    """Return the numbers that stand first on the page."""
    return [
        *_progress(run),
        *_speed(run),
        *_results(run),
    ]


def _progress(run: RunReport) -> Iterator[Tile]:
    goodput = run.goodput
    epochs = {epoch for values in run.history.epochs.values() for epoch in values}
    note = f"{len(epochs)} epoch{'s' if len(epochs) != 1 else ''} logged" if epochs else ""
    yield Tile("optimizer steps", words.count(run.optimizer_steps), note)
    times = len(goodput.restarts)
    note = f"{times} restart{'s' if times > 1 else ''}" if times else "no restart"
    yield Tile("wall time", words.duration(goodput.wall), note)
    yield Tile("goodput", words.share(goodput.share), "of the wall time")


def _speed(run: RunReport) -> Iterator[Tile]:
    sizes = run.history.world_sizes
    if sizes:
        told = " then ".join(str(size) for size in dict.fromkeys(sizes))
        yield Tile("processes", told)
    for column, name in (("samples_per_second", "samples/s"), ("step.median", "time of a step")):
        value = run.median(column)
        if value is not None:
            text = words.duration(value) if column == "step.median" else words.number(value)
            yield Tile(name, text, "median")
    mfu = run.median("mfu")
    if mfu is not None:
        yield Tile("MFU", words.share(mfu), "median")


def _results(run: RunReport) -> Iterator[Tile]:
    """The newest results of validation and test, or of training where there are none."""
    found = run.results()
    chosen = [name for name in found if name.startswith(("valid ", "test "))]
    chosen = chosen or [name for name in found if name.startswith("train ")]
    for name in chosen[:MOST_RESULTS]:
        yield Tile(name, words.number(found[name]), "last")


def overview_panels(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels of the picture: the most telling ones that there are."""
    by_title = {panel.title: panel for panel in reversed(panels)}
    first = [by_title[title] for title in FIRST if title in by_title]
    rest = [panel for panel in panels if panel not in first]
    return [*first, *rest][:MOST_PANELS]
