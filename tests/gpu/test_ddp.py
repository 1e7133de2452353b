"""Several processes with NCCL, as a user starts them: a GPU each, or all on one where there are too
few.
"""

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
# torch, CUDA and NCCL started by every process, on a machine that has read none of them yet
COLD_SECONDS = 120.0
STEPS = 12  # of three epochs of 64 samples, 16 at a time
SAMPLES = [64, 63, 50, 49]


def needs(gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, found {torch.cuda.device_count()}")


def start(folder, processes, *words, name="run", trainings=({},)):
    asked = [{"distributed_backend": "nccl", **one} for one in trainings]
    command = torchrun(
        processes,
        str(SCRIPT),
        str(folder / name),
        *words,
        "--trainings",
        json.dumps(asked),
    )
    return Run(command, folder, name=name)


def results(folder, processes, *words, name="run", trainings=({},)):
    """Train to the end, one training after the other; return what each rank ended each of them
    with.
    """
    run = start(folder, processes, *words, name=name, trainings=trainings).wait(COLD_SECONDS)
    assert run.code == 0, run.tail(60)
    ranks = [torch.load(folder / f"{name}.{rank}", weights_only=True) for rank in range(processes)]
    return list(zip(*ranks, strict=True))


def assert_alike(found):
    for one in found[1:]:
        assert (one["steps"], one["scale"]) == (found[0]["steps"], found[0]["scale"])
        torch.testing.assert_close(one["weights"], found[0]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_over_nccl_follows_one_process(processes, tmp_path):
    """Also with remainders, where a rank may repeat a sample that counts in no statistic."""
    trainings = [{"samples": samples, "dtype": "float64"} for samples in SAMPLES]
    own = torch.cuda.device_count() >= processes
    for samples, found in zip(
        SAMPLES,
        results(tmp_path, processes, trainings=trainings),
        strict=True,
    ):
        assert_alike(found)
        assert [one["device"] for one in found] == [
            f"cuda:{rank if own else 0}" for rank in range(processes)
        ]
        _, alone = train(torch.float64, samples)
        torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("processes", [2, 4])
def test_ddp_in_half_precision_with_remainders(processes, tmp_path):
    """A rank that repeats a batch sends statistics of the same dtype as the others; else NCCL
    stands still.

    The loss scale is one at which nothing overflows: a rank's gradients, of a mean over fewer
    samples, are larger.
    """
    trainings = [
        {"samples": samples, "precision": half} for half in ("bf16", "fp16") for samples in SAMPLES
    ]
    scaled = [{**one, "scale": 1024.0} for one in trainings]
    for training, found in zip(
        trainings,
        results(tmp_path, processes, trainings=scaled),
        strict=True,
    ):
        assert_alike(found)
        brain, alone = train(**training, scale=1024.0)
        assert found[0]["steps"] == brain.optimizer_step
        assert found[0]["scale"] == brain.scaler.get_scale()
        torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=2e-2)


def test_an_overflow_on_one_rank_is_skipped_and_scaled_down_on_all(tmp_path):
    half = [{"precision": "fp16"}]
    [usual] = results(tmp_path, 2, name="usual", trainings=half)
    [found] = results(tmp_path, 2, "--fault", "infinite", "1", "2", trainings=half)
    assert_alike(found)
    assert found[0]["steps"] == usual[0]["steps"] - 1
    assert found[0]["scale"] == usual[0]["scale"] / 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_with_shared_statistics_waits_for_the_gpu_once_and_a_fused_one_never(
    processes,
    tmp_path,
):
    usual, fused = results(tmp_path, processes, "--count_syncs", trainings=[{}, {"fused": True}])
    for one in usual:
        assert one["syncs"][4:] == [1] * (STEPS - 4)
    for one in fused:
        assert one["syncs"][4:] == [0] * (STEPS - 4), (
            "torch does not count the wait for a norm that has been sent"
        )


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_other_backends_on_gpus_give_the_same(backend, tmp_path):
    [found] = results(
        tmp_path,
        2,
        trainings=[{"dtype": "float64", "samples": 49, "distributed_backend": backend}],
    )
    assert_alike(found)
    _, alone = train(torch.float64, 49)
    torch.testing.assert_close(found[0]["weights"], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "at once"])
def test_a_killed_run_on_gpus_goes_on_as_if_it_had_not_been(processes, asynchronous, tmp_path):
    """With dropout, whose random numbers are the GPU's; saved while NCCL is at work."""
    trainings = [{"dropout": True, "ckpt_interval_steps": 1, "ckpt_async": asynchronous}]
    folders = [f"--folder={tmp_path / name}" for name in ("whole", "killed")]
    [whole] = results(tmp_path, processes, folders[0], name="whole", trainings=trainings)
    fault = ["--fault", "kill", str(processes - 1), "7"]
    killed = start(
        tmp_path,
        processes,
        folders[1],
        *fault,
        name="killed",
        trainings=trainings,
    ).wait(COLD_SECONDS)
    assert killed.code != 0
    assert not list(tmp_path.glob("killed.[0-9]")), "no rank has come to the end"
    [again] = results(tmp_path, processes, folders[1], name="again", trainings=trainings)
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
    assert "operation timeout" not in run.err, "it is not NCCL's time limit that has ended them"


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
def test_random_numbers_go_on_where_a_rank_sees_its_gpu_by_another_number(
    sees_its_own_first,
    tmp_path,
):
    """Saved under torchrun, where each rank sees all GPUs; resumed where each task sees its own;
    and the other way.
    """
    needs(2)
    all_of_them = ({}, "1")
    alone = ({"CUDA_VISIBLE_DEVICES": "1"}, "0")
    order = (alone, all_of_them) if sees_its_own_first else (all_of_them, alone)
    drawn = []
    for how, (environment, number) in zip(("save", "restore"), order, strict=True):
        command = python("-c", DRAWS, number, how, str(tmp_path / "state.pt"))
        run = Run(
            command,
            tmp_path,
            {"PYTHONPATH": str(SCRIPT.parents[2]), **environment},
            how,
        ).wait(COLD_SECONDS)
        assert run.code == 0, run.err
        drawn.append(run.out)
    assert drawn[0] == drawn[1]
