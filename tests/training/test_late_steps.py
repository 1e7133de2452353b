"""Steps that the host looks at one step later: nothing else than the same optimizers do when each
is looked at first.

On a CPU, whose fused kernels skip by themselves as a GPU's do; what it takes for a GPU is changed.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpkit import optim
from ddpkit.checkpoints import Checkpointer
from ddpkit.control import PeriodicSync
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import BatchError, NonFiniteLossError
from ddpkit.optim import (
    PendingStep,
    StepCounters,
    gradients,
    make_optimizer,
    making,
    take_late_step,
    take_step,
)
from ddpkit.precision import drop_casts
from ddpkit.run import stage_runner
from tests.host_reads import HostReads
from tests.recipes import Killed, Mortal

BATCHES = 8
ADAM = torch.optim.Adam
ADAMW = torch.optim.AdamW
SGD = torch.optim.SGD
KINDS = {
    "Adam": functools.partial(ADAM, lr=0.05, amsgrad=True),
    "AdamW": functools.partial(ADAMW, lr=0.05, weight_decay=0.1),
    "SGD": functools.partial(SGD, lr=0.1, weight_decay=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
}


@pytest.fixture
def late(monkeypatch):
    """Switch late steps on and off."""

    def switch(on=True):
        for module in (optim, making):
            monkeypatch.setattr(module, "GPUS", ("cpu",) if on else ())

    return switch


class Recipe(Mortal):
    """Remembers which steps were left open, and what it was told of the run."""

    counts = looks = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.open = []
        self.seen = []
        self.ends = []
        self.rates = []

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch[1].to(self.device)).square().flatten()
        return (losses.sum(), batch[2].sum()) if self.counts else losses.mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.open.append(self.progress.pending is not None)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        if self.looks:
            self.seen.append((self.optimizer_step, self.nonfinite_count, self.progress.clipped))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.ends.append(
            (stage.name, epoch, self.optimizer_step, self.nonfinite_count, self.progress.clipped)
        )


class Sums(Recipe):
    counts = True


class Looking(Recipe):
    looks = True


def data(bad=(), counts=1.0):
    """Batches of 4 samples; those of some numbers have gradients that are not finite."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for sample in range(4 * BATCHES):
        inputs = torch.randn(3, generator=draw)
        inputs[0] = math.nan if sample // 4 in bad else inputs[0]
        found.append((inputs, torch.randn(2, generator=draw), torch.tensor(counts)))
    return found


def make(opt, kind=Recipe, folder=None, scheduler=None, **options):
    torch.manual_seed(0)
    modules = {"net": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))}
    made = kind(
        modules,
        functools.partial(opt, fused=True),
        run_opts={"device": "cpu", "noprogressbar": True, "nonfinite_patience": 9, **options},
        checkpointer=None if folder is None else Checkpointer(folder, modules),
    )
    made.scheduler_class = scheduler
    return made


