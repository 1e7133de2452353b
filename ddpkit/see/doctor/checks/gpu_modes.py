"""Switches of GPUs: persistence, who may compute, and division into parts (MIG)."""

from __future__ import annotations

from collections.abc import Sequence

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gpus.driver import Gpu
from ddpkit.see.doctor.gpus.rule_finding import Row, Rule, finding_of

# Source: nvml.h, nvmlComputeMode_t.
SHARED = 0
PROHIBITED = 2
EXCLUSIVE = (1, 3)

PERSISTENCE = Rule(
    "persistence mode",
    "on",
    "NVML, nvmlDeviceGetPersistenceMode",
    cost="each start takes seconds longer, and limits that were set are lost in between",
    advice="Start nvidia-persistenced, or run `nvidia-smi -pm 1` (as root).",
)
COMPUTE = Rule(
    "compute mode",
    "default: several processes may compute",
    "NVML, nvmlDeviceGetComputeMode",
    cost="a second process on the GPU (another run, a loader worker that uses CUDA) fails",
    advice="nvidia-smi -c DEFAULT (as root), if nobody means it.",
)
MIG = Rule(
    "MIG",
    "off, for several processes",
    "NVML, nvmlDeviceGetMigMode; NCCL does not connect parts of GPUs",
    cost="one process can train on a part; several cannot average their gradients",
    advice=(
        "Train with one process on CUDA_VISIBLE_DEVICES=MIG-..., or switch it off "
        "(nvidia-smi -mig 0, as root). Several processes on parts need --distributed_backend=gloo."
    ),
)


def persistence(gpus: Sequence[Gpu]) -> Finding | None:
    """Look whether the driver stays loaded."""
    rows = [
        Row(
            gpu,
            OK if gpu.persistence else LOOK,
            "on" if gpu.persistence else "off",
        )
        for gpu in gpus
        if gpu.persistence is not None
    ]
    return finding_of(PERSISTENCE, rows) if rows else None


def compute_mode(gpus: Sequence[Gpu]) -> Finding | None:
    """Look whether a run may compute on the GPUs."""
    rows = [_compute_row(gpu) for gpu in gpus if gpu.compute_mode is not None]
    return finding_of(COMPUTE, rows) if rows else None


def _compute_row(gpu: Gpu) -> Row:
    if gpu.compute_mode == PROHIBITED:
        return Row(gpu, PROBLEM, "prohibited: no process may compute")
    if gpu.compute_mode in EXCLUSIVE:
        return Row(gpu, LOOK, "exclusive: one process alone")
    return Row(gpu, OK, "default")


def mig(gpus: Sequence[Gpu], processes: int) -> Finding | None:
    """Look whether GPUs are divided.

    Args:
        gpus: to look at.
        processes: of the run.
    """
    rows = []
    for gpu in gpus:
        if gpu.mig is None:
            continue
        verdict = OK if not gpu.mig else PROBLEM if processes > 1 else LOOK
        parts = len(gpu.mig_devices)
        rows.append(
            Row(gpu, verdict, f"on, {parts or 'no'} part{'s' * (parts != 1)}" if gpu.mig else "off")
        )
    return finding_of(MIG, rows) if rows else None
