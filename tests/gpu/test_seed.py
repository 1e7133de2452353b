"""Random states of CUDA devices."""

from __future__ import annotations

import torch

from ddpkit.seed import restore_rng_state, rng_state


def test_rng_state_brings_cuda_generators_back(tmp_path):
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        torch.rand(1, device=device)
    state = rng_state()
    first = [torch.rand(3, device=device) for device in devices]
    torch.save(state, tmp_path / "rng.pt")
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True, map_location="cuda")
    restore_rng_state(loaded)
    for device, expected in zip(devices, first, strict=True):
        assert torch.equal(torch.rand(3, device=device), expected)
