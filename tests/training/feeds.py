"""What a feed yields, and its windows: for the tests of feeds."""

from __future__ import annotations

from typing import Any, NamedTuple

from ddpkit.training.window import Window


class Step(NamedTuple):
    """A batch, and what the window says of it."""

    batch: Any
    count: int
    weight: float
    scale: float
    closes: bool
    correction: float


def drain(feed):
    window = Window()
    return [
        Step(batch, window.count, window.weight, window.scale, window.closes, window.correction)
        for batch in feed.batches(window)
    ]


def windows_of(steps):
    """Cut steps into windows; each ends where ``closes`` is true."""
    found = []
    current = []
    for step in steps:
        current.append(step)
        if step.closes:
            found.append(current)
            current = []
    assert not current, "the last window is closed"
    return found
