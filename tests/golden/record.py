"""Writes the golden traces: ``python -m tests.golden.record``, for a change that is meant to change numbers."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.cases import CASES, fresh, killed, resumed
from tests.rank_pool import RankPool

HERE = Path(__file__).parent
TRACES = HERE / "traces.json"
CHECKPOINTS = HERE / "checkpoints"
KILL_AT = {"plain": 23, "global-batch": 13, "stream": 9}  # in the second epoch; of another case 8
WORLD_SIZES = (1, 2, 3)
# A checkpoint that lies in the repository, written by the code of its day on two ranks, is resumed on two and on one.
KEPT = ("float64-accumulation", "norm-dropout-clipping", "stream")


def machine() -> dict[str, str]:
    """What the last bit of a sum depends on."""
    return {"torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability(), "cpu": cpu_model()}


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def kill_at(name: str, world_size: int) -> int:
    return max(KILL_AT.get(name, 8) // world_size, 4) if name != "global-batch" else KILL_AT[name]


def traces_of(pool: RankPool, name: str, world_size: int) -> dict[str, list[dict]]:
    """Train once without a stop, and once killed and gone on; where it went on with another number of ranks, too."""
    found = {"fresh": pool.run(fresh, name, world_size=world_size)}
    with tempfile.TemporaryDirectory() as folder:
        found["killed"] = pool.run(killed, name, folder, kill_at(name, world_size), world_size=world_size)
        for others in {world_size, 2 if world_size == 1 else 1}:
            copy = Path(folder, f"on {others}")
            shutil.copytree(folder, copy, ignore=lambda _, names: [one for one in names if one.startswith("on ")])
            found[f"resumed on {others}"] = pool.run(resumed, name, str(copy), world_size=others)
    return found


def traces_of_kept(pool: RankPool, name: str) -> dict[str, list[dict]]:
    """Go on from a checkpoint that lies beside this file."""
    found = {}
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(CHECKPOINTS / name, folder, dirs_exist_ok=True)
            found[f"resumed on {world_size}"] = pool.run(resumed, name, folder, world_size=world_size)
    return found


def main() -> None:
    only = sys.argv[1:]
    traces = {}
    with RankPool(timeout=300) as pool:
        for name in CASES:
            for world_size in WORLD_SIZES:
                traces[f"{name} on {world_size}"] = traces_of(pool, name, world_size)
        if "--checkpoints" in only:
            shutil.rmtree(CHECKPOINTS, ignore_errors=True)
            for name in KEPT:
                pool.run(killed, name, str(CHECKPOINTS / name), kill_at(name, 2), world_size=2)
        for name in KEPT:
            traces[f"{name}: a checkpoint of before"] = traces_of_kept(pool, name)
    TRACES.write_text(json.dumps({"machine": machine(), "traces": traces}, indent=1) + "\n")


if __name__ == "__main__":
    main()
