"""Two ranks of a machine that see one GPU each, and come to the same."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddpkit import device
from ddpkit.comm import process_group
from ddpkit.comm.process_group import claim_device
from ddpkit.errors import LaunchError
from ddpkit.launch import LaunchInfo


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(device, "count_devices", lambda kind: int(kind == "cuda"))


def test_two_ranks_that_come_to_one_physical_gpu_are_refused(one_gpu, monkeypatch):
    monkeypatch.setattr(process_group, "physical_device", lambda _: "GPU-8f2")
    store = dist.HashStore()
    places = [LaunchInfo("environment", rank, rank, 2, 2) for rank in range(2)]
    claim_device(store, places[1], "cuda:0")
    claim_device(store, places[1], "cuda:0")  # the same rank again
    with pytest.raises(
        LaunchError,
        match=r"Not enough GPUs: rank 1 and rank 0 on .* the same \(GPU-8f2\)",
    ):
        claim_device(store, places[0], "cuda:0")
    monkeypatch.setattr(process_group, "physical_device", lambda _: "GPU-8f3")
    claim_device(store, places[0], "cuda:0")
    monkeypatch.setattr(process_group, "this_place", lambda: ("another", "", ""))
    monkeypatch.setattr(process_group, "physical_device", lambda _: "GPU-8f2")
    claim_device(store, places[0], "cuda:0")


def test_who_shares_a_gpu_by_a_launchers_leave_is_not_compared(one_gpu, monkeypatch):
    monkeypatch.setattr(process_group, "physical_device", lambda _: "GPU-8f2")
    store = dist.HashStore()
    for rank in range(2):
        claim_device(store, LaunchInfo("slurm", rank, rank, 2, 2, own_devices=True), "cuda:0")
        claim_device(store, LaunchInfo("environment", rank, rank, 2, 2), "cpu")
