"""Law 2 on several ranks: bit-identical on as many, the same samples and steps on another
number.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.distributed import gather_objects, get_rank, if_main_process
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError, RankFailedError, RankMismatchError
from ddpkit.run import rank_state
from ddpkit.run.rank_state import RankStates
from ddpkit.types import Stage
from tests.recipes import Killed

QUIET = {"device": "cpu", "noprogressbar": True, "shard_evaluation": True}


class Learner(Brain):
    noisy = True
    one_sided = False
    inside = ""

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.inside and self.step == 3 and (self.inside == "all" or if_main_process()):
            began = time.monotonic()
            self.checkpointer.save_checkpoint(end_of_epoch=False)
            self.waited.append(time.monotonic() - began)

    def compute_forward(self, batch, stage):
        numbers, inputs, _ = batch
        if stage is Stage.TRAIN:
            if (self.epoch, self.step) == self.dies_at:
                raise Killed
            if self.progress.window.count:  # what is repeated to keep step counts nothing
                self.seen.append((self.epoch, self.optimizer_step, numbers.tolist()))
            if self.noisy:
                inputs = inputs + random.random() + np.random.rand() + torch.rand_like(inputs)  # noqa: NPY002 -- as recipes do
        return self.modules.net(inputs)

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[2])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append((stage.name, epoch, stage_loss))
        if stage is Stage.VALID and (if_main_process() or not self.one_sided):
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def numbered(number):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    return [(index, row, row.sum(0, keepdim=True)) for index, row in enumerate(inputs)]


class Stream(IterableDataset):
    """Its state is its place, which it keeps from epoch to epoch."""

    def __init__(self, number):
        self.data = numbered(64)
        self.place = 0
        self.left = number
        self.number = number

    def __iter__(self):
        self.left = self.left or self.number
        while self.left:
            self.left -= 1
            self.place += 1
            yield self.data[self.place % 64]

    def state_dict(self):
        return {"place": self.place, "left": self.left}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.left = state["left"]


class EndingStream(Stream):
    """Told that it is at its end it yields nothing, once; as streams of ``datasets`` do."""

    goes_on = False

    def __iter__(self):
        self.left = self.left if self.goes_on else self.number
        self.goes_on = False
        if self.left:
            yield from super().__iter__()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.goes_on = True


def data(kind):
    if kind in {"stream", "ending stream"}:
        return (Stream if kind == "stream" else EndingStream)(26), {"batch_size": 2}
    if kind == "looped":
        return LoopedLoader(make_dataloader(Stream(26), batch_size=2), 6), {}
    if kind == "sampler":
        return numbered(26), {
            "batch_sampler": BatchSampler(SequentialSampler(range(26)), 2, drop_last=False)
        }
    return numbered(26), {"batch_size": 2, "shuffle": True}


def train(folder, kind, dies_at, noisy, options=None):
    """Run as a script does; return this rank's weights, losses and samples."""
    torch.manual_seed(3)
    layers = (
        [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)]
        if noisy
        else [nn.Linear(3, 1)]
    )
    net = nn.Sequential(*layers).double()
    options = dict(options or {})
    counter = EpochCounter(options.pop("epochs", 2))
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.02)
    one_sided = options.pop("one_sided", False)
    inside = options.pop("inside", "")
    brain = Learner(
        {"net": net},
        optimizer,
        None,
        {**QUIET, "ckpt_interval_steps": 2, **options},
        checkpointer,
    )
    brain.dies_at = dies_at
    brain.seen = []
    brain.losses = []
    brain.waited = []
    brain.noisy = noisy
    brain.one_sided = one_sided
    brain.inside = inside
    train_set, kwargs = data(kind)
    try:
        brain.fit(
            counter,
            train_set,
            numbered(5),
            train_loader_kwargs=kwargs,
            valid_loader_kwargs={"batch_size": 2},
        )
    except Killed:
        return None
    except ConfigError as error:
        return str(error)
    state = {name: value.clone() for name, value in brain.raw_modules.state_dict().items()}
    moments = [value.clone() for one in brain.optimizer.state.values() for value in one.values()]
    return state, moments, brain.losses, gather_objects(lambda: brain.seen), brain.waited


