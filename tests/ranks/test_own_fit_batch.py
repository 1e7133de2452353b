"""A recipe's own ``fit_batch``, as docs/how-to/own-fit-batch.md shows it, on one process and on
several.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset

import ddpkit as sb
from ddpkit.brain import run_of
from ddpkit.distributed import control_group
from ddpkit.types import Stage
from tests.contract.test_fp16_sums import Half
from tests.rank_pool import RankPoolError
from tests.recipes import (
    QUIET,
    BackwardByHand,
    OptimizerOfEachEntry,
    Regression,
    linear,
    make,
    points,
    sgd,
    weights,
    world_size,
)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-fit-batch.md"
SHOWN = {}
for block in re.findall(
    r"^```python\n(.*?)^```",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
):
    exec(block, SHOWN)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


class Tokens(SHOWN["TokenLoss"], Regression):
    """The first input of a sample says how much it counts; some count nothing."""

    def compute_objectives(self, predictions, batch, stage):
        tokens = (10 * batch[0][:, :1].abs()).floor()
        return (tokens * (predictions - batch[1]).square()).sum(), tokens.sum()


class OneLoss(SHOWN["OneLoss"], Regression):
    """The page's first example."""


class TwoLosses(SHOWN["TwoLosses"], Regression):
    """The page's example with two losses."""


class Gan(SHOWN["Gan"]):
    """The page's example with two optimizers."""


RECIPES = {cls.__name__: cls for cls in (OneLoss, TwoLosses, Tokens, Gan)}


def modules_of(name, *, normalised=False):
    torch.manual_seed(3)
    if name == "Gan":
        discriminator = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        return {"generator": nn.Linear(3, 1).double(), "discriminator": discriminator}
    norm = [nn.BatchNorm1d(4)] if normalised else []
    return {"net": nn.Sequential(nn.Linear(3, 4), *norm, nn.Tanh(), nn.Linear(4, 1)).double()}


class Stream(IterableDataset):
    def __init__(self, number):
        self.data = points(number)

    def __iter__(self):
        return iter(self.data)


def train(name, number, joined, factor, streams=False, normalised=False):
    """Train two epochs; ``joined`` samples are a micro-batch of all ranks."""
    options = {**QUIET, "grad_accumulation_factor": factor, "max_grad_norm": 1e6}
    brain = RECIPES[name](
        modules_of(name, normalised=normalised),
        sgd(lr=0.05, momentum=0.9),
        None,
        options,
    )
    kwargs = {"batch_size": joined // world_size()}
    losses = []
    brain.on_stage_end = lambda stage, loss, epoch=None: losses.append(loss)
    brain.fit([1, 2], Stream(number) if streams else points(number), train_loader_kwargs=kwargs)
    return weights(brain), brain.optimizer_step, losses


# 4 and 4, then 4 and 1, of which rank 1 has none. 4, 4, 4, and then 1 alone in a short window. 11:
# the last is 2 and 1.
SIZES = [(13, 2), (13, 3), (11, 3), (5, 1)]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("number", "factor"), SIZES)
@pytest.mark.parametrize("name", ["OneLoss", "TwoLosses", "Tokens", "Gan"])
def test_a_documented_fit_batch_gives_the_same_answer_on_any_number_of_processes(
    ranks,
    name,
    number,
    factor,
):
    expected, steps, losses = train(name, number, 4, factor)
    for found, steps_there, losses_there in ranks.run(train, name, number, 4, factor):
        assert_close(found, expected)
        assert steps_there == steps == 2 * math.ceil(math.ceil(number / 4) / factor)
        assert losses_there == pytest.approx(losses, abs=1e-10)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("name", ["OneLoss", "Tokens"])
def test_a_repeated_batch_is_in_no_batch_statistics(ranks, name, factor):
    """6, 6 and then 2: the third rank repeats a batch."""
    expected, _, losses = train(name, 14, 6, factor, normalised=True)
    for found, _, losses_there in ranks.run(train, name, 14, 6, factor, False, True, world_size=3):
        assert_close(found, expected)
        assert losses_there == pytest.approx(losses, abs=1e-10)


