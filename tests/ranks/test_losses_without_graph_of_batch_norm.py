"""Losses that depend on no parameter, where BatchNorm is synchronised: the other ranks wait in its
backward pass.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.test_losses_without_graph import Sparse, Sums, data, own, shown, whole
from tests.recipes import QUIET

# By batches of 2: rank 0's, rank 1's, that of both ranks, both micro-batches of a rank, all of a
# step of four.
WITHOUT = frozenset({1, 2, 4, 5, 8, 9, 10, 11, 13})


class Normalised(nn.Module):
    """Two layers with batch statistics between them, and one at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4).double()
        self.inner = nn.BatchNorm1d(4).double()
        self.second = nn.Linear(4, 3).double()
        self.outer = nn.BatchNorm1d(3).double()

    def hidden(self, inputs):
        return self.inner(self.first(inputs)).tanh()

    def forward(self, inputs):
        return self.outer(self.second(self.hidden(inputs)))


@dataclass
class Output:
    """What a model may return."""

    found: dict


class Nests(Normalised):
    """Returns an object of tensors."""

    def forward(self, inputs):
        return Output({"all": [super().forward(inputs)], "number": 3})


class Checkpoints(Normalised):
    """Computes a part again in the backward pass: its statistics are sent again, too."""

    def hidden(self, inputs):
        return checkpoint(super().hidden, inputs, use_reentrant=False)


class Once(Sparse):
    """Has one module, which is called once."""

    make = Normalised
    without_gradient = False

    def compute_forward(self, batch, stage):
        inputs = batch[0].clamp(max=10)
        if self.without_gradient:
            with torch.no_grad():
                self.modules.net(inputs)
        return self.predict(inputs)

    def predict(self, inputs):
        return self.modules.net(inputs)[:, :1]


class OnceOfSums(Once, Sums):
    """Likewise, with a sum and a count."""


class Twice(Once):
    """Calls its module twice in a batch."""

    def predict(self, inputs):
        return super().predict(inputs) - super().predict(inputs + inputs.square())


class Looks(Once):
    """Looks at predictions without gradients, too."""

    without_gradient = True


class OfNests(Once):
    """Its module returns an object."""

    make = Nests

    def predict(self, inputs):
        output = self.modules.net(inputs)
        return output.found.pop("all")[0][:, :1]


class OfCheckpoints(Once):
    """Its module computes a part again."""

    make = Checkpoints


class WithHead(Once):
    """Has two modules, of which one has batch statistics."""

    def predict(self, inputs):
        return self.modules.head(self.modules.net(inputs))


class BeforeFrozen(Once):
    """Its module comes before a frozen one with batch statistics, and has none itself."""

    def predict(self, inputs):
        return self.modules.frozen(self.modules.head(inputs))[:, :1]


def modules_of(cls):
    if cls is BeforeFrozen:
        torch.manual_seed(5)
        head = nn.Linear(3, 3).double()
        return {"head": head, "frozen": Normalised().requires_grad_(requires_grad=False)}
    modules = {"net": cls.make()}
    if cls is WithHead:
        modules["head"] = nn.Linear(3, 1).double()
    return modules


ADAM = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5, eps=1e-3)


def train(
    cls,
    micro_batch_size,
    options,
    *,
    is_own=None,
    per_step=4,
    without=WITHOUT,
    optimizer=ADAM,
    number=32,
):
    """Return losses and weights after two epochs; AdamW moves what has a gradient of zero."""
    torch.manual_seed(4)
    kind = cls if is_own is None else own(cls, without_sync=is_own)
    sizes = {"global_batch_size": per_step, "micro_batch_size": micro_batch_size}
    brain = kind(modules_of(cls), optimizer, None, {**QUIET, **sizes, **options})
    result = brain.fit([1, 2], data(number, without), train_loader_kwargs={"shuffle": False})
    weights = torch.cat([whole(one) for one in brain.raw_modules.parameters()]).tolist()
    return [result.train_loss, float(result.optimizer_steps), *weights]


