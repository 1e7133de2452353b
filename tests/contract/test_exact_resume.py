"""Law 2 in one process: what is random, or remembers where it is, goes on as if nothing had
happened.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Mortal, assert_same, points, sgd, weights

from .test_brain_resume import assert_same_losses

EPOCHS = 3


class Noisy(Mortal):
    """Draws from every stream: in the model, in a batch's hook, at the start of an epoch, and at
    its end.
    """

    saves = True

    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if stage is Stage.TRAIN:
            self.mask = torch.rand(4, dtype=torch.float64)

    def compute_forward(self, batch, stage):
        drawn = random.random() + np.random.rand()  # noqa: NPY002 -- as recipes do
        shift = drawn if stage is Stage.TRAIN else torch.rand(()).item()
        return super().compute_forward([self.hidden(batch[0]) * self.mask + shift, batch[1]], stage)

    def hidden(self, inputs):
        return nn.functional.dropout(nn.functional.pad(inputs, (0, 1)), 0.5, self.modules.training)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        torch.rand(3)
        if stage is Stage.VALID and self.saves:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})
        torch.rand(7), random.random()


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.3),
        nn.Linear(4, 1),
    ).double()


def run(folder, train, *, dies_at=None, seed=11, valid=None, kwargs=None, cls=Noisy, **options):
    counter = EpochCounter(EPOCHS)
    model = net(7)
    checkpointer = Checkpointer(folder, {"net": model, "counter": counter})
    torch.manual_seed(seed)  # the run's seed: the same command
    brain = cls(
        {"net": model},
        sgd(lr=0.01, momentum=0.9),
        None,
        {**QUIET, **options},
        checkpointer,
    )
    brain.dies_at = dies_at
    kwargs = {"batch_size": 2} if kwargs is None else kwargs
    arguments = {"train_loader_kwargs": kwargs, "valid_loader_kwargs": {"batch_size": 2}}
    if dies_at is None:
        brain.fit(counter, train, valid, **arguments)
    else:
        with pytest.raises(Killed):
            brain.fit(counter, train, valid, **arguments)
    return brain


def assert_exact(folder, make, dies_at, **options):
    whole = run(folder / "whole", make(), valid=points(6), **options)
    run(folder / "killed", make(), valid=points(6), dies_at=dies_at, **options)
    resumed = run(folder / "killed", make(), valid=points(6), **options)
    assert_same(weights(resumed), weights(whole))
    assert_same_losses(resumed.losses, whole.losses[len(whole.losses) - len(resumed.losses) :])
    again = resumed.trained_on
    assert all(
        torch.equal(one, other)
        for one, other in zip(again, whole.trained_on[-len(again) :], strict=True)
    )
    return resumed


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("dies_at", [(1, 2), (1, 9), (2, 1), (2, 2), (3, 10)])
def test_a_resume_with_dropout_and_every_other_stream_is_exact(tmp_path, dies_at, factor):
    options = {"ckpt_interval_steps": 2, "grad_accumulation_factor": factor}
    assert_exact(
        tmp_path,
        lambda: points(20),
        dies_at,
        kwargs={"batch_size": 2, "shuffle": True},
        **options,
    )


@pytest.mark.costly
def test_a_resume_at_the_end_of_an_epoch_is_exact(tmp_path):
    """Without checkpoints inside epochs: what is drawn after the save makes no difference."""
    assert_exact(tmp_path, lambda: points(20), (3, 4))


class MovesWeights(Noisy):
    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if stage is Stage.TRAIN and not self.step:
            with torch.no_grad():
                self.modules.net[0].bias.add_(torch.rand(4, dtype=torch.float64))


@pytest.mark.costly
@pytest.mark.parametrize(
    "dies_at",
    [
        (2, 3),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 1), (2, 1), (2, 10), (3, 4))),
    ],
)
def test_weights_that_are_moved_as_an_epoch_begins_are_moved_once(tmp_path, dies_at):
    assert_exact(tmp_path, lambda: points(20), dies_at, cls=MovesWeights, ckpt_interval_steps=2)


@pytest.mark.costly
def test_a_seed_of_torch_or_of_everything_decides(tmp_path, monkeypatch):
    first = run(tmp_path / "a", points(10))
    second = run(tmp_path / "b", points(10))
    assert_same(weights(first), weights(second))
    assert first.losses == second.losses
    other = run(tmp_path / "c", points(10), seed=12)
    assert other.losses[0] != first.losses[0], "other masks, in the first epoch already"
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "12")
    everything = run(tmp_path / "d", points(10))
    again = run(tmp_path / "e", points(10), seed=13)
    assert everything.losses == again.losses, "the seed of everything comes before torch's"
    assert everything.losses[0] != first.losses[0]


class Remembering(IterableDataset):
    """Goes on from epoch to epoch, as a stream of a crawler would; its state is its place and its
    own noise.
    """

    def __init__(self, number=20, wraps=True):
        self.data = points(64)
        self.number = number
        self.place = 0
        self.left = number
        self.wraps = wraps
        self.read = 0

    def __iter__(self):
        if self.left == 0:
            self.left = self.number
        while self.left:
            item = self.data[self.place % len(self.data)]
            self.place = self.place + 1
            self.left = self.left - 1
            self.read += 1
            yield item[0] + torch.rand((), dtype=torch.float64), item[1]

    def state_dict(self):
        return {"place": self.place, "left": self.left}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.left = state["left"]


class Sharded(Remembering):
    """The same, but dividing itself."""

    is_sharded = True


class Batches:
    """A loader of one's own that can say where it is."""

    def __init__(self):
        self.stream = Remembering()

    def __iter__(self):
        batch = []
        for item in self.stream:
            batch.append(item)
            if len(batch) == 2 or not self.stream.left:
                yield [torch.stack(column) for column in zip(*batch, strict=True)]
                batch = []

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("factor", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dies_at", [(1, 4), (1, 9), (2, 1), (2, 4), (3, 10)])
@pytest.mark.parametrize("make", [Remembering, Sharded])
def test_a_stream_with_a_state_goes_on_without_reading_again(tmp_path, make, dies_at, factor):
    options = {"ckpt_interval_steps": 2, "grad_accumulation_factor": factor}
    made = []
    resumed = assert_exact(tmp_path, lambda: made.append(make()) or made[-1], dies_at, **options)
    # one batch, to know what follows
    assert made[-1].read - sum(len(batch) for batch in resumed.trained_on) in {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies_at",
    [(2, 4), *(pytest.param(one, marks=pytest.mark.slow) for one in [(1, 4), (2, 1), (3, 10)])],
)
def test_a_loader_with_a_state_goes_on_without_reading_again(tmp_path, dies_at):
    made = []
    resumed = assert_exact(
        tmp_path,
        lambda: made.append(Batches()) or made[-1],
        dies_at,
        kwargs={},
        ckpt_interval_steps=2,
    )
    assert made[-1].stream.read - sum(len(batch) for batch in resumed.trained_on) in {0, 2}


class Gaussian(Noisy):
    """Draws one normal number of every kind per batch; Python, numpy and torch make them in pairs
    and store one.
    """

    def compute_forward(self, batch, stage):
        drawn = np.random.randn() + random.gauss(0, 1)  # noqa: NPY002 -- as recipes do
        return super().compute_forward(
            [batch[0] + drawn + torch.randn(1, dtype=torch.float64), batch[1]],
            stage,
        )


class GaussianStream(Remembering):
    """The same in the data."""

    def __iter__(self):
        for inputs, target in super().__iter__():
            yield inputs + np.random.randn() + random.gauss(0, 1), target  # noqa: NPY002 -- as recipes do


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: points(8), lambda: GaussianStream(8)],
    ids=["map", "stream"],
)
def test_the_second_normal_number_of_a_pair_goes_through_a_resume(tmp_path, make):
    """The checkpoint is made after three batches, so that the fourth draws what is in store."""
    assert_exact(tmp_path, make, (2, 4), cls=Gaussian, ckpt_interval_steps=1)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dies_at", [(1, 4), (2, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("kind", ["state", "stream", "plan", "loader"])
