"""Jobs on a real Slurm of two nodes, as a user submits them."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.cells import some_of
from tests.launching import BIN, PATIENCE, wait_until

from .recipe import HPARAMS, SCRIPT, read_ends, read_steps

PYTHON = sys.executable
STEPS = 20

TORCHRUN = f"""\
#!/bin/bash
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --nodes=2 --ntasks-per-node=1 {BIN}/torchrun --nnodes=2 --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" {SCRIPT} {HPARAMS} "$@"
"""  # noqa: E501


BARE = f"#!/bin/bash\nexec srun {PYTHON} {SCRIPT} {HPARAMS}\n"


def script(folder: Path, text: str) -> str:
    path = folder / "job.sh"
    path.write_text(textwrap.dedent(text))
    return str(path)


def results(folder: Path, world_size: int, hosts: set[str]) -> list[dict]:
    """Check that all ranks came to the end together, and return what they said."""
    ends = read_ends(folder / "results")
    assert [end["rank"] for end in ends] == list(range(world_size))
    assert {end["world_size"] for end in ends} == {world_size}
    assert {end["host"] for end in ends} == hosts
    assert {end["step"] for end in ends} == {STEPS}
    assert len({end["weights"] for end in ends}) == 1, "all ranks have the same weights"
    return ends


def agreed(folder: Path, world_size: int) -> None:
    """Check that the ranks had the same weights after every step."""
    seen: dict[tuple[int, int], set[str]] = {}
    for step in read_steps(folder / "results"):
        assert step.world_size == world_size
        seen.setdefault((step.restart, step.step), set()).add(step.weights)
    assert all(len(weights) == 1 for weights in seen.values()), seen


def held(folder: Path, after: int = 1) -> Path:
    """Let the ranks of the coming run wait after a step, until the file that is returned is
    removed.
    """
    gate = folder / "results" / "wait"
    gate.parent.mkdir(exist_ok=True)
    gate.write_text(str(after))
    return gate


def both_at(folder: Path, step: int = 1, ranks: int = 2) -> bool:
    return len({one.rank for one in read_steps(folder / "results") if one.step >= step}) == ranks


@pytest.mark.exhaustive
def test_sbatch_of_torchrun_on_two_nodes(slurm, tmp_path):
    with slurm.submit(
        tmp_path,
        "--nodes=2",
        "--ntasks-per-node=1",
        script(tmp_path, TORCHRUN),
    ) as job:
        assert job.wait() == "COMPLETED", job.report()
    results(tmp_path, 2, {"node1", "node2"})
    agreed(tmp_path, 2)


@pytest.mark.exhaustive
def test_scancel_ends_every_process(slurm, tmp_path):
    held(tmp_path)
    with slurm.submit(
        tmp_path,
        "--nodes=2",
        "--ntasks-per-node=1",
        script(tmp_path, TORCHRUN),
    ) as job:
        job.until(lambda: both_at(tmp_path), 60, "the first step of both ranks")
        assert set(job.ranks()) == {0, 1}
        job.cancel()
        job.until(lambda: not job.processes(), 10, "the end of all processes")
        job.until(lambda: job.state == "CANCELLED", 5, "the state CANCELLED")
    assert not read_ends(tmp_path / "results")


@pytest.mark.exhaustive
def test_requeue_starts_again_and_goes_on(slurm, tmp_path):
    gate = held(tmp_path, after=12)
    options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    with slurm.submit(tmp_path, *options, script(tmp_path, BARE)) as job:
        job.until(lambda: both_at(tmp_path, 12), 60, "the second epoch")
        first = {one.pid for one in job.processes()}
        job.requeue()
        job.until(
            lambda: not first & {one.pid for one in job.processes()},
            15,
            "the end of the first processes",
        )
        gate.unlink()
        assert job.wait() == "COMPLETED", job.report()
        assert job.facts()["Restarts"] == "1"
    results(tmp_path, 2, {"node1", "node2"})
    agreed(tmp_path, 2)
    again = [one.step for one in read_steps(tmp_path / "results") if one.restart == 1]
    assert min(again) == 11, f"it goes on after the first epoch, where it saved: {again}"


def test_bare_srun(slurm, tmp_path):
    """No torchrun: each task is a rank; the address is that of the first node, the port comes from
    job and step.
    """
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=2", script(tmp_path, BARE)) as job:
        assert job.wait() == "COMPLETED", job.report()
    ends = results(tmp_path, 4, {"node1", "node2"})
    assert [end["host"] for end in ends] == ["node1", "node1", "node2", "node2"]
    agreed(tmp_path, 4)


@pytest.mark.exhaustive
def test_neighbours_of_a_cyclic_distribution(slurm, tmp_path):
    """Ranks 1 and 3 are on the second node: when one is killed, it is the other that sees it."""
    held(tmp_path)
    text = BARE.replace("srun", "srun --distribution=cyclic")
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=2", script(tmp_path, text)) as job:
        job.until(lambda: both_at(tmp_path, ranks=4), 60, "the first step of all ranks")
        hosts = {one.rank: one.host for one in read_steps(tmp_path / "results")}
        assert hosts == {0: "node1", 1: "node2", 2: "node1", 3: "node2"}
        killed = job.ranks()[3]
        killed.signal(signal.SIGKILL)
        job.until(lambda: not job.ranks(), 5, "the end of all ranks, which are in the user's code")
        assert job.wait() == "FAILED"
        said = (
            f"rank 3 (node2, pid {killed.pid}) disappeared in TRAIN of epoch 1 at step 1: it was "
            "killed"
        )
        assert said in job.output, job.report()


@pytest.mark.exhaustive
def test_two_steps_of_one_job_beside_each_other(slurm, tmp_path):
    """They share the job's variables and must not meet on one port."""
    step = f"srun --exact -N2 -n2 {PYTHON} {SCRIPT} {HPARAMS}"
    text = (
        f"#!/bin/bash\n{step} --output_folder=one/results &\n{step} --output_folder=other/results "
        "--seed=2 &\nwait\n"
    )
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=2", script(tmp_path, text)) as job:
        assert job.wait() == "COMPLETED", job.report()
    one, other = (results(tmp_path / name, 2, {"node1", "node2"}) for name in ("one", "other"))
    assert one[0]["weights"] != other[0]["weights"]


