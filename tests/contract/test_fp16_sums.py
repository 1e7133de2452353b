"""Sums and counts under the loss scaler of fp16, whose range a sum over many tokens leaves.

There is no fp16 training on a CPU; its scaler's arithmetic is, and gradients that pass through half
precision.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.brain import run_of
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Regression, assert_same, linear, points, sgd, weights

TOKENS = 1e5  # per sample, or so


class Half(Regression):
    """A mean over tokens as a sum and a count; the gradient of that sum leaves the range of half
    precision.
    """

    killed_at = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("scaler", self.scaler)

    def compute_objectives(self, predictions, batch, stage):
        if predictions.requires_grad:
            predictions.register_hook(lambda gradient: gradient.half().to(gradient.dtype))
        if self.killed_at == self.optimizer_step:
            raise KeyboardInterrupt
        tokens = (TOKENS * (1 + batch[0][:, :1].abs())).round()
        return (tokens * (predictions - batch[1]).square()).sum(), tokens.sum()


class OwnHalf(Half):
    def fit_batch(self, batch):
        outputs = self.compute_forward(batch, Stage.TRAIN)
        loss_sum, count = self.compute_objectives(outputs, batch, Stage.TRAIN)
        self.backward((loss_sum, count))
        if self.should_step:
            self.optimizers_step()
        return loss_sum.detach(), count


class Exact(Half):
    """The same without a scaler, in double precision."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def compute_objectives(self, predictions, batch, stage):
        tokens = (TOKENS * (1 + batch[0][:, :1].abs())).round()
        return (tokens * (predictions - batch[1]).square()).sum(), tokens.sum()


def train(cls, factor=1, folder=None, killed_at=None, number=96):
    net = linear()
    counter = EpochCounter(2)
    checkpointer = (
        None if folder is None else Checkpointer(folder, {"net": net, "counter": counter})
    )
    options = {**QUIET, "grad_accumulation_factor": factor, "ckpt_interval_steps": 1}
    brain = cls({"net": net}, sgd(), None, options, checkpointer)
    brain.killed_at = killed_at
    brain.fit(counter, points(number), train_loader_kwargs={"batch_size": 8, "shuffle": True})
    return brain


@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("cls", [Half, OwnHalf])
def test_sums_over_many_tokens_do_not_overflow_the_scaler(cls, factor):
    """Not one step is lost, and the weights are those of full precision, up to that of half."""
    brain = train(cls, factor)
    exact = train(Exact, factor)
    assert brain.optimizer_step == exact.optimizer_step == 2 * 12 // factor
    for name, value in weights(exact).items():
        torch.testing.assert_close(weights(brain)[name], value, rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [14, pytest.param(5, marks=pytest.mark.slow)])
def test_what_sums_are_divided_by_goes_through_a_resume(tmp_path, killed_at):
    plain = train(Half, folder=tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        train(Half, folder=tmp_path / "killed", killed_at=killed_at)
    again = train(Half, folder=tmp_path / "killed")
    assert again.optimizer_step == plain.optimizer_step
    assert len(again.trained_on) < len(plain.trained_on)
    assert run_of(again).train_step.sum_divisor == run_of(plain).train_step.sum_divisor > TOKENS
    assert_same(weights(again), weights(plain))
