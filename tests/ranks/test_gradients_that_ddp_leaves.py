"""Gradients that DDP does not average, or not in the batch that ends a step: in the same answer,
too.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddpkit.distributed import get_rank
from ddpkit.errors import ConfigError
from ddpkit.types import Stage
from tests.recipes import QUIET, Regression, points, sgd


class Net(nn.Module):
    """Two layers, the second of which may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 1).double()
        self.second = nn.Linear(3, 1).double()

    def forward(self, inputs, both=True):
        return self.first(inputs) + self.second(inputs) if both else self.first(inputs)


class Thaws(Regression):
    """Sets weights free after three steps, in the middle of an epoch."""

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN and self.optimizer_step == 3:
            for one in [*self.modules.net.second.parameters(), *self.modules.frozen.parameters()]:
                one.requires_grad_(True)
        return self.modules.net(batch[0]) + self.modules.frozen(batch[0])


class EveryOther(Regression):
    """Uses one layer in every other batch only; it is never in the batch that ends a step."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0], both=self.step % 2 == 1)


class Auxiliary(Regression):
    """Calls an entry in each batch; its output is in the loss of every other batch, never in that
    which ends a step.
    """

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]), self.modules.frozen(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions[0], batch, stage)
        return loss + predictions[1].square().mean() if self.step % 2 == 1 else loss


def own(cls):
    """Give a recipe a ``fit_batch`` of its own."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()

    return type(f"Own{cls.__name__}", (cls,), {"fit_batch": fit_batch})


def whole(weight):
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().flatten()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def train(cls, world_size, options, is_own=False, adam=False):
    """Return all weights at the end, after steps of 12 samples in two batches."""
    torch.manual_seed(4)
    modules = {"net": Net(), "frozen": nn.Linear(3, 1).double()}
    if cls is Thaws:
        for one in (modules["net"].second, modules["frozen"]):
            one.requires_grad_(False)
    sizes = {"global_batch_size": 12, "micro_batch_size": 6 // world_size}
    opt = adamw if adam else sgd(lr=0.1)
    brain = (own(cls) if is_own else cls)(modules, opt, None, {**QUIET, **sizes, **options})
    brain.fit([1, 2], points(48), train_loader_kwargs={"shuffle": True})
    return torch.cat([whole(one) for one in brain.raw_modules.parameters()]).tolist()


def assert_equals_one_process(ranks, cls, world_size, options, is_own=False, adam=False):
    expected = torch.tensor(train(cls, 1, {}, is_own, adam))
    found = torch.tensor(
        ranks.run(train, cls, world_size, options, is_own, adam, world_size=world_size)
    )
    assert torch.equal(found[0], found[-1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": "zero1"}, {"strategy": "fsdp"}, {"virtual_ranks": 2}],
    ids=str,
)
@pytest.mark.parametrize("is_own", [False, True])
def test_weights_that_are_set_free_in_the_middle_of_an_epoch(ranks, options, is_own):
    assert_equals_one_process(ranks, Thaws, 2, options, is_own)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_own", [False, True])
def test_what_the_last_batch_of_a_step_does_not_use(ranks, world_size, is_own):
    assert_equals_one_process(
        ranks,
        EveryOther,
        world_size,
        {"find_unused_parameters": True},
        is_own,
    )


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_an_entry_that_the_last_loss_of_a_step_does_not_use(ranks, world_size, is_own, options):
    assert_equals_one_process(ranks, Auxiliary, world_size, options, is_own)


class InOddSteps(Regression):
    """Uses a layer, and an entry, in no batch of every other step."""

    def compute_forward(self, batch, stage):
        is_odd = self.optimizer_step % 2 == 1
        outputs = self.modules.net(batch[0], both=is_odd)
        return outputs + self.modules.frozen(batch[0]) if is_odd else outputs


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"strategy": "zero1"}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("is_own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_parameter_that_no_batch_of_a_step_uses_is_not_moved_by_decay_or_momentum(
    ranks,
    options,
    is_own,
):
    """Where gradients are averaged as the optimizers step, no process has one of it: a zero would
    move it.
    """
    options = {"find_unused_parameters": True, **options}
    assert_equals_one_process(ranks, InOddSteps, 2, options, is_own, adam=True)


class InTwoOptimizers(own(Auxiliary)):
    """One optimizer has the entry's weight, and steps last; the other has all else."""

    steps_now = "rest"

    def init_optimizers(self):
        weight = self.modules.frozen.weight
        rest = [one for one in self.modules.parameters() if one is not weight]
        self.optimizers_dict = {
            "rest": torch.optim.SGD(rest, lr=0.1),
            "last": torch.optim.SGD([weight], lr=0.1),
        }

    def freeze_optimizers(self, optimizers):
        return {self.steps_now: optimizers[self.steps_now]}

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            for self.steps_now in ("rest", "last"):
                self.optimizers_step()
        return loss.detach()


@pytest.mark.costly
def test_an_entry_of_two_optimizers_that_step_one_after_the_other(ranks):
    assert_equals_one_process(ranks, InTwoOptimizers, 2, {})


class TakesTurns(Regression):
    """The second loss of a window gives gradients to the optimizer that has stepped with the
    first.
    """

    def init_optimizers(self):
        self.optimizers_dict = {name: adamw(one.parameters()) for name, one in self.modules.items()}

    def freeze_optimizers(self, optimizers):
        return {self.turn: optimizers[self.turn]}

    def fit_batch(self, batch):
        judge = self.modules.judge
        made = self.modules.maker(batch[0])
        self.learn("judge", judge(torch.cat([made.detach(), batch[0]])).square().mean())
        return self.learn("maker", (judge(made) - 1).square().mean())

    def learn(self, turn, loss):
        self.turn = turn
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


def take_turns(world_size, factor, options):
    torch.manual_seed(3)
    modules = {"judge": nn.Linear(3, 1).double(), "maker": nn.Linear(3, 3).double()}
    sizes = {"global_batch_size": 4 * factor, "micro_batch_size": 4 // world_size}
    brain = TakesTurns(modules, None, None, {**QUIET, **sizes, **options})
    brain.turn = "judge"
    brain.fit([1, 2], points(22))
    return torch.cat([whole(one) for one in brain.raw_modules.parameters()]).tolist()


@pytest.mark.costly
@pytest.mark.parametrize("factor", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param({"strategy": one}, marks=pytest.mark.slow) for one in ("zero1", "fsdp"))],
    ids=str,
)
def test_a_gradient_that_comes_after_the_step_of_its_optimizer(ranks, factor, options):
    expected = torch.tensor(take_turns(1, factor, {}))
    found = torch.tensor(ranks.run(take_turns, 2, factor, options, world_size=2))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