def steps_of(seen):
    """Return the samples of each optimizer step, over all ranks and its batches."""
    steps = {}
    for one in seen:
        for epoch, step, numbers in one:
            steps.setdefault((epoch, step), []).extend(numbers)
    return {key: sorted(numbers) for key, numbers in steps.items()}


def assert_bits(found, expected):
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert found[2] == expected[2][len(expected[2]) - len(found[2]) :]
    for again, through in zip(found[3], expected[3], strict=True):
        assert again == through[len(through) - len(again) :]


# On three ranks the last bit of a sum depends on the order in which it is added up.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "dies_at", "options"),
    [
        (3, "plan", (2, 4), {}),
        (2, "plan", (2, 1), {"one_sided": True}),
        (2, "plan", (1, 4), {"grad_accumulation_factor": 2}),
        (2, "plan", (2, 5), {"inside": "all", "ckpt_interval_steps": 0}),
        (2, "stream", (2, 5), {"inside": "all", "ckpt_interval_steps": 0}),
        (2, "sampler", (2, 3), {}),
        (2, "stream", (1, 4), {}),
        (3, "stream", (2, 4), {"grad_accumulation_factor": 2}),
        (2, "ending stream", (2, 1), {}),
        (2, "looped", (2, 5), {}),
        (2, "looped", (3, 4), {"epochs": 3}),
    ],
    ids=str,
)
def test_every_rank_goes_on_to_the_last_bit(ranks, tmp_path, world_size, kind, dies_at, options):
    whole = ranks.run(train, tmp_path / "whole", kind, None, True, options, world_size=world_size)
    dead = ranks.run(train, tmp_path / "dead", kind, dies_at, True, options, world_size=world_size)
    assert dead == [None] * world_size
    found = ranks.run(train, tmp_path / "dead", kind, None, True, options, world_size=world_size)
    for mine, expected in zip(found, whole, strict=True):
        assert_bits(mine, expected)
    assert whole[0][3][0] != whole[0][3][1]


# The trainings of tests/model draw more pairs of numbers, without a state of the data's own.
@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize(
    ("before", "after", "kind", "dies_at", "options"),
    [
        (2, 1, "plan", (2, 4), {}),
        (3, 2, "plan", (2, 4), {"grad_accumulation_factor": 2}),
        (1, 2, "plan", (3, 1), {"epochs": 3}),
        (2, 3, "stream", (2, 4), {}),
        (2, 1, "stream", (3, 1), {"epochs": 3}),
    ],
    ids=str,
)
def test_another_number_of_ranks_takes_the_same_steps(
    ranks,
    tmp_path,
    before,
    after,
    kind,
    dies_at,
    options,
):
    """As `before` processes would have: the same samples in every optimizer step, the same weights,
    in float64.
    """
    whole = ranks.run(train, tmp_path / "whole", kind, None, False, options, world_size=before)[0]
    ranks.run(train, tmp_path / "dead", kind, dies_at, False, options, world_size=before)
    shutil.copytree(tmp_path / "dead", tmp_path / "other", symlinks=True)
    found = ranks.run(train, tmp_path / "other", kind, None, False, options, world_size=after)[0]
    for name, value in whole[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-10, atol=1e-12)
    again = steps_of(found[3])
    through = steps_of(whole[3])
    assert again == {key: through[key] for key in again}
    assert max(through) in again
    losses = [loss for *_, loss in found[2]]
    assert losses == pytest.approx(
        [loss for *_, loss in whole[2][len(whole[2]) - len(losses) :]],
        rel=1e-10,
    )


@pytest.mark.slow
def test_batches_that_cannot_be_divided_are_refused(ranks, tmp_path):
    ranks.run(train, tmp_path, "sampler", (2, 4), False, world_size=2)
    messages = ranks.run(train, tmp_path, "sampler", None, False, world_size=3)
    assert all("3 processes cannot divide" in text for text in messages)
    assert isinstance(ranks.run(train, tmp_path, "sampler", None, False, world_size=1)[0], tuple)


