"""The steps of the command: rehearse, compute the peaks, print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddpkit.base import accelerator_kind
from ddpkit.errors import LaunchError
from ddpkit.launch import SlicePlan
from ddpkit.options import RUN_OPTIONS
from ddpkit.see.estimate.checkpoint_room import checkpoint_room
from ddpkit.see.estimate.figures import MemoryEstimate
from ddpkit.see.estimate.request import ASSUMED, EstimateRequest
from ddpkit.see.estimate.table import report
from ddpkit.see.json_file import write_json
from ddpkit.see.orderly_end import ended_in_order
from ddpkit.see.scale.cells import Cell
from ddpkit.see.scale.rounds import scratch_folder
from ddpkit.see.scale.slice_process import SliceFailedError, run_plan

#: Options of the process that rehearses: it has the whole model on one device, and takes no times.
OPTIONS = {"measure_steps": "off", **{name: RUN_OPTIONS[name].default for name in ASSUMED}}
FULL = ("out of memory", "can't allocate memory", "not enough memory", "was ended by SIGKILL")
ON_THE_CPU = "  the GPU is too small for a rehearsal: once more on the CPU"
TOO_LARGE = (
    "{}\nAn estimate has the whole model, its gradients and the states of its optimizers in the "
    "memory of one process, and there is not enough of it here. Estimate on a machine with more, "
    "with --device=cpu and a smaller batch; or a model with fewer blocks, twice: each block adds "
    "the same."
)


def run_estimate(
    request: EstimateRequest,
    say: Callable[[str], object],
    tell: Callable[[str], object],
) -> int:
    """Rehearse a few steps of a recipe, and say what each strategy would take.

    Args:
        request: what to estimate, and what to write.
        say: is given the answer.
        tell: is told what the recipe says, if it takes long.

    Returns:
        0; 1 if the run cannot be, or does not fit into the memory that is known.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.

    Ranks: one process, outside of a launch.
    """
    request.check()
    with ended_in_order(), scratch_folder() as folder:
        result = _rehearsed(request, folder, tell)
        given = request.memory_bytes
        memory = result["device_memory"] if given is None else given
        found = MemoryEstimate(
            request.recipe.shown,
            result,
            request.processes,
            memory,
            checkpoint_room(request.words, result["checkpoint"]),
        )
        say(report(found))
        write_json(request.json, found.as_dict())
    if found.refusal is not None:
        return 1
    own = found.chosen
    if own is None or memory is None:
        return 0
    return 0 if own.fits(memory) else 1


def _rehearsed(
    request: EstimateRequest,
    folder: Path,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Return what the rehearsal has written; on the CPU where the device is too small."""
    try:
        return _run(request, folder, OPTIONS, tell)
    except SliceFailedError as error:
        if not _is_full(error):
            raise
        # without a GPU it was the host that was too small
        memory = _memory_of_gpu()
        if memory is None:
            raise LaunchError(TOO_LARGE.format(error)) from error
    tell(ON_THE_CPU)
    try:
        found = _run(
            request,
            folder,
            {**OPTIONS, "device": "cpu"},
            tell,
        )
    except SliceFailedError as error:
        if not _is_full(error):
            raise
        raise LaunchError(TOO_LARGE.format(error)) from error
    return {**found, "device_memory": memory}


def _run(
    request: EstimateRequest,
    folder: Path,
    options: Mapping[str, Any],
    tell: Callable[[str], object],
) -> dict[str, Any]:
    plan = SlicePlan(
        str(folder),
        str(folder / "result.json"),
        options=options,
        estimated_on=request.processes,
        assumed=request.assumed,
    )
    return run_plan(request.recipe, Cell("", 1), plan, tell)


def _is_full(error: SliceFailedError) -> bool:
    """Say whether a rehearsal has failed for want of memory, of its device or of the host."""
    return any(words in str(error) for words in FULL)


def _memory_of_gpu() -> float | None:
    """Return the memory of the first GPU; None where there is none."""
    kind = accelerator_kind()
    if kind not in {"cuda", "xpu"}:
        return None
    allocator: Any = getattr(torch, kind)
    return float(allocator.mem_get_info(0)[1])
