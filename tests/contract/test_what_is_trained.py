"""A model, or a part of it, that is not trained: told by name after the first step, or an error
where nothing is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ddpkit.errors import ConfigError
from ddpkit.types import Stage
from tests.recipes import BackwardByHand, Regression, SeveralOptimizers, linear, make, points

KWARGS = {"batch_size": 4}


def train(brain, epochs=1):
    return brain.fit(range(1, epochs + 1), points(8), train_loader_kwargs=KWARGS)


def own_batch(cls):
    """Give a recipe a ``fit_batch`` of its own."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()

    return type(f"Own{cls.__name__}", (cls,), {"fit_batch": fit_batch})


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if "first_gradients" in one.name]


class OnBackbone(Regression):
    """Computes with a module of its own, and with ``modules.net``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backbone = linear(seed=3)

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) + self.backbone(batch[0])


class OnHparams(Regression):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) + self.hparams.heads[1](batch[0])


class OnClosure(Regression):
    """Nobody finds a name for its parameter."""

    hidden = staticmethod(linear(width=1, seed=3).forward)

    def compute_forward(self, batch, stage):
        return self.hidden(self.modules.net(batch[0]))


@pytest.mark.parametrize("wrap", [lambda cls: cls, own_batch], ids=["library's", "own fit_batch"])
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (OnBackbone, "depends on self.backbone (2 parameter(s)), in no entry of modules"),
        (OnHparams, "depends on hparams.heads[1] (2 parameter(s)), in no entry of modules"),
        (OnClosure, "a parameter of shape (1,)"),
    ],
)
def test_a_module_that_is_in_no_entry_of_modules_is_named_once(recipe, words, wrap, caplog):
    train(make(wrap(recipe), hparams={"heads": [linear(seed=1), linear(seed=2)]}), epochs=2)
    (told,) = warnings_of(caplog)
    assert words in told
    assert "Put the module into `modules`; or freeze it with requires_grad_(False)" in told


class HalfStepped(Regression):
    def init_optimizers(self):
        self.optimizer = torch.optim.SGD([self.modules.net.weight], lr=0.1)


class CopyOfOne(Regression):
    """One optimizer is right, and the other one is made from a copy."""

    def init_optimizers(self):
        steps = [self.modules.net, copy.deepcopy(self.modules.head)]
        found = {
            f"opt{k}": torch.optim.SGD(one.parameters(), lr=0.1) for k, one in enumerate(steps)
        }
        self.optimizers_dict = found

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0]) + self.modules.head(batch[0])


def test_a_parameter_that_no_optimizer_has_is_named_once(caplog):
    train(make(HalfStepped), epochs=2)
    (told,) = warnings_of(caplog)
    assert "that no optimizer has: net.bias." in told
    assert "copy" not in told


def test_an_optimizer_of_a_copy_is_named_beside_another(caplog):
    brain = CopyOfOne(
        {"net": linear(), "head": linear(seed=1)},
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    train(brain)
    (told,) = warnings_of(caplog)
    assert "that no optimizer has: head.weight, head.bias" in told
    assert "The optimizer 'opt1' has 2 parameter(s) without a gradient" in told


class OfACopy(Regression):
    def init_optimizers(self):
        self.optimizer = torch.optim.SGD(copy.deepcopy(self.modules).parameters(), lr=0.1)


class AllOutside(OnBackbone):
    def compute_forward(self, batch, stage):
        return self.backbone(batch[0])


class StepsUnseen(BackwardByHand, OfACopy):
    """Has a backward pass of its own, too."""


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            OfACopy,
            (
                r"depends on net.weight, net.bias of `modules`, and none of that is in the "
                r"optimizer: optimizer. 2 of"
            ),
        ),
        (own_batch(OfACopy), r"depends on net.weight, net.bias of `modules`"),
        (
            AllOutside,
            (
                r"depends on self.backbone \(2 parameter\(s\)\), and none of that is in the "
                r"optimizer: opt_class"
            ),
        ),
        (StepsUnseen, r"In the whole first epoch no parameter of the optimizer got a gradient"),
    ],
)
def test_a_training_that_moves_nothing_is_an_error(recipe, words):
    with pytest.raises(ConfigError, match=f"nothing is trained. .*{words}"):
        train(make(recipe))


class StepsByHand(OnBackbone):
    """Makes its backward pass and its step without the library."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_step += 1
        return loss.detach()


class StepsACopyByHand(StepsByHand):
    init_optimizers = OfACopy.init_optimizers


def test_steps_of_the_recipe_itself_are_seen_too(caplog):
    train(make(StepsByHand), epochs=2)
    (told,) = warnings_of(caplog)
    assert "depends on self.backbone (2 parameter(s)), in no entry of modules" in told
    with pytest.raises(
        ConfigError,
        match="In the whole first epoch no parameter of the optimizer got a gradient",
    ):
        train(make(StepsACopyByHand))


class Frozen(OnBackbone):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backbone.requires_grad_(False)


class WithoutGradients(OnBackbone):
    def compute_forward(self, batch, stage):
        with torch.no_grad():
            features = self.backbone(batch[0])
        return self.modules.net(batch[0]) + features


class SteppedByHand(OnBackbone):
    """The optimizer of its backbone is its own, and so is its step."""

    def on_fit_start(self):
        super().on_fit_start()
        self.by_hand = [torch.optim.SGD(self.backbone.parameters(), lr=0.1)]
        self.others = {"backbone": torch.optim.SGD(self.backbone.parameters(), lr=0.1)}


class HeldByTheOptimizer(OnBackbone):
    def init_optimizers(self):
        both = [*self.modules.parameters(), *self.backbone.parameters()]
        self.optimizer = torch.optim.SGD(both, lr=0.1)


class InputNeedsGradient(Regression):
    def compute_forward(self, batch, stage):
        self.inputs = batch[0].requires_grad_(stage is Stage.TRAIN)
        return self.modules.net(self.inputs)


class Recomputed(Regression):
    def compute_forward(self, batch, stage):
        return checkpoint(self.modules.net, batch[0].requires_grad_(), use_reentrant=True)


class Alternates(SeveralOptimizers):
    """Two optimizers, each of a part of the model, step in turn."""

    def freeze_optimizers(self, optimizers):
        name = ("weight", "bias")[self.optimizer_step % 2]
        return {name: optimizers[name]}


class LateTruth(Regression):
    """The first batch has nothing that a loss could be computed of."""

    def compute_objectives(self, predictions, batch, stage):
        found = super().compute_objectives(predictions, batch, stage)
        return found if self.step > 1 else found * 0.0


@pytest.mark.parametrize(
    "recipe",
    [
        Regression,
        Frozen,
        WithoutGradients,
        SteppedByHand,
        HeldByTheOptimizer,
        InputNeedsGradient,
        Recomputed,
        Alternates,
        LateTruth,
    ],
)
def test_what_is_as_it_should_be_is_not_told(recipe, caplog):
    train(make(recipe))
    assert warnings_of(caplog) == []


@pytest.mark.slow
def test_a_compiled_model_is_not_told(caplog):
    train(make(compile=True))
    assert warnings_of(caplog) == []
