"""Asks NVIDIA's driver about the GPUs of this machine, through the package nvidia-ml-py.

Source: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpkit.errors import MissingExtraError
from ddpkit.see.doctor.gpus.driver import Driver, Gpu, GpuProcess, NvLink

NO_DRIVER = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
READ = 0  # of peers; the constant of that name is a tuple in some versions of nvidia-ml-py
THERMAL = 1  # NVML_PERF_POLICY_THERMAL
NANOSECONDS = 1e9


def read_driver(nvml: Any = None) -> Driver:
    """Ask the driver about all GPUs of the machine, hidden ones too; nothing is made on a GPU.

    Args:
        nvml: in place of the module ``pynvml`` of nvidia-ml-py.

    Returns:
        The answers; without ``version`` where the machine has no NVIDIA driver.

    Raises:
        MissingExtraError: nvidia-ml-py is not installed.
    """
    nvml = nvml or _import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        is_absent = type(error).__name__ in NO_DRIVER
        return Driver(problem=None if is_absent else str(error))
    try:
        return _read(nvml)
    except nvml.NVMLError as error:  # of the driver itself; a GPU's are kept beside its answers
        return Driver(problem=str(error))
    finally:
        nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MissingExtraError(
            "The GPUs cannot be looked at: nvidia-ml-py is not installed. "
            "Run `pip install nvidia-ml-py`."
        ) from error


def _read(nvml: Any) -> Driver:
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    handles: dict[int, Any] = {}
    gpus: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:  # it has fallen off the bus
            gpus.append(Gpu(index, unanswered={"handle": str(error)}))
            continue
        gpus.append(_Questions(nvml, handles[index]).gpu(index))
    pairs = [(i, j) for i in handles for j in handles if i < j]
    common = nvml.nvmlDeviceGetTopologyCommonAncestor
    return Driver(
        version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(gpus),
        common=_of_pairs(nvml, common, handles, pairs),
        peers=_of_pairs(
            nvml,
            lambda *two: nvml.nvmlDeviceGetP2PStatus(*two, READ),
            handles,
            pairs,
        ),
    )


def _of_pairs(
    nvml: Any,
    ask: Callable[..., int],
    handles: Mapping[int, Any],
    pairs: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int, int], ...]:
    found = []
    for i, j in pairs:
        try:
            found.append(
                (
                    i,
                    j,
                    int(ask(handles[i], handles[j])),
                )
            )
        except nvml.NVMLError:  # not known here: the pair is then not in the answer
            continue
    return tuple(found)


class _Questions:
    """Asks about one GPU, and keeps why something was not answered."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self.unanswered: dict[str, str] = {}

    def ask(
        self,
        name: str,
        function: str,
        *arguments: Any,
    ) -> Any:
        """Return the answer; None where the driver has none for this GPU."""
        ask = getattr(self.nvml, function, None)
        if ask is None:
            self.unanswered[name] = f"nvidia-ml-py has no {function}"
            return None
        try:
            return ask(self.handle, *arguments)
        except self.nvml.NVMLError as error:
            self.unanswered[name] = str(error)
            return None

    def ask_all(self, functions: Mapping[str, str]) -> dict[str, Any]:
        """Return the answers to several questions, by name."""
        return {name: self.ask(name, function) for name, function in functions.items()}

    def gpu(self, index: int) -> Gpu:
        """Return all that is asked."""
        return Gpu(
            index,
            **self._identity(),
            **self._memory(),
            **self._pcie(),
            **self._errors(),
            **self._repairs(),
            **self._speed(),
            **self._power(),
            **self._modes(),
            links=self._links(),
            processes=self._processes(),
            unanswered=self.unanswered,
        )

    def _identity(self) -> dict[str, Any]:
        pci = self.ask("bus", "nvmlDeviceGetPciInfo")
        name = self.ask("name", "nvmlDeviceGetName")
        uuid = self.ask("uuid", "nvmlDeviceGetUUID")
        capability = self.ask("compute_capability", "nvmlDeviceGetCudaComputeCapability")
        return {
            "name": None if name is None else _text(name),
            "uuid": None if uuid is None else _text(uuid),
            "bus": None if pci is None else _text(pci.busId),
            "compute_capability": None if capability is None else tuple(map(int, capability)),
        }

    def _memory(self) -> dict[str, Any]:
        second = getattr(self.nvml, "nvmlMemory_v2", None)
        memory = self.ask("memory_reserved", "nvmlDeviceGetMemoryInfo", second) if second else None
        reserved = None if memory is None else int(memory.reserved)
        if memory is None:  # an old driver: what it keeps for itself counts as used
            memory = self.ask("memory", "nvmlDeviceGetMemoryInfo")
        if memory is None:
            return {}
        return {
            "memory_total": int(memory.total),
            "memory_used": int(memory.used),
            "memory_free": int(memory.free),
            "memory_reserved": reserved,
        }

    def _pcie(self) -> dict[str, Any]:
        return self.ask_all(
            {
                "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
                "pcie_max_generation": "nvmlDeviceGetMaxPcieLinkGeneration",
                "pcie_gpu_generation": "nvmlDeviceGetGpuMaxPcieLinkGeneration",
                "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
                "pcie_max_width": "nvmlDeviceGetMaxPcieLinkWidth",
                "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
            }
        )

    def _links(self) -> tuple[NvLink, ...]:
        links = []
        for number in range(int(self.nvml.NVML_NVLINK_MAX_LINKS)):
            try:
                is_up = bool(self.nvml.nvmlDeviceGetNvLinkState(self.handle, number))
            except self.nvml.NVMLError:  # this GPU has no link of that number
                continue
            version = remote = None
            if is_up:
                version = self.ask("nvlink_version", "nvmlDeviceGetNvLinkVersion", number)
                remote = self.ask("nvlink_remote", "nvmlDeviceGetNvLinkRemotePciInfo", number)
            end = None if remote is None else _text(remote.busId)
            links.append(NvLink(number, is_up, version, end))
        return tuple(links)

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        found = self.ask("processes", "nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        return tuple(
            GpuProcess(
                int(process.pid),
                process.usedGpuMemory,
                self._name_of(int(process.pid)),
            )
            for process in found
        )

    def _name_of(self, pid: int) -> str | None:
        try:
            return _text(self.nvml.nvmlSystemGetProcessName(pid))
        except self.nvml.NVMLError:  # of another user, or in another container
            return None

    def _errors(self) -> dict[str, Any]:
        nvml = self.nvml
        modes = self.ask("ecc", "nvmlDeviceGetEccMode")
        found: dict[str, Any] = {"ecc": None if modes is None else bool(modes[0])}
        if not found["ecc"]:
            return found
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        counters = {"": nvml.NVML_VOLATILE_ECC, "_ever": nvml.NVML_AGGREGATE_ECC}
        for suffix, counter in counters.items():
            for kind, number in kinds.items():
                name = f"ecc_{kind}{suffix}"
                found[name] = self.ask(name, "nvmlDeviceGetTotalEccErrors", number, counter)
        return found

    def _repairs(self) -> dict[str, Any]:
        rows = self.ask("remapped", "nvmlDeviceGetRemappedRows")
        if rows is not None:
            return {
                "remapped_corrected": int(rows[0]),
                "remapped_uncorrected": int(rows[1]),
                "remapping_pending": bool(rows[2]),
                "remapping_failed": bool(rows[3]),
            }
        causes = range(int(self.nvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT))
        pages = [self.ask("retired_pages", "nvmlDeviceGetRetiredPages", cause) for cause in causes]
        known = [page for page in pages if page is not None]
        pending = self.ask("retirement_pending", "nvmlDeviceGetRetiredPagesPendingStatus")
        return {
            "retired_pages": sum(map(len, known)) if known else None,
            "retirement_pending": None if pending is None else bool(pending),
        }

    def _speed(self) -> dict[str, Any]:
        nvml = self.nvml
        reasons = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(nvml, reasons):  # what it was called before
            reasons = "nvmlDeviceGetCurrentClocksThrottleReasons"
        busy = self.ask("utilization", "nvmlDeviceGetUtilizationRates")
        slowed = self.ask("thermal_seconds", "nvmlDeviceGetViolationStatus", THERMAL)
        degrees = nvml.NVML_TEMPERATURE_GPU
        limit = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        sm = nvml.NVML_CLOCK_SM
        return {
            "throttle_reasons": self.ask("throttle_reasons", reasons),
            "thermal_seconds": None if slowed is None else slowed.violationTime / NANOSECONDS,
            "performance_state": self.ask("performance_state", "nvmlDeviceGetPerformanceState"),
            "sm_clock": self.ask("sm_clock", "nvmlDeviceGetClockInfo", sm),
            "sm_max_clock": self.ask("sm_max_clock", "nvmlDeviceGetMaxClockInfo", sm),
            "temperature": self.ask("temperature", "nvmlDeviceGetTemperature", degrees),
            "slowdown_temperature": self.ask(
                "slowdown_temperature",
                "nvmlDeviceGetTemperatureThreshold",
                limit,
            ),
            "utilization": None if busy is None else int(busy.gpu),
        }

    def _power(self) -> dict[str, Any]:
        milliwatts = self.ask_all(
            {
                "power": "nvmlDeviceGetPowerUsage",
                "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
                "power_default_limit": "nvmlDeviceGetPowerManagementDefaultLimit",
            }
        )
        return {name: None if value is None else value / 1000 for name, value in milliwatts.items()}

    def _modes(self) -> dict[str, Any]:
        persistence = self.ask("persistence", "nvmlDeviceGetPersistenceMode")
        modes = self.ask("mig", "nvmlDeviceGetMigMode")
        is_divided = None if modes is None else bool(modes[0])
        return {
            "persistence": None if persistence is None else bool(persistence),
            "compute_mode": self.ask("compute_mode", "nvmlDeviceGetComputeMode"),
            "mig": is_divided,
            "mig_devices": self._mig_devices() if is_divided else (),
        }

    def _mig_devices(self) -> tuple[str, ...]:
        names = []
        most = self.ask("mig_devices", "nvmlDeviceGetMaxMigDeviceCount")
        for number in range(int(most or 0)):
            try:
                part = self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
            except self.nvml.NVMLError:  # no part of that number has been made
                continue
            names.append(_text(self.nvml.nvmlDeviceGetUUID(part)))
        return tuple(names)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
