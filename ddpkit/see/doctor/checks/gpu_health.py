"""Whether GPUs are well: errors of their memory, heat, power, and what slows them down."""

from __future__ import annotations

from collections.abc import Sequence

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gpus.driver import Gpu
from ddpkit.see.doctor.gpus.rule_finding import Row, Rule, finding_of

# Why clocks are lower than they could be. Source: nvml.h, nvmlClocksEventReason...
SLOWED = {
    0x08: "hardware slowdown (heat, or the power supply)",
    0x20: "heat (by the driver)",
    0x40: "heat (by the hardware)",
    0x80: "power brake (by the power supply)",
}
LIMITED = {
    0x02: "clocks set by hand (nvidia-smi -ac or -lgc)",
    0x10: "sync boost: all GPUs of a group run like the slowest",
    0x100: "the clocks of a display",
}
MANY_CORRECTED = 100
NEAR_DEGREES = 5
MUCH_HEAT_SECONDS = 1.0

LOST = Rule(
    "GPU answers",
    "an answer from each GPU",
    "NVML, nvmlDeviceGetHandleByIndex",
    cost="a run that takes this GPU fails",
    advice=(
        "It has fallen off the bus: look for Xid in `dmesg`. Reset it (nvidia-smi --gpu-reset) or "
        "restart the machine; if it comes again, the card, its power or its seat is bad."
    ),
)
ECC = Rule(
    "memory errors",
    "no error that was not corrected, none waiting for a repair",
    "NVML: ECC counters, remapped rows or retired pages; NVIDIA's guide to GPU memory errors",
    cost="a run ends with an Xid, or its numbers are wrong",
    advice=(
        "Reset the GPU (nvidia-smi --gpu-reset) or restart the machine: repairs that wait are made "
        "then. If it comes again, or a repair has failed, have the card replaced "
        "(nvidia-smi -q -d ECC,ROW_REMAPPER)."
    ),
)
SLOWDOWN = Rule(
    "GPU clocks",
    "not slowed by heat or by the power supply",
    "NVML, nvmlDeviceGetCurrentClocksEventReasons and the thermal violation counter",
    cost="every step of all ranks is as slow as the slowest GPU",
    advice=(
        "Look at fans, dust, air flow and neighbours (heat), at power cables and the supply "
        "(power). Clocks set by hand: nvidia-smi -rac and -rgc put them back."
    ),
)
HEAT = Rule(
    "GPU temperature",
    f"more than {NEAR_DEGREES} degrees below the point of slowing down",
    "NVML, nvmlDeviceGetTemperatureThreshold (slowdown)",
    cost="the GPU will lower its clocks in a long run",
    advice="Look at fans, dust and air flow; lower the power limit as a stopgap.",
)
POWER = Rule(
    "power limit",
    "the card's default",
    "NVML, nvmlDeviceGetPowerManagementDefaultLimit",
    cost="lower clocks under load, on this GPU alone if others are not limited",
    advice="If nobody means it: nvidia-smi -pl WATTS (as root), the same on all GPUs.",
)


def lost(gpus: Sequence[Gpu]) -> Finding | None:
    """Look for GPUs that do not answer at all."""
    rows = [
        Row(gpu, PROBLEM, gpu.unanswered["handle"]) for gpu in gpus if "handle" in gpu.unanswered
    ]
    return finding_of(LOST, rows) if rows else None


def memory_errors(gpus: Sequence[Gpu]) -> Finding | None:
    """Look for errors of memory and for repairs that wait or have failed."""
    rows = [
        _errors_row(gpu) for gpu in gpus if gpu.ecc is not None or gpu.remapping_failed is not None
    ]
    return finding_of(ECC, rows) if rows else None


def _errors_row(gpu: Gpu) -> Row:
    bad = {
        "not corrected since the driver was loaded": gpu.ecc_uncorrected,
        "repair has failed": gpu.remapping_failed,
        "a repair waits for a reset": gpu.remapping_pending or gpu.retirement_pending,
    }
    odd = {
        "not corrected in the card's life": gpu.ecc_uncorrected_ever,
        "rows replaced after such errors": gpu.remapped_uncorrected,
        "pages retired": gpu.retired_pages,
        "corrected since the driver was loaded": _many(gpu.ecc_corrected),
    }
    for verdict, seen in ((PROBLEM, bad), (LOOK, odd)):
        words = [
            name if value is True else f"{value} {name}" for name, value in seen.items() if value
        ]
        if words:
            return Row(gpu, verdict, ", ".join(words))
    return Row(gpu, OK, "none" if gpu.ecc else "not counted (ECC is off)")


def _many(count: int | None) -> int:
    """Return a count if it is worth a look: single corrected errors happen to each memory."""
    return count if count and count >= MANY_CORRECTED else 0


def slowdown(gpus: Sequence[Gpu], *, is_loaded: bool) -> Finding | None:
    """Look for what lowers the clocks.

    Args:
        gpus: to look at.
        is_loaded: whether they were at work.
    """
    rows = [
        _clocks_row(gpu, is_loaded=is_loaded) for gpu in gpus if gpu.throttle_reasons is not None
    ]
    return finding_of(SLOWDOWN, rows) if rows else None


def _clocks_row(gpu: Gpu, *, is_loaded: bool) -> Row:
    reasons = gpu.throttle_reasons or 0
    clocks = f" ({gpu.sm_clock} of {gpu.sm_max_clock} MHz)" if gpu.sm_clock and is_loaded else ""
    for verdict, known in ((PROBLEM, SLOWED), (LOOK, LIMITED)):
        found = [words for bit, words in known.items() if reasons & bit]
        if found:
            return Row(gpu, verdict, ", ".join(found) + clocks)
    if (gpu.thermal_seconds or 0) >= MUCH_HEAT_SECONDS:
        return Row(
            gpu,
            LOOK,
            f"{gpu.thermal_seconds:.0f} s of heat since the driver was loaded{clocks}",
        )
    return Row(gpu, OK, f"not slowed{clocks}" if is_loaded else "not slowed, at rest")


def temperature(gpus: Sequence[Gpu]) -> Finding | None:
    """Compare temperatures with the point of slowing down."""
    rows = []
    for gpu in gpus:
        if gpu.temperature is None or not gpu.slowdown_temperature:
            continue
        left = gpu.slowdown_temperature - gpu.temperature
        verdict = PROBLEM if left <= 0 else LOOK if left <= NEAR_DEGREES else OK
        words = f"{gpu.temperature} C, slows down at {gpu.slowdown_temperature} C"
        rows.append(Row(gpu, verdict, words))
    return finding_of(HEAT, rows) if rows else None


def power_limit(gpus: Sequence[Gpu]) -> Finding | None:
    """Compare power limits with the default of the card."""
    rows = [
        Row(
            gpu,
            LOOK if gpu.power_limit < 0.99 * gpu.power_default_limit else OK,
            f"{gpu.power_limit:.0f} of {gpu.power_default_limit:.0f} W",
        )
        for gpu in gpus
        if gpu.power_limit and gpu.power_default_limit
    ]
    return finding_of(POWER, rows) if rows else None
