"""What the time of a step is divided into, on a rank that is late and on one that waits for it."""

from __future__ import annotations

from ddpkit.step_times import phases
from drawings.canvas import Canvas

LEFT = 10
HIGH = 34
UNIT = 5.0  # of a millisecond
FILLS = {
    phases.DATA: "plain",
    phases.MOVE: "plain",
    phases.FORWARD: "first",
    phases.BACKWARD: "second",
    phases.EXCHANGE: "waiting",
    phases.OPTIMIZER: "third",
    phases.OTHER: "plain",
}
WORDS = {
    phases.DATA: "waits for the loader",
    phases.MOVE: "the batch goes to the device",
    phases.FORWARD: "up to the backward pass",
    phases.BACKWARD: "until the rank's own gradients are there",
    phases.EXCHANGE: "waits for the other ranks",
    phases.OPTIMIZER: "clip, step and zero",
    phases.OTHER: "the rest",
}
# Milliseconds; both ranks end a step at the same time.
RANKS = {
    "rank 0": (8, 4, 18, 26, 26, 14, 4),
    "rank 1, late in the forward pass": (8, 4, 36, 26, 8, 14, 4),
}


def draw() -> str:
    """Return the picture as SVG."""
    canvas = Canvas("The phases of a step on two ranks, of which one is late", 352)
    y = 10.0
    for name, lengths in RANKS.items():
        canvas.words(LEFT, y + 14, name, "bold")
        x = float(LEFT)
        for number, (phase, length) in enumerate(zip(phases.PHASES, lengths, strict=True), 1):
            width = UNIT * length
            canvas.box(x, y + 22, width, HIGH, fill=FILLS[phase])
            canvas.words(x + width / 2, y + 44, str(number), anchor="middle")
            x += width
        y += 70
    canvas.line([(LEFT, y + 4), (LEFT + 500, y + 4)], arrow=True)
    canvas.words(LEFT + 500, y + 22, "time", "faint small", anchor="end")
    y += 26
    for number, phase in enumerate(phases.PHASES, 1):
        canvas.box(LEFT, y, 22, 20, fill=FILLS[phase])
        canvas.words(LEFT + 11, y + 15, str(number), "small", anchor="middle")
        canvas.words(LEFT + 32, y + 15, phase, "code")
        canvas.words(LEFT + 118, y + 15, WORDS[phase], "small")
        y += 25
    return canvas.svg()
