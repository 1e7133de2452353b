"""A step of several micro-batches on two processes, and the short one at the end of an epoch."""

from __future__ import annotations

from ddpkit.data.plan import SamplingPlan
from drawings.canvas import WIDTH, Canvas

PLAN = SamplingPlan(200, world_size=2, global_batch_size=48, micro_batches=4)
CELL = 62
HIGH = 34
TOP = 60
ROW = 46
BAR = 26
STEP = 52
LEFT = 10


def samples(batch: int, rank: int) -> int:
    """Return how many samples a rank has in a batch."""
    start, stop = PLAN.share(batch, rank)
    return stop - start


def _window(canvas: Canvas, x: float, first: int, last: int, title: str) -> float:
    """Draw the batches of a window; return where it ends."""
    width = (last - first + 1) * CELL + BAR + STEP
    canvas.words(x, 18, title, "bold")
    for rank in range(PLAN.world_size):
        y = TOP + rank * ROW
        for number, batch in enumerate(range(first, last + 1)):
            fill = "first" if batch < last else "second"
            canvas.box(x + number * CELL, y, CELL - 4, HIGH, fill=fill)
            canvas.words(
                x + number * CELL + (CELL - 4) / 2,
                y + 22,
                str(samples(batch, rank)),
                anchor="middle",
            )
        canvas.box(x + width - STEP, y, STEP - 4, HIGH, fill="third")
        canvas.words(x + width - STEP / 2 - 2, y + 22, "step", anchor="middle")
    bar = x + width - STEP - BAR
    canvas.box(bar + 3, TOP - 6, BAR - 10, PLAN.world_size * ROW, fill="second")
    return x + width


def draw() -> str:
    """Return the picture as SVG."""
    canvas = Canvas("A window of four micro-batches on two processes, and a short one", 282)
    end = _window(canvas, LEFT, 0, 3, "a step of 48 samples")
    canvas.words(LEFT, 44, "rank 0 above, rank 1 below", "faint small")
    last = len(PLAN) - 1
    _window(canvas, end + 20, last, last, "the last, of 8")
    rows = (
        ("first", "forward and backward in no_sync: gradients add up on each process"),
        ("second", "the last backward: the processes exchange gradients, once"),
        ("third", "clip, optimizer step, zero"),
    )
    y = TOP + PLAN.world_size * ROW + 22
    for fill, words in rows:
        canvas.box(LEFT, y, 18, 18, fill=fill)
        canvas.words(LEFT + 26, y + 14, words, "small")
        y += 30
    canvas.words(
        WIDTH / 2,
        y + 12,
        "A number is the samples that a process has in a micro-batch.",
        "faint small",
        anchor="middle",
    )
    return canvas.svg()
