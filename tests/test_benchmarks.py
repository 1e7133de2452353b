"""Every benchmark loads: what it takes from ddpkit is still there."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import Run, python

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_loads(path):
    assert callable(runpy.run_path(str(path), run_name="loaded")["main"])


def run(folder, *words, seconds=60.0):
    """Run a benchmark in a process that has imported torch, as all that it starts."""
    done = Run(python(*words), folder, {"PYTHONPATH": str(ROOT)}, warm=True).wait(seconds)
    assert done.code == 0, done.out + done.err
    return done.out


SMALL_SCALE = """
import sys
from benchmarks import scale

scale.WIDTH, scale.LAYERS = 256, 4
sys.argv[1:] = ["--ranks", "2", "64", "256"]
scale.main()
"""


@pytest.mark.slow
def test_a_step_has_as_many_collectives_on_many_ranks_as_on_two(tmp_path):
    """Of ZeRO-1, which sends a parameter at a time, as many on 256 as on 64. So of virtual ranks,
    which exchange pairs of messages between few.
    """
    rows = [row.strip("| ").split(" | ") for row in run(tmp_path, "-c", SMALL_SCALE).splitlines()]
    found = {name: figures for name, *figures in rows if name.endswith(": collectives")}
    assert {name.partition(",")[0]: len(set(figures)) for name, figures in found.items()} == {
        "DDP": 1,
        "FSDP": 1,
        "virtual ranks": 2,
        "ZeRO-1": 2,
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_first_step_is_timed_in_fresh_processes():
    command = [
        sys.executable,
        str(BENCHMARKS[0].parent / "first_step.py"),
        "--turns=1",
        "--not_counted=0",
        "--cpu_time",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"by hand \d\.\d+ s, ddpkit \d\.\d+ s, ratio [012]\.\d+ ", done.stdout)


@pytest.mark.slow
def test_planted_faults_are_named_and_a_clean_run_on_a_busy_machine_is_left_alone(tmp_path):
    words = ("-m", "benchmarks.planted_delays", "--short", "--seconds=10", "--load=1")
    told = run(tmp_path, *words, seconds=110)
    assert "2 of 2 faults named; 0 of 1 clean runs had a verdict" in told


def test_the_benchmark_of_gpus_says_how_many_it_needs(monkeypatch):
    path = str(BENCHMARKS[0].parent / "gpu.py")
    monkeypatch.setattr(sys, "argv", [path, "--processes", "99"])
    with pytest.raises(SystemExit, match=r"gpu.py needs 99 GPU\(s\), found \d+: --device cpu"):
        runpy.run_path(path, run_name="__main__")


# One process measures checkpoints. Two take the rows that differ in what a rank does: each model,
# workers, what is moved ahead.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "rows", "number", "not_here"),
    [
        (1, ["small", "checkpoint"], 7, {"small, fp16", "small, reduce-overhead"}),
        (2, ["bf16", "large batches", "first"], 6, {"as before, read first"}),
    ],
)
def test_the_benchmark_of_gpus_runs_on_a_cpu_and_ends_with_the_bits_of_the_loop_by_hand(
    tmp_path, processes, rows, number, not_here
):
    script = str(BENCHMARKS[0].parent / "gpu.py")
    words = ("--device=cpu", f"--processes={processes}", "--rows", *rows)
    told = run(tmp_path, script, *words)
    found = {line[:32].strip(): line[32:].strip() for line in told.splitlines()[2:]}
    refused = {name for name, figures in found.items() if figures == "not on a CPU"}
    assert refused == not_here
    assert ("checkpoint" in found) == (processes == 1)
    trained = found.keys() - refused - {"checkpoint"}
    assert len(trained) == number
    assert all(found[name].endswith("same") for name in trained), told