class ByRank(Regression):
    """The ranks choose different entries, whose weights have one shape."""

    def compute_forward(self, batch, stage):
        entry = self.modules.one if get_rank() else self.modules.other
        return entry(batch[0])


def choose(options):
    modules = {"one": nn.Linear(3, 1).double(), "other": nn.Linear(3, 1).double()}
    brain = ByRank(modules, sgd(lr=0.1), None, {**QUIET, "global_batch_size": 8, **options})
    brain.fit([1], points(16))


@pytest.mark.corner
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"strategy": "zero1"}],
    ids=str,
)
def test_ranks_that_use_different_entries_are_told_at_the_end_of_the_pass(ranks, options):
    """DDP itself mixes their gradients without a word."""
    for outcome in ranks.outcomes(choose, options, world_size=2):
        assert outcome.error_type == "RankMismatchError", outcome.trace
        assert "the ranks have used different entries of modules" in outcome.error


def wrap_by_hand():
    modules = {"net": nn.parallel.DistributedDataParallel(nn.Linear(3, 1).double())}
    with pytest.raises(ConfigError) as caught:
        Regression(modules, sgd(lr=0.1), None, {**QUIET, "global_batch_size": 8}).fit(
            [1],
            points(16),
        )
    return str(caught.value)


def test_an_entry_that_the_recipe_has_wrapped_is_refused(ranks):
    for message in ranks.run(wrap_by_hand):
        assert "modules['net'] is wrapped or sharded already (DistributedDataParallel)" in message


class Grows(Regression):
    """Gets one more entry: when the optimizer is made, or when the second epoch begins."""

    def add(self):
        torch.manual_seed(5 + (get_rank() or 0))  # rank 0's values count
        self.modules["head"] = nn.Linear(3, 1).double()
        self.optimizer.add_param_group({"params": list(self.modules.head.parameters())})

    def init_optimizers(self):
        super().init_optimizers()
        if self.at == 0:
            self.add()

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and epoch == self.at:
            self.add()

    def compute_forward(self, batch, stage):
        found = self.modules.net(batch[0])
        return found + self.modules.head(batch[0]) if "head" in self.modules else found


def grow(at, options):
    torch.manual_seed(4)
    sizes = {"global_batch_size": 12}
    brain = Grows(
        {"net": nn.Linear(3, 1).double()},
        sgd(lr=0.1),
        None,
        {**QUIET, **sizes, **options},
    )
    brain.at = at
    brain.fit([1, 2, 3], points(48), train_loader_kwargs={"shuffle": True})
    return torch.cat([whole(one) for one in brain.raw_modules.parameters()]).tolist()


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("options", [{}, {"strategy": "zero1"}], ids=str)
def test_an_entry_that_comes_later(ranks, at, options):
    expected = torch.tensor(grow(at, {}))
    found = torch.tensor(ranks.run(grow, at, options, world_size=2))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)
