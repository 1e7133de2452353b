"""How GPUs are connected: PCIe, NVLink, and whether they read each other's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gpus.by_torch import ByTorch
from ddpkit.see.doctor.gpus.driver import TOPOLOGY, Driver, Gpu
from ddpkit.see.doctor.gpus.load import Busy
from ddpkit.see.doctor.gpus.rule_finding import Row, Rule, finding_of

# Bytes per second of a lane, in one direction, after encoding.
# Source: PCI Express Base Specification: 2.5 to 64 GT/s; 8b/10b, from 8 GT/s on 128b/130b.
LANE = {
    1: 0.25e9,
    2: 0.5e9,
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
    6: 7.563e9,
}
FULL_STATES = (0, 1)  # performance states in which a GPU does not save power

PCIE = Rule(
    "PCIe link",
    "the widest link and the highest generation that GPU and machine can have",
    "NVML, nvmlDeviceGetMaxPcieLinkWidth and MaxPcieLinkGeneration",
    cost="batches, and gradients of GPUs without NVLink, go through this link",
    advice=(
        "Seat the card again, in a slot that has all lanes (the mainboard's manual; other cards "
        "may take lanes away). Look at the PCIe settings of the BIOS, and at risers and cables."
    ),
)
REPLAYS = Rule(
    "PCIe replays",
    "none",
    "NVML, nvmlDeviceGetPcieReplayCounter: packets sent again since the driver was loaded",
    cost="copies are slower, and the link may fail",
    advice="Seat the card again; replace the riser or the cable.",
)
NVLINK = Rule(
    "NVLink",
    "all links of a GPU are up",
    "NVML, nvmlDeviceGetNvLinkState of each link",
    cost="gradients take the links that are left, or PCIe",
    advice=(
        "Look at `nvidia-smi nvlink --status` and at `dmesg | grep -i nvlink`. Reset the GPUs or "
        "restart the machine; with NVSwitch, look whether the fabric manager runs. Else: hardware."
    ),
)
MANY_REPLAYS = 100


def pcie(gpus: Sequence[Gpu], *, is_loaded: bool) -> Finding | None:
    """Compare the PCIe links with what they can be.

    Args:
        gpus: to look at.
        is_loaded: whether they were at work; at rest a GPU lowers the generation of its link.
    """
    rows = [
        _pcie_row(gpu, is_loaded=is_loaded) for gpu in gpus if gpu.pcie_width and gpu.pcie_max_width
    ]
    return finding_of(PCIE, rows) if rows else None


def _pcie_row(gpu: Gpu, *, is_loaded: bool) -> Row:
    width = gpu.pcie_width or 0
    most = gpu.pcie_max_width or 0
    now = gpu.pcie_generation or 0
    best = gpu.pcie_max_generation or 0
    may_rest = not is_loaded or gpu.performance_state not in FULL_STATES
    generation = best if may_rest else now  # of a link that rests nothing can be said
    share = _speed(generation, width) / _speed(best, most)
    words = f"x{width} of x{most}, generation {now} of {best}"
    if now < best and may_rest:
        words += " (at rest)"
    if share < 1:
        words += f": {_speed(generation, width) / 1e9:.1f} of {_speed(best, most) / 1e9:.1f} GB/s"
    slot = gpu.pcie_gpu_generation or best
    if slot > best and share >= 1:
        words += f"; the GPU itself could generation {slot}"
    verdict = OK if share >= 1 else PROBLEM if share < 0.5 else LOOK  # noqa: PLR2004 -- half of it
    return Row(gpu, verdict, words)


def _speed(generation: int, width: int) -> float:
    return LANE.get(generation, LANE[max(LANE)]) * width


def replays(gpus: Sequence[Gpu]) -> Finding | None:
    """Look for packets that had to be sent again."""
    rows = [
        Row(gpu, LOOK if gpu.pcie_replays >= MANY_REPLAYS else OK, f"{gpu.pcie_replays or 'none'}")
        for gpu in gpus
        if gpu.pcie_replays is not None
    ]
    return finding_of(REPLAYS, rows) if rows else None


def copies(gpus: Sequence[Gpu], done: Sequence[Busy]) -> Finding | None:
    """Compare what was copied to the GPUs in a second with what their links can carry.

    Args:
        gpus: that were at work.
        done: by each of them, in the same order.
    """
    rows = []
    for gpu, busy in zip(gpus, done, strict=True):
        best = _speed(gpu.pcie_max_generation or 0, gpu.pcie_max_width or 0)
        if not gpu.pcie_max_width or not gpu.pcie_max_generation or not busy.copied:
            continue
        share = busy.copied / best
        rows.append(
            Row(
                gpu,
                OK if share >= 0.5 else LOOK,  # noqa: PLR2004 -- half of it
                f"{busy.copied / 1e9:.1f} of {best / 1e9:.1f} GB/s",
            )
        )
    rule = Rule(
        "copies to the GPU",
        "at least half of what the PCIe link can carry",
        "64 MB from pinned memory, by torch; the lanes times the speed of the PCIe specification",
        cost="each batch takes longer to its GPU",
        advice=(
            "If a link above is narrow, that is why. Else GPUs may share a switch (below), the "
            "process may run on cores of another socket (numactl, --cpu-bind), or the machine "
            "is virtual."
        ),
    )
    return finding_of(rule, rows) if rows else None


def nvlinks(gpus: Sequence[Gpu]) -> Finding | None:
    """Look for NVLinks that are down.

    Args:
        gpus: to look at; those without NVLink are left out.
    """
    rows = [_nvlink_row(gpu, len(gpus)) for gpu in gpus if gpu.links]
    return finding_of(NVLINK, rows) if rows else None


def _nvlink_row(gpu: Gpu, count: int) -> Row:
    down = [link.number for link in gpu.links if not link.is_up]
    up = len(gpu.links) - len(down)
    words = f"{up} of {len(gpu.links)} links up"
    if not down:
        return Row(gpu, OK, words)
    if not up:  # a card whose bridge is not there; one alone needs none
        return Row(gpu, OK if count == 1 else LOOK, f"{words}: no bridge, or it is switched off")
    return Row(gpu, PROBLEM, f"{words}; down: {', '.join(map(str, down))}")


def peers(driver: Driver, seen: ByTorch, indices: Sequence[int]) -> Iterator[Finding]:
    """Tell how GPUs reach each other.

    Args:
        driver: its answers.
        seen: by torch, in whose order ``indices`` are.
        indices: the driver's numbers of the GPUs that torch sees.
    """
    if len(indices) < 2 or not seen.peers:  # noqa: PLR2004 -- a pair
        return
    level = {(i, j): name for i, j, name in driver.common} | {
        (j, i): name for i, j, name in driver.common
    }
    linked = _linked(driver, indices)
    without = [
        (indices[i], indices[j])
        for i, j, can in seen.peers
        if i < j and not can and max(i, j) < len(indices)
    ]
    broken = [pair for pair in without if pair in linked]
    pairs = ", ".join(f"{i}-{j}" for i, j in without)
    yield Finding(
        "GPU to GPU",
        PROBLEM if broken else LOOK if without else OK,
        f"no direct access: {pairs}" if without else "each GPU reads the memory of each other",
        "each GPU reads the memory of each other",
        "torch.cuda.can_device_access_peer; the letters below are those of nvidia-smi topo -m",
        cost="gradients go through the memory of the host",
        advice=(
            "Gaming cards have no direct access: nothing is broken then. In a virtual machine, or "
            "with the IOMMU on, it may be switched off (ACS in the BIOS). NCCL_DEBUG=INFO shows "
            "what NCCL takes."
        ),
        lines=_matrix(indices, level, linked),
        details={"without": without},
    )


def _linked(
    driver: Driver,
    indices: Sequence[int],
) -> dict[tuple[int, int], int]:
    """Count the links between two GPUs; by way of a switch those of the one that has fewer."""
    of = {gpu.index: gpu for gpu in driver.gpus}
    buses = {gpu.bus: gpu.index for gpu in driver.gpus}
    found: dict[tuple[int, int], int] = {}
    for i in indices:
        for j in indices:
            up = [link for link in of[i].links if link.is_up]
            direct = [link for link in up if buses.get(link.remote) == j]
            switched = [link for link in up if buses.get(link.remote) is None]
            others = [link for link in of[j].links if link.is_up and buses.get(link.remote) is None]
            number = len(direct) or min(len(switched), len(others))
            if i != j and number:
                found[i, j] = number
    return found


def _matrix(
    indices: Sequence[int],
    level: dict[tuple[int, int], int],
    linked: dict[tuple[int, int], int],
) -> tuple[str, ...]:
    head = "      " + "".join(f"{f'GPU{j}':>6}" for j in indices)
    rows = [head]
    for i in indices:
        cells = []
        for j in indices:
            far = TOPOLOGY.get(level.get((i, j), -1), "?")
            cells.append("X" if i == j else f"NV{linked[i, j]}" if (i, j) in linked else far)
        rows.append(f"{f'GPU{i}':6}" + "".join(f"{cell:>6}" for cell in cells))
    return tuple(rows)