@pytest.mark.parametrize(("number", "factor"), [(24, 2), (16, 3), (13, 2)])
@pytest.mark.parametrize("name", ["OneLoss", "TwoLosses", "Tokens"])
def test_accumulated_micro_batches_are_one_batch(name, number, factor):
    """On one process: a window of micro-batches, the last one shorter, is one batch of all its
    samples.
    """
    accumulated, steps, _ = train(name, number, 4, factor)
    joined, steps_there, _ = train(name, number, 4 * factor, 1)
    assert steps == steps_there
    assert_close(accumulated, joined)


@pytest.mark.parametrize(("number", "factor"), [(16, 3), (14, 2)])
@pytest.mark.parametrize("name", ["OneLoss", "TwoLosses", "Tokens", "Gan"])
def test_a_documented_fit_batch_on_a_stream(name, number, factor):
    """The weights of a stream's window are only known when it closes; the step corrects them, or
    both steps.
    """
    streamed, steps, _ = train(name, number, 4, factor, streams=True)
    mapped, steps_there, _ = train(name, number, 4, factor)
    assert steps == steps_there
    assert_close(streamed, mapped)


class Surgery(Regression):
    """Keeps the gradients of a first loss while a second one is back-propagated."""

    def fit_batch(self, batch):
        parameters = list(self.modules.parameters())
        kept = []
        for sign in (1, -1):
            self.zero_grad(set_to_none=True)
            loss = (self.modules.net(batch[0]) - sign * batch[1]).square().mean()
            self.backward(loss)
            kept.append([one.grad for one in parameters])
        for one, first, second in zip(parameters, *kept, strict=True):
            one.grad = 3 * first - second
        self.optimizers_step()
        return loss.detach()


class Momentum(Regression):
    """Adds half of the step's gradients before, which it has kept."""

    kept = None

    def check_gradients(self):
        kept = self.kept
        parameters = list(self.modules.parameters())
        self.kept = [one.grad for one in parameters]
        for one, before in zip(parameters, kept or (), strict=bool(kept)):
            one.grad = one.grad + before / 2


class Difference(torch.optim.SGD):
    """Keeps the last gradient, as some optimizers do."""

    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"]:
            one.sub_(0.1 * (2 * one.grad - self.state[one].get("last", one.grad)))
            self.state[one]["last"] = one.grad


def kept_gradients(cls, optimizer):
    brain = make(
        cls,
        opt=lambda parameters: optimizer(parameters, lr=0.1),
        skip_nonfinite_grads=cls is Momentum,
    )
    brain.fit([1], points(24), train_loader_kwargs={"batch_size": 6 // world_size()})
    return weights(brain)


KEEPING = [(Surgery, torch.optim.SGD), (Momentum, torch.optim.SGD), (Regression, Difference)]


@pytest.mark.corner
@pytest.mark.parametrize(("cls", "optimizer"), KEEPING)
def test_a_gradient_that_is_kept_is_not_overwritten(ranks, cls, optimizer):
    """DDP's own buckets are, by the next backward pass."""
    expected = kept_gradients(cls, optimizer)
    for found in ranks.run(kept_gradients, cls, optimizer):
        assert_close(found, expected)


class Default(Regression):
    """The same arithmetic through the default fit_batch."""


RECIPES["Default"] = Default


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
def test_the_default_does_what_the_documented_one_does(ranks, world):
    for found, one in zip(
        ranks.run(train, "Default", 27, 6, 2, world_size=world),
        ranks.run(train, "OneLoss", 27, 6, 2, world_size=world),
        strict=True,
    ):
        assert_close(found[0], one[0])


# ------------------------------------------------------------------------------------ what it costs


def count_all_reduces(name, factor):
    control = []
    real = dist.all_to_all_single

    def counted(*args, **kwargs):
        if kwargs.get("group") is control_group():
            control.append(1)
        return real(*args, **kwargs)

    modules = modules_of("Gan") if name == "Gan" else {"net": linear()}
    brain = RECIPES[name](
        modules,
        sgd(),
        None,
        {**QUIET, "grad_accumulation_factor": factor, "measure_steps": "off"},
    )
    data = points(48)
    kwargs = {"batch_size": 2}
    brain.fit([1], data, train_loader_kwargs=kwargs)
    before = brain.optimizer_step
    dist.all_to_all_single = counted
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            brain._fit_train(brain.make_dataloader(data, Stage.TRAIN, **kwargs), 2, enable=False)
    finally:
        dist.all_to_all_single = real
    found = Counter(
        {
            event.key: event.count
            for event in profiler.key_averages()
            if event.key.startswith("c10d::")
        }
    )
    return found, len(control), brain.optimizer_step - before


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 3, 5])
@pytest.mark.parametrize(
    ("name", "messages"),
    [("OneLoss", 1), ("TwoLosses", 2), ("Tokens", 2), ("Gan", 2)],
)
def test_a_documented_fit_batch_communicates_where_a_window_closes(ranks, name, messages, factor):
    """One message of gradients per step; one more for a second backward pass or step, and one for a
    count.
    """
    for found, control, steps in ranks.run(count_all_reduces, name, factor):
        assert steps == math.ceil(12 / factor)
        assert found == {"c10d::alltoall_base_": steps * messages + control}


