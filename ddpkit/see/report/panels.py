"""The panels of a page: which curves there are, and which of them stand in one frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddpkit.see.report.columns import STEP, Numbers
from ddpkit.see.report.history import META
from ddpkit.see.report.run_report import RunReport
from ddpkit.step_times import PHASES

EPOCH_AXIS = "epoch"
STEP_AXIS = "optimizer step"
STAGES = ("train", "valid", "test")
NUMBER = ""
SECONDS = "s"
BYTES = "B"
SHARE = "%"

RESULTS = "Results"
OPTIMISATION = "Optimisation"
SPEED = "Speed"
MEMORY = "Memory"
SECTIONS = (RESULTS, OPTIMISATION, SPEED, MEMORY)


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: what it is.
        run: number of its run on the page, from 0.
        stage: number of its stage or kind in the panel, from 0.
        x: shape ``(n,)``, ascending.
        y: shape ``(n,)``; what is not finite is a gap.
    """

    label: str
    run: int
    stage: int
    x: Numbers
    y: Numbers

    @property
    def num_not_finite(self) -> int:
        """Values that cannot be drawn: infinities. Not-a-number of a measured column is just
        missing.
        """
        return int(np.count_nonzero(np.isinf(self.y)))


@dataclass(frozen=True)
class Panel:
    """Curves in one frame.

    Attributes:
        title: what is drawn.
        section: of the page.
        axis: what is to the right.
        unit: one of the constants of this module.
        lines: the curves.
        is_stack: they are drawn upon each other, as parts of a whole.
        note: a few words below; may be empty.
    """

    title: str
    section: str
    axis: str
    unit: str
    lines: tuple[Line, ...]
    is_stack: bool = False
    note: str = ""
    not_numbers: int = field(default=0)


def panels_of(runs: Sequence[RunReport]) -> list[Panel]:
    """Return all panels that have something to show, in the order of the page."""
    panels = [
        *_by_epoch(runs),
        *_by_step(runs),
        *_optimisation(runs),
        *_speed(runs),
        *_memory(runs),
    ]
    shown = [panel for panel in panels if panel.lines]
    return sorted(shown, key=lambda panel: SECTIONS.index(panel.section))


# ------------------------------------------------------------------------- what a recipe has logged


def _by_epoch(runs: Sequence[RunReport]) -> Iterator[Panel]:
    names = dict.fromkeys(name for run in runs for name, _ in run.history.epochs)
    stages = dict.fromkeys(stage for run in runs for _, stage in run.history.epochs)
    order = [
        *(stage for stage in STAGES if stage in stages),
        *(stage for stage in stages if stage not in STAGES),
    ]
    for name in sorted(names, key=lambda name: name != "loss"):
        found = [
            _epoch_line(run, number, name, stage, order.index(stage))
            for number, run in enumerate(runs)
            for stage in order
            if (name, stage) in run.history.epochs
        ]
        gaps = sum(int(np.isnan(line.y).sum()) for line in found)
        yield Panel(
            name,
            RESULTS,
            EPOCH_AXIS,
            NUMBER,
            tuple(found),
            not_numbers=gaps,
        )


def _epoch_line(
    run: RunReport,
    number: int,
    name: str,
    stage: str,
    place: int,
) -> Line:
    values = sorted(run.history.epochs[name, stage].items())
    x = np.array([epoch for epoch, _ in values])
    y = np.array([value for _, value in values])
    return Line("by epoch" if stage == META else stage, number, place, x, y)


def _by_step(runs: Sequence[RunReport]) -> Iterator[Panel]:
    names = dict.fromkeys(name for run in runs for name in run.steps if name != STEP)
    for name in names:
        lines = tuple(_column_lines(runs, "steps", {name: "train"}))
        yield Panel(f"{name}, by step", RESULTS, STEP_AXIS, NUMBER, lines)


def _column_lines(
    runs: Sequence[RunReport],
    source: str,
    columns: Mapping[str, str],
    scale: float = 1.0,
) -> Iterator[Line]:
    """Yield the curves of columns that some run has, where there is a number in them."""
    for number, run in enumerate(runs):
        table: Mapping[str, Numbers] = getattr(run, source)
        for place, (column, label) in enumerate(columns.items()):
            values = table.get(column)
            if values is not None and not np.isnan(values).all():
                yield Line(label, number, place, table[STEP], values * scale)


def _one(
    runs: Sequence[RunReport],
    section: str,
    title: str,
    column: str,
    unit: str,
) -> Panel:
    lines = tuple(_column_lines(runs, "speed", {column: title}))
    return Panel(title, section, STEP_AXIS, unit, lines)


