"""Measures the sizes in turns: what else happens on the machine then slows all of them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ddpkit.errors import ConfigError
from ddpkit.launch import SlicePlan
from ddpkit.run import SliceResult
from ddpkit.see.scale.cells import Cell
from ddpkit.see.scale.request import ScaleRequest
from ddpkit.see.scale.result_file import Measurement
from ddpkit.see.scale.slice_process import SliceFailedError, run_slice


def measured(request: ScaleRequest, tell: Callable[[str], object]) -> Measurement:
    """Run all slices.

    Args:
        request: what to measure.
        tell: is told, in a line each, what was done.

    Returns:
        All results. A size whose slice has failed is left out of later rounds.

    Raises:
        SliceFailedError: the smallest size has failed, with which the others would be compared.
        ConfigError: the recipe does not allow this scaling.

    State: no process and no file stays, also after an exception.
    """
    cells = request.cells()
    slices: list[SliceResult] = []
    failed: dict[str, str] = {}
    with scratch_folder() as folder:
        for number in range(1, request.rounds + 1):
            for cell in _still(cells, failed):
                began = time.monotonic()
                plan = _plan(request, folder, cell, slices)
                try:
                    found = run_slice(request.recipe, cell, plan, tell)
                except SliceFailedError as error:
                    if not slices:
                        raise
                    failed[cell.name] = str(error)
                    tell(str(error))
                    continue
                slices.append(found)
                tell(
                    _progress(
                        cell,
                        found,
                        number,
                        request.rounds,
                        time.monotonic() - began,
                    )
                )
    is_strong = scales_strongly(request.scaling, slices[0])
    return Measurement(request.recipe.shown, is_strong, slices, failed)


def _still(cells: Sequence[Cell], failed: dict[str, str]) -> Iterator[Cell]:
    return (cell for cell in cells if cell.name not in failed)


def _progress(
    cell: Cell,
    found: SliceResult,
    number: int,
    rounds: int,
    seconds: float,
) -> str:
    rate = f"{found.samples_per_second:,.0f} samples/s"
    return (
        f"  {cell.name}, round {number} of {rounds}: {rate} ({found.steps} steps, {seconds:.0f} s)"
    )


def _plan(
    request: ScaleRequest,
    folder: Path,
    cell: Cell,
    slices: Sequence[SliceResult],
) -> SlicePlan:
    options = dict(cell.run_options)
    if slices:
        options |= batch_options(request.scaling, slices[0], cell)
    plan = SlicePlan(
        str(folder),
        str(folder / "result.json"),
        seconds=request.seconds,
    )
    return replace(plan, options=options)


# ----------------------------------------------------------------------------------- strong or weak


def scales_strongly(scaling: str | None, base: SliceResult) -> bool:
    """Return whether the batch of a step stays the same on any number of processes.

    Args:
        scaling: what was asked for; None: as the recipe has it.
        base: of the smallest size.
    """
    return base.global_batch_size is not None if scaling is None else scaling == "strong"


def batch_options(scaling: str | None, base: SliceResult, cell: Cell) -> dict[str, int]:
    """Return the run options that give a size its batch.

    Args:
        scaling: ``"strong"``, ``"weak"``, or None: as the recipe has it.
        base: of the smallest size, with the batch of the recipe.
        cell: the size.

    Raises:
        ConfigError: the recipe makes its batches itself.
    """
    is_strong = scales_strongly(scaling, base)
    is_own = is_strong == (base.global_batch_size is not None) and cell.way != "dp"
    if scaling is None or is_own or cell.size == base.size:
        return {}
    step = base.samples_per_step
    if step is None or not base.can_fix_step:
        raise ConfigError(
            f"--{scaling} sets the samples of a step, and this recipe's batch sampler or stream "
            "decides about them. Leave it out: the batches of a process then stay the same."
        )
    return {"global_batch_size": step if is_strong else step * cell.size // base.size}


# ----------------------------------------------------------------------------- where they may write


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Return a context with a folder for all that the slices write.

    State: the folder is removed at the end, whatever is in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="ddpkit-scale-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
