"""How GPUs are read, in one object. A test can replace it by recorded values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpkit.device import resolve_device
from ddpkit.launch import LaunchInfo
from ddpkit.see.doctor.gpus.by_torch import ByTorch, ask_torch
from ddpkit.see.doctor.gpus.driver import Driver
from ddpkit.see.doctor.gpus.load import Load
from ddpkit.see.doctor.gpus.nvml import read_driver


@dataclass(frozen=True)
class GpuSight:
    """How checks look at GPUs.

    Attributes:
        driver: asks the driver about all GPUs of the machine.
        by_torch: asks torch about those that this process sees.
        device_of: names the device that ddpkit gives a process: by what is asked, and its place.
        load: keeps GPUs busy, by torch's numbers, while it is entered.
    """

    driver: Callable[[], Driver] = read_driver
    by_torch: Callable[[], ByTorch] = ask_torch
    device_of: Callable[[str | None, LaunchInfo], str] = resolve_device
    load: Callable[[Sequence[int]], Load] = Load
