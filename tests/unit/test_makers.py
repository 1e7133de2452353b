"""An optimizer or a scheduler that is made already, in the place of what makes one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from tests.recipes import Squares


def fit(opt_class, scheduler_class=None, net=None):
    run_opts = {"device": "cpu", "noprogressbar": True}
    modules = {"net": net or nn.Linear(1, 1)}
    brain = Squares(modules, opt_class, None, run_opts, scheduler_class=scheduler_class)
    brain.fit([1], torch.ones(4, 1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_object_is_no_opt_class():
    net = nn.Linear(1, 1)
    with pytest.raises(ConfigError) as caught:
        fit(sgd(net.parameters()), net=net)
    assert "opt_class is an object of the class SGD, which is made already" in str(caught.value)
    assert "!name: instead of !new:" in str(caught.value)


def test_the_name_of_a_class_is_no_opt_class():
    with pytest.raises(
        ConfigError,
        match="opt_class='Adam' is a text: give a class or a function that makes it",
    ):
        fit("Adam")


def test_a_scheduler_object_is_no_scheduler_class():
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(nn.Linear(1, 1).parameters()), 1)
    with pytest.raises(
        ConfigError,
        match="scheduler_class is an object of the class StepLR, which is made already",
    ):
        fit(sgd, scheduler)
