"""What a run writes of its measured steps into metrics.jsonl, in whatever way it goes on."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import IterableDataset

from ddpkit.epoch_loop import EpochCounter
from ddpkit.train_logger import set_run_log
from tests.recipes import Failing, Killed, OwnFitBatch, Poisoned, Regression, linear, make, points

PHASES = ["data", "move", "forward", "backward", "exchange", "optimizer", "other"]
LOADER = {"batch_size": 2}


@pytest.fixture
def speed(tmp_path):
    """Return the speed events so far."""
    log = set_run_log(tmp_path / "metrics.jsonl")

    def events():
        lines = log.path.read_text(encoding="utf-8").splitlines() if log.path.exists() else ()
        found = [json.loads(line) for line in lines]
        return [one for one in found if one["event"] == "speed"]

    yield events
    set_run_log(None)


def hooks(brain):
    return [len(one._forward_pre_hooks) for one in brain.modules.values()]


def fit(brain, epochs=(1,), number=48, **loader):
    brain.fit(epochs, points(number), train_loader_kwargs={**LOADER, **loader})
    return brain


def test_the_event_has_times_sizes_and_who_has_most(speed):
    brain = fit(make(measure_steps="all"))
    event = speed()[0]
    assert event["epoch"] == 1
    assert 0 < event["windows"] < event["step"] == event["optimizer_step"]
    assert list(event["phases"]) == PHASES
    for spread in (*event["phases"].values(), event["step_seconds"], event["memory"]["rss"]):
        assert list(spread) == ["min", "median", "max", "max_rank"]
        assert spread["max_rank"] == 0
        assert spread["min"] == spread["median"] == spread["max"] >= 0
    assert event["phases"]["exchange"]["max"] == 0
    rate = 2 / event["step_seconds"]["max"]
    assert event["samples_per_second"] == pytest.approx(rate, rel=1e-3)
    assert event["learning_rate"] == 0.1
    assert event["batches_per_window"] == 1
    assert event["gradient_norm"] > 0
    assert not {"tokens_per_second", "exchanged_bytes", "mfu"} & set(event)
    assert hooks(brain) == [0]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_of_a_few_steps_has_an_event_if_all_are_measured(speed, epochs):
    fit(make(measure_steps="all"), range(1, epochs + 1), number=10)
    event = speed()[0]
    assert event["epoch"] == 1
    assert event["step"] == event["optimizer_step"] == 5
    assert event["windows"] == 4  # not the first, which waits for the loader to start
    assert event["loss"] > 0


def test_a_run_of_one_step_has_no_event(speed):
    fit(make(measure_steps="all"), number=2)
    assert not speed()


def test_a_failure_in_a_short_run_exchanges_nothing(speed):
    brain = make(Failing, measure_steps="all")
    brain.fails_at = 4
    with pytest.raises(RuntimeError, match="planted"):
        fit(brain, number=10)
    assert not speed()  # the other ranks would be waited for
    assert hooks(brain) == [0]


def test_with_off_nothing_is_measured_or_written(speed):
    class Looks(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            assert hooks(self) == [0]

    fit(make(Looks, measure_steps="off"))
    assert not speed()


@pytest.mark.slow
def test_between_the_steps_that_are_measured_nothing_hangs_on_the_model(speed):
    class Looks(Regression):
        hooked = 0

        def on_fit_batch_start(self, batch, should_step):
            self.hooked += hooks(self)[0]

    brain = fit(make(Looks), number=2400)
    assert 0 < brain.hooked < 600
    assert speed()


def test_a_window_of_several_batches_is_one_step(speed):
    fit(make(grad_accumulation_factor=3, measure_steps="all"), number=96)
    event = speed()[0]
    assert event["batches_per_window"] == 3
    assert event["samples_per_second"] == pytest.approx(6 / event["step_seconds"]["max"], rel=1e-3)


def test_counts_of_sums_are_tokens(speed):
    class Tokens(Regression):
        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().sum(), torch.tensor(7)

    fit(make(Tokens, measure_steps="all"))
    event = speed()[0]
    assert event["tokens_per_second"] == pytest.approx(7 / event["step_seconds"]["max"], rel=1e-3)


def test_steps_that_are_skipped_are_measured_too(speed):
    brain = make(Poisoned, measure_steps="all")
    brain.bad_steps = (5,)
    fit(brain)
    assert brain.optimizer_step == 23
    assert speed()[0]["windows"] >= 8


def test_a_fit_batch_of_the_recipe_has_the_same_phases(speed):
    fit(make(OwnFitBatch, measure_steps="all"))
    phases = speed()[0]["phases"]
    assert all(phases[name]["max"] > 0 for name in ("data", "forward", "backward", "optimizer"))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(48))


def test_streams_are_measured(speed):
    make(measure_steps="all").fit([1], Stream(), train_loader_kwargs=LOADER)
    assert speed()[0]["phases"]["data"]["max"] > 0


def test_fit_again_and_after_a_step_that_failed(speed):
    class Fails(Regression):
        fails = True

        def compute_objectives(self, predictions, batch, stage):
            if self.fails and self.step == 12:
                raise Killed
            return super().compute_objectives(predictions, batch, stage)

    brain = make(Fails, measure_steps="all")
    with pytest.raises(Killed):
        fit(brain)
    assert hooks(brain) == [0]
    brain.fails = False
    before = len(speed())
    fit(brain, (1, 2))
    assert len(speed()) > before
    assert hooks(brain) == [0]


@pytest.mark.costly
def test_a_resume_inside_of_an_epoch_ends_with_the_same_weights(speed, tmp_path):
    def run(folder, stop_at=None, **options):
        counter = EpochCounter(2)
        net = linear()

        class Stops(Regression):
            def on_fit_batch_end(self, batch, outputs, loss, should_step):
                if self.optimizer_step == stop_at:
                    raise Killed

        brain = make(
            Stops,
            net=net,
            folder=tmp_path / folder,
            recoverables={"counter": counter},
            ckpt_interval_steps=5,
            **options,
        )
        brain.fit(counter, points(48), train_loader_kwargs={**LOADER, "shuffle": True})
        return net.weight.detach().clone()

    usual = run("whole", measure_steps="off")
    with pytest.raises(Killed):
        run("cut", stop_at=17, measure_steps="all")
    assert torch.equal(run("cut", measure_steps="all"), usual)
    assert len(speed()) >= 2
