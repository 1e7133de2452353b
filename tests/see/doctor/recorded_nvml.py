"""NVML's answers from a file, in place of the driver, and machines made from them by changes.

``recorded/h200_at_rest.json`` and ``h200_at_work.json`` (a product of matrices in a loop) hold what
one real NVIDIA H200 answered, driver 580.159.04, in a virtual machine. Left out are the serial
number and questions that no check asks. The process that was at work had been written down as
text: its number and memory are those of nvidia-smi.

All other machines of the tests are these answers with changes; each test says which.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pynvml

from ddpkit.see.doctor.gpus.by_torch import ByTorch, TorchGpu
from ddpkit.see.doctor.gpus.driver import Driver
from ddpkit.see.doctor.gpus.load import Busy
from ddpkit.see.doctor.gpus.nvml import read_driver

FOLDER = Path(__file__).with_name("recorded")
LINKS = 18  # of an H200 on a board with NVSwitch


def recorded(name: str) -> dict[str, Any]:
    """Return a recording."""
    return json.loads(FOLDER.joinpath(f"{name}.json").read_text())


class RecordedNvml:
    """Stands in for the module ``pynvml``: constants and errors are its own."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record

    def nvmlInit(self) -> None:
        if "problem" in self.record:
            raise getattr(pynvml, self.record["problem"])

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.record["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._value(self.record["devices"][index].get("handle", {"value": 0}))
        return index

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.record.get("names", {}):
            raise pynvml.NVMLError_NotFound
        return self.record["names"][pid]

    def __getattr__(self, name: str) -> Any:
        own = getattr(pynvml, name)
        if not name.startswith(("nvmlSystem", "nvmlDevice")):
            return own
        if name.startswith("nvmlSystem"):
            return lambda: self._value(self.record["system"][name])
        return lambda handle, *arguments: self._answer(handle, name, arguments)

    def _answer(self, handle: int, name: str, arguments: tuple[Any, ...]) -> Any:
        key = f"{name}({','.join(map(str, arguments))})" if arguments else name
        return self._value(
            self.record["devices"][handle].get(key, {"error": "NVMLError_NotSupported"})
        )

    def _value(self, answer: Mapping[str, Any]) -> Any:
        if "error" in answer:
            raise getattr(pynvml, answer["error"])
        return _object(answer["value"])


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _object(one) for name, one in value.items()})
    return list(map(_object, value)) if isinstance(value, list) else value


def machine_of(count: int, name: str = "h200_at_rest", *, links: int = 0) -> dict[str, Any]:
    """Return a recording of several such GPUs, with UUIDs of their own and NVLinks to a switch."""
    made = recorded(name)
    first = made["devices"][0]
    made["devices"] = [copy.deepcopy(first) for _ in range(count)]
    for index, device in enumerate(made["devices"]):
        device["nvmlDeviceGetIndex"] = {"value": index}
        device["nvmlDeviceGetUUID"] = {"value": f"GPU-{index:08d}-8142-0545-2c8a-7f46d9b5fdea"}
        device["nvmlDeviceGetPciInfo"]["value"]["busId"] = f"00000000:0{index}:00.0"
        for number in range(links):
            device[f"nvmlDeviceGetNvLinkState({number})"] = {"value": 1}
            device[f"nvmlDeviceGetNvLinkVersion({number})"] = {"value": 4}
            switch = {"busId": f"00000000:F{number % 4}:00.0"}
            device[f"nvmlDeviceGetNvLinkRemotePciInfo({number})"] = {"value": switch}
        for other in range(count):
            device[f"nvmlDeviceGetTopologyCommonAncestor({other})"] = {"value": 40}
            device[f"nvmlDeviceGetP2PStatus({other},0)"] = {"value": 0}
    return made


def change(record: dict[str, Any], gpu: int, **answers: Any) -> dict[str, Any]:
    """Change answers of a GPU in a recording, and return it; ``name__1_0`` is ``name(1,0)``."""
    for name, value in answers.items():
        question, _, arguments = name.partition("__")
        key = f"{question}({arguments.replace('_', ',')})" if arguments else question
        is_error = isinstance(value, str) and value.startswith("NVMLError")
        record["devices"][gpu][key] = {"error": value} if is_error else {"value": value}
    return record


def driver_of(record: Mapping[str, Any]) -> Driver:
    """Read a recording."""
    return read_driver(RecordedNvml(record))


def torch_of(driver: Driver, **changes: Any) -> ByTorch:
    """Return what a torch for CUDA 12.8 sees of a driver's GPUs."""
    gpus = tuple(
        TorchGpu(number, gpu.name, gpu.uuid, gpu.compute_capability, gpu.memory_total)
        for number, gpu in enumerate(one for one in driver.gpus if one.name)
    )
    pairs = [(i, j) for i in range(len(gpus)) for j in range(len(gpus)) if i != j]
    fields = {
        "version": "2.13.0+cu128",
        "cuda": "12.8",
        "architectures": ("sm_80", "sm_90", "sm_100"),
        "gpus": gpus,
        "peers": tuple((i, j, True) for i, j in pairs),
    }
    return ByTorch(**{**fields, **changes})


@final
class RecordedLoad:
    """Stands in for GPUs at work."""

    def __init__(
        self,
        copied: float = 50e9,
        computed: float = 7e14,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.copied = copied
        self.computed = computed
        self.slow = slow or {}
        self.done: dict[int, Busy] = {}

    def __call__(self, devices: list[int]) -> RecordedLoad:
        self.done = {
            one: Busy(self.copied, self.computed * self.slow.get(one, 1.0)) for one in devices
        }
        return self

    def __enter__(self) -> RecordedLoad:
        return self

    def __exit__(self, *_: object) -> None:
        pass