WAIT_SECONDS = 3.0  # more than a save that waits no longer needs, also on a busy machine


def train_waiting_less(folder, dies_at, options):
    with mock.patch.object(rank_state, "WAIT_SECONDS", WAIT_SECONDS):
        return train(folder, "plan", dies_at, False, options)


@pytest.mark.slow
def test_a_save_of_the_main_process_alone_inside_an_epoch_waits_once_and_hangs_nobody(
    ranks,
    tmp_path,
):
    """The weights are right; the reported loss of that epoch is the main process's share for
    all.
    """
    options = {"inside": "main", "ckpt_interval_steps": 0, "epochs": 3}
    whole = ranks.run(train_waiting_less, tmp_path / "whole", None, options)
    first, *later = whole[0][4]
    assert first >= WAIT_SECONDS
    assert len(later) == 2
    assert max(later) < WAIT_SECONDS
    ranks.run(train_waiting_less, tmp_path / "dead", (2, 5), options)
    for mine, expected in zip(
        ranks.run(train_waiting_less, tmp_path / "dead", None, options),
        whole,
        strict=True,
    ):
        assert all(torch.equal(mine[0][name], value) for name, value in expected[0].items())
        assert mine[2][1:] == expected[2][len(expected[2]) - len(mine[2]) + 1 :]


def gathered(fails=False):
    def collect():
        if fails and get_rank() == 1:
            raise ValueError("not to be had")
        return {"rank": get_rank(), "large": torch.full((1000,), float(get_rank()))}

    states = RankStates(collect)
    try:
        states.gather()
    except (ValueError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return [
        None if one is None else (one["rank"], one["large"].sum().item())
        for one in states.state_dict()["ranks"]
    ]


@pytest.mark.costly
def test_the_states_of_all_ranks_reach_the_main_process_and_no_other(ranks):
    assert ranks.run(gathered, world_size=3) == [
        [(0, 0.0), (1, 1000.0), (2, 2000.0)],
        [None] * 3,
        [None] * 3,
    ]
    first, second, third = ranks.run(gathered, True, world_size=3)
    assert second == "ValueError: not to be had"
    assert first == third
    assert first.startswith("RankFailedError: nothing could be gathered")
    assert first.endswith("rank 1: ValueError: not to be had")


def with_a_checkpointer_on_main(folder):
    net = nn.Linear(3, 1).double()
    checkpointer = Checkpointer(folder, {"net": net}) if if_main_process() else None
    brain = Learner(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        None,
        QUIET,
        checkpointer,
    )
    try:
        brain.fit(EpochCounter(1), numbered(8))
    except RankMismatchError as error:
        return str(error)
    return None


def test_a_checkpointer_on_some_ranks_only_is_refused_on_all(ranks, tmp_path):
    for text in ranks.run(with_a_checkpointer_on_main, tmp_path):
        assert "checkpointer: Checkpointer on rank 0; none on rank 1" in text


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["never", pytest.param("path", marks=pytest.mark.slow)])
def test_a_restarted_launch_keeps_the_samples_of_a_step(ranks, tmp_path, resume):
    """One decision: the weights are those of the newest of this launch, and so is the number of
    samples per step.
    """
    whole = ranks.run(train, tmp_path / "whole", "plan", None, False)[0]
    folder = tmp_path / "dead"
    ranks.run(with_environment, folder, (2, 4), "auto", 0)
    asked = "never" if resume == "never" else str(next((tmp_path / "whole").glob("CKPT*")))
    found = ranks.run(with_environment, folder, None, asked, 1, world_size=1)[0]
    again = steps_of(found[3])
    through = steps_of(whole[3])
    assert again == {key: through[key] for key in again}
    assert len(again) < len(through)
    for name, value in whole[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-10, atol=1e-12)


def with_environment(folder, dies_at, resume, restarts):
    before = dict(os.environ)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "launch-7", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    )
    try:
        return train(folder, "plan", dies_at, False, {"resume": resume})
    finally:
        os.environ.clear()
        os.environ.update(before)
