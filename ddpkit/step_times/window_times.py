"""What was measured of single optimizer steps on this rank, and the medians of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpkit.step_times.medians import median
from ddpkit.step_times.phases import EXCHANGE, PHASES, STEP
from ddpkit.step_times.seconds import SINGLE_WINDOWS


@dataclass
class WindowTimes:
    """One measured step.

    Attributes:
        seconds: by phase.
        samples: of this rank.
        size: elements of the first tensors of its batches.
        batches: how many there were.
        counts: of ``(loss_sum, count)``, one per batch: numbers, or tensors that nobody has waited
            for.
        host_seconds: that the host took.
        is_host_bound: whether the GPU had reached the end when the host came there.
        is_cut: whether a sync has ended it, for which the host has waited for the GPU: then the
            last two tell nothing.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0
    size: float = 0.0
    batches: int = 0
    counts: list[Any] = field(default_factory=list)
    host_seconds: float = 0.0
    is_host_bound: bool = False
    is_cut: bool = False


class SingleWindow(NamedTuple):
    """Numbers of one measured step that its medians would hide.

    Attributes:
        size: elements of the first tensors.
        own: seconds without the wait for others.
        exchange: seconds of that wait.
    """

    size: float
    own: float
    exchange: float


@dataclass
class RankNumbers:
    """What one rank tells of its measured steps since the last sync of the ranks.

    Attributes:
        phases: medians over the steps, by phase, and ``"step"`` for their sum.
        samples: mean per step, as are the next.
        size: elements of the first tensors.
        tokens: counts of the losses; None where there are none.
        host_seconds: median.
        is_host_bound: share of the steps, 0 to 1.
        singles: the last steps one by one, at most
            :data:`~ddpkit.step_times.seconds.SINGLE_WINDOWS`.
    """

    phases: dict[str, float]
    samples: float
    size: float
    tokens: float | None
    host_seconds: float
    is_host_bound: float
    singles: list[SingleWindow] = field(default_factory=list)


def summarized(windows: list[WindowTimes]) -> RankNumbers:
    """Return what a rank tells of its measured steps.

    Args:
        windows: at least one.

    Ranks: local. Waits for counts that are on a GPU.

    Example:
        >>> first = WindowTimes(dict.fromkeys(PHASES, 0.5), samples=4.0)
        >>> summarized([first, first]).phases["step"]
        3.5
    """
    phases = {phase: median(window.seconds[phase] for window in windows) for phase in PHASES}
    phases[STEP] = median(sum(window.seconds.values()) for window in windows)
    number = len(windows)
    whole = [window for window in windows if not window.is_cut]
    counts = [float(count) for window in windows for count in window.counts]
    return RankNumbers(
        phases=phases,
        samples=sum(window.samples for window in windows) / number,
        size=sum(window.size for window in windows) / number,
        tokens=sum(counts) / number if counts else None,
        host_seconds=median(window.host_seconds for window in whole or windows),
        is_host_bound=sum(window.is_host_bound for window in whole) / max(len(whole), 1),
        singles=[_single(window) for window in windows[-SINGLE_WINDOWS:]],
    )


def _single(window: WindowTimes) -> SingleWindow:
    exchange = window.seconds[EXCHANGE]
    return SingleWindow(
        window.size,
        sum(window.seconds.values()) - exchange,
        exchange,
    )
