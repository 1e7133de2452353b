"""In which order the methods of a Brain are called by ``fit``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drawings.canvas import WIDTH, Canvas

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = 26
HEAD = 26
INSET = 14
GAP = 8


@dataclass(frozen=True)
class Call:
    """A call of a method.

    Attributes:
        name: of the method.
        argument: the stage that it is given, if any.
        note: words beside it.
        is_needed: whether each recipe has to write the method.
    """

    name: str
    argument: str = ""
    note: str = ""
    is_needed: bool = False


@dataclass(frozen=True)
class Block:
    """Calls that belong together; ``method`` is the one that makes them, if that can be overridden,
    too.
    """

    title: str
    rows: list[Call | Block] = field(default_factory=list)
    method: str = ""


FORWARD = Call("compute_forward", note="needed", is_needed=True)
OBJECTIVES = Call("compute_objectives", note="needed; then the backward pass", is_needed=True)
FIT = Block(
    "fit",
    [
        Call("make_dataloader", "TRAIN"),
        Call("make_dataloader", "VALID"),
        Call("on_fit_start", note="compiles and wraps the modules"),
        Call("init_optimizers", note="then the checkpoint is loaded"),
        Block(
            "for each epoch",
            [
                Call("on_stage_start", "TRAIN"),
                Block(
                    "for each batch: fit_batch",
                    [
                        Call("on_fit_batch_start"),
                        FORWARD,
                        OBJECTIVES,
                        Call("optimizers_step", note="at the end of a window"),
                        Call("on_fit_batch_end"),
                    ],
                    method="fit_batch",
                ),
                Call("on_stage_end", "TRAIN"),
                Call("on_stage_start", "VALID"),
                Block(
                    "for each batch: evaluate_batch",
                    [FORWARD, Call("compute_objectives", note="needed", is_needed=True)],
                    method="evaluate_batch",
                ),
                Call("on_stage_end", "VALID"),
            ],
        ),
    ],
)


def names(block: Block = FIT) -> Iterator[str]:
    """Yield the methods in order, for one epoch with one batch of each stage."""
    if block.method:
        yield block.method
    for row in block.rows:
        if isinstance(row, Block):
            yield from names(row)
        else:
            yield f"{row.name}({row.argument})" if row.argument else row.name


def _height(row: Call | Block) -> float:
    if isinstance(row, Call):
        return ROW
    return HEAD + sum(map(_height, row.rows)) + GAP * len(row.rows)


def _draw(canvas: Canvas, row: Call | Block, x: float, y: float) -> None:
    if isinstance(row, Block):
        canvas.box(x, y, WIDTH - 2 * x, _height(row), fill="panel")
        canvas.words(x + 10, y + 18, row.title, "bold")
        y += HEAD
        for part in row.rows:
            _draw(canvas, part, x + INSET, y)
            y += _height(part) + GAP
        return
    name = f"{row.name}({row.argument})" if row.argument else row.name
    width = 8.1 * len(name) + 16
    canvas.box(x, y, width, ROW, fill="first" if row.is_needed else "plain")
    canvas.words(x + 8, y + 18, name, "code")
    canvas.words(x + width + 8, y + 18, row.note, "faint small")


def draw() -> str:
    """Return the picture as SVG."""
    canvas = Canvas("The order in which fit calls the methods of a Brain", _height(FIT) + 2)
    _draw(canvas, FIT, 1, 1)
    return canvas.svg()
