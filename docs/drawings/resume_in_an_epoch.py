"""A run that is killed in the middle of an epoch, and goes on from its checkpoint."""

from __future__ import annotations

from drawings.canvas import Canvas

STEPS = 10
SAVED = 6
KILLED = 8
CELL = 50
HIGH = 30
LEFT = 10


def _steps(canvas: Canvas, y: float, first: int, last: int, fill: str) -> None:
    for step in range(first, last + 1):
        x = LEFT + (step - 1) * CELL
        canvas.box(x, y, CELL - 4, HIGH, fill=fill)
        canvas.words(x + (CELL - 4) / 2, y + 20, str(step), anchor="middle")


def draw() -> str:
    """Return the picture as SVG."""
    canvas = Canvas("A run killed after step 8 goes on from the checkpoint after step 6", 318)
    saved_x = LEFT + SAVED * CELL - 2
    killed_x = LEFT + KILLED * CELL - 2

    canvas.words(LEFT, 18, "first start", "bold")
    canvas.words(LEFT + 84, 18, "steps of epoch 3", "faint")
    _steps(canvas, 28, 1, KILLED, "first")
    canvas.words(killed_x + 10, 48, "killed", "trouble bold")
    canvas.line([(killed_x, 22), (killed_x, 64)], edge="trouble", width=2.5)
    canvas.line([(saved_x, 22), (saved_x, 92)])
    canvas.box(saved_x - 110, 92, 220, 46, fill="panel")
    canvas.words(saved_x, 111, "checkpoint", "bold", anchor="middle")
    canvas.words(
        saved_x,
        129,
        "weights, place, random streams",
        "faint small",
        anchor="middle",
    )
    canvas.line([(saved_x, 138), (saved_x, 172)], arrow=True)

    canvas.words(LEFT, 166, "second start", "bold")
    canvas.box(LEFT, 176, SAVED * CELL - 4, HIGH, fill="none", dashed=True)
    canvas.words(
        LEFT + SAVED * CELL / 2,
        196,
        "not computed again",
        "faint small",
        anchor="middle",
    )
    _steps(canvas, 176, SAVED + 1, KILLED, "second")
    _steps(canvas, 176, KILLED + 1, STEPS, "first")
    canvas.words(LEFT + SAVED * CELL, 226, "again, the same samples", "faint small")

    canvas.words(LEFT, 264, "never killed", "bold")
    _steps(canvas, 274, 1, STEPS, "first")
    end = LEFT + STEPS * CELL - CELL / 2
    canvas.line([(end, 210), (end, 270)], dashed=True)
    canvas.words(end - 8, 258, "the same bits", "bold", anchor="end")
    return canvas.svg()
