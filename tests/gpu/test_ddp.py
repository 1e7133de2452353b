"""Several processes with NCCL, a GPU each, as a user starts them; with one GPU only what one process can show."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.gpu.test_brain import train
from tests.launching import Run, python, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("train_on_gpus.py")
COLD_SECONDS = 120.0  # torch, CUDA and NCCL started by every process, on a machine that has read none of them yet
STEPS = 12  # of three epochs of 64 samples, 16 at a time


def needs(processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, found {torch.cuda.device_count()}")


def start(folder, processes, *words, name="run", **options):
    needs(processes)
    asked = ["--options", json.dumps({"distributed_backend": "nccl", **options})]
    return Run(torchrun(processes, str(SCRIPT), str(folder / name), *words, *asked), folder, name=name)


def results(folder, processes, *words, name="run", **options):
    """Train to the end; return what each rank ended with."""
    run = start(folder, processes, *words, name=name, **options).wait(COLD_SECONDS)
    assert run.code == 0, run.tail(60)
    return [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(processes)]


def assert_alike(found):
    for one in found[1:]:
        assert (one["steps"], one["scale"]) == (found[0]["steps"], found[0]["scale"])
        torch.testing.assert_close(one["weights"], found[0]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("samples", [64, 63, 50, 49])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_over_nccl_follows_one_process(processes, samples, tmp_path):
    """Also with remainders, where a rank may repeat a sample that counts in no statistic."""
    found = results(tmp_path, processes, f"--samples={samples}", "--dtype=float64")
    assert_alike(found)
    assert [one["device"] for one in found] == [f"cuda:{rank}" for rank in range(processes)]
    _, alone = train(torch.float64, samples)
    torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("samples", [64, 63, 50, 49])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ddp_in_half_precision_with_remainders(precision, processes, samples, tmp_path):
    """A rank that repeats a batch sends statistics of the same dtype as the others; else NCCL stands still."""
    found = results(tmp_path, processes, f"--samples={samples}", precision=precision)
    assert_alike(found)
    brain, alone = train(samples=samples, precision=precision)
    assert found[0]["steps"] == brain.optimizer_step
    assert found[0]["scale"] == brain.scaler.get_scale()
    torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=2e-2)


def test_an_overflow_on_one_rank_is_skipped_and_scaled_down_on_all(tmp_path):
    usual = results(tmp_path, 2, name="usual", precision="fp16")
    found = results(tmp_path, 2, "--fault", "infinite", "1", "2", precision="fp16")
    assert_alike(found)
    assert found[0]["steps"] == usual[0]["steps"] - 1
    assert found[0]["scale"] == usual[0]["scale"] / 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_with_shared_statistics_waits_for_the_gpu_once_and_a_fused_one_never(processes, tmp_path):
    for one in results(tmp_path, processes, "--count_syncs"):
        assert one["syncs"][4:] == [1] * (STEPS - 4)
    for one in results(tmp_path, processes, "--count_syncs", "--fused", name="fused"):
        assert one["syncs"][4:] == [0] * (STEPS - 4), "torch does not count the wait for a norm that has been sent"


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_other_backends_on_gpus_give_the_same(backend, tmp_path):
    found = results(tmp_path, 2, "--dtype=float64", "--samples=49", distributed_backend=backend)
    assert_alike(found)
    _, alone = train(torch.float64, 49)
    torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "at once"])
def test_a_killed_run_on_gpus_goes_on_as_if_it_had_not_been(processes, asynchronous, tmp_path):
    """With dropout, whose random numbers are the GPU's; saved while NCCL is at work."""
    options = {"ckpt_interval_steps": 1, "ckpt_async": asynchronous}
    folders = [f"--folder={tmp_path / name}" for name in ("whole", "killed")]
    whole = results(tmp_path, processes, "--dropout", folders[0], name="whole", **options)
    fault = ["--fault", "kill", str(processes - 1), "7"]
    killed = start(tmp_path, processes, "--dropout", folders[1], *fault, name="killed", **options).wait(COLD_SECONDS)
    assert killed.code != 0
    assert not list(tmp_path.glob("killed.[0-9]")), "no rank has come to the end"
    again = results(tmp_path, processes, "--dropout", folders[1], name="again", **options)
    for one, other in zip(again, whole, strict=True):
        assert one["steps"] == other["steps"] == STEPS
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["raise", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_under_nccl_ends_all_and_is_named(kind, rank, tmp_path):
    run = start(tmp_path, 2, "--fault", kind, str(rank), "5").wait(COLD_SECONDS)
    assert run.code != 0
    assert f"rank {rank}" in run.err.lower()
    reason = "planted on purpose" if kind == "raise" else signal.SIGKILL.name
    assert reason in run.err
    assert "watchdog" not in run.err.lower(), "it is not NCCL's time limit that has ended them"


DRAWS = """
import sys, torch
from ddpkit.seed import restore_rng_state, rng_state
number, how, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.cuda.set_device(number)
torch.cuda.manual_seed_all(number)
torch.rand(7, device="cuda")
if how == "save":
    torch.save(rng_state(), path)
else:
    restore_rng_state(torch.load(path, weights_only=True))
print(torch.rand(3, device="cuda").tolist())
"""


@pytest.mark.parametrize("sees_its_own_first", [True, False])
def test_random_numbers_go_on_where_a_rank_sees_its_gpu_by_another_number(sees_its_own_first, tmp_path):
    """Saved under torchrun, where each rank sees all GPUs; resumed where each task sees its own; and the other way."""
    needs(2)
    all_of_them, alone = ({}, "1"), ({"CUDA_VISIBLE_DEVICES": "1"}, "0")
    order = (alone, all_of_them) if sees_its_own_first else (all_of_them, alone)
    drawn = []
    for how, (environment, number) in zip(("save", "restore"), order, strict=True):
        command = python("-c", DRAWS, number, how, str(tmp_path / "state.pt"))
        run = Run(command, tmp_path, {"PYTHONPATH": str(SCRIPT.parents[2]), **environment}, how).wait(COLD_SECONDS)
        assert run.code == 0, run.err
        drawn.append(run.out)
    assert drawn[0] == drawn[1]
