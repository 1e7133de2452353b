"""The driver's answers as plain values, which can be written down as JSON and read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# What two GPUs have in common on their way, by NVML's number, with the letters of nvidia-smi.
TOPOLOGY = {
    0: "SAME",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}


@dataclass(frozen=True)
class NvLink:
    """A link of a GPU: its number, whether it is up, its version, the bus of its other end."""

    number: int
    is_up: bool
    version: int | None = None
    remote: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU; ``memory`` in bytes, None where the driver does not say."""

    pid: int
    memory: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class Gpu:
    """The driver's answers about one GPU; None where it gives none, and ``unanswered`` says why.

    Units: memory in bytes, power in watts, clocks in MHz, temperatures in degrees Celsius.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    memory_reserved: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_gpu_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_replays: int | None = None
    links: tuple[NvLink, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    ecc: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected_ever: int | None = None
    ecc_uncorrected_ever: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    throttle_reasons: int | None = None
    thermal_seconds: float | None = None  # that heat has slowed it down since the driver was loaded
    performance_state: int | None = None
    sm_clock: int | None = None
    sm_max_clock: int | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    power_default_limit: float | None = None
    utilization: int | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    mig: bool | None = None
    mig_devices: tuple[str, ...] = ()
    unanswered: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How findings name it."""
        return f"GPU {self.index}"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Gpu:
        """Make one from its part of what :meth:`Driver.to_plain` gave."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in plain.items() if name in known}
        for name, kind in (("links", NvLink), ("processes", GpuProcess)):
            if given.get(name) is not None:
                given[name] = tuple(kind(**entry) for entry in given[name])
        for name in ("compute_capability", "mig_devices"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        return cls(**given)


@dataclass(frozen=True)
class Driver:
    """The driver of a machine and its GPUs.

    Attributes:
        version: of the driver, such as ``"570.86.15"``; None: it could not be asked.
        cuda: the newest CUDA that it can run, such as ``(12, 8)``.
        gpus: in the driver's order, that of their bus addresses; hidden ones too.
        common: what two GPUs have in common: ``(i, j, level)``, i < j, by :data:`TOPOLOGY`.
        peers: whether two GPUs read each other's memory: ``(i, j, status)``, i < j; 0 is yes.
        problem: why it could not be asked, in its words; None too where there is no driver at all.

    Example:
        >>> Driver(version="580.1", gpus=(Gpu(0, name="NVIDIA H200"),)).gpus[0].label
        'GPU 0'
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    common: tuple[tuple[int, int, int], ...] = ()
    peers: tuple[tuple[int, int, int], ...] = ()
    problem: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Driver:
        """Make one from what :meth:`to_plain` gave, also after JSON."""
        cuda = plain.get("cuda")
        return cls(
            version=plain.get("version"),
            cuda=None if cuda is None else (int(cuda[0]), int(cuda[1])),
            gpus=tuple(Gpu.from_plain(gpu) for gpu in plain.get("gpus", ())),
            common=_triples(plain.get("common", ())),
            peers=_triples(plain.get("peers", ())),
            problem=plain.get("problem"),
        )


def _triples(rows: Iterable[Sequence[Any]]) -> tuple[tuple[int, int, int], ...]:
    """Make triples of what was JSON: two GPUs, and what is known of them."""
    return tuple((int(i), int(j), int(known)) for i, j, known in rows)
