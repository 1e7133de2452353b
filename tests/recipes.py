"""The zoo: recipes that tests share, written as a user of a Brain writes them, and their data.

Most are a ``Regression`` with one thing changed, and call ``super()``: so they go together, as in
``class Mine(Mortal, SavesAfterValidation)``. What a test is about stands in the test, as a subclass
that shows the twist alone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.types import Stage

QUIET = {"device": "cpu", "noprogressbar": True}


class Killed(RuntimeError):
    """Stands for the end of the process."""


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Value:
    """The smallest thing that can be saved: a number with a state_dict."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def points(number, *, width=3, seed=5):
    """Return ``number`` pairs (input, target) in float64, different from each other."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, width, generator=generator, dtype=torch.float64)
    targets = torch.randn(number, 1, generator=generator, dtype=torch.float64)
    return list(zip(inputs, targets, strict=True))


def linear(*, width=3, seed=7):
    torch.manual_seed(seed)
    return nn.Linear(width, 1).double()


def sgd(lr=0.1, **options):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


class Regression(Brain):
    """Mean squared error; remembers the inputs it was trained on, and what on_stage_end was
    told.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained_on = []
        self.losses = []

    def compute_forward(self, batch, stage):
        if stage.name == "TRAIN":
            self.trained_on.append(batch[0].clone())
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append((stage.name, epoch, stage_loss))


# -------------------------------------------------------------------------- other models and losses


class Squares(Brain):
    """The mean of the squared outputs; a batch is the inputs alone."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


class Classifier(Regression):
    """Cross entropy; the second of a batch are the classes."""

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


class Sums(Regression):
    """Returns the sum of the squared errors, and the number of samples."""

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().sum(), len(batch[1])


class FrontAndNet(Regression):
    """Its net stands behind another entry of ``modules``, the front."""

    def compute_forward(self, batch, stage):
        return self.modules.net(self.modules.front(batch[0]))


class Poisoned(Regression):
    """The loss of the training batches ``bad_steps`` is not finite, on ``bad_rank`` or on all."""

    bad_steps = ()
    bad_rank = None

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        is_bad = (
            stage is Stage.TRAIN
            and self.step in self.bad_steps
            and self.bad_rank in {None, self.rank}
        )
        return loss * float("nan") if is_bad else loss


# --------------------------------------------------------------------------- a fit_batch of its own


class OwnFitBatch(Regression):
    """Has a fit_batch of its own, as the documentation shows it."""

    def fit_batch(self, batch):
        with self.training_ctx:
            outputs = self.compute_forward(batch, Stage.TRAIN)
            loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


class SpeechBrainFitBatch(Regression):
    """fit_batch as SpeechBrain's own, word for word."""

    def fit_batch(self, batch):
        should_step = self.step % self.grad_accumulation_factor == 0
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            scaled_loss = self.scaler.scale(loss / self.grad_accumulation_factor)
            self.check_loss_isfinite(scaled_loss)
            scaled_loss.backward()
        if should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return loss.detach().cpu()


