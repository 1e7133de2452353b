"""A run that goes on in the middle of an epoch with other batches or other data: every sample once,
or a warning.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, sgd

OTHER_DATA = "The data has changed since"


class Counting(Regression):
    """Remembers the numbers it was trained on; dies before a batch; saves at the end of an epoch,
    if told to.
    """

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN:
            if self.dies_at in {self.step, (self.progress.epoch, self.step)}:
                raise Killed
            self.seen += batch[0].flatten().long().tolist()
        return self.modules.net(batch[0] / 100)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.saves:
            self.checkpointer.save_and_keep_only()


def numbers(size):
    return [(torch.tensor([float(index)]), torch.zeros(1)) for index in range(size)]


class Numbers(IterableDataset):
    def __init__(self, size):
        self.data = numbers(size)

    def __iter__(self):
        return iter(self.data)


class Placed(Numbers):
    """Its state is its place."""

    place = 0

    def __iter__(self):
        while self.place < len(self.data):
            self.place += 1
            yield self.data[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def run(folder, train, *, dies_at=None, saves=False, epochs=1, options=None, **kwargs):
    """Train as a script does; return the numbers that it was trained on."""
    net = nn.Linear(1, 1)
    counter = EpochCounter(epochs)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    options = {**QUIET, "ckpt_interval_steps": 4 if dies_at else 0, **(options or {})}
    brain = Counting({"net": net}, sgd(lr=0.01), None, options, checkpointer)
    brain.dies_at = dies_at
    brain.saves = saves
    brain.seen = []
    try:
        brain.fit(counter, train, train_loader_kwargs=kwargs)
    except Killed:
        assert dies_at is not None
    return brain.seen


@pytest.mark.corner
@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2), (2, 5), (4, 3)])
def test_dealt_batches_with_another_accumulation_come_once_each(tmp_path, caplog, before, now):
    """The place in the data stays, and the first step may be a shorter one."""
    batches = [[index, index + 1] for index in range(0, 80, 2)]
    arguments = {"batch_sampler": batches}
    first = run(
        tmp_path,
        numbers(80),
        dies_at=13,
        options={"grad_accumulation_factor": before},
        **arguments,
    )
    assert first[:24] == list(range(24))
    caplog.clear()
    rest = run(tmp_path, numbers(80), options={"grad_accumulation_factor": now}, **arguments)
    assert rest == list(range(24, 80))
    assert f"{now} batches per optimizer step, before {before}" in caplog.text
    assert "the epoch goes on after 12 of the 12 batches that were done" in caplog.text
    assert OTHER_DATA not in caplog.text


def looped(kind, size):
    if kind == "plan":
        return LoopedLoader(make_dataloader(numbers(80), batch_size=size), 40)
    if kind == "shuffled":
        return LoopedLoader(
            make_dataloader(numbers(80), batch_size=size, sampler=list(reversed(range(80)))),
            40,
        )
    stream = Placed(80) if kind == "state" else Numbers(80)
    return LoopedLoader(make_dataloader(stream, batch_size=size), 40)


@pytest.mark.corner
@pytest.mark.parametrize("kind", ["plan", "shuffled", "stream", "state"])
@pytest.mark.parametrize(("before", "now"), [(5, 3), (2, 4), (4, 2), (2, 3), (3, 5)])
def test_nominal_epochs_with_another_batch_size_go_on_in_the_data(tmp_path, kind, before, now):
    """What is done of a batch that is not whole is done once more; nothing is left out, and the
    epoch has its end.
    """
    run(tmp_path, looped(kind, before), dies_at=13)
    rest = run(tmp_path, looped(kind, now))
    order = [79 - index if kind == "shuffled" else index for index in range(80)]
    place = 11 * before + before // now * now if kind == "state" else 12 * before // now * now
    assert 12 * before - max(before, now) < place <= 12 * before
    batches = [order[start : start + now] for start in range(place, 80, now)]
    batches += 2 * [order[start : start + now] for start in range(0, 80, now)]
    assert rest == list(itertools.chain(*batches[: 40 - 12 * before // now]))


def test_nominal_epochs_with_more_samples_per_step_than_were_done(tmp_path):
    run(tmp_path, looped("plan", 2), dies_at=5)
    rest = run(tmp_path, looped("plan", 9))
    assert rest[:80] == list(range(80))
    assert len(rest) == 4 * 80 + 4 * 9


@pytest.mark.corner
@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, None),
        ({"number": 60}, "samples 60, before 40"),
        ({"shuffle": False}, "order as it stands, before shuffled"),
        ({"drop_last": True}, "drop_last True, before False"),
        ({"shuffle": None, "sampler": list(range(40))}, "order by list, before shuffled"),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_is_told(tmp_path, caplog, now, said):
    def go(number=40, shuffle=True, dies_at=None, **options):
        return run(
            tmp_path,
            numbers(number),
            dies_at=dies_at,
            batch_size=4,
            shuffle=shuffle,
            **options,
        )

    go(dies_at=5)
    (file,) = tmp_path.glob("CKPT+*/brain.ckpt")
    assert yaml.safe_load(file.read_text())["data"] == {
        "order": "shuffled",
        "drop_last": False,
        "samples": 40,
    }
    caplog.clear()
    go(**now)
    assert (OTHER_DATA in caplog.text) == (said is not None)
    assert said is None or said in caplog.text


def test_more_data_after_the_end_of_an_epoch_is_not_told(tmp_path, caplog):
    run(tmp_path, numbers(20), saves=True, batch_size=4)
    caplog.clear()
    assert len(run(tmp_path, numbers(40), saves=True, epochs=2, batch_size=4)) == 40
    assert OTHER_DATA not in caplog.text


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2), (2, 8)])
def test_a_stream_with_a_state_goes_on_in_the_data_with_another_batch_size(tmp_path, before, now):
    run(tmp_path, Placed(80), dies_at=13, batch_size=before)
    assert run(tmp_path, Placed(80), batch_size=now) == list(range(12 * before, 80))


class GoesOn(Placed):
    """Gives so many numbers in an epoch, and other ones in the next."""

    def __init__(self, size):
        super().__init__(3 * size)
        self.size = size

    def __iter__(self):
        for _ in range(self.size - self.place % self.size):
            self.place += 1
            yield self.data[self.place - 1]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "batches",
    [2, 3, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 5))],
)
def test_a_stream_of_few_batches_is_not_put_where_it_was_in_the_epoch_before(tmp_path, batches):
    """As few batches as places are remembered: those of the first epoch have not all been replaced
    in the second.
    """
    options = {"ckpt_interval_steps": 1}
    run(tmp_path, GoesOn(4 * batches), dies_at=(2, 2), epochs=2, options=options, batch_size=4)
    rest = run(tmp_path, GoesOn(4 * batches), epochs=3, options=options, batch_size=2)
    assert rest == list(range(4 * batches + 4, 12 * batches))


@pytest.mark.parametrize(("kind", "keeps"), [(nn.BatchNorm1d, False), (nn.LayerNorm, True)])
def test_fewer_processes_tell_that_a_batch_norm_has_other_samples(tmp_path, caplog, kind, keeps):
    """As if two processes had saved it."""

    def start():
        net = nn.Sequential(kind(1), nn.Linear(1, 1))
        counter = EpochCounter(2)
        checkpointer = Checkpointer(tmp_path, {"net": net, "counter": counter})
        opts = {**QUIET, "ckpt_verify": "off"}
        brain = Counting({"net": net}, sgd(lr=0.01), run_opts=opts, checkpointer=checkpointer)
        brain.dies_at = None
        brain.saves = True
        brain.seen = []
        brain.fit(counter, numbers(8), train_loader_kwargs={"batch_size": 2})

    start()
    [saved] = tmp_path.glob("CKPT*/brain.ckpt")
    state = yaml.safe_load(saved.read_text()) | {
        "world_size": 2,
        "per_step": 4,
        "per_process": 2,
        "asked": None,
    }
    saved.write_text(yaml.safe_dump(state))
    caplog.set_level("INFO")
    start()
    [told] = [text for text in caplog.messages if "go on with what 2 saved" in text]
    said = (
        "BatchNorm statistics are now computed over batches of another size, so the results "
        "differ; "
    )
    assert (f"{said}--global_batch_size=4 alone keeps them." in told) != keeps
