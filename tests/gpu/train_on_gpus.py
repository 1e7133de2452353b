"""Trains under torchrun with NCCL on the data of ``test_brain.py`` and saves the weights; not a test by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from ddpkit.distributed import ddp_init_group, get_world_size, if_main_process
from tests.gpu.test_brain import Classifier, make_data, make_net

if __name__ == "__main__":
    ddp_init_group({"distributed_backend": "nccl"})
    brain = Classifier(
        {"net": make_net(torch.float64)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        run_opts={"noprogressbar": True},
    )
    data = make_data(int(sys.argv[2]), dtype=torch.float64)
    loader = {"batch_size": 16 // get_world_size(), "shuffle": True}
    brain.fit(range(1, 4), data, data[:20], train_loader_kwargs=loader)
    if if_main_process():
        torch.save({name: value.cpu() for name, value in brain.raw_modules.state_dict().items()}, sys.argv[1])
