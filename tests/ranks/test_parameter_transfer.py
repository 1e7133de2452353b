"""Pretrained parameters on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.distributed import run_on_main
from ddpkit.parameter_transfer import Pretrainer


def transfer(folder, *, on_main):
    model = nn.Linear(2, 1)
    pretrainer = Pretrainer(folder / "links", {"model": model}, {"model": folder / "best.pt"})
    if on_main:
        run_on_main(pretrainer.collect_files)
    else:
        pretrainer.collect_files()
    pretrainer.load_collected()
    return model.weight.tolist()


def transfer_on_main(folder):
    return transfer(folder, on_main=True)


def transfer_everywhere(folder):
    return transfer(folder, on_main=False)


@pytest.mark.parametrize("way", [transfer_on_main, transfer_everywhere])
def test_every_rank_loads_the_file(ranks, tmp_path, way):
    torch.save({"weight": torch.full((1, 2), 3.0), "bias": torch.zeros(1)}, tmp_path / "best.pt")
    assert ranks.run(way, tmp_path) == [[[3.0, 3.0]]] * 2


@pytest.mark.parametrize("way", [transfer_on_main, transfer_everywhere])
def test_a_source_that_is_not_on_disk_fails_on_every_rank(ranks, tmp_path, way):
    first, second = ranks.outcomes(way, tmp_path)
    assert first.error_type == "MissingFileError"
    assert second.error_type == (
        "MainProcessError" if way is transfer_on_main else "MissingFileError"
    )
    assert "Download it first" in second.error