def test_the_batch_script_itself_is_one_process(slurm, tmp_path):
    """Slurm sets SLURM_PROCID and SLURM_NTASKS there, too: without srun nobody else will come."""
    text = f"#!/bin/bash\nenv | grep -c '^SLURM_NTASKS=2'\nexec {PYTHON} {SCRIPT} {HPARAMS}\n"
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks=2", script(tmp_path, text)) as job:
        assert job.wait() == "COMPLETED", job.report()
        assert job.output.splitlines()[1] == "1", "the trap is there"
    results(tmp_path, 1, {"node1"})


def test_a_rank_that_is_killed_ends_the_job(slurm, tmp_path):
    gate = held(tmp_path)
    with slurm.submit(
        tmp_path,
        "--nodes=2",
        "--ntasks-per-node=1",
        script(tmp_path, TORCHRUN),
    ) as job:
        job.until(lambda: both_at(tmp_path), 60, "the first step of both ranks")
        killed = job.ranks()[1]
        killed.signal(signal.SIGKILL)
        gate.unlink()
        assert wait_until(lambda: not job.ranks(), 10), job.report()
        assert job.wait() == "FAILED"
        assert (
            f"rank 1 (node2, pid {killed.pid}) disappeared in TRAIN of epoch 1 at step"
            in job.output
        ), job.report()


def names_the_failure(text: str, rank: int) -> None:
    """Check that the last lines name the rank, its host, where it was, and show its own
    traceback.
    """
    last = text.rstrip().splitlines()[-30:]
    shown = "\n".join(last)
    assert "ValueError: so it was asked for" in shown, text
    assert "in on_fit_batch_end" in shown, text
    assert f"rank {rank} (" in shown, text
    assert "in TRAIN of epoch 2 at step" in shown, text
    assert "Connection" not in shown, text


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", some_of([0, 1], [0]))
def test_an_exception_under_bare_srun(slurm, tmp_path, rank):
    """All are gone soon: neither srun nor Slurm ends the other task, which would wait for ever."""
    job_script = script(tmp_path, f"{BARE.rstrip()} --fails_on={rank}\n")
    with slurm.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", job_script) as job:
        assert job.wait() == "FAILED", job.report()
        assert wait_until(lambda: not job.ranks(), 1), job.report()
        gone = time.time() - float((tmp_path / "results" / "failed").read_text())
        assert gone < 5 * PATIENCE, gone
        names_the_failure(job.output, rank)
