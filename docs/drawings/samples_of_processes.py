"""Which process takes which samples: one epoch on one, two and three of them."""

from __future__ import annotations

from ddpkit.data.plan import Order, SamplingPlan
from drawings.canvas import WIDTH, Canvas

SAMPLES = 11
GLOBAL_BATCH = 6
RANKS = ("first", "second", "third")
CELL = 42
HIGH = 30
STEP_GAP = 16
LEFT = (WIDTH - SAMPLES * CELL - STEP_GAP) / 2
FIRST_ROW = 62
ROW = 66


def shares(world_size: int) -> list[list[list[int]]]:
    """Return the samples of each step, rank by rank."""
    order = Order(SAMPLES, seed=1, epoch=1)
    plan = SamplingPlan(SAMPLES, world_size=world_size, global_batch_size=GLOBAL_BATCH)
    return [
        [order.indices(*plan.share(step, rank)) for rank in range(world_size)]
        for step in range(len(plan))
    ]


def _row(canvas: Canvas, world_size: int, y: float) -> None:
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    canvas.words(LEFT, y - 8, processes, "bold")
    x = LEFT
    for step in shares(world_size):
        for rank, samples in enumerate(step):
            for sample in samples:
                canvas.box(x, y, CELL - 3, HIGH, fill=RANKS[rank])
                canvas.words(x + (CELL - 3) / 2, y + 20, str(sample), anchor="middle")
                x += CELL
        x += STEP_GAP


def draw() -> str:
    """Return the picture as SVG."""
    height = FIRST_ROW + 3 * ROW + 8
    title = f"The same {SAMPLES} samples in the same order on 1, 2 and 3 processes"
    canvas = Canvas(title, height)
    first = GLOBAL_BATCH * CELL
    for start, width, words in (
        (LEFT, first, f"step 1: {GLOBAL_BATCH} samples"),
        (
            LEFT + first + STEP_GAP,
            (SAMPLES - GLOBAL_BATCH) * CELL,
            f"step 2: {SAMPLES - GLOBAL_BATCH} samples",
        ),
    ):
        canvas.words(start + width / 2, 16, words, anchor="middle")
        canvas.line([(start, 28), (start, 22), (start + width - 3, 22), (start + width - 3, 28)])
    for number in (1, 2, 3):
        _row(canvas, number, FIRST_ROW + (number - 1) * ROW)
    x = LEFT
    for rank, fill in enumerate(RANKS):
        canvas.box(x, height - 24, 18, 18, fill=fill)
        canvas.words(x + 24, height - 10, f"rank {rank}")
        x += 92
    return canvas.svg()
