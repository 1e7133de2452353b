"""The peak of the memory that a step allocates, before its optimizer step and in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from ddpkit.compat import RecordedPeaks, StepPeaks
from ddpkit.errors import ConfigError

COUNTED = ("cuda", "xpu")  # kinds of devices whose allocator keeps its peak


class Peaks(Protocol):
    """Measures the peaks of steps.

    Ranks: local.
    """

    def begin(self) -> None:
        """Begin a step."""

    def begin_optimizer(self) -> None:
        """Note that the optimizers step from here on."""

    def end(self) -> StepPeaks:
        """End the step, and return its peaks."""


def peaks_on(
    device: str,
    scratch: str,
) -> Peaks:
    """Return what measures peaks on a device.

    Args:
        device: such as ``"cuda:0"``.
        scratch: folder for files that are removed again.

    Raises:
        ConfigError: torch does not tell what such a device allocates.

    Example:
        >>> peaks_on("mps", "/tmp")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: torch does not tell what a device of the kind 'mps' allocates...
    """
    kind = torch.device(device).type
    if kind in COUNTED:
        return AllocatorPeaks(device)
    if kind == "cpu":
        return RecordedPeaks(Path(scratch))
    raise ConfigError(
        f"torch does not tell what a device of the kind {kind!r} allocates, so that its memory is "
        "not estimated. Measure on the CPU, with --device=cpu: most of it is the same there."
    )


class AllocatorPeaks:
    """Peaks as the allocator of a GPU counts them.

    Args:
        device: such as ``"cuda:0"``.

    Ranks: local.
    """

    def __init__(
        self,
        device: str,
    ) -> None:
        self._device = device
        self._allocator: Any = getattr(torch, torch.device(device).type)
        self._before = 0
        self._passes: float | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._passes = None
        # what the step before has freed may still be in use
        self._allocator.synchronize(self._device)
        self._allocator.reset_peak_memory_stats(self._device)
        self._before = self._allocator.memory_allocated(self._device)

    def begin_optimizer(self) -> None:
        """Note that the optimizers step from here on."""
        # the first optimizer of several: the others step after it
        if self._passes is None:
            self._passes = self._peak()
            self._allocator.reset_peak_memory_stats(self._device)

    def end(self) -> StepPeaks:
        """End the step, and return its peaks."""
        last = self._peak()
        if self._passes is None:
            return StepPeaks(last, None)
        return StepPeaks(self._passes, last)

    def _peak(self) -> float:
        return float(self._allocator.max_memory_allocated(self._device) - self._before)