# ------------------------------------------------------------------------- what ddpkit has measured


def _optimisation(runs: Sequence[RunReport]) -> Iterator[Panel]:
    yield _one(runs, OPTIMISATION, "mean training loss of the epoch", "loss", NUMBER)
    yield _one(runs, OPTIMISATION, "learning rate", "learning_rate", NUMBER)
    yield _one(runs, OPTIMISATION, "gradient norm", "gradient_norm", NUMBER)
    yield Panel(
        "steps with clipped gradients",
        OPTIMISATION,
        EPOCH_AXIS,
        SHARE,
        tuple(_clipped(runs)),
    )
    yield Panel("skipped steps, in all", OPTIMISATION, STEP_AXIS, NUMBER, tuple(_skipped(runs)))


def _clipped(runs: Sequence[RunReport]) -> Iterator[Line]:
    for number, run in enumerate(runs):
        values = sorted(run.history.clipped.items())
        if any(share for _, share in values):
            x, y = (np.array(column) for column in zip(*values, strict=True))
            yield Line("clipped", number, 0, x, y)


def _skipped(runs: Sequence[RunReport]) -> Iterator[Line]:
    for number, run in enumerate(runs):
        if run.history.skipped:
            x, y = (np.array(column) for column in zip(*run.history.skipped, strict=True))
            yield Line("skipped", number, 0, x, y)


def _speed(runs: Sequence[RunReport]) -> Iterator[Panel]:
    yield _one(runs, SPEED, "samples per second", "samples_per_second", NUMBER)
    yield _one(runs, SPEED, "tokens per second", "tokens_per_second", NUMBER)
    spread = {"step.max": "slowest rank", "step.median": "median rank", "step.min": "fastest rank"}
    if all(_has_one_process(run) for run in runs):
        spread = {"step.median": "one step"}
    yield Panel(
        "time of a step",
        SPEED,
        STEP_AXIS,
        SECONDS,
        tuple(_column_lines(runs, "speed", spread)),
    )
    for number, run in enumerate(runs):
        yield _split(run, number, f" of {run.label}" if len(runs) > 1 else "")
    yield Panel("wait for the other ranks", SPEED, STEP_AXIS, SECONDS, tuple(_waits(runs)))
    yield _one(runs, SPEED, "share of the device's peak (MFU)", "mfu", SHARE)
    yield _one(runs, SPEED, "steps in which the GPU waited for the host", "host_bound", SHARE)


def _has_one_process(run: RunReport) -> bool:
    sizes = run.speed.get("world_size")
    return sizes is None or bool((sizes <= 1).all())


def _split(run: RunReport, number: int, words: str) -> Panel:
    """The medians over the ranks of each phase, upon each other."""
    lines = []
    for place, phase in enumerate(PHASES):
        values = run.speed.get(f"phases.{phase}.median")
        if values is not None and np.nansum(values) > 0:
            lines.append(
                Line(
                    phase,
                    number,
                    place,
                    run.speed[STEP],
                    np.nan_to_num(values),
                )
            )
    note = "Medians over the ranks; averaged where points lie close."
    return Panel(
        f"split of a step{words}",
        SPEED,
        STEP_AXIS,
        SECONDS,
        tuple(lines),
        True,
        note,
    )


def _waits(runs: Sequence[RunReport]) -> Iterator[Line]:
    """How long ranks wait for the others: who waits least has come last."""
    columns = {
        "phases.exchange.max": "the rank that came first",
        "phases.exchange.min": "the rank that came last",
    }
    several = [run for run in runs if not _has_one_process(run)]
    for line in _column_lines(runs, "speed", columns):
        if runs[line.run] in several:
            yield line


def _memory(runs: Sequence[RunReport]) -> Iterator[Panel]:
    names = dict.fromkeys(
        name.split(".")[1] for run in runs for name in run.speed if name.startswith("memory.")
    )
    words = {
        "rss": "memory of a process (RSS)",
        "allocated": "GPU memory in use",
        "reserved": "GPU memory reserved",
        "peak": "GPU memory, peak",
    }
    for name in names:
        columns = {f"memory.{name}.max": "fullest rank", f"memory.{name}.min": "emptiest rank"}
        if all(_has_one_process(run) for run in runs):
            columns = {f"memory.{name}.max": "process"}
        lines = tuple(_column_lines(runs, "speed", columns))
        yield Panel(
            words.get(name, f"memory: {name}"),
            MEMORY,
            STEP_AXIS,
            BYTES,
            lines,
        )
