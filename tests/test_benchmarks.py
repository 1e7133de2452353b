"""Every benchmark loads: what it takes from ddpkit is still there."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_loads(path):
    assert callable(runpy.run_path(str(path), run_name="loaded")["main"])