def bits(value):
    """Return tensors as bytes, with what holds them."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


def told(brain):
    """All that a training ends with."""
    progress = brain.progress
    return bits(
        {
            "weights": brain.raw_modules.state_dict(),
            "optimizer": brain.optimizer.state_dict(),
            "ema": None if brain.ema is None else brain.ema.state_dict(),
            "counters": [progress.optimizer_step, progress.nonfinite, progress.clipped],
            "hooks": [brain.seen, brain.ends, brain.rates],
        }
    )


def fit(opt, samples=None, epochs=2, **given):
    brain = make(opt, **given)
    words = {"train_loader_kwargs": {"batch_size": 4}}
    brain.fit(range(1, epochs + 1), data((1, 5)) if samples is None else samples, **words)
    return brain


def both(late, *args, **given):
    """Train in both ways; return both Brains."""
    found = []
    for on in (False, True):
        late(on)
        found.append(fit(*args, **given))
    at_once, later = found
    assert told(later) == told(at_once)
    assert not any(at_once.open)
    return at_once, later


# ------------------------------------------------------------------------------------ the same runs


@pytest.mark.corner
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_grad_norm", [0, 0.3, 0.7, 1e6])
def test_the_same_bits_and_counts(late, kind, max_grad_norm):
    _, later = both(late, KINDS[kind], max_grad_norm=max_grad_norm)
    has_state = kind != "SGD"
    assert later.open == [not has_state, *[True] * (2 * BATCHES - 1)], (
        "the first step makes the state"
    )
    assert later.ends[-1][:4] == ("TRAIN", 2, 2 * BATCHES - 4, 2)
    assert (later.ends[-1][4] > 0) == (0 < max_grad_norm < 1e6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_step_that_is_skipped_leaves_nothing_behind(late, kind):
    _, later = both(late, KINDS[kind], data([0, 1]), epochs=1)
    assert later.ends == [("TRAIN", 1, BATCHES - 2, 2, later.progress.clipped)]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("max_grad_norm", [0, 0.3, 1e6])
def test_sums_and_counts(late, kind, max_grad_norm):
    for factor in (1, 2, 3):
        _, later = both(
            late,
            KINDS[kind],
            data([1, 5], 3.0),
            kind=Sums,
            grad_accumulation_factor=factor,
            max_grad_norm=max_grad_norm,
        )
        assert any(later.open)


@pytest.mark.parametrize(
    "options",
    [
        {"grad_accumulation_factor": 2},
        {"grad_accumulation_factor": 3},
        # collects garbage among thousands of tests
        pytest.param({"gc_interval": 2}, marks=pytest.mark.costly),
        {"kind": Looking},
        {"optimizer_step_limit": 5},
        {"ema_decay": 0.9},
        {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR},
        {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_every": "epoch"},
        {"precision": "bf16"},
        {"skip_nonfinite_grads": True},
        {"lr_scaling": "linear", "reference_batch_size": 2},
        {"remove_vector_weight_decay": True},
    ],
    ids=str,
)
def test_with_what_follows_a_step(late, options):
    _, later = both(late, KINDS["AdamW"], **options)
    at_once = {"ema_decay", "skip_nonfinite_grads", "lr_scaling"} & options.keys()
    follows = "scheduler" in options and "scheduler_every" not in options
    assert any(later.open) is not (bool(at_once) or follows)


def test_a_step_that_a_limit_ends_is_looked_at_before_the_next_batch(late):
    _, later = both(late, KINDS["Adam"], optimizer_step_limit=3)
    assert (len(later.open), later.optimizer_step) == (4, 3), "one was skipped"


class Unsynced(PeriodicSync):
    """Comes never: when the ranks sync is a matter of time."""

    def start(self, step):
        super().start(step)
        self.due = sys.maxsize


def test_a_step_is_looked_at_when_the_next_is_made(late, monkeypatch):
    late()
    monkeypatch.setattr(stage_runner, "PeriodicSync", Unsynced)
    brain = make(KINDS["AdamW"])
    looked = []
    real = StepCounters.resolve_pending

    def resolve_pending(counters):
        looked.append((brain.step, counters.pending is not None))
        real(counters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCounters, "resolve_pending", resolve_pending)
        brain.fit([1], data(), train_loader_kwargs={"batch_size": 4})
    assert [step for step, is_open in looked if is_open] == [*range(3, BATCHES + 1), BATCHES], (
        "and at the end"
    )


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bad", [(2,), (1, 5), (BATCHES - 1,), (0,)], ids=str)
def test_giving_up_names_the_step_and_leaves_the_same(late, caplog, bad):
    found = []
    for on in (False, True):
        late(on)
        caplog.clear()
        brain = make(KINDS["AdamW"], nonfinite_patience=len(bad) - 1)
        with pytest.raises(NonFiniteLossError) as caught:
            brain.fit([1, 2], data(bad), train_loader_kwargs={"batch_size": 4})
        warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert f"the last in epoch 1, batch {bad[-1] + 1}, after" in str(caught.value)
        found.append(
            (
                str(caught.value),
                [one for one in warned if "step skipped" in one],
                brain.optimizer_step,
            )
        )
    assert found[0] == found[1]


def test_a_negative_count_is_an_error_one_step_later(late, monkeypatch):
    late()
    monkeypatch.setattr(stage_runner, "PeriodicSync", Unsynced)
    brain = make(KINDS["SGD"], kind=Sums)
    with pytest.raises(BatchError, match="counts that add up to less than 0"):
        brain.fit([1], data(counts=-1.0), train_loader_kwargs={"batch_size": 4})
    assert brain.step == 2


def test_no_count_at_all_is_told(late, caplog):
    both(late, KINDS["SGD"], data(counts=0.0), kind=Sums)
    assert "was 0 over all batches of an optimizer step" in caplog.text


def test_reading_a_counter_raises_nothing(late, monkeypatch):
    """One rank may look alone: all end in the next step."""
    late()
    monkeypatch.setattr(stage_runner, "PeriodicSync", Unsynced)
    brain = make(KINDS["SGD"], kind=Looking, nonfinite_patience=0)
    with pytest.raises(NonFiniteLossError, match="batch 2, after optimizer step 1"):
        brain.fit([1], data([1]), train_loader_kwargs={"batch_size": 4})
    assert brain.seen == [(1, 0, brain.progress.clipped), (1, 1, brain.progress.clipped)]
    assert brain.step == 3


def test_the_next_fit_begins_without_the_error_of_one_that_was_interrupted(late):
    late()
    brain = make(KINDS["SGD"], nonfinite_patience=0)
    brain.dies_at = (1, 3)
    with pytest.raises(Killed):
        brain.fit([1], data([1]), train_loader_kwargs={"batch_size": 4})
    brain.dies_at = None
    brain.fit([1], data(), train_loader_kwargs={"batch_size": 4})
    assert brain.optimizer_step == 1 + BATCHES


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize(
    "dies_at",
    [(1, 3), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 4), (2, 2), (2, 7)))],
    ids=str,
)
@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(late, tmp_path, kind, dies_at):
    def run(folder, dies_at=None):
        brain = make(KINDS[kind], folder=folder, ckpt_interval_steps=1)
        counter = EpochCounter(2)
        brain.checkpointer.add_recoverable("counter", counter)
        brain.dies_at = dies_at
        brain.fit(counter, data((1, 5)), train_loader_kwargs={"batch_size": 4})
        return told(brain)["weights"], told(brain)["optimizer"], told(brain)["counters"]

    late(on=False)
    whole = run(tmp_path / "whole")
    late()
    with pytest.raises(Killed):
        run(tmp_path / "cut", dies_at)
    assert run(tmp_path / "cut") == whole
    late(on=False)
    with pytest.raises(Killed):
        run(tmp_path / "back", dies_at)
    late()
    assert run(tmp_path / "back") == whole


@pytest.mark.costly
def test_a_run_goes_on_with_its_own_kernel(late, tmp_path, caplog):
    """From a GPU to a CPU and back: which kernel steps is not the checkpoint's, and no changed
    setting.
    """

    def run(epochs):
        torch.manual_seed(0)
        modules = {"net": nn.Linear(3, 2)}
        counter = EpochCounter(epochs)
        checkpointer = Checkpointer(tmp_path, {**modules, "counter": counter})
        options = {"device": "cpu", "noprogressbar": True, "ckpt_interval_steps": 1}
        brain = Recipe(modules, ADAMW, run_opts=options, checkpointer=checkpointer)
        brain.fit(counter, data(), train_loader_kwargs={"batch_size": 4})
        steps = {one["step"].item() for one in brain.optimizer.state.values()}
        return brain.optimizer.param_groups[0]["fused"], any(brain.open), steps

    assert run(1) == (None, False, {BATCHES})
    late()
    assert run(2) == (True, True, {2 * BATCHES})
    late(on=False)
    assert run(3) == (None, False, {3 * BATCHES})
    assert "goes on with the checkpoint's" not in caplog.text
    assert "fused" not in caplog.text


class Saving(Recipe):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        super().on_fit_batch_end(batch, outputs, loss, should_step)
        if self.step == 3:
            self.saved = self.checkpointer.save_checkpoint(end_of_epoch=False)


def test_a_checkpoint_that_a_recipe_saves_counts_the_step_just_made(late, tmp_path):
    late()
    brain = make(KINDS["SGD"], Saving, tmp_path)
    brain.fit([1], data(bad=(1,)), train_loader_kwargs={"batch_size": 4})
    assert brain.open[2], "the save is made before the host has read the norm"
    lines = (brain.saved.path / "brain.ckpt").read_text().splitlines()
    assert {"step: 3", "optimizer_step: 2", "nonfinite: 1"} <= {*lines}


# ----------------------------------------------------------------------------------- one step alone


def parameters(dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    made = [
        nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((3,), (2, 4), ())
    ]
    for one in made:
        one.grad = torch.randn(one.shape, generator=draw).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "multiplier",
    [1.0, 0.37, torch.tensor(0.37), torch.tensor(0.37, dtype=torch.float64)],
)
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.4, 0.9999, 1.0, 1.0001, 2.0, 1e30, math.inf])
def test_a_step_is_that_of_take_step_bit_for_bit(dtype, multiplier, max_norm):
    size = torch.stack([one.grad.norm() for one in parameters(dtype)]).norm().item() * float(
        multiplier
    )
    limit = None if max_norm is None else max_norm * size
    now = parameters(dtype)
    later = parameters(dtype)
    expected = take_step([SGD(now, lr=0.1, fused=True)], limit, None, multiplier)
    with HostReads() as reads:
        step = take_late_step([SGD(later, lr=0.1, fused=True)], limit, multiplier)
    assert not reads.count
    assert step.result() == expected
    assert bits(later) == bits(now)
    assert gradients([SGD(later)]) == []


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_two_optimizers_with_a_parameter_in_common_step_together(max_norm):
    found = []
    for take in (
        lambda those: take_step(those, max_norm),
        lambda those: take_late_step(those, max_norm).result(),
    ):
        mine = parameters()
        optimizers = [SGD(mine[:2], lr=0.1, fused=True), SGD(mine[1:], lr=0.2, fused=True)]
        torch.optim.lr_scheduler.StepLR(optimizers[0], 1)  # which wraps its step
        found.append((take(optimizers), bits(mine)))
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    mine = parameters()
    adam = ADAM(mine, fused=True)
    adam.step()
    before = bits([mine, adam.state_dict()])
    mine[1].grad[0, 0] = bad
    step = take_late_step([adam], 1.0)
    assert not step.result().stepped
    assert bits([mine, adam.state_dict()]) == before
    assert not {"found_inf", "grad_scale"} & vars(adam).keys()


class Own(ADAM):
    pass


def with_hook(those):
    sgd = SGD(those, fused=True)
    sgd.register_step_post_hook(lambda *_: None)
    return sgd


def wrapped(those):
    sgd = SGD(those, fused=True)
    sgd.step = functools.partial(sgd.step)
    return sgd


def wrapped_over_a_schedulers(those):
    sgd = SGD(those, fused=True)
    torch.optim.lr_scheduler.StepLR(sgd, 10)
    step = sgd.step
    sgd.step = functools.wraps(step)(lambda: step())  # noqa: PLW0108 -- another function
    return sgd


def wrapped_under_a_schedulers(those):
    sgd = SGD(those, fused=True)
    sgd.step = types.MethodType(lambda self: SGD.step(self), sgd)  # noqa: PLW0108 -- likewise
    torch.optim.lr_scheduler.StepLR(sgd, 10)
    return sgd


def mixed(those):
    those[0] = nn.Parameter(those[0].double())
    those[0].grad = torch.ones(3, dtype=torch.float64)
    return SGD(those, fused=True)


@pytest.mark.parametrize(
    "kind",
    [
        SGD,
        torch.optim.RMSprop,
        with_hook,
        wrapped,
        wrapped_over_a_schedulers,
        wrapped_under_a_schedulers,
        mixed,
        functools.partial(Own, fused=True),
        functools.partial(ADAM, fused=True),
        functools.partial(SGD, momentum=0.9, fused=True),
    ],
)
def test_what_cannot_step_late_is_left_as_it_is(kind):
    mine = parameters()
    optimizer = kind(mine)
    before = bits([mine, [one.grad for one in mine]])
    assert take_late_step([SGD(parameters(), fused=True), optimizer], 1.0) is None
    assert bits([mine, [one.grad for one in mine]]) == before


def test_nothing_steps_late_without_gradients():
    assert take_late_step([], 1.0) is None
    assert take_late_step([SGD([nn.Parameter(torch.ones(1))], fused=True)], 1.0) is None


def test_half_precision_does_not_step_late():
    assert take_late_step([SGD(parameters(torch.bfloat16), fused=True)], 1.0) is None


def test_nothing_steps_late_while_all_steps_are_watched():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert take_late_step([SGD(parameters(), fused=True)], 1.0) is None
    finally:
        handle.remove()
    assert take_late_step([SGD(parameters(), fused=True)], 1.0) is not None


def test_under_torchs_scheduler_alone_it_steps_late():
    sgd = SGD(parameters(), fused=True)
    torch.optim.lr_scheduler.StepLR(sgd, 10)
    assert take_late_step([sgd], 1.0) is not None


def test_opt_class_gets_what_steps_late(late):
    late()
    net = nn.Linear(1, 1)
    optimizer = make_optimizer(ADAM, net)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()  # makes the state
    assert take_late_step([optimizer], 1.0).result().stepped


def pending(callback, norm=1.0):
    step = PendingStep(torch.tensor(norm), None)
    step.then(callback)
    return step


def test_who_looks_from_another_thread_and_who_makes_the_next_step_count_once():
    counters = StepCounters()
    has_begun = threading.Event()
    may_end = threading.Event()

    def count(result):
        has_begun.set()
        may_end.wait(10)
        counters.optimizer_step += result.stepped

    counters.pending = pending(count)
    other = threading.Thread(target=counters.resolve_pending)
    other.start()
    assert has_begun.wait(10)
    assert counters.pending is not None, "the training would make the next step"
    threading.Timer(0.05, may_end.set).start()
    counters.resolve_at_sync()
    other.join()
    assert counters.optimizer_step == 1


def test_what_follows_a_step_may_ask_whether_it_was_made():
    """As a handler of logged warnings may, which reads the counters of its Brain."""
    counters = StepCounters()

    def count(result):
        counters.resolve_pending()
        assert counters.pending is not None, "it is not counted yet"
        counters.nonfinite += not result.stepped

    counters.pending = pending(count, math.nan)
    counters.resolve_at_sync()
    assert (counters.nonfinite, counters.pending) == (1, None)


def test_an_error_of_the_device_is_raised_at_once_and_leaves_nothing_pending():
    counters = StepCounters()

    def fail(result):
        raise RuntimeError("CUDA error")

    counters.pending = pending(fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        counters.resolve_pending()
    assert counters.pending is counters.pending_error is None


def test_a_copy_has_all_counters():
    counters = StepCounters()

    def count(result):
        counters.optimizer_step += 1

    for number, copied in enumerate((copy.copy, copy.deepcopy), 1):
        counters.pending = pending(count)
        other = copied(counters)
        assert (other.optimizer_step, other.pending) == (number, None)


class Writing(Recipe):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        super().on_fit_batch_end(batch, outputs, loss, should_step)
        if self.step == 4:
            self.optimizer_step = 100
            self.nonfinite_count = 0


def test_what_a_recipe_writes_into_a_counter_stays(late):
    late()
    brain = make(KINDS["SGD"], Writing)
    brain.fit([1], data(bad=(2,)), train_loader_kwargs={"batch_size": 4})
    assert any(brain.open)
    assert (brain.optimizer_step, brain.nonfinite_count) == (100 + BATCHES - 4, 0)


class Stepping(Recipe):
    """Makes a step in a hook outside of the pass, and another in a loop of its own."""

    def on_stage_start(self, stage, epoch=None):
        if stage.name == "TRAIN":
            self.step_by_itself()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage.name == "TRAIN":
            self.step_by_itself()

    def step_by_itself(self):
        self.modules.net(torch.ones(1, 3)).sum().backward()
        self.optimizers_step()


def test_steps_that_hooks_make_are_counted(late, monkeypatch):
    told = []
    monkeypatch.setattr(
        stage_runner,
        "run_event",
        lambda _, **fields: told.append(fields["optimizer_step"]),
    )
    late()
    brain = make(KINDS["SGD"], Stepping)
    result = brain.fit([1, 2], data(), train_loader_kwargs={"batch_size": 4})
    of_epoch = BATCHES + 2
    assert told == [of_epoch - 1, 2 * of_epoch - 1]
    assert result.optimizer_steps == 2 * of_epoch


def test_names_of_earlier_versions_are_still_there():
    assert optim.LateStep is optim.PendingStep
    assert optim.own_gradients is optim.clone_gradients


def test_a_hook_that_only_drops_casts_does_not_wait_for_the_norm():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    optimizer.register_step_post_hook(drop_casts)
    weight.sum().backward()
    assert take_late_step([optimizer], None) is not None
    optimizer.register_step_post_hook(lambda *_: None)
    weight.sum().backward()
    assert take_late_step([optimizer], None) is None
