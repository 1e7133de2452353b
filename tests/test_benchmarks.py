"""Every benchmark loads: what it takes from ddpkit is still there."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_loads(path):
    assert callable(runpy.run_path(str(path), run_name="loaded")["main"])


@pytest.mark.slow
def test_a_step_has_as_many_collectives_on_many_ranks_as_on_two():
    """Of ZeRO-1, which sends a parameter at a time, as many on 256 as on 64."""
    command = [sys.executable, str(BENCHMARKS[0].parent / "scale.py"), "--ranks", "2", "64", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row.strip("| ").split(" | ") for row in done.stdout.splitlines()]
    found = {name: figures for name, *figures in rows if name.endswith(": collectives")}
    assert {name.partition(",")[0]: len(set(figures)) for name, figures in found.items()} == {
        "DDP": 1,
        "FSDP": 1,
        "virtual ranks": 1,
        "ZeRO-1": 2,
    }