def test_nominal_epochs_of_every_kind(tmp_path, kind, dies_at, saves):
    class Loopy(Noisy):
        pass

    Loopy.saves = saves

    class Plain(IterableDataset):
        def __iter__(self):
            for item in points(11):
                yield item[0] + torch.rand((), dtype=torch.float64), item[1]

    def make():
        if kind == "plan":
            return LoopedLoader(make_dataloader(points(11), batch_size=3, shuffle=True), 4)
        if kind == "loader":
            return LoopedLoader(Batches(), 4)
        stream = Remembering(11) if kind == "state" else Plain()
        return LoopedLoader(make_dataloader(stream, batch_size=3), 4)

    assert_exact(tmp_path, make, dies_at, cls=Loopy, ckpt_interval_steps=2)


@pytest.mark.slow
def test_batches_that_are_moved_ahead_change_no_number_and_no_position(tmp_path):
    """A batch that was fetched, and not trained on, is not done: saved and resumed in the middle of
    an epoch.
    """
    options = {"ckpt_interval_steps": 2, "valid": points(6)}
    usual = run(
        tmp_path / "usual",
        points(14),
        kwargs={"batch_size": 2, "shuffle": True},
        **options,
    )
    options |= {
        "kwargs": {"batch_size": 2, "shuffle": True, "num_workers": 1},
        "prefetch_to_device": True,
    }
    run(tmp_path / "killed", points(14), dies_at=(1, 5), **options)
    (place,) = (tmp_path / "killed").glob("CKPT*/dataloader-TRAIN.ckpt")
    assert place.read_text(encoding="utf-8") == "4"
    resumed = run(tmp_path / "killed", points(14), **options)
    assert_same(weights(resumed), weights(usual))
    assert_same_losses(resumed.losses, usual.losses)
    assert [one.tolist() for one in resumed.trained_on] == [
        one.tolist() for one in usual.trained_on[4:]
    ]
