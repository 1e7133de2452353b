"""``--lr_scaling`` as a recipe meets it: defaults, own optimizers, schedules, resuming."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.sampler import DynamicBatchSampler
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, assert_same, linear, make, points, sgd, weights

LINEAR = {"lr_scaling": "linear", "reference_batch_size": 2}


class Tracing(Regression):
    """Notes the learning rates that each step is made with; dies where it is told to."""

    dies_at = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = []
        self.notes = False

    def note(self, optimizer, *_):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_stage_start(self, stage, epoch=None):
        if not self.notes:
            for one in self.optimizers_dict.values():
                one.register_step_pre_hook(self.note)
        self.notes = True

    def on_fit_batch_start(self, batch, should_step):
        if self.dies_at == len(self.rates):
            raise Killed


class Scheduled(Tracing):
    """Makes a schedule with its optimizer, and steps it after each step."""

    def init_optimizers(self):
        super().init_optimizers()
        self.scheduler = CosineAnnealingLR(self.optimizer, 12, eta_min=0.01)
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("scheduler", self.scheduler)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.scheduler.step()


class Several(Tracing):
    """Two optimizers of its own, one of them with two groups and a schedule."""

    def init_optimizers(self):
        net = self.modules.net
        groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.02}]
        self.first = torch.optim.SGD(groups, lr=0.1)
        self.second = torch.optim.Adam(self.modules.other.parameters(), lr=1.0)
        self.optimizers_dict = {"first": self.first, "second": self.second}
        self.annealing = ExponentialLR(self.first, 0.5)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.annealing.step()


class OldStyle(Scheduled):
    """Writes out what on_fit_start does, as many recipes do."""

    def on_fit_start(self):
        self._compile()
        self._wrap_distributed()
        self.init_optimizers()
        if self.checkpointer is not None:
            self.checkpointer.recover_if_possible()


class Late(Tracing):
    """Makes its schedule when the training has begun."""

    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if not hasattr(self, "scheduler"):
            self.scheduler = ExponentialLR(self.optimizer, 0.9)

    on_fit_batch_end = Scheduled.on_fit_batch_end


def train(
    cls=Tracing,
    number=12,
    *,
    batch_size=4,
    epochs=(1, 2),
    hparams=None,
    net=None,
    **run_opts,
):
    brain = make(cls, hparams=hparams, net=net, **run_opts)
    brain.fit(epochs, points(number), train_loader_kwargs={"batch_size": batch_size})
    return brain


# ----------------------------------------------------------------------------------- what is scaled


@pytest.mark.parametrize("where", ["run_opts", "hparams"])
@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_the_rates_follow_the_batch_of_an_optimizer_step(where, rule, factor, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    options = {"lr_scaling": rule, "reference_batch_size": 2, "grad_accumulation_factor": 2}
    brain = train(hparams=options) if where == "hparams" else train(**options)
    assert brain.rates == [[pytest.approx(0.1 * factor)]] * 4
    assert brain.lr_scale == factor
    lines = [line for line in caplog.messages if line.startswith("Learning rates")]
    reason = (
        f"lr_scaling={rule}, 8 samples per step (1 process, accumulation 2), "
        f"reference_batch_size=2: x {factor:g}"
    )
    assert lines == (
        []
        if rule == "none"
        else [(f"Learning rates ({reason}): opt_class 0.1 -> {0.1 * factor:g}.")]
    )


def test_the_global_batch_is_the_one_that_counts():
    brain = train(global_batch_size=6, micro_batch_size=2, **LINEAR)
    assert brain.lr_scale == 3.0
    assert brain.rates == [[pytest.approx(0.3)]] * 4


def test_several_optimizers_and_groups_of_a_recipe():
    brain = make(Several, **LINEAR)
    brain.modules["other"] = linear(seed=3)
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 4})
    assert brain.rates == [[0.2, 0.04], [2.0], [0.1, 0.02], [2.0]]


@pytest.mark.parametrize("cls", [Scheduled, OldStyle, Late])
def test_the_schedule_is_the_unscaled_one_times_the_factor(cls):
    expected = train(cls).rates
    found = train(cls, **LINEAR).rates
    assert len({rates[0] for rates in expected}) == len(expected) == 6
    assert found == [[pytest.approx(2.0 * rate) for rate in rates] for rates in expected]


def test_a_recipes_own_schedule_knows_no_scale():
    """NewBob and its like hold rates of their own and set them at the end of an epoch."""

    class Annealed(Tracing):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + epoch)

    assert train(Annealed, **LINEAR).rates == [[0.2]] * 3 + [[0.1]] * 3
    assert make(Annealed, **LINEAR).lr_scale == 1.0, "not known before fit"


def test_a_second_fit_with_another_batch_size():
    brain = make(Scheduled, **LINEAR)
    brain.fit([1], points(8), train_loader_kwargs={"batch_size": 4})
    assert brain.lr_scale == 2.0
    brain.fit([2], points(8), train_loader_kwargs={"batch_size": 8})
    assert brain.lr_scale == 4.0
    expected = train(Scheduled, 12, epochs=(1,)).rates
    assert brain.rates[2] == [pytest.approx(4.0 * expected[2][0])]


def test_a_second_fit_without_the_rule_has_the_recipes_rates():
    brain = train(Tracing, 4, epochs=(1,), **LINEAR)
    brain.run_opts["lr_scaling"] = "none"
    brain.fit([2], points(4), train_loader_kwargs={"batch_size": 4})
    assert brain.rates == [[0.2], [0.1]]
    assert brain.lr_scale == 1.0


def test_another_brain_without_the_rule_steps_a_shared_optimizer_with_its_own_rates():
    first = train(Tracing, 4, epochs=(1,), **LINEAR)
    second = make(Tracing, net=first.modules.net, opt=lambda _: first.optimizer)
    second.fit([1], points(4), train_loader_kwargs={"batch_size": 4})
    assert (first.rates[0], second.rates) == ([0.2], [[0.1]])
    first.fit([2], points(4), train_loader_kwargs={"batch_size": 4})
    assert second.rates == [[0.1], [0.2]]


def test_optimizers_that_a_recipe_changes_between_epochs_are_scaled_too():
    class Changes(Tracing):
        def on_stage_start(self, stage, epoch=None):
            pass

        def on_fit_batch_start(self, batch, should_step):
            super().on_stage_start(Stage.TRAIN)  # its hook comes after that of the scaling

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.optimizers_dict = {"mine": torch.optim.SGD(self.modules.parameters(), lr=0.3)}
            self.notes = False

    assert train(Changes, 4, **LINEAR).rates == [[0.2], [0.6]]


# ----------------------------------------------------------------------------------------- refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(8))


REFUSED = {
    "no reference": (
        {"batch_size": 4},
        points(8),
        {"lr_scaling": "linear"},
        ("needs reference_batch_size"),
    ),
    "batch sampler": (
        {"batch_sampler": DynamicBatchSampler(range(8), 20.0, 2, lengths_list=[2.0] * 8)},
        points(8),
        LINEAR,
        "needs a step of known size",
    ),
    "stream of batches": ({"batch_size": None}, Stream(), LINEAR, "needs a step of known size"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_scaled_is_refused_before_anything_starts(kind):
    kwargs, data, run_opts, match = REFUSED[kind]
    made = []

    def run():
        made.append(make(Tracing, **run_opts))
        made[0].fit([1], data, train_loader_kwargs=kwargs)

    with pytest.raises(ConfigError, match=match):
        run()
    assert all(brain.optimizers_dict is None and brain.trained_on == [] for brain in made)


def test_a_stream_with_a_batch_size_is_scaled():
    brain = make(Tracing, **LINEAR)
    brain.fit([1], Stream(), train_loader_kwargs={"batch_size": 4})
    assert brain.rates == [[0.2]] * 2


# ----------------------------------------------------------------------------------------- resuming


def run(folder, *, cls=Scheduled, dies_at=None, batch_size=4, seed=7, run_opts=LINEAR):
    counter = EpochCounter(3)
    net = linear(seed=seed)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 1, **run_opts}
    brain = cls({"net": net}, sgd(momentum=0.9), None, options, checkpointer)
    brain.dies_at = dies_at
    kwargs = {"batch_size": batch_size, "shuffle": True}
    if dies_at is None:
        brain.fit(counter, points(16), train_loader_kwargs=kwargs)
    else:
        with pytest.raises(Killed):
            brain.fit(counter, points(16), train_loader_kwargs=kwargs)
    return brain


@pytest.mark.costly
@pytest.mark.parametrize(
    "cls",
    [Scheduled, *(pytest.param(one, marks=pytest.mark.slow) for one in (OldStyle, Tracing))],
)
def test_a_resumed_run_does_not_scale_twice(tmp_path, cls):
    whole = run(tmp_path / "whole", cls=cls)
    killed = run(tmp_path / "killed", cls=cls, dies_at=6)
    resumed = run(tmp_path / "killed", cls=cls, seed=8)
    assert killed.rates + resumed.rates == whole.rates
    assert_same(weights(resumed), weights(whole))


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls", [Scheduled, OldStyle])
@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        ({"batch_size": 4}, {"batch_size": 8}, 4.0),
        ({"batch_size": 4}, {"run_opts": {}}, 1.0),
        ({"run_opts": {}}, {"batch_size": 4}, 2.0),
    ],
)
def test_a_run_resumed_with_another_batch_goes_on_at_its_scale(
    tmp_path,
    cls,
    before,
    after,
    factor,
):
    """On other processes, say: the rates are those without scaling times the new factor."""
    unscaled = run(tmp_path / "unscaled", cls=cls, run_opts={}).rates
    run(tmp_path / "killed", cls=cls, dies_at=4, **before)
    resumed = run(tmp_path / "killed", cls=cls, seed=8, **after)
    assert resumed.rates == [
        [pytest.approx(factor * rates[0])] for rates in unscaled[4 : 4 + len(resumed.rates)]
    ]
