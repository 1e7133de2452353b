"""Writes the golden traces: ``python -m tests.golden.record``, for a change that is meant to change
numbers.

``python -m tests.golden.record CASE ...`` writes those of some cases only. A checkpoint that is
kept is written where there is none: delete its folder to have another.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.cases import CASES, WORLD_SIZES
from tests.golden.training import fresh, killed, resumed
from tests.rank_pool import RankPool

HERE = Path(__file__).parent
TRACES = HERE / "traces.json"
CHECKPOINTS = HERE / "checkpoints"
# Of these cases a checkpoint lies in the repository, written by the code of its day on two ranks.
# It is resumed on two and on one.
KEPT = (
    "float64-accumulation",
    "norm-dropout-clipping",
    "stream",
    "zero1",
    "fsdp",
    "virtual-ranks",
    "local-sgd",
    "powersgd",
    "two-optimizers",
    "schedule-and-lr-scaling",
)


def machine() -> dict[str, str]:
    """What the last bit of a sum depends on."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "kernels": kernels, "cpu": cpu_model()}


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def run(pool: RankPool, function, name: str, *args, world_size: int) -> list[dict]:
    """Run a function of a case on so many ranks."""
    has_group = not (CASES[name].alone and world_size == 1)
    return pool.run(function, name, *args, world_size=world_size, init=has_group)


def fresh_trace(pool: RankPool, name: str, world_size: int) -> list[dict]:
    return run(pool, fresh, name, world_size=world_size)


def traces_of(pool: RankPool, name: str, world_size: int) -> dict[str, list[dict]]:
    """Train once without a stop, and once killed and resumed; on another number of ranks, too."""
    found = {"fresh": fresh_trace(pool, name, world_size)}
    with tempfile.TemporaryDirectory() as folder:
        found["killed"] = kill(pool, name, folder, world_size, found["fresh"][0]["steps"])
        for other in {world_size, 2 if world_size == 1 else 1}:
            copy = Path(folder, f"on {other}")
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("on *"))
            found[f"resumed on {other}"] = run(pool, resumed, name, str(copy), world_size=other)
    return found


def kill(pool: RankPool, name: str, folder: str, world_size: int, steps: int) -> list[dict]:
    """Train a case up to the step at which it is killed: in the last batch of the second of three
    epochs.

    Its newest checkpoint is one from the middle of that epoch.
    """
    kill_at = CASES[name].kill_at.get(world_size, steps * 2 // 3)
    return run(pool, killed, name, folder, kill_at, world_size=world_size)


def traces_of_kept(pool: RankPool, name: str) -> dict[str, list[dict]]:
    """Resume a checkpoint that lies beside this file."""
    return {f"resumed on {number}": resume_kept(pool, name, number) for number in (1, 2)}


def resume_kept(pool: RankPool, name: str, world_size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CHECKPOINTS / name, folder, dirs_exist_ok=True)
        return run(pool, resumed, name, folder, world_size=world_size)


def write_missing_checkpoints(pool: RankPool) -> None:
    for name in KEPT:
        folder = CHECKPOINTS / name
        if not folder.exists():
            kill(pool, name, str(folder), 2, fresh_trace(pool, name, 2)[0]["steps"])
            *older, _ = sorted(folder.glob("CKPT*"))
            for checkpoint in older:
                shutil.rmtree(checkpoint)


def as_text(traces: dict[str, dict[str, list[dict]]]) -> str:
    """Return the traces as JSON with a line for each rank of each run, so that a change shows as
    lines.
    """
    cases = []
    for name, parts in traces.items():
        runs = []
        for part, ranks in parts.items():
            lines = ",\n".join(f"    {json.dumps(facts)}" for facts in ranks)
            runs.append(f"   {json.dumps(part)}: [\n{lines}\n   ]")
        cases.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(runs) + "\n  }")
    body = ",\n".join(cases)
    return f' {{\n "machine": {json.dumps(machine())},\n "traces": {{\n{body}\n }}\n}}\n'.lstrip()


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    is_known = TRACES.exists() and len(chosen) < len(CASES)
    traces = json.loads(TRACES.read_text())["traces"] if is_known else {}
    with RankPool(timeout=300) as pool:
        write_missing_checkpoints(pool)
        for name in chosen:
            for world_size in WORLD_SIZES:
                traces[f"{name} on {world_size}"] = traces_of(pool, name, world_size)
        for name in KEPT:
            if name in chosen:
                traces[f"{name}: a checkpoint of before"] = traces_of_kept(pool, name)
    TRACES.write_text(as_text(traces))


if __name__ == "__main__":
    main()
