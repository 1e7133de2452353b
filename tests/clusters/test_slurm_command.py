"""What ``python -m ddpkit slurm`` writes, submitted to a real Slurm as it is."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import Run, torchrun

from .recipe import HPARAMS, SCRIPT, read_ends, read_steps
from .test_slurm import agreed, both_at, held, results, script


@pytest.fixture
def written(tmp_path):
    """Write a script for two nodes without GPUs, from the folder of the recipe, as a user does."""
    shutil.copy(SCRIPT, tmp_path / "recipe.py")
    shutil.copy(HPARAMS, tmp_path / "hparams.yaml")

    def write(*words, processes=1, time="10:00", recipe=()):
        numbers = [
            "--nodes=2",
            "--gpus-per-node=0",
            f"--nproc-per-node={processes}",
            f"--time={time}",
        ]
        command = [
            sys.executable,
            "-m",
            "ddpkit",
            "slurm",
            "recipe.py",
            "hparams.yaml",
            *numbers,
            *words,
        ]
        done = subprocess.run(
            [*command, "--", *recipe],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (tmp_path / "train.sbatch").write_text(done.stdout)
        return "train.sbatch"

    return write


def test_it_trains(slurm, tmp_path, written):
    """Two processes on each of two nodes; what is quoted arrives as it was."""
    script = written(
        "--job-name=digits",
        "--sbatch=--comment='a test'",
        "--partition=other",
        processes=2,
    )
    with slurm.submit(tmp_path, script) as job:
        assert job.wait() == "COMPLETED", job.report()
        facts = job.facts()
        assert job.output.count("meeting at node1:") == 1, job.output
    assert (facts["JobName"], facts["Partition"], facts["NumNodes"]) == ("digits", "other", "2")
    assert (facts["CPUs/Task"], facts["TimeLimit"], facts["Requeue"]) == ("2", "00:10:00", "1")
    assert facts["Comment"] == "a"  # of "a test": what comes after a blank is not in this table
    results(tmp_path, 4, {"node1", "node2"})
    agreed(tmp_path, 4)
    assert {(one.rank, one.host) for one in read_steps(tmp_path / "results")} == {
        (0, "node1"),
        (1, "node1"),
        (2, "node2"),
        (3, "node2"),
    }


@pytest.mark.exhaustive
def test_with_restarts_by_torchrun_a_killed_rank_comes_back(slurm, tmp_path, written):
    """Both agents meet through the c10d rendezvous of the first node, and all ranks start again
    within the job.
    """
    gate = held(tmp_path, after=6)
    script = written("--max-restarts=2", recipe=["--ckpt_interval_steps=4"])
    with slurm.submit(tmp_path, script) as job:
        job.until(lambda: both_at(tmp_path, 6), 60, "the sixth step of both ranks")
        job.until(
            lambda: list((tmp_path / "results" / "save").glob("CKPT*")),
            5,
            "the checkpoint of the fourth step",
        )
        first = job.ranks()
        first[1].signal(signal.SIGKILL)
        gate.unlink()
        assert job.wait(90) == "COMPLETED", job.report()
        assert job.facts()["Restarts"] == "0"
    results(tmp_path, 2, {"node1", "node2"})
    old = {one.pid for one in first.values()}
    again = [one for one in read_steps(tmp_path / "results") if one.pid not in old]
    assert {one.rank for one in again} == {0, 1}, "both ranks were started again"
    assert min(one.step for one in again) == 5, "and went on after the checkpoint"


def test_the_signal_before_the_limit_ends_the_attempt_and_queues_the_job_again(
    slurm,
    tmp_path,
    written,
):
    """Slurm itself sends it, up to 30 s early as it looks at the limits every 30 s: here 50 to 80 s
    after the start.

    Then the job gets more time, so that its further attempts can start and end on a machine of any
    speed.
    """
    gate = held(tmp_path, after=2)
    script = written("--signal-before=100", time="3:00", recipe=["--step_seconds=0.2"])
    with slurm.submit(tmp_path, script) as job:
        job.until(lambda: both_at(tmp_path, 2), 60, "the second step of both ranks")
        job.until(lambda: "the time limit is near" in job.output, 90, "the signal")
        job.give_time("30:00")
        gate.unlink()
        assert job.wait(90) == "COMPLETED", job.report()
        assert int(job.facts()["Restarts"]) >= 1
        assert "queued again" in job.output
        assert re.search(r"attempt [1-9]\d*: node\[1-2\]", job.output), (
            "on a slow machine the first is told before it can say so"
        )
    results(tmp_path, 2, {"node1", "node2"})
    agreed(tmp_path, 2)
    taken = [one.step for one in read_steps(tmp_path / "results") if one.rank == 0]
    assert taken == list(range(1, len(taken) + 1)), "no step is lost and none is taken twice"


@pytest.mark.exhaustive
def test_a_node_that_is_lost_and_comes_back(slurm, tmp_path, written):
    """A bare srun and the written script at the same time: the node is lost to both, and both go on
    by themselves.

    The script has to wait for Slurm to find out: its srun gives up after 5 s here, and Slurm knows
    after 15 s.
    """
    if not slurm.machines:
        pytest.skip(
            "no namespaces here: both nodes are this machine, and cannot be lost one by one"
        )
    text = (
        f"#!/bin/bash\nexec srun {sys.executable} {SCRIPT} {HPARAMS} --output_folder=bare/results\n"
    )
    (tmp_path / "bare").mkdir()
    bare = script(tmp_path, text)
    own = written("--signal-before=10", time="3:00")
    gates = [held(folder, after=12) for folder in (tmp_path / "bare", tmp_path)]
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    with slurm.submit(tmp_path, *options, bare) as one, slurm.submit(tmp_path, own) as other:
        jobs = {tmp_path / "bare": one, tmp_path: other}
        for folder, job in jobs.items():
            job.until(lambda folder=folder: both_at(folder, 12), 90, "the second epoch")
        survivors = [Path(f"/proc/{job.ranks()[0].pid}") for job in jobs.values()]
        slurm.lose(1)
        for gate in gates:
            gate.unlink()
        one.until(
            lambda: not any(path.exists() for path in survivors),
            10,
            "the end of the other ranks",
        )
        (tmp_path / "uninterrupted").mkdir()
        reference = Run(torchrun(2, str(SCRIPT), str(HPARAMS)), tmp_path / "uninterrupted").wait()
        assert reference.code == 0, reference.tail()
        [weights] = {end["weights"] for end in read_ends(reference.folder / "results")}
        for job in jobs.values():
            job.until(lambda job=job: job.facts()["Restarts"] == "1", 60, "its being queued again")
        slurm.bring_back(1)
        for folder, job in jobs.items():
            assert job.wait(90) == "COMPLETED", job.report()
            assert re.search(
                r"rank 1 \(node2, pid \d+\) disappeared in TRAIN of epoch 2 at "
                r"step \d",
                job.output,
            )
            assert {end["weights"] for end in results(folder, 2, {"node1", "node2"})} == {weights}
            again = [step.step for step in read_steps(folder / "results") if step.restart == 1]
            assert min(again) == 11, f"it goes on after the first epoch, where it saved: {again}"
    assert "a node does not answer" in other.output


@pytest.mark.exhaustive
def test_a_failure_is_not_queued_again(slurm, tmp_path, written):
    with slurm.submit(tmp_path, written(recipe=["--global_batch_size=none_such"])) as job:
        assert job.wait() == "FAILED", job.report()
        assert job.facts()["Restarts"] == "0"


@pytest.mark.exhaustive
def test_scancel_ends_it_for_good(slurm, tmp_path, written):
    held(tmp_path)
    with slurm.submit(tmp_path, written()) as job:
        job.until(lambda: both_at(tmp_path), 60, "the first step of both ranks")
        job.cancel()
        job.until(lambda: not job.processes(), 20, "the end of all processes")
        job.until(lambda: job.state == "CANCELLED", 5, "the state CANCELLED")
        assert job.facts()["Restarts"] == "0"
