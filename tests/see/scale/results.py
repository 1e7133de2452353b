"""Results of slices as a machine could have measured them: what a test does not say is the same
everywhere.
"""

from __future__ import annotations

from ddpkit.run import SliceResult
from ddpkit.see.scale.result_file import Measurement
from ddpkit.see.scale.summary import rows_of

USUAL = {
    "data": 0.1,
    "move": 0.1,
    "forward": 4.0,
    "backward": 8.0,
    "exchange": 0.0,
    "optimizer": 1.0,
    "other": 0.2,
}  # milliseconds


def result(size=1, *, ranks=None, per_process=48.0, way=None, world_size=None, **more):
    """A slice of a size. ``ranks`` has for each rank the milliseconds of phases that are not the
    usual ones.
    """
    processes = world_size or size
    own = ranks or [{}] * processes
    phases = [{name: ms / 1e3 for name, ms in {**USUAL, **one}.items()} for one in own]
    step = sum(phases[0].values())
    values = {
        "way": way or ("single" if size == 1 else "ddp"),
        "size": size,
        "world_size": processes,
        "cores": 8,
        "steps": 100,
        "seconds": 100 * step,
        "step_seconds": [step] * 3,
        "samples": [per_process * size / processes] * processes,
        "phases": phases,
        "transfer_seconds": min(one["exchange"] for one in phases),
        "last": [1 / processes] * processes,
        "core_waits": [0.0] * processes,
        "samples_per_step": int(per_process * size),
    }
    return SliceResult(**{**values, **more})


def measured(*slices, is_strong=False, failed=None, recipe="train.py hparams.yaml"):
    return Measurement(recipe, is_strong, slices, failed or {})


def last_row(*slices):
    return rows_of(slices)[-1]
