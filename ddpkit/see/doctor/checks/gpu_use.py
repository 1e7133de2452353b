"""Who else uses the GPUs, and how much of their memory is left."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.gpus.driver import Gpu, GpuProcess
from ddpkit.see.doctor.gpus.rule_finding import Row, Rule, finding_of

MUCH = 0.05  # of the memory of a GPU
BUSY_PERCENT = 10
MIB = 2**20

OTHERS = Rule(
    "GPUs to ourselves",
    "no other process computes on them, and their memory is free",
    "NVML, running processes and memory, before this command has used the GPUs",
    cost="the GPU is shared: steps wait for the other, and memory is missing",
    advice=(
        "Ask whose they are (ps -o user,etime,args -p PID). End what was left behind, or hide the "
        "GPU: CUDA_VISIBLE_DEVICES. Memory without a process belongs to another container, or to "
        "one that hangs."
    ),
)


def others(gpus: Sequence[Gpu], ours: Collection[int]) -> Finding | None:
    """Look for other processes, and for memory that is taken.

    Args:
        gpus: at rest, before this command has used them.
        ours: process ids of this command on this host.
    """
    rows = [_row(gpu, ours) for gpu in gpus if gpu.memory_total]
    return finding_of(OTHERS, rows) if rows else None


def _row(gpu: Gpu, ours: Collection[int]) -> Row:
    total = gpu.memory_total or 1
    used = gpu.memory_used or 0
    busy = gpu.utilization or 0
    foreign = [process for process in gpu.processes or () if process.pid not in ours]
    if foreign:
        shown = ", ".join(map(_process, foreign))
        heavy = used > MUCH * total or busy >= BUSY_PERCENT
        return Row(gpu, PROBLEM if heavy else LOOK, f"used by {shown}; {busy} % busy")
    free = f"{_mib(total - used)} of {_mib(total)} MiB free"
    if used > MUCH * total:
        return Row(gpu, PROBLEM, f"{free}, and no process is shown; {busy} % busy")
    if busy >= BUSY_PERCENT:
        return Row(gpu, LOOK, f"{busy} % busy, and no process is shown; {free}")
    return Row(gpu, OK, free)


def _process(process: GpuProcess) -> str:
    name = f" ({process.name})" if process.name else ""
    memory = "" if process.memory is None else f" with {_mib(process.memory)} MiB"
    return f"pid {process.pid}{name}{memory}"


def _mib(count: int) -> int:
    return round(count / MIB)
