"""Whether torch can use the GPUs that the driver has: versions, and variables that hide GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gpus.by_torch import ByTorch
from ddpkit.see.doctor.gpus.driver import Driver
from ddpkit.see.doctor.gpus.visible import VARIABLE, Visible, visible_gpus

ORDER = "CUDA_DEVICE_ORDER"
IN_ORDER = "PCI_BUS_ID"


def no_driver(driver: Driver, seen: ByTorch) -> Finding:
    """Say that the driver cannot be asked: there is none, or it is broken."""
    if driver.problem:
        return Finding(
            "NVIDIA driver",
            PROBLEM,
            driver.problem,
            "a driver that answers, or none",
            "NVML, nvmlInit",
            cost="torch finds no GPU",
            advice=(
                "Run nvidia-smi. After an update of the driver restart the machine (its parts are "
                "of two versions then); a container needs --gpus all, and libraries that fit."
            ),
        )
    with_hip = f"no NVIDIA driver here; torch sees {len(seen.gpus)} GPUs of AMD (HIP {seen.hip})"
    return Finding(
        "NVIDIA driver",
        OK,
        with_hip if seen.hip and seen.gpus else "no NVIDIA driver here",
        "none needed on a machine without NVIDIA's GPUs",
        "NVML, nvmlInit",
    )


def hidden(environ: Mapping[str, str], driver: Driver) -> tuple[Visible, Finding]:
    """Compare ``CUDA_VISIBLE_DEVICES`` with the GPUs that are there.

    Args:
        environ: of this process.
        driver: with all GPUs.

    Returns:
        The GPUs that are left, and the finding.
    """
    value = environ.get(VARIABLE)
    visible = visible_gpus(value, driver.gpus)
    verdict = PROBLEM if visible.mistakes else OK
    count = f"{len(visible.gpus)} of {len(driver.gpus)} GPUs are left"
    words = "not set" if value is None else f"{value!r}: {count}"
    if visible.mistakes:
        words = f"{VARIABLE}={value!r}: {'; '.join(visible.mistakes)}; {count}"
    elif value is not None and driver.gpus and not visible.gpus:
        verdict = LOOK
    names = {gpu.name for gpu in driver.gpus if gpu.name}
    if len(names) > 1 and visible.gpus and environ.get(ORDER) != IN_ORDER:
        verdict = max(
            verdict,
            LOOK,
            key=(OK, LOOK, PROBLEM).index,
        )
        words += (
            f"; {ORDER} is not {IN_ORDER}: CUDA begins with the fastest GPU, nvidia-smi does not"
        )
    return visible, Finding(
        VARIABLE,
        verdict,
        words,
        "not set, or numbers and UUIDs of GPUs that are there",
        "CUDA programming guide, environment variables: what follows a wrong word is hidden, too",
        cost="processes see fewer GPUs, or others, than you think",
        advice=(
            "nvidia-smi -L lists them. Where a launcher or container shows a process a part of the "
            f"GPUs, they count from 0. Give UUIDs, or {ORDER}={IN_ORDER}, where GPUs differ."
        ),
    )


def seen_by_torch(
    seen: ByTorch,
    visible: Visible,
    *,
    is_wanted: bool,
) -> Finding:
    """Compare the GPUs that torch sees with those that the driver has and nothing hides.

    Args:
        seen: by torch.
        visible: what is left of the driver's.
        is_wanted: False where the run is to be on the CPU.
    """
    expected = len(visible.gpus)
    found = len(seen.gpus)
    words = f"{found} of {expected}"
    if seen.problem and expected:
        words += f": {seen.problem}"
    verdict = OK if found >= expected else PROBLEM if is_wanted else LOOK
    return Finding(
        "GPUs that torch sees",
        verdict,
        words,
        f"{expected}",
        f"NVML, and {VARIABLE}",
        cost="training on the CPU, or on fewer GPUs" if found < expected else "",
        advice=_remedy(seen),
        details={"torch": seen.version, "cuda": seen.cuda},
    )


def _remedy(seen: ByTorch) -> str:
    if seen.cuda is None:
        return (
            f"torch {seen.version} was built without CUDA. Install one for CUDA: "
            "pytorch.org/get-started/locally has the command."
        )
    return (
        "Error 802: NVSwitch's fabric manager does not run. Error 803 or 804: the parts of the "
        "driver do not fit (restart the machine). In a container: --gpus all. Try nvidia-smi, "
        "and dmesg for Xid."
    )


def versions(driver: Driver, seen: ByTorch) -> Iterator[Finding]:
    """Compare torch's CUDA with the driver's, and its kernels with the GPUs."""
    if seen.cuda is None or driver.cuda is None:
        return
    built = _version(seen.cuda)
    able = ".".join(map(str, driver.cuda))
    # From CUDA 11 on a driver runs all minor versions of its own major one.
    # Source: https://docs.nvidia.com/deploy/cuda-compatibility/ , minor version compatibility
    verdict = PROBLEM if built[0] > driver.cuda[0] else LOOK if built > driver.cuda else OK
    yield Finding(
        "driver for CUDA",
        verdict,
        f"driver {driver.version} (CUDA {able}), torch {seen.version} for CUDA {seen.cuda}",
        f"a driver for CUDA {built[0]}, best for {seen.cuda} or newer",
        "docs.nvidia.com/deploy/cuda-compatibility",
        cost=(
            "torch finds no GPU"
            if verdict == PROBLEM
            else "kernels that are compiled on the spot (torch.compile, Triton) may fail"
        ),
        advice=f"Update the driver, or install a torch for CUDA {able} or older.",
    )
    yield from _kernels(seen)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _kernels(seen: ByTorch) -> Iterator[Finding]:
    if not seen.architectures or not seen.gpus:
        return
    missing = {
        f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})"
        for gpu in seen.gpus
        if not _has_kernels(gpu.compute_capability, seen.architectures)
    }
    yield Finding(
        "kernels of torch",
        PROBLEM if missing else OK,
        f"none for {', '.join(sorted(missing))}; there are {' '.join(seen.architectures)}"
        if missing
        else "for each GPU",
        "kernels for each GPU",
        "torch.cuda.get_arch_list(), and the compute capability of each GPU",
        cost='"no kernel image is available for execution on the device"',
        advice="Install a newer torch for a new GPU, an older one for an old GPU.",
    )


def _has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Say whether a GPU runs kernels: those of its own major version, or PTX of an older one.

    Source: CUDA C++ programming guide, binary and PTX compatibility.
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        plain = digits.rstrip("af")  # variants of one architecture alone
        own = (int(plain[:-1]), int(plain[-1]))
        if kind == "compute" and own <= capability:
            return True
        if kind == "sm" and own[0] == capability[0] and own[1] <= capability[1]:
            return True
    return False
