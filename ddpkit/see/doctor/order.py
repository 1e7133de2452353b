"""The checks in the order in which they run and are shown, within one verdict."""

from __future__ import annotations

from ddpkit.see.doctor.check import EACH_RANK, TOGETHER, Check
from ddpkit.see.doctor.checks import (
    gpus,
    locked_memory,
    memory,
    open_files,
    process_limit,
    processor_cores,
    shared_memory,
)

CHECKS: tuple[Check, ...] = (
    Check("processor cores", processor_cores.look, TOGETHER),
    Check("memory", memory.look),
    Check("shared memory", shared_memory.look),
    Check("open files", open_files.look, EACH_RANK),
    Check("process limit", process_limit.look),
    Check("locked memory", locked_memory.look, EACH_RANK),
    Check("GPUs", gpus.look, TOGETHER),
)
