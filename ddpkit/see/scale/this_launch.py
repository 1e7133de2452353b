"""Measures the size of the present launch: every rank of torchrun, srun or mpirun calls the command
itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ddpkit.base import dying_with_parent
from ddpkit.errors import LaunchError
from ddpkit.launch import SLICE, LaunchInfo, SlicePlan
from ddpkit.run import SliceResult
from ddpkit.see.scale.request import ScaleRequest
from ddpkit.see.scale.result_file import Measurement, write_measurement
from ddpkit.see.scale.slice_process import NO_FIT


def measure_this_launch(request: ScaleRequest, info: LaunchInfo) -> Measurement | None:
    """Run one slice as the ranks of this launch, and write its result file.

    Args:
        request: what to measure.
        info: the launch.

    Returns:
        What the main process has read; None on the others.

    Raises:
        LaunchError: the recipe has failed on this rank; what it said stands above.

    Ranks: every rank of the launch.
    """
    path = (request.json or Path(f"scale_{info.world_size}.json")).absolute()
    scratch = path.with_suffix(".scratch")  # beside the results, where all nodes see it
    result = scratch / "result.json"
    plan = SlicePlan(
        str(scratch),
        str(result),
        seconds=request.seconds,
    )
    is_main = info.rank == 0
    if is_main:
        scratch.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
    try:
        _run_recipe(request.recipe.command, plan)
        return _written(request, result, path) if is_main else None
    finally:
        if is_main:
            shutil.rmtree(scratch, ignore_errors=True)


def _run_recipe(command: Sequence[str], plan: SlicePlan) -> None:
    environment = {**os.environ, SLICE: plan.text()}
    code = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
        preexec_fn=dying_with_parent(signal.SIGKILL),
    ).returncode
    if code:
        raise LaunchError(
            f"the recipe ended with exit code {code} on this rank. What it said stands above."
        )


def _written(request: ScaleRequest, result: Path, path: Path) -> Measurement:
    if not result.exists():
        raise LaunchError(NO_FIT)
    found = SliceResult.from_dict(json.loads(result.read_text(encoding="utf-8")), str(result))
    is_strong = found.global_batch_size is not None
    measurement = Measurement(request.recipe.shown, is_strong, [found], {})
    write_measurement(path, measurement, [])
    return measurement