# ---------------------------------------------------------------------------- mixed and odd recipes


class Direct(OneLoss):
    """Steps its optimizer itself, clipping before."""

    def optimizers_step(self):
        nn.utils.clip_grad_norm_(self.modules.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_step += 1


class Both(OptimizerOfEachEntry):
    """One loss back-propagated by hand and stepped in every batch, the other in windows."""

    def freeze_optimizers(self, optimizers):
        return {"net": optimizers["net"]}

    def fit_batch(self, batch):
        side = nn.functional.mse_loss(self.modules.side(batch[0]), batch[1])
        side.backward()
        self.optimizers_dict["side"].step()
        self.optimizers_dict["side"].zero_grad()
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


class ByModulo(Regression):
    """The new backward with the old should_step."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.step % self.grad_accumulation_factor == 0:
            self.optimizers_step()
        return loss.detach()


class Scaled(Regression):
    """As the docs told it before: the window's scale, and the step's number."""

    def fit_batch(self, batch):
        should_step = self.step % self.grad_accumulation_factor == 0
        with self.no_sync(not should_step):
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN),
                batch,
                Stage.TRAIN,
            )
            (loss * self.progress.window.scale).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach()


RECIPES |= {cls.__name__: cls for cls in (Direct, Both, ByModulo, Scaled)}


def train_odd(name, number, joined, factor, streams=False):
    modules = {"net": linear(), "side": linear(seed=9)} if name == "Both" else {"net": linear()}
    brain = RECIPES[name](
        modules,
        sgd(),
        None,
        {**QUIET, "grad_accumulation_factor": factor, "max_grad_norm": 0},
    )
    data = Stream(number) if streams else points(number)
    brain.fit([1, 2], data, train_loader_kwargs={"batch_size": joined // world_size()})
    return weights(brain)


@pytest.mark.corner
@pytest.mark.parametrize(("number", "factor"), [(20, 2), (24, 4), (20, 1)])
@pytest.mark.parametrize("name", ["Direct", "Both", "ByModulo", "Scaled"])
def test_old_and_new_ways_may_be_mixed(ranks, name, number, factor):
    expected = train_odd(name, number, 4, factor)
    for found in ranks.run(train_odd, name, number, 4, factor):
        assert_close(found, expected)


class PastDDP(Regression):
    """Computes through hparams, past DDP, and steps its optimizer itself."""

    def fit_batch(self, batch):
        loss = (self.hparams.net(batch[0]) - batch[1]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class ThroughDDP(BackwardByHand, Direct):
    """Computes through modules, and steps its optimizer itself."""


def warned_of(cls):
    """Train two epochs; return what was warned of."""
    net = linear()
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger("ddpkit").addHandler(handler)
    try:
        brain = cls({"net": net, "other": linear(seed=9)}, sgd(), {"net": net}, QUIET)
        brain.fit([1, 2], points(8), train_loader_kwargs={"batch_size": 2})
    finally:
        logging.getLogger("ddpkit").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_weights_that_part_are_told_of_once(ranks):
    (not_counted, told), silent = ranks.run(warned_of, PastDDP)
    assert not_counted.startswith("No optimizer step of PastDDP was counted in its first epoch")
    assert silent == []
    assert told.startswith(
        "PastDDP.fit_batch steps with gradients that are not averaged over the ranks"
    )
    assert "the weights of modules['net'] are not the same on all of them" in told
    assert "Call self.optimizers_step()" in told
    assert warned_of(PastDDP) == [not_counted]  # one process has nobody to part from


def test_weights_that_keep_together_are_not_told_of(ranks):
    assert ranks.run(warned_of, ThroughDDP) == [[], []]


@pytest.mark.corner
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("number", "factor"), [(10, 4), (13, 2), (18, 3)])
@pytest.mark.parametrize("name", ["Scaled", "ByModulo", "OneLoss"])
def test_a_short_last_window_is_corrected_once(name, number, factor, streams):
    expected = train_odd("Default", number, 4, factor, streams=streams)
    assert_close(train_odd(name, number, 4, factor, streams=streams), expected)


class Parts(Regression):
    """Two losses that share the first layer, and have a second each."""

    under_no_sync = False

    def fit_batch(self, batch):
        with self.no_sync(use=self.under_no_sync):
            one, other = self.modules.net(batch[0])
            self.backward((one - batch[1]).square().mean(), retain_graph=True)
            self.backward((other + batch[1]).square().mean())
        if self.should_step:
            self.optimizers_step()
        return one.detach().mean()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.one, self.other = (
            nn.Linear(*sizes).double() for sizes in ((3, 4), (4, 1), (4, 1))
        )

    def forward(self, rows):
        rows = self.trunk(rows).tanh()
        return self.one(rows), self.other(rows)


def train_parts(kind, factor):
    brain = make(Parts, net=TwoHeads(), grad_accumulation_factor=factor)
    brain.under_no_sync = kind == "under no_sync"
    brain.fit([1, 2], points(13), train_loader_kwargs={"batch_size": 4 // world_size()})
    return weights(brain)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2])
def test_losses_of_parts_of_a_module_are_averaged_by_the_step(ranks, factor):
    expected = train_parts("under no_sync", factor)
    assert_close(train_parts("bare", factor), expected)
    for found in ranks.run(train_parts, "under no_sync", factor):
        assert_close(found, expected)
    with pytest.raises(RankPoolError) as caught:
        ranks.run(train_parts, "bare", factor, timeout=100)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == "BatchError"
        assert "with self.no_sync():" in outcome.error


class Explodes(OneLoss):
    """The loss of a batch that is only repeated is infinite, and so is its derivative."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss if self.progress.window.count else loss - (0.0 * predictions).sqrt().log().sum()


class ExplodesByDefault(Explodes):
    fit_batch = sb.Brain.fit_batch


RECIPES |= {cls.__name__: cls for cls in (Explodes, ExplodesByDefault)}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("name", ["Explodes", "ExplodesByDefault"])
def test_a_repeated_batch_whose_loss_is_infinite_spoils_no_gradient(ranks, name):
    expected, steps, _ = train("Default", 13, 4, 2)
    for found, steps_there, _ in ranks.run(train, name, 13, 4, 2):
        assert steps_there == steps
        assert_close(found, expected)


def train_half(joined):
    torch.manual_seed(3)
    brain = Half({"net": linear()}, sgd(), None, {**QUIET, "grad_accumulation_factor": 2})
    brain.fit([1, 2], points(45), train_loader_kwargs={"batch_size": joined // world_size()})
    return weights(brain), brain.optimizer_step, run_of(brain).train_step.sum_divisor


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_divide_sums_by_the_same_power_of_two(ranks, world):
    """Their counts differ, and gradients that are averaged must have been divided by one number."""
    expected, steps, divisor = train_half(6)
    results = ranks.run(train_half, 6, world_size=world)
    assert len({result[2] for result in results}) == 1
    assert divisor / 8 < results[0][2] <= divisor
    for found, steps_there, _ in results:
        assert steps_there == steps == 2 * 4
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_two_steps_of_a_window_have_one_loss_scale(factor):
    """The gradients that the second one accumulates must not be scaled in two ways; here the scale
    always grows.
    """
    results = []
    for options in ({"enabled": False}, {"init_scale": 1024.0, "growth_interval": 1}):
        brain = Gan(
            modules_of("Gan"),
            sgd(momentum=0.9),
            None,
            {**QUIET, "grad_accumulation_factor": factor},
        )
        brain.scaler = torch.amp.GradScaler("cpu", **options)
        brain.fit([1, 2], points(13), train_loader_kwargs={"batch_size": 2})
        results.append(weights(brain))
    assert brain.scaler.get_scale() > 1024.0
    assert_close(results[1], results[0])
