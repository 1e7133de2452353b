"""Checkpoints of what is trained, from weights and optimizers that are divided over the ranks: the
base has the same fingerprint as on one process.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer, safe_load, whole_state_dict
from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from tests.recipes import QUIET, Regression, assert_same, points

DATA = points(8)


class Adapted(nn.Module):
    def __init__(self, seed=1, device="cpu"):
        super().__init__()
        torch.manual_seed(seed)
        kinds = {"dtype": torch.float64, "device": device}
        self.base = nn.Linear(3, 5, **kinds)  # 5 rows: uneven on 2 ranks
        self.down = nn.Linear(5, 1, **kinds)
        self.base.requires_grad_(False)

    def forward(self, rows):
        return self.down(torch.tanh(self.base(rows)))


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def train(folder, epochs, batch_size, seed=1, device="cpu", **options):
    net = Adapted(seed, device)
    counter = EpochCounter(epochs)
    brain = Saving(
        {"net": net},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        run_opts={**QUIET, **options},
        checkpointer=Checkpointer(folder, {"net": net, "counter": counter}, trained_only=["net"]),
    )
    brain.fit(counter, DATA, train_loader_kwargs={"batch_size": batch_size})
    return whole_state_dict(brain.modules.net)


def train_and_go_on(folder, options, device):
    if device == "meta":
        os.environ["DDPKIT_GLOBAL_SEED"] = "4"
        options = {**options, "init_from": folder / "base.pt", "init_skip": "down.*"}
    whole = train(folder / "a", 2, 1, device=device, **options)
    train(folder / "b", 1, 1, device=device, **options)
    again = train(folder / "b", 2, 1, device=device, **options)
    assert get_rank() or whole.keys() == again.keys()
    return [torch.equal(whole[name], again[name]) for name in whole or ()]


def base_of(folder):
    return [safe_load(file)["__base__"] for file in sorted(folder.glob("CKPT*/net.ckpt"))]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"strategy": "fsdp", "ema_decay": 0.5}, "cpu"),
        *(
            pytest.param(options, device, marks=pytest.mark.slow)
            for options, device in [
                ({"strategy": "fsdp"}, "meta"),
                ({"strategy": "zero1", "ema_decay": 0.5}, "cpu"),
                ({}, "cpu"),
                ({"ckpt_load": "broadcast"}, "cpu"),
            ]
        ),
    ],
)
def test_two_ranks_go_on_and_name_the_base_as_one_process_does(ranks, tmp_path, options, device):
    state = Adapted().state_dict()
    torch.save({name: state[name] for name in ("base.weight", "base.bias")}, tmp_path / "base.pt")
    found = ranks.run(train_and_go_on, tmp_path, options, device, world_size=2)
    assert found == [[True] * 4, []]
    train(tmp_path / "one", 1, 2)
    (expected,) = base_of(tmp_path / "one")
    assert base_of(tmp_path / "a") == [expected] * 2
    assert base_of(tmp_path / "b") == [expected] * 2


def go_on_with_another_base(folder):
    train(folder, 1, 1, strategy="fsdp")
    train(folder, 2, 1, seed=2, strategy="fsdp")


@pytest.mark.costly
def test_another_base_is_the_same_error_on_all_ranks(ranks, tmp_path):
    outcomes = ranks.outcomes(go_on_with_another_base, tmp_path, world_size=2)
    assert all("other base   base.weight" in one.error for one in outcomes)


def train_on_two(folder):
    train(folder, 1, 1, strategy="fsdp")


@pytest.mark.costly
def test_one_process_goes_on_from_what_two_have_saved(ranks, tmp_path):
    ranks.run(train_on_two, tmp_path, world_size=2)
    state = train(tmp_path, 2, 2)
    expected = Adapted().state_dict()
    assert_same({"base.weight": state["base.weight"]}, {"base.weight": expected["base.weight"]})
