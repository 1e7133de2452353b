"""The plot of ``python -m ddpkit lr-find``: the losses over the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpkit.base import replacing, writing
from ddpkit.see.lr_find.curve import LrCurve, smoothed
from ddpkit.see.plots import COLOURS, INK, MUTED, clean

INCHES = (7.0, 4.0)
DPI = 150
ABOVE = 0.6  # of the way from the lowest to the first loss, above the first: more is cut off


def draw(curve: LrCurve, path: Path) -> None:
    """Draw a curve into a file.

    Args:
        curve: with at least one loss.
        path: of the file; its suffix says the format.

    Raises:
        ConfigError: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "text.color": INK, "svg.hashsalt": "ddpkit"}):
        figure = Figure(figsize=INCHES, layout="constrained")
        _draw_losses(figure.subplots(), curve)
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        with writing(f"--plot={str(path)!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                figure.savefig(unfinished, format=path.suffix[1:], dpi=DPI, metadata=metadata)


def _draw_losses(axes: Any, curve: LrCurve) -> None:
    means = smoothed(curve.losses)
    found = curve.suggestion
    axes.plot(curve.rates, curve.losses, color=MUTED, alpha=0.4, linewidth=1.0, label="of a step")
    axes.plot(curve.rates, means, color=COLOURS[0], linewidth=1.8, label="smoothed")
    if found.position is not None:
        rate = curve.rates[found.position]
        axes.axvline(rate, color=COLOURS[1], linewidth=1.2, linestyle=(0, (4, 3)))
        axes.plot([rate], [means[found.position]], "o", color=COLOURS[1], label=f"{rate:.1e}")
    axes.set_xscale("log")
    least = min(means)
    room = max(means[0] - least, 1e-12)
    axes.set_ylim(least - 0.1 * room, means[0] + ABOVE * room)
    clean(axes)
    axes.set_xlabel("learning rate", color=MUTED)
    axes.set_title(f"loss, {curve.recipe}", loc="left", fontsize=10)
    axes.legend(frameon=False)