def assert_equals_one_process(ranks, cls, options, **given):
    """On one process a batch is the joined batch of all ranks."""
    train_on = functools.partial(train, cls, **given)
    alike = {name: value for name, value in options.items() if name == "max_grad_norm"}
    expected = torch.tensor(train_on(4, alike), dtype=torch.float64)
    found = torch.tensor(ranks.run(train_on, 2, options, world_size=2), dtype=torch.float64)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


@pytest.mark.costly
def test_a_loss_without_a_graph_goes_backwards_through_batch_statistics(ranks):
    assert_equals_one_process(ranks, Once, {})


ALL_KINDS = [Once, OnceOfSums, Twice, Looks, OfNests, OfCheckpoints, WithHead, BeforeFrozen]


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALL_KINDS)
def test_whatever_the_batch_calls(ranks, cls):
    assert_equals_one_process(ranks, cls, {}, per_step=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"strategy": "zero1"},
        {"gradient_as_bucket_view": False},
        {"max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_with_other_options(ranks, options):
    assert_equals_one_process(ranks, Once, options, per_step=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "without_sync", "options"),
    [
        *((cls, without_sync, {}) for cls in (Once, WithHead) for without_sync in (False, True)),
        (OnceOfSums, True, {}),
        (Once, True, {"find_unused_parameters": True}),
    ],
    ids=shown,
)
def test_in_a_fit_batch_of_the_recipe(ranks, cls, without_sync, options):
    assert_equals_one_process(ranks, cls, options, per_step=8, is_own=without_sync)


@pytest.mark.slow
@pytest.mark.parametrize("per_step", [4, 8])
def test_with_weights_that_are_averaged(ranks, per_step):
    """Plain SGD with an average after every step; it decays weights wherever there is a
    gradient.
    """
    options = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 1, "max_grad_norm": 1e9}
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, weight_decay=0.5)
    assert_equals_one_process(ranks, Once, options, per_step=per_step, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("number", [30, 34])
@pytest.mark.parametrize("cls", [Once, OnceOfSums])
def test_where_the_last_step_has_samples_for_one_rank_only(ranks, cls, number):
    assert_equals_one_process(ranks, cls, {}, number=number)


def largest_number_kept(cls):
    """Return how many outputs are kept in a validation, and after a training."""
    kept = []

    class Watches(cls):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            [module] = self.modules.values()
            kept.append(len(module.gradient_reduction.clock.outputs.now()))
            copy.deepcopy(module.module)

    train(Watches, 2, {})
    return max(kept)


@pytest.mark.slow
def test_nothing_is_kept_after_a_pass(ranks):
    assert ranks.run(largest_number_kept, Once, world_size=2) == [0, 0]


class Skips(Once):
    """Does not call its module where a batch has no target."""

    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage) if self.has_target(batch).any() else None


class Hidden:
    """Keeps a tensor where nobody finds it."""

    def __init__(self, tensor):
        self.get = lambda: tensor


class Hides(Normalised):
    """Returns something that is not looked into."""

    def forward(self, inputs):
        return Hidden(super().forward(inputs))


class OfHides(Once):
    """Its module returns no tensor."""

    make = Hides

    def predict(self, inputs):
        return self.modules.net(inputs).get()[:, :1]


class Retains(Once):
    """Has two losses of one batch."""

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch, None)
        loss = self.compute_objectives(predictions, batch, None)
        self.backward(loss, retain_graph=True)
        self.backward(predictions.square().mean())
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("per_step", [4, 8])
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Skips, "Call the module in every batch"),
        (OfHides, "has returned has no tensor with a gradient"),
        (Retains, "another loss of the batch follows"),
    ],
)
def test_what_the_others_wait_for_must_be_known(ranks, cls, words, per_step):
    without = frozenset({1, 3})  # of rank 1 alone
    train_on = functools.partial(train, cls, per_step=per_step, without=without)
    outcomes = ranks.outcomes(train_on, 2, {}, world_size=2)
    assert words in outcomes[1].error
    assert "0.0 * outputs.sum()" in outcomes[1].error
    assert not outcomes[0].ok
