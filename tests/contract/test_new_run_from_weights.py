"""What a checkpoint does not fit is refused with the way to a new run from its weights, and this
way works.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.errors import CheckpointUsageError
from ddpkit.parameter_transfer import Pretrainer
from ddpkit.types import Stage
from tests.recipes import SavesAfterTraining, make, points


class Looking(SavesAfterTraining):
    """Remembers what it begins with."""

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = self.modules.net.body.weight.detach().clone()


class Net(nn.Module):
    """A body and a head, by any name."""

    def __init__(self, outputs=1, head="head"):
        super().__init__()
        self.body = nn.Linear(3, 2).double()
        self.add_module(head, nn.Linear(2, outputs).double())

    def forward(self, rows):
        for layer in self.children():
            rows = layer(rows)
        return rows.mean(dim=1, keepdim=True)


def start(folder, net, groups=None, cls=SavesAfterTraining, **options):
    def optimizer(parameters):
        return torch.optim.Adam(list(parameters) if groups is None else groups(net), lr=0.01)

    brain = make(cls, net=net, opt=optimizer, folder=folder, **options)
    brain.fit([1], points(4), train_loader_kwargs={"batch_size": 2})
    return brain


def refused(folder, *arguments, **options):
    with pytest.raises(CheckpointUsageError) as caught:
        start(folder, *arguments, **options)
    words = str(caught.value)
    assert "begin anew from the weights alone" in words
    assert "--init_from=" in words
    assert "--resume=never" in words
    return words


def two_groups(net):
    return [{"params": net.body.parameters()}, {"params": net.head.parameters()}]


def test_another_head_is_refused_and_begins_from_the_weights(tmp_path):
    old = Net()
    start(tmp_path, old)
    words = refused(tmp_path, Net(outputs=2))
    assert "size mismatch for head.weight" in words
    assert "--init_skip=NAMES leaves out the layers that do not fit" in words
    weight = old.body.weight.detach().clone()
    (checkpoint,) = tmp_path.glob("CKPT*")
    new = Net(outputs=2)
    brain = start(
        tmp_path,
        new,
        cls=Looking,
        resume="never",
        init_from=checkpoint,
        init_skip="head.*",
    )
    assert torch.equal(brain.seen, weight)
    assert brain.optimizer_step == 2


def test_a_layer_with_another_name_begins_from_the_weights_by_hand(tmp_path):
    old = Net()
    start(tmp_path, old)
    (file,) = tmp_path.glob("CKPT*/net.ckpt")
    new = Net(outputs=2, head="new_head")
    Pretrainer(loadables={"net": new}, paths={"net": file}).load_collected()
    assert torch.equal(new.body.weight, old.body.weight)
    brain = start(tmp_path, new, resume="never")
    assert brain.optimizer_step == 2


def test_a_layer_that_is_new_or_gone_is_refused_with_the_same_way_out(tmp_path):
    start(tmp_path, Net())
    words = refused(tmp_path, Net(head="top"))
    assert "Missing key(s)" in words
    assert ". ." not in words


def test_other_parameter_groups_are_refused_with_their_sizes(tmp_path):
    start(tmp_path, Net())
    words = refused(tmp_path, Net(), groups=two_groups)
    assert (
        "The checkpoint has parameter groups of [4] tensors, and the script makes groups of [2, 2]."
        in words
    )
    assert "init_optimizers" not in words


class Thawing(SavesAfterTraining):
    """Adds a parameter group while it trains."""

    adds_at_start = False

    def init_optimizers(self):
        super().init_optimizers()
        if self.adds_at_start:
            self.add()

    def add(self):
        self.optimizer.add_param_group(
            {"params": list(self.modules["net"].head.parameters()), "lr": 0.001}
        )

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and len(self.optimizer.param_groups) == 1:
            self.add()


class ThawedAtStart(Thawing):
    adds_at_start = True


def test_a_group_that_was_added_later_is_added_in_init_optimizers(tmp_path: Path):
    def body(net):
        return [{"params": list(net.body.parameters())}]

    start(tmp_path, Net(), groups=body, cls=Thawing)
    words = refused(tmp_path, Net(), groups=body, cls=Thawing)
    assert (
        "groups of [2, 2] tensors, and the script makes groups of [2]. A group that the run has "
        "added later"
    ) in words
    assert "add it in init_optimizers" in words
    brain = make(
        ThawedAtStart,
        net=(net := Net()),
        opt=lambda _: torch.optim.Adam(body(net), lr=0.01),
        folder=tmp_path,
    )
    brain.fit([1, 2], points(4), train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step > 2
