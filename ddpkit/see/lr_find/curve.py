"""The losses of rising learning rates, smoothed, and the rate that they suggest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_POINTS = 20
SMOOTHED_OVER = 0.04  # of the curve: standard deviation of the bell that losses are averaged with
TIMES_THE_NOISE = 3.0  # so far a fall must go to be one
LEAST_FALL = 0.01  # of the first loss
# of the curve: a steepest point that is nearer to its begin lies perhaps before it, as a bell has
# neighbours on one side only there
EDGE = 2 * SMOOTHED_OVER


@dataclass(frozen=True)
class Suggestion:
    """What a curve suggests.

    Attributes:
        rate: the learning rate; None: the curve shows none.
        why: in a sentence.
        position: of the rate in the curve; None without one.
        lowest: position of the lowest smoothed loss.
    """

    rate: float | None
    why: str
    position: int | None = None
    lowest: int = 0


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return losses as means over their neighbours on both sides, so that nothing is moved.

    Args:
        losses: at least one.

    Source: a bell as in kernel regression (Nadaraya, 1964).

    Example:
        >>> smoothed([1.0, 1.0, 1.0])
        [1.0, 1.0, 1.0]
    """
    values = np.asarray(losses, dtype=np.float64)
    places = np.arange(len(values))
    width = max(SMOOTHED_OVER * len(values), 0.5)
    distances = places[:, None] - places[None, :]
    bells = np.exp(-0.5 * (distances / width) ** 2)
    means: list[float] = ((bells @ values) / bells.sum(1)).tolist()
    return means


def suggest(rates: Sequence[float], losses: Sequence[float]) -> Suggestion:
    """Suggest the rate at which the smoothed loss falls fastest over the logarithm of the rate.

    Args:
        rates: rising, each a factor larger than the one before.
        losses: of the steps with these rates; finite.

    Source: Smith (2017), *Cyclical Learning Rates for Training Neural Networks*, section 3.3.
    """
    if len(losses) < LEAST_POINTS:
        return Suggestion(
            None,
            f"only {len(losses)} of the steps have a finite loss, and {LEAST_POINTS} are needed. "
            "Give a smaller --from, or more --steps",
        )
    curve = np.asarray(smoothed(losses))
    lowest = int(curve.argmin())
    first = float(curve[0])
    fall = first - float(curve[lowest])
    noise = _noise(losses, curve, lowest)
    if fall <= max(TIMES_THE_NOISE * noise, LEAST_FALL * abs(first)):
        return Suggestion(None, _flat(first, fall, noise, lowest, len(curve)), lowest=lowest)
    slopes = np.gradient(curve, np.log(np.asarray(rates[: len(curve)])))
    steepest = int(slopes[: lowest + 1].argmin())
    if steepest <= EDGE * len(curve):
        return Suggestion(
            None,
            f"the loss falls fastest at the first rates, from {rates[0]:.1e} on, so a better rate "
            "may lie below. Give a smaller --from",
            lowest=lowest,
        )
    why = (
        f"there the smoothed loss falls fastest; it is lowest at {rates[lowest]:.1e}, "
        f"{fall:.3g} below its first value of {first:.3g}"
    )
    return Suggestion(rates[steepest], why, steepest, lowest)


@dataclass(frozen=True)
class LrCurve:
    """A measured curve, and what it suggests.

    Args:
        recipe: the command line.
        rates: of each step.
        losses: likewise.
        ended: why there are no more.
        world_size: processes.
    """

    recipe: str
    rates: list[float]
    losses: list[float]
    ended: str
    world_size: int

    @property
    def suggestion(self) -> Suggestion:
        """The rate, or why there is none."""
        return suggest(self.rates, self.losses)

    def as_dict(self) -> dict[str, Any]:
        """Return the curve as plain values."""
        found = self.suggestion
        return {
            "recipe": self.recipe,
            "world_size": self.world_size,
            "ended": self.ended,
            "suggestion": found.rate,
            "why": found.why,
            "points": [
                {"learning_rate": rate, "loss": loss, "smoothed": mean}
                for rate, loss, mean in zip(
                    self.rates,
                    self.losses,
                    smoothed(self.losses) if self.losses else [],
                    strict=True,
                )
            ],
        }


def _noise(losses: Sequence[float], curve: np.ndarray, lowest: int) -> float:
    """Return how far a smoothed loss is off by chance: from the spread of the losses around it."""
    number = max(lowest, LEAST_POINTS // 2)
    spread = float(np.std(np.asarray(losses[:number]) - curve[:number]))
    # a mean over a bell has about so many independent losses in it
    independent = max(2.0 * math.sqrt(math.pi) * SMOOTHED_OVER * len(losses), 1.0)
    return spread / math.sqrt(independent)


def _flat(first: float, fall: float, noise: float, lowest: int, number: int) -> str:
    if lowest <= EDGE * number:
        return "the loss does not fall at any rate. Give a smaller --from"
    if fall <= LEAST_FALL * abs(first):
        return f"the loss of {first:.3g} hardly falls at any rate. Give a larger --to"
    return (
        f"the loss falls by {max(fall, 0.0):.2g} from {first:.3g}, which chance can do (a smoothed "
        f"loss is off by about {noise:.2g}). Give a larger --to, larger batches, or more --steps"
    )
