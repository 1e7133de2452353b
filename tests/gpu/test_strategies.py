"""Strategies, virtual ranks and automatic micro-batches on GPUs: the same answer there as on one
process.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_ddp import COLD_SECONDS, assert_alike, results, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

BATCH = {"global_batch_size": 16}
STRATEGIES = [
    {"strategy": "ddp", "ddp_comm_hook": "bf16"},
    {"strategy": "zero1"},
    {"strategy": "fsdp", "fsdp_min_parameters": 30},
    {"strategy": "fsdp", "fsdp_min_parameters": 30, "fsdp_reshard_after_forward": False},
]


def test_the_same_bits_on_any_number_of_processes_that_share_or_have_gpus(tmp_path):
    """In float32, with dropout, whose random numbers are the GPU's, clipping, AdamW and an average
    of the weights.
    """
    common = {**BATCH, "virtual_ranks": 4, "dropout": True, "ema_decay": 0.9, "max_grad_norm": 0.3}
    trainings = [
        {**common, "samples": samples, "optimizer": optimizer, "precision": precision}
        for samples, optimizer, precision in [
            (64, "AdamW", "fp32"),
            (49, "SGD", "fp32"),
            (50, "AdamW", "bf16"),
        ]
    ]
    # the sum of a large gradient begins in the backward pass
    trainings.append({**BATCH, "virtual_ranks": 4, "norm": "none", "optimizer": "AdamW"})
    alone, *others = (
        results(tmp_path, number, name=f"on {number}", trainings=trainings) for number in (1, 2, 4)
    )
    for other in others:
        for one, found in zip(alone, other, strict=True):
            assert_alike([*one, *found])


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_same_bits_where_states_or_weights_are_divided(tmp_path, strategy):
    """Also with the fused kernels of a GPU."""
    trainings = [
        {
            **BATCH,
            "virtual_ranks": 4,
            "dropout": True,
            "ema_decay": 0.9,
            "max_grad_norm": 0.3,
            "optimizer": "AdamW",
            "fused": is_fused,
            "precision": precision,
        }
        for is_fused, precision in [(False, "fp32"), (True, "fp32"), (False, "bf16")]
    ]
    expected = results(tmp_path, 1, name="alone", trainings=trainings)
    divided = [{**one, "strategy": strategy} for one in trainings]
    for number in (2, 4):
        found = results(tmp_path, number, name=f"on {number}", trainings=divided)
        for one, ranks in zip(expected, found, strict=True):
            assert_alike([*one, *ranks])


def test_virtual_ranks_explain_an_operation_without_deterministic_kernels(tmp_path):
    run = start(
        tmp_path,
        1,
        trainings=[{**BATCH, "virtual_ranks": 4, "kind": "unrepeatable"}],
    ).wait(COLD_SECONDS)
    assert run.code != 0
    assert "virtual_ranks=4: bits are the same only with deterministic kernels" in run.err
    assert "adaptive_avg_pool2d_backward_cuda" in run.err


@pytest.mark.parametrize("processes", [1, 2])
def test_strategies_follow_one_process(processes, tmp_path):
    usual = [
        {**BATCH, "dtype": "float64", "samples": samples, "optimizer": "AdamW"}
        for samples in (64, 49)
    ]
    half = {**BATCH, "precision": "bf16"}
    trainings = [{**one, **chosen} for one in usual for chosen in STRATEGIES[1:]]
    trainings += [{**half, **chosen} for chosen in STRATEGIES]
    expected = results(tmp_path, 1, name="alone", trainings=[*usual, half])
    expected = [one for [one] in expected]
    found = results(tmp_path, processes, trainings=trainings)
    for training, ranks in zip(trainings, found, strict=True):
        assert_alike(ranks)
        wide = training.get("dtype") == "float64"
        alone = expected[[64, 49].index(training["samples"]) if wide else 2]
        assert ranks[0]["steps"] == alone["steps"]
        tolerance = 1e-9 if wide else 2e-2
        torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=0, atol=tolerance)


def test_a_checkpoint_of_fsdp_goes_on_under_ddp_and_back(tmp_path):
    usual = {**BATCH, "dtype": "float64", "optimizer": "AdamW"}
    [[whole]] = results(tmp_path, 1, name="whole", trainings=[usual])
    folder = f"--folder={tmp_path / 'save'}"
    order = [(2, STRATEGIES[2]), (1, {}), (2, {"strategy": "zero1"})]
    for epochs, (processes, chosen) in enumerate(order, start=1):
        trainings = [{**usual, **chosen, "epochs": epochs, "ckpt_interval_steps": 1}]
        [last] = results(tmp_path, processes, folder, name=f"part {epochs}", trainings=trainings)
    torch.testing.assert_close(last[0]["weights"], whole["weights"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_one_gpu_has_no_memory_for_is_made_in_parts_on_all(processes, tmp_path):
    usual = {"global_batch_size": 64, "dtype": "float64", "samples": 256, "norm": "group"}
    hungry = {**usual, "kind": "hungry", "auto_micro_batch": True}
    [[alone]] = results(tmp_path, 1, name="alone", trainings=[usual])
    [found] = results(tmp_path, processes, trainings=[hungry])
    assert_alike(found)
    assert found[0]["steps"] == alone["steps"]
    for one in found:
        assert one["sizes"][0] == 64 // processes
        assert 8 < max(one["sizes"][-4:]) <= 15, (
            "the largest that fits, and not only the half of what did not"
        )
    torch.testing.assert_close(found[0]["weights"], alone["weights"], rtol=0, atol=1e-9)


def test_an_error_for_want_of_memory_names_the_option(tmp_path):
    run = start(tmp_path, 1, trainings=[{"kind": "hungry", "global_batch_size": 64}]).wait(
        COLD_SECONDS
    )
    assert run.code != 0
    assert "OutOfMemoryError" in run.err
    assert "--auto_micro_batch" in run.err
