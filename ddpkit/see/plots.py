"""The look of plots: colours, and axes without frames. Nothing of matplotlib is loaded here."""

from __future__ import annotations

from typing import Any

from ddpkit.step_times import BACKWARD, DATA, EXCHANGE, FORWARD, MOVE, OPTIMIZER, OTHER

#: Of lines, in turn.
COLOURS = ("#2f6fd0", "#d9730d", "#2b8a5e", "#b3409b", "#8a6d1f", "#5b5bd6")
INK = "#1f2933"
MUTED = "#6b7280"
GRID = "#e5e7eb"

#: Of each phase of a step: work is blue, what waits is warm.
PHASE_COLOURS = {
    DATA: "#e0a12e",
    MOVE: "#b9c7dd",
    FORWARD: "#6f9fe0",
    BACKWARD: "#2f6fd0",
    EXCHANGE: "#d9480f",
    OPTIMIZER: "#2b8a5e",
    OTHER: "#a3a9b3",
}


def clean(axes: Any) -> None:
    """Take frames and ticks off axes, and put a light grid behind.

    Args:
        axes: of matplotlib.
    """
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