class BackwardByHand(Regression):
    """Calls ``loss.backward()`` itself, and steps with ``optimizers_step``."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizers_step()
        return loss.detach()


class SeveralOptimizers(Regression):
    """Has an optimizer for each of those ``optimized``: the weight and the bias of its net."""

    def optimized(self):
        net = self.modules.net
        return {"weight": [net.weight], "bias": [net.bias]}

    def init_optimizers(self):
        self.optimizers_dict = {
            name: torch.optim.SGD(parameters, lr=0.1)
            for name, parameters in self.optimized().items()
        }
        if self.checkpointer is not None:
            for name, optimizer in self.optimizers_dict.items():
                self.checkpointer.add_recoverable(f"{name}_optimizer", optimizer)


class OptimizerOfEachEntry(SeveralOptimizers):
    """Has an optimizer for each entry of ``modules``."""

    def optimized(self):
        return {name: module.parameters() for name, module in self.modules.items()}


class Gan(Brain):
    """Two updates per batch with direct steps, as vocoder recipes do; see ``gan_modules``."""

    def init_optimizers(self):
        self.optimizer_g = torch.optim.Adam(self.modules.generator.parameters(), lr=0.01)
        self.optimizer_d = torch.optim.Adam(self.modules.discriminator.parameters(), lr=0.02)
        self.optimizers_dict = {"g": self.optimizer_g, "d": self.optimizer_d}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer_g", self.optimizer_g)
            self.checkpointer.add_recoverable("optimizer_d", self.optimizer_d)

    def compute_forward(self, batch, stage):
        return self.modules.generator(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return {"g": self.modules.discriminator(predictions).mean(), "d": predictions.sum()}

    def fit_batch(self, batch):
        fake = self.compute_forward(batch, Stage.TRAIN)
        real = self.modules.discriminator(batch[1])
        faked = self.modules.discriminator(fake.detach())
        loss_d = ((real - 1) ** 2).mean() + (faked**2).mean()
        self.optimizer_d.zero_grad()
        loss_d.backward()
        self.optimizer_d.step()
        loss_g = ((self.modules.discriminator(fake) - 1) ** 2).mean() + (
            fake - batch[1]
        ).abs().mean()
        self.optimizer_g.zero_grad()
        loss_g.backward()
        self.optimizer_g.step()
        self.optimizer_step += 1
        return loss_g.detach().cpu()

    def evaluate_batch(self, batch, stage):
        return (
            self.compute_objectives(self.compute_forward(batch, stage), batch, stage)["g"]
            .detach()
            .cpu()
        )


def gan_modules():
    torch.manual_seed(3)
    discriminator = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return {"generator": nn.Linear(3, 1).double(), "discriminator": discriminator}


# ------------------------------------------------------------------------- saves, ends, evaluations


class SavesAfterTraining(Regression):
    """Saves when the training of an epoch ends."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.TRAIN:
            self.checkpointer.save_checkpoint()


class SavesAfterValidation(Regression):
    """Saves with the loss as its metric when a validation ends, and keeps what ``keeping`` says."""

    keeping: ClassVar = {}

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID and self.checkpointer is not None:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, **self.keeping)


class Mortal(Regression):
    """Dies before it trains on batch ``dies_at``: (epoch, step), or a number of optimizer steps."""

    dies_at = None

    def on_fit_batch_start(self, batch, should_step):
        super().on_fit_batch_start(batch, should_step)
        counts_steps = isinstance(self.dies_at, int)
        here = self.optimizer_step if counts_steps else (self.progress.epoch, self.step)
        if self.dies_at == here:
            raise Killed


class Failing(Regression):
    """Raises an error in the forward pass of batch ``fails_at``."""

    fails_at = None

    def compute_forward(self, batch, stage):
        if self.step == self.fails_at:
            raise RuntimeError("planted")
        return super().compute_forward(batch, stage)


class EvaluatesAsItIs(Regression):
    """An evaluation takes the weights as they are, so that it may stand inside of fit."""

    def on_evaluate_start(self, max_key=None, min_key=None):
        """Recover nothing."""


# ------------------------------------------------------------------------------- making and looking


def make(
    cls=Regression,
    *,
    net=None,
    opt=None,
    hparams=None,
    folder=None,
    recoverables=(),
    **run_opts,
):
    """Make a Brain around one linear layer; with ``folder``, checkpoints hold the layer and
    ``recoverables``.
    """
    net = linear() if net is None else net
    checkpointer = None
    if folder is not None:
        checkpointer = Checkpointer(folder, {"net": net, **dict(recoverables)})
    return cls({"net": net}, opt or sgd(), hparams, {**QUIET, **run_opts}, checkpointer)


def weights(brain):
    """Return copies of all parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in brain.raw_modules.state_dict().items()}


def assert_same(found, expected):
    """The same names and the same bits."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), (
            f"{name}: {found[name]} != {expected[name]}"
        )


def seen_in(data, trained_on):
    """Return, for each batch, the positions in ``data`` of its samples."""
    return [
        [next(k for k, (known, _) in enumerate(data) if torch.equal(row, known)) for row in inputs]
        for inputs in trained_on
    ]
