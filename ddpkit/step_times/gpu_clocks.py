"""How fast this rank's GPU is clocked, and why it is not faster, as its driver says."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch


class GpuClocks:
    """Asks the driver of an NVIDIA GPU, through ``nvidia-ml-py``, if that is installed (``ddpkit[see]``).

    Args:
        device: of this rank, such as ``"cuda:1"``.

    Ranks: local.

    State: a connection of this process to the driver, until the process ends.

    Example:
        >>> GpuClocks("cpu").read() is None
        True
    """

    def __init__(self, device: str) -> None:
        self._driver: Any = None
        self._gpu: Any = None
        if device.startswith("cuda"):
            with contextlib.suppress(ImportError):
                self._connect(device)

    def _connect(self, device: str) -> None:
        driver: Any = importlib.import_module("pynvml")  # of nvidia-ml-py, which has no types
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is None:  # a torch without it, or a GPU of another maker
            return
        with contextlib.suppress(driver.NVMLError):
            driver.nvmlInit()
            self._gpu = driver.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._driver = driver

    def read(self) -> dict[str, float] | None:
        """Return ``"share"`` of the highest clock, 0 to 1, and ``"reasons"``, bits of NVML; None: not known."""
        driver = self._driver
        if driver is None:
            return None
        with contextlib.suppress(driver.NVMLError):
            now = driver.nvmlDeviceGetClockInfo(self._gpu, driver.NVML_CLOCK_SM)
            most = driver.nvmlDeviceGetMaxClockInfo(self._gpu, driver.NVML_CLOCK_SM)
            reasons = driver.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu)
            return {"share": now / max(most, 1), "reasons": float(reasons)}
        return None
