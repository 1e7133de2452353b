"""Epoch counters in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddpkit.checkpointing import find_load_hook, find_save_hook
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.errors import CheckpointError, ConfigError


def save(obj, path):
    find_save_hook(obj)(obj, path)
    return path


def load(obj, path, end_of_epoch):
    find_load_hook(obj)(obj, path, end_of_epoch)
    return obj


def stopper(limit=20, limit_to_stop=2, limit_warmup=0, direction="min"):
    return EpochCounterWithStopper(limit, limit_to_stop, limit_warmup, direction)


def run(counter, metrics):
    """Return the epochs that are run when each ends with its metric."""
    epochs = []
    for epoch in counter:
        epochs.append(epoch)
        counter.update_metric(metrics[epoch - 1])
    return epochs


def test_counts_from_one_to_the_limit(caplog):
    caplog.set_level("INFO")
    counter = EpochCounter(3)
    assert counter.current == 0
    assert list(counter) == [1, 2, 3]
    assert caplog.messages == ["Going into epoch 1", "Going into epoch 2", "Going into epoch 3"]
    assert list(counter) == []
    counter.limit = 4
    assert list(counter) == [4]


def test_a_second_start_says_that_it_is_done(tmp_path, caplog):
    caplog.set_level("INFO")
    counter = EpochCounter(2)
    list(counter)
    path = save(counter, tmp_path / "counter.ckpt")
    caplog.clear()
    assert list(load(EpochCounter(2), path, end_of_epoch=True)) == []
    assert caplog.messages == ["Epoch 2 is done already, of 2 at most: nothing is left to train."]


def test_a_second_start_says_that_it_was_stopped(tmp_path, caplog):
    caplog.set_level("INFO")
    counter = stopper(limit_to_stop=2)
    assert run(counter, [1.0, 2.0, 2.0]) == [1, 2, 3]
    path = save(counter, tmp_path / "counter.ckpt")
    caplog.clear()
    assert list(load(stopper(limit_to_stop=2), path, end_of_epoch=True)) == []
    [told] = caplog.messages
    assert told.startswith(
        "The run was stopped early after epoch 3: 2 epochs without improvement over 1 of epoch 1"
    )
    assert told.endswith("To go on, give a larger limit_to_stop.")


def test_a_limit_of_zero_yields_nothing():
    assert list(EpochCounter(0)) == []


@pytest.mark.parametrize("limit", [-1, 2.5, "many", None, math.inf])
def test_a_bad_limit(limit):
    with pytest.raises(ConfigError, match="limit=.*whole number"):
        EpochCounter(limit)


def test_resume(tmp_path):
    counter = EpochCounter(5)
    next(counter), next(counter)
    path = save(counter, tmp_path / "counter.ckpt")
    assert path.read_text() == "2"
    assert list(load(EpochCounter(5), path, end_of_epoch=True)) == [3, 4, 5]
    assert list(load(EpochCounter(5), path, end_of_epoch=False)) == [2, 3, 4, 5]
    assert list(load(EpochCounter(2), path, end_of_epoch=True)) == []


@pytest.mark.parametrize(
    "make",
    [EpochCounter, lambda limit: EpochCounterWithStopper(limit, 0, 1, "min")],
)
def test_a_counter_of_a_later_call_begins_with_epoch_1_after_a_checkpoint_inside_of_an_epoch(
    tmp_path,
    make,
):
    find_save_hook(make(2))(make(2), tmp_path / "counter.ckpt")
    resumed = make(2)
    find_load_hook(resumed)(resumed, tmp_path / "counter.ckpt", False)
    assert next(iter(resumed)) == 1


def test_a_damaged_file(tmp_path):
    path = tmp_path / "counter.ckpt"
    path.write_text("two")
    with pytest.raises(CheckpointError, match="'two' where the number of an epoch was expected"):
        load(EpochCounter(5), path, end_of_epoch=True)


# ------------------------------------------------------------------------------------------ stopper


def test_stops_when_patience_is_exhausted(caplog):
    caplog.set_level("INFO")
    counter = stopper()
    assert run(counter, [3, 2, 1, 1.5, 2.0, 0.1]) == [1, 2, 3, 4, 5]
    assert (counter.best_limit, counter.best_score, counter.should_stop) == (3, 1.0, True)
    assert "2 epochs without improvement over 1: patience is exhausted." in caplog.messages


def test_an_improvement_starts_patience_anew():
    assert run(stopper(limit=6), [3, 4, 2, 5, 1, 6]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("flat", [0.9, 0.0, -0.9, 1e-9, -1e9])
def test_2_5_a_flat_metric_is_no_improvement(direction, flat):
    assert run(stopper(direction=direction), [flat] * 20) == [1, 2, 3]


@pytest.mark.parametrize(("direction", "sign"), [("min", -1), ("max", 1)])
@pytest.mark.parametrize("start", [-1.0, 0.0, 1.0])
def test_2_5_the_tolerance_has_the_right_sign(direction, sign, start):
    """Changes below a millionth of the best score do not count, larger ones do, whatever their
    sign.
    """
    small = [start + sign * 1e-7 * abs(start) * epoch for epoch in range(20)]
    assert len(run(stopper(direction=direction), small)) == 3
    large = [start + sign * 0.01 * epoch for epoch in range(20)]
    assert len(run(stopper(direction=direction), large)) == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_2_5_a_metric_that_is_not_finite_is_no_improvement(bad, direction):
    counter = stopper(direction=direction)
    assert run(counter, [1.0, bad, bad, 5.0]) == [1, 2, 3]
    assert counter.best_score == 1.0
    assert run(stopper(direction=direction), [bad] * 20) == [1, 2]


def test_warm_up_epochs_count_for_nothing():
    counter = stopper(limit_to_stop=2, limit_warmup=5)
    assert run(counter, [0, 9, 9, 9, 9, 1, 2, 3]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (counter.best_limit, counter.best_score) == (6, 1.0)


def test_no_finite_metric_after_the_warm_up():
    assert run(stopper(limit_to_stop=2, limit_warmup=5), [math.nan] * 20) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("patience", [0, 1])
def test_no_patience_stops_at_the_first_epoch_without_improvement(patience):
    assert run(stopper(limit_to_stop=patience), [3, 2, 2, 1]) == [1, 2, 3]


@pytest.mark.parametrize(
    "metric",
    [torch.tensor(1.0), torch.tensor([1.0], requires_grad=True), np.float32(1), np.array([1.0]), 1],
)
def test_what_a_metric_may_be(metric):
    counter = stopper()
    next(counter)
    counter.update_metric(metric)
    assert type(counter.best_score) is float
    assert counter.best_score == 1.0


@pytest.mark.parametrize("metric", ["low", None, torch.ones(2), np.ones(2)])
def test_what_a_metric_may_not_be(metric):
    counter = stopper()
    next(counter)
    with pytest.raises(ConfigError, match="is not a number"):
        counter.update_metric(metric)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit=-1"),
        ({"limit_to_stop": -1}, "limit_to_stop=-1"),
        ({"limit_warmup": -1}, "limit_warmup=-1"),
        ({"direction": "down"}, "direction='down': say 'min'"),
    ],
)
def test_bad_arguments_are_value_errors(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        stopper(**arguments)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("metrics", [[3, 2, 2.5], []])
def test_the_stopper_resumes(tmp_path, metrics):
    counter = stopper()
    for metric in metrics:
        next(counter)
        counter.update_metric(metric)
    path = save(counter, tmp_path / "counter.ckpt")
    for end_of_epoch in (True, False):
        other = load(stopper(), path, end_of_epoch)
        assert other.current == max(counter.current - (not end_of_epoch), 0)
        names = ("best_limit", "best_score", "should_stop")
        assert [getattr(other, name) for name in names] == [
            getattr(counter, name) for name in names
        ]


def test_a_stopper_that_has_stopped_stays_stopped(tmp_path):
    counter = stopper()
    run(counter, [1] * 20)
    assert list(load(stopper(), save(counter, tmp_path / "c"), end_of_epoch=True)) == []


NUMPY_SCORE = """!!python/object/apply:numpy.core.multiarray.scalar
- !!python/object/apply:numpy.dtype
  args: [f8, false, true]
  state: !!python/tuple [3, <, null, null, null, -1, -1, 0]
- !!binary |
  AAAAAAAA0D8=
"""


@pytest.mark.parametrize(
    ("score", "best"),
    [
        ("0.25", 0.25),
        (".inf", math.inf),
        ("1", 1.0),
        (NUMPY_SCORE, 0.25),
    ],
)
def test_files_of_speechbrain_load(tmp_path, score, best):
    path = tmp_path / "counter.ckpt"
    path.write_text(f"best_epoch: 4\nbest_score: {score}\ncurrent_epoch: 6\nshould_stop: false\n")
    counter = load(stopper(), path, end_of_epoch=True)
    assert (counter.current, counter.best_limit, counter.best_score, counter.should_stop) == (
        6,
        4,
        best,
        False,
    )


@pytest.mark.parametrize("text", ["", "best_epoch: 4", "{", "!!python/object/apply:os.getcwd []"])
def test_a_damaged_stopper_file(tmp_path, text):
    path = tmp_path / "counter.ckpt"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="where a stopper's YAML was expected"):
        load(stopper(), path, end_of_epoch=True)
