"""How fast a GPU is clocked, and why not faster; asked of the driver every ten seconds."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from ddpkit.logger import get_logger

logger = get_logger(__name__)

#: From one question to the next: clocks follow heat slowly, and a question takes up to a
#: millisecond.
INTERVAL_SECONDS = 10.0


class GpuClocks:
    """Asks NVML for the clock of this rank's GPU.

    Without such a GPU, or without nvidia-ml-py (``pip install nvidia-ml-py``), it knows nothing. A
    driver that refuses an answer is not asked again.

    Args:
        device: of this rank.
        nvml: in place of the module ``pynvml`` of nvidia-ml-py.

    State: a connection of this process to the driver, until the process ends.
    """

    def __init__(self, device: str, nvml: Any = None) -> None:
        self._device = device
        self._nvml = nvml
        self._handle: Any = None
        self._is_known = device.startswith("cuda") and torch.version.hip is None
        self._asked_at = float("-inf")
        self._last: dict[str, float] | None = None

    def read(self) -> dict[str, float] | None:
        """Return ``"share"`` of the highest clock, 0 to 1, and ``"reasons"``, bits; None: not
        known.
        """
        now = time.monotonic()
        if self._is_known and now - self._asked_at >= INTERVAL_SECONDS:
            self._asked_at = now
            self._last = self._ask()
        return self._last

    def _ask(self) -> dict[str, float] | None:
        try:
            nvml = self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            self._is_known = False
            return None
        try:
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(_uuid(self._device))
            now = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
            highest = nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM)
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except nvml.NVMLError as error:
            logger.debug("NVML does not tell the clock of %s: %s.", self._device, error)
            self._is_known = False
            return None
        return {"share": min(now / max(highest, 1), 1.0), "reasons": float(reasons)}


def _uuid(device: str) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
