"""What is not trained is told on several processes, whatever divides or averages the gradients."""

from __future__ import annotations

import logging

import pytest

from ddpkit.types import Stage
from tests.recipes import Regression, linear, make, points


class OnBackbone(Regression):
    def compute_forward(self, batch, stage):
        found = self.modules.net(batch[0])
        return found + self.hparams.backbone(batch[0]) if self.hparams.uses else found


class HalfStepped(OnBackbone):
    def init_optimizers(self):
        super().init_optimizers()
        weight, _ = self.modules.parameters()
        self.optimizer.param_groups[0]["params"] = [weight]


class StepsByItself(Regression):
    """Trains one parameter, which on several ranks only one of them steps."""

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch, Stage.TRAIN)
        loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train_one_parameter(options):
    net = linear()
    net.weight.requires_grad_(False)
    brain = make(StepsByItself, net=net, global_batch_size=4, **options)
    brain.fit([1], points(9))
    return net.bias.item()


def train(recipe, uses, options):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("ddpkit.training.first_gradients")
    logger.addHandler(handler)
    try:
        brain = make(
            recipe,
            hparams={"backbone": linear(seed=1), "uses": uses},
            global_batch_size=4,
            **options,
        )
        brain.fit([1], points(9))
    finally:
        logger.removeHandler(handler)
    return told


STRATEGIES = [
    {},
    {"strategy": "zero1"},
    {"strategy": "fsdp"},
    {"virtual_ranks": 2},
    {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2},
    {"micro_batch_size": 1},
]


@pytest.mark.corner
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
@pytest.mark.parametrize("recipe", [OnBackbone, HalfStepped])
def test_it_is_told_under_each_strategy_and_nothing_else_is(ranks, recipe, options):
    told = ranks.run(train, recipe, False, options, world_size=2)[0]
    assert len(told) == (recipe is HalfStepped)
    assert not told or "that no optimizer has: net.bias." in told[0]


@pytest.mark.costly
def test_a_rank_that_steps_no_part_of_an_optimizer_is_no_mistake(ranks):
    usual = ranks.run(train_one_parameter, {}, world_size=2)
    found = ranks.run(train_one_parameter, {"strategy": "zero1"}, world_size=2)
    assert found == usual


@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [one for one in STRATEGIES if "fsdp" not in one.values()],
    ids=str,
)
def test_a_module_outside_is_told_under_each_strategy(ranks, options):
    (told,) = ranks.run(train, OnBackbone, True, options, world_size=2)[0]
    assert "depends on hparams.backbone (2 parameter(s)), in no entry of modules" in told
