"""An ``optimizers_step`` of the recipe clips the gradients that the step uses, on any number of
processes.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddpkit.precision import StepScaler
from ddpkit.types import Stage
from tests.recipes import QUIET, Regression, SeveralOptimizers, points, sgd

LARGEST = 0.2


class Clips(Regression):
    """Clips by itself, and remembers the norms that it found."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norms = []

    def optimizers_step(self):
        norm = nn.utils.clip_grad_norm_(self.modules.parameters(), LARGEST)
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        super().optimizers_step()


class ClipsSums(Clips):
    """Its loss is a sum and a count, which differs between batches."""

    def compute_objectives(self, predictions, batch, stage):
        there = batch[1][:, 0] > -0.5
        return (predictions - batch[1])[there].square().sum(), there.sum()


class ClipsTwice(ClipsSums):
    """A class below another one that has its own, too."""

    def optimizers_step(self):
        for one in self.modules.parameters():
            one.grad.mul_(0.5)
        super().optimizers_step()


class StepsByItself(ClipsSums):
    """Steps without the library's own."""

    def optimizers_step(self):
        self.norms.append(float(nn.utils.clip_grad_norm_(self.modules.parameters(), LARGEST)))
        for one in self.optimizers_dict.values():
            one.step()
            one.zero_grad()


class OneByOne(SeveralOptimizers, ClipsSums):
    """Says inside of it which optimizer steps."""

    now = None

    def freeze_optimizers(self, optimizers):
        return optimizers if self.now is None else {self.now: optimizers[self.now]}

    def optimizers_step(self):
        nn.utils.clip_grad_norm_(self.modules.parameters(), LARGEST)
        for self.now in ("weight", "bias"):
            super(Clips, self).optimizers_step()
        self.now = None


def train(cls, options, per_step=12, micro=None, scaler=None):
    """Return the norms and the weights."""
    torch.manual_seed(4)
    sizes = {
        "global_batch_size": per_step,
        **({} if micro is None else {"micro_batch_size": micro}),
    }
    net = nn.Linear(3, 1).double()
    brain = cls({"net": net}, sgd(lr=0.1), None, {**QUIET, **sizes, **options})
    if scaler is not None:
        brain.scaler = scaler
    brain.fit([1, 2], points(44), train_loader_kwargs={"shuffle": True})
    weights = [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().flatten()
        for one in brain.raw_modules.parameters()
    ]
    return [*brain.norms, *torch.cat(weights).tolist()]


def by_hand(cls):
    """Return what a plain loop has on one process: the mean over all that a step counts,
    clipped.
    """
    torch.manual_seed(4)
    net = nn.Linear(3, 1).double()
    brain = type("Plain", (Regression,), {"compute_objectives": cls.compute_objectives})(
        {"net": net},
        None,
        None,
        {**QUIET, "global_batch_size": 12},
    )
    optimizer = sgd(lr=0.1)(net.parameters())
    norms = []
    data = points(44)
    loader = brain.make_dataloader(data, Stage.TRAIN, shuffle=True)
    for epoch in (1, 2):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            loss = brain.compute_objectives(net(batch[0]), batch, None)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), LARGEST)))
            optimizer.step()
    return [*norms, *torch.cat([one.detach().flatten() for one in net.parameters()]).tolist()]


@functools.cache
def expected(cls):
    return torch.tensor(by_hand(cls), dtype=torch.float64)


def assert_as_by_hand(found, cls):
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        expected(cls),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("cls", [Clips, ClipsSums, StepsByItself])
def test_it_clips_means_on_one_process(cls):
    assert_as_by_hand(train(cls, {}), cls)
    assert_as_by_hand(train(cls, {}, micro=5), cls)


@pytest.mark.corner
@pytest.mark.parametrize("options", [{}, {"strategy": "zero1"}], ids=str)
def test_it_clips_means_on_two_processes(ranks, options):
    for found in ranks.run(train, ClipsSums, options, world_size=2):
        assert_as_by_hand(found, ClipsSums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "micro"),
    [
        ({}, None),
        ({}, 1),
        ({"strategy": "zero1"}, 1),
        ({"strategy": "fsdp"}, 1),
        ({"virtual_ranks": 6}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [Clips, ClipsSums])
def test_it_clips_means_with_other_options(ranks, cls, options, micro):
    for found in ranks.run(train, cls, options, 12, micro, world_size=3):
        assert_as_by_hand(found, cls)


@pytest.mark.parametrize("cls", [Clips, ClipsSums])
def test_gradients_have_no_scale_of_fp16(cls):
    scaler = StepScaler("cpu", init_scale=1024.0, growth_interval=2)
    assert_as_by_hand(train(cls, {}, scaler=scaler), cls)
    assert scaler.get_scale() > 1024


class UnscalesAgain(Clips):
    """Unscales by itself before it clips, as torch's documentation says."""

    def optimizers_step(self):
        for one in self.optimizers_dict.values():
            self.scaler.unscale_(one)
        super().optimizers_step()


def test_a_recipe_may_unscale_by_itself():
    assert_as_by_hand(train(UnscalesAgain, {}, scaler=StepScaler("cpu", init_scale=1024.0)), Clips)


def test_two_classes_that_have_one_do_not_divide_twice():
    found = train(ClipsTwice, {})
    plain = train(ClipsSums, {})
    assert found[0] == pytest.approx(plain[0] / 2)


@pytest.mark.costly
def test_the_optimizers_that_step_may_be_chosen_in_it(ranks):
    weights = expected(ClipsSums)[-4:]
    for found in [train(OneByOne, {}), *ranks.run(train, OneByOne, {}, world_size=2)]:
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64),
            weights,
            rtol=1e-9,
            atol=1e-9,
        )
