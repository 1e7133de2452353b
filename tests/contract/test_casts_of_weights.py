"""Several optimizer steps inside of one autocast context: each computes with the weights of now."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpkit.types import Stage
from tests.recipes import Regression, make, points

STEPS = 3


class Several(Regression):
    """Steps three times on each batch, in a context for each step."""

    def fit_batch(self, batch):
        for _ in range(STEPS):
            with self.training_ctx:
                loss = self.compute(batch)
            self.step_on(loss)
        return loss.detach()

    def compute(self, batch):
        return self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)

    def step_on(self, loss):
        self.backward(loss)
        self.optimizers_step()


class SeveralByHand(Several):
    def step_on(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_step += 1


class InOneContext:
    """The same in one context around all steps."""

    def fit_batch(self, batch):
        with self.training_ctx:
            for _ in range(STEPS):
                loss = self.compute(batch)
                self.step_on(loss)
        return loss.detach()


class SeveralInOne(InOneContext, Several):
    pass


class SeveralInOneByHand(InOneContext, SeveralByHand):
    pass


class OfAnAttribute(SeveralByHand):
    """Its optimizer is in no place that the library looks into, but for the attribute."""

    def init_optimizers(self):
        self.mine = torch.optim.SGD(self.modules.parameters(), lr=0.1)

    def step_on(self, loss):
        loss.backward()
        self.mine.step()
        self.mine.zero_grad()
        self.optimizer_step += 1


class OfAnAttributeInOne(InOneContext, OfAnAttribute):
    pass


def trained(recipe, context=None, **options):
    torch.manual_seed(7)
    brain = make(recipe, net=nn.Linear(3, 1), **options)
    data = [(inputs.float(), targets.float()) for inputs, targets in points(8)]
    with context or torch.enable_grad():
        brain.fit([1, 2], data, train_loader_kwargs={"batch_size": 4})
    return brain.modules.net.weight.detach().clone()


@pytest.mark.parametrize(
    ("in_one", "in_each"),
    [
        (SeveralInOne, Several),
        (SeveralInOneByHand, SeveralByHand),
        (OfAnAttributeInOne, OfAnAttribute),
    ],
)
def test_one_context_around_several_steps_trains_as_one_for_each(in_one, in_each):
    found = trained(in_one, precision="bf16")
    assert torch.equal(found, trained(in_each, precision="bf16"))
    assert not torch.equal(found, trained(in_each)), "nothing was computed in bf16"


def test_autocast_around_the_whole_training_is_the_precision():
    around = trained(Regression, torch.autocast("cpu", torch.bfloat16))
    assert torch.equal(around, trained(Regression, precision="bf16"))


def test_an_optimizer_has_one_hook_however_often_it_is_trained_with():
    brain = make(Several, net=nn.Linear(3, 1))
    data = [(inputs.float(), targets.float()) for inputs, targets in points(4)]
    for _ in range(2):
        brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    hooks = [one.__name__ for one in brain.optimizer._optimizer_step_post_hooks.values()]
    assert hooks == ["drop_casts"]
