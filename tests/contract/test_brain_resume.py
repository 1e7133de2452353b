"""Checkpoints of the loop itself: where it stands, in the middle of an epoch and at its end."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    Killed,
    Mortal,
    Regression,
    SpeechBrainFitBatch,
    assert_same,
    linear,
    make,
    points,
    seen_in,
    sgd,
    weights,
)

EPOCHS = 3


class MortalOwn(SpeechBrainFitBatch, Mortal):
    """The same with an overridden fit_batch."""


def run(folder, data, *, cls=Mortal, dies_at=None, seed=7, kwargs=None, wrap=None, **run_opts):
    """Run as a script does: everything made anew, ``seed`` deciding the initial weights."""
    counter = EpochCounter(EPOCHS)
    net = linear(seed=seed)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = cls({"net": net}, sgd(momentum=0.9), None, {**QUIET, **run_opts}, checkpointer)
    brain.dies_at = dies_at
    kwargs = {"batch_size": 2, "shuffle": True} if kwargs is None else kwargs
    train = data if wrap is None else wrap(data)
    if dies_at is None:
        brain.fit(counter, train, data[:3], train_loader_kwargs=kwargs)
    else:
        with pytest.raises(Killed):
            brain.fit(counter, train, data[:3], train_loader_kwargs=kwargs)
    return brain


def assert_same_losses(found, expected):
    """The same stages and epochs, the same means to the last bit."""
    assert [entry[:3] for entry in found] == [entry[:3] for entry in expected]


INTERVALS = {"steps": {"ckpt_interval_steps": 2}, "minutes": {"ckpt_interval_minutes": 1e-9}}


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("cls", [Mortal, MortalOwn])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("dies_at", [(1, 9), (2, 2), (3, 10)])
@pytest.mark.parametrize("interval", INTERVALS)
def test_a_run_continued_in_the_middle_of_an_epoch_is_the_uninterrupted_run(
    tmp_path,
    interval,
    dies_at,
    factor,
    cls,
):
    """The same samples, once each, the same weights to the last bit, the same reported losses."""
    options = {**INTERVALS[interval], "grad_accumulation_factor": factor, "cls": cls}
    data = points(19)  # ten batches: the last window of 4 is short, and the last batch is, too
    whole = run(tmp_path / "whole", data, **options)
    killed = run(tmp_path / "killed", data, dies_at=dies_at, **options)
    resumed = run(tmp_path / "killed", data, seed=8, **options)
    assert_same(weights(resumed), weights(whole))
    assert resumed.optimizer_step == whole.optimizer_step
    assert_same_losses(resumed.losses, whole.losses[len(whole.losses) - len(resumed.losses) :])
    assert resumed.losses[0][0] == "TRAIN"
    through = seen_in(data, whole.trained_on)
    again = seen_in(data, resumed.trained_on)
    assert again == through[len(through) - len(again) :]
    redone = len(killed.trained_on) + len(again) - len(through)
    assert redone >= 0
    # later epochs of such quick steps sync once: about once a second
    if interval == "steps" or dies_at[0] == 1:
        assert redone <= 3 + factor


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("every", [2, 5, 7])
def test_checkpoints_in_the_middle_of_an_epoch_stand_at_window_ends(tmp_path, every):
    saved = []

    class Watching(Mortal):
        def _save(self, path):
            if self.progress.is_in_pass:
                saved.append((self.progress.epoch, self.step))
            super()._save(path)

    run(tmp_path, points(19), cls=Watching, ckpt_interval_steps=every, grad_accumulation_factor=4)
    assert saved
    assert all(step % 4 == 0 or step == 10 for _, step in saved)
    expected = {2: [4, 8, 10], 5: [8], 7: [8]}[every]
    assert [step for epoch, step in saved if epoch == 1] == expected


@pytest.mark.costly
def test_only_one_checkpoint_of_the_middle_is_kept_and_it_says_what_it_is(tmp_path):
    run(tmp_path, points(19), ckpt_interval_steps=2)
    [folder] = tmp_path.glob("CKPT*")
    meta = yaml.safe_load((folder / "CKPT.yaml").read_text())
    assert meta["brain_intra_epoch_ckpt"] is True
    assert meta["end-of-epoch"] is False
    state = yaml.safe_load((folder / "brain.ckpt").read_text())
    assert (state["step"], state["optimizer_step"]) == (10, 30)


def test_no_interval_no_checkpoint(tmp_path):
    run(tmp_path, points(19))
    assert not list(tmp_path.glob("CKPT*"))


@pytest.mark.costly
def test_a_checkpoint_that_a_recipe_makes_in_the_middle_of_an_epoch(tmp_path):
    """Not only the interval's own: the samples, the weights and the reported mean, the batch of the
    hook included.
    """

    class Saving(Mortal):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.step == 4:
                self.checkpointer.save_checkpoint(end_of_epoch=False)

    data = points(12)
    whole = run(tmp_path / "whole", data, cls=Saving)
    run(tmp_path / "killed", data, cls=Saving, dies_at=(2, 6))
    resumed = run(tmp_path / "killed", data, cls=Saving, seed=8)
    assert_same(weights(resumed), weights(whole))
    assert seen_in(data, resumed.trained_on) == seen_in(data, whole.trained_on)[10:]
    assert_same_losses(resumed.losses, whole.losses[2:])


@pytest.mark.costly
def test_a_checkpoint_that_a_recipe_makes_before_the_only_batch_of_an_epoch(tmp_path):
    """The batch before has the same number, in the epoch before: it is not this one, which is still
    to be done.
    """

    class Saving(Mortal):
        def on_fit_batch_start(self, batch, should_step):
            self.checkpointer.save_checkpoint(end_of_epoch=False)
            super().on_fit_batch_start(batch, should_step)

    data = points(2)
    whole = run(tmp_path / "whole", data, cls=Saving)
    run(tmp_path / "killed", data, cls=Saving, dies_at=(2, 1))
    resumed = run(tmp_path / "killed", data, cls=Saving)
    assert resumed.optimizer_step == whole.optimizer_step
    assert_same(weights(resumed), weights(whole))
    assert_same_losses(resumed.losses, whole.losses[2:])


def ready_made_loader(data):
    return DataLoader(data, batch_size=2, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "workers",
        "ready-made",
        pytest.param("ready-made with workers", marks=pytest.mark.slow),
        pytest.param("batch sampler", marks=pytest.mark.slow),
        pytest.param("whole batches", marks=pytest.mark.slow),
    ],
)
def test_loaders_of_all_kinds_are_continued_where_they_were(tmp_path, how):
    data = points(20)
    kwargs = {"batch_size": 2, "shuffle": True}
    wrap = None
    if how == "workers":
        kwargs["num_workers"] = 2
    elif how == "ready-made":
        wrap = ready_made_loader
    elif how == "ready-made with workers":
        wrap = lambda inner: DataLoader(inner, batch_size=2, shuffle=True, num_workers=2)
    elif how == "batch sampler":
        kwargs = {"batch_sampler": BatchSampler(RandomSampler(data), 2, drop_last=False)}
    else:
        kwargs = {"batch_size": None, "shuffle": True}
        wrap = lambda inner: [
            tuple(torch.stack(part) for part in zip(*inner[k : k + 2], strict=True))
            for k in range(0, len(inner), 2)
        ]
    options = {"kwargs": kwargs, "wrap": wrap, "ckpt_interval_steps": 4}
    whole = run(tmp_path / "whole", data, **options)
    run(tmp_path / "killed", data, dies_at=(2, 7), **options)
    resumed = run(tmp_path / "killed", data, seed=8, **options)
    assert seen_in(data, resumed.trained_on) == seen_in(data, whole.trained_on)[14:]
    assert_same(weights(resumed), weights(whole))


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 2])
def test_a_stream_is_continued_where_it_was(tmp_path, factor):
    options = {
        "ckpt_interval_steps": 4, "grad_accumulation_factor": factor, "wrap": Stream,
        "kwargs": {"batch_size": 2},
    }  # fmt: skip
    data = points(19)
    whole = run(tmp_path / "whole", data, **options)
    run(tmp_path / "killed", data, dies_at=(2, 7), **options)
    resumed = run(tmp_path / "killed", data, seed=8, **options)
    assert seen_in(data, resumed.trained_on) == seen_in(data, whole.trained_on)[14:]
    assert_same(weights(resumed), weights(whole))
    assert_same_losses(resumed.losses, whole.losses[2:])


def ready_made_loop(data):
    return LoopedLoader(make_dataloader(data, batch_size=2, shuffle=True), 5)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("ready_made", [False, True])
def test_a_nominal_epoch_is_continued_where_it_was(tmp_path, ready_made):
    """The nominal epochs of 5 batches are cut out of shuffled passes of 4 batches."""
    kwargs = {"batch_size": 2, "shuffle": True, "looped_nominal_epoch": 5}
    options = {
        "ckpt_interval_steps": 3,
        "kwargs": kwargs,
        "wrap": ready_made_loop if ready_made else None,
    }
    data = points(8)
    whole = run(tmp_path / "whole", data, **options)
    run(tmp_path / "killed", data, dies_at=(2, 5), **options)
    resumed = run(tmp_path / "killed", data, seed=8, **options)
    assert seen_in(data, resumed.trained_on) == seen_in(data, whole.trained_on)[8:]
    assert_same(weights(resumed), weights(whole))


def test_a_looped_loader_saved_at_the_very_end_of_an_epoch_yields_nothing_first(tmp_path):
    looped = LoopedLoader(list("abc"), 2)
    assert list(looped) == ["a", "b"]
    next_one = LoopedLoader(list("abc"), 2)
    iterator = iter(next_one)
    next(iterator), next(iterator)
    next_one.save(tmp_path / "looped")
    recovered = LoopedLoader(list("abc"), 2)
    recovered.load(tmp_path / "looped", end_of_epoch=False)
    assert list(recovered) == []
    assert list(recovered) == ["c", "a"]


# -------------------------------------------------------------- evaluate and fit after a checkpoint


def test_evaluate_after_a_checkpoint_of_the_middle(tmp_path):
    """The test loss is that of the recovered weights over the test set alone, and fit goes on from
    its own place.
    """
    data = points(10)
    test = points(7, seed=6)
    brain = run(tmp_path, data, ckpt_interval_steps=3)
    saved = brain.checkpointer.find_checkpoint()
    state = torch.load(saved.paramfiles["net"], weights_only=True)
    inputs = torch.stack([x for x, _ in test])
    targets = torch.stack([y for _, y in test])
    expected = torch.nn.functional.mse_loss(torch.nn.functional.linear(inputs, **state), targets)
    steps = brain.optimizer_step
    assert brain.evaluate(test, test_loader_kwargs={"batch_size": 2}) == pytest.approx(
        expected.item()
    )
    assert (brain.step, brain.optimizer_step) == (0, steps)
    brain.trained_on = []
    brain.fit([4], data, train_loader_kwargs={"batch_size": 2})
    assert seen_in(data, brain.trained_on) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_evaluate_in_a_process_of_its_own(tmp_path):
    data = points(10)
    run(tmp_path, data, dies_at=(2, 5), ckpt_interval_steps=3)
    brain = make(folder=tmp_path, test_only=True)
    loss = brain.evaluate(data, test_loader_kwargs={"batch_size": 10})
    inputs = torch.stack([x for x, _ in data])
    targets = torch.stack([y for _, y in data])
    assert loss == pytest.approx(
        torch.nn.functional.mse_loss(brain.modules.net(inputs), targets).item()
    )
    assert brain.step == 0


@pytest.mark.parametrize("factor", [1, 2])
def test_a_checkpoint_of_the_end_of_training_continues_with_the_next_epoch(tmp_path, factor):
    class WithoutValidation(Mortal):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            super().on_stage_end(stage, stage_loss, epoch)
            if stage is Stage.TRAIN:
                self.checkpointer.save_checkpoint(meta={"loss": stage_loss})

    data = points(10)
    options = {"cls": WithoutValidation, "grad_accumulation_factor": factor}
    whole = run(tmp_path / "whole", data, **options)
    run(tmp_path / "killed", data, dies_at=(2, 4), **options)
    resumed = run(tmp_path / "killed", data, seed=8, **options)
    assert_same_losses(resumed.losses, whole.losses[2:])
    assert seen_in(data, resumed.trained_on) == seen_in(data, whole.trained_on)[5:]
    assert_same(weights(resumed), weights(whole))
    assert resumed.optimizer_step == whole.optimizer_step


def test_evaluate_takes_the_best_checkpoint(tmp_path):
    class Saving(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                with torch.no_grad():
                    self.modules.net.bias.fill_(epoch)
                self.checkpointer.save_checkpoint(meta={"error": abs(epoch - 2), "score": epoch})

    brain = make(Saving, folder=tmp_path)
    brain.fit([1, 2, 3], points(2), points(2))
    for keys, epoch in (({"min_key": "error"}, 2), ({"max_key": "score"}, 3), ({}, 3)):
        brain.evaluate(points(2), **keys)
        assert brain.modules.net.bias.item() == epoch


def test_a_subclass_saves_and_recovers_in_its_own_way(tmp_path):
    """Plain overriding is enough (0.12), with or without calling the method of the class above."""

    class Own(Mortal):
        mine = 0

        def on_stage_start(self, stage, epoch=None):
            if stage is Stage.TRAIN:
                self.first_step = self.step

        def _save(self, path):
            super()._save(path)
            path.write_text(path.read_text() + f"mine: {self.optimizer_step * 10}\n")

        def _recover(self, path, end_of_epoch):
            super()._recover(path, end_of_epoch)
            self.mine = yaml.safe_load(path.read_text())["mine"]

    run(tmp_path, points(10), cls=Own, dies_at=(1, 5), ckpt_interval_steps=3)
    resumed = run(tmp_path, points(10), cls=Own, ckpt_interval_steps=3)
    assert resumed.mine == 30
    assert resumed.first_step == 0
    assert resumed.optimizer_step == 15


def test_a_checkpoint_of_speechbrain_without_optimizer_step_is_continued(tmp_path):
    run(tmp_path, points(10), dies_at=(1, 5), ckpt_interval_steps=3)
    [folder] = tmp_path.glob("CKPT*")
    (folder / "brain.ckpt").write_text("avg_train_loss: 0.5\nstep: 3\n")
    (folder / "CKPT.yaml").write_text(
        "# yamllint disable\nbrain_intra_epoch_ckpt: true\nend-of-epoch: false\nunixtime: "
        "1700000000.5\n"
    )
    (folder / "manifest.json").unlink()
    brain = run(tmp_path, points(10), ckpt_interval_steps=3)
    assert brain.optimizer_step == 15


class Late(Regression):
    """Makes a second optimizer when epoch ``late_at`` begins; at 0, with the first one, as it
    should.
    """

    late_at = 0

    def init_optimizers(self):
        super().init_optimizers()
        if not self.late_at:
            self.make_second()

    def make_second(self):
        self.optimizers_dict["second"] = torch.optim.Adam(self.modules.parameters(), lr=0.01)
        self.checkpointer.add_recoverable("second", self.optimizers_dict["second"])

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and self.late_at == epoch and "second" not in self.optimizers_dict:
            self.make_second()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TRAIN:
            self.checkpointer.save_and_keep_only()


def train_late(folder, epochs, late_at, fits=1, more=(), **options):
    counter = EpochCounter(epochs)
    net = linear()
    data = points(4)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter, **dict(more)})
    brain = Late({"net": net}, sgd(), None, {**QUIET, **options}, checkpointer)
    brain.late_at = late_at
    for _ in range(fits):
        brain.fit(counter, data, None, train_loader_kwargs={"batch_size": 2})
    return brain


def told(caplog):
    return [text for text in caplog.messages if "no recoverable of this name" in text]


@pytest.mark.parametrize(("late_at", "number"), [(0, 0), (2, 1)])
def test_what_comes_too_late_for_its_state_is_named_once(tmp_path, caplog, late_at, number):
    train_late(tmp_path, 2, late_at)
    assert told(caplog) == [], "nothing was recovered"
    train_late(tmp_path, 3, late_at, fits=2)
    assert len(told(caplog)) == number
    assert all("holds 'second', and no recoverable" in text for text in told(caplog))


def test_an_evaluation_needs_no_optimizer(tmp_path, caplog):
    train_late(tmp_path, 1, 0)
    net = linear()
    brain = Regression({"net": net}, None, None, QUIET, Checkpointer(tmp_path, {"net": net}))
    brain.evaluate(points(4), test_loader_kwargs={"batch_size": 2})
    assert told(caplog) == []


def test_an_average_that_is_no_longer_kept_is_named_and_a_scaler_and_a_loader_are_not(
    tmp_path,
    caplog,
):
    others = {"scaler": linear(), "dataloader-TRAIN": linear()}
    train_late(tmp_path, 1, 0, more=others, ema_decay=0.9)
    train_late(tmp_path, 2, 0)
    [text] = told(caplog)
    assert "holds 'ema', and no recoverable" in text
    assert "kept with ema_decay" in text


@pytest.mark.costly
def test_what_a_later_call_of_fit_takes_up_is_not_named(tmp_path, caplog):
    """A script that makes its second optimizer between two calls, and was stopped in the second."""

    def script(epochs, late):
        first = EpochCounter(1)
        second = EpochCounter(epochs)
        net = linear()
        data = points(4)
        checkpointer = Checkpointer(
            tmp_path,
            {"net": net, "first": first, "second_counter": second},
        )
        brain = Late({"net": net}, sgd(), None, QUIET, checkpointer)
        brain.late_at = -1
        brain.fit(first, data, None, train_loader_kwargs={"batch_size": 2})
        if late:
            brain.make_second()
        brain.fit(second, data, None, train_loader_kwargs={"batch_size": 2})

    script(1, late=True)
    script(2, late=True)
    assert told(caplog) == []
    script(3, late=False)
    assert len(told(caplog)) == 1
