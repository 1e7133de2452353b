"""A run that ends inside of an epoch, by whatever way, goes on inside of that epoch: each sample
exactly once.
"""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, assert_same, points, seen_in, sgd, weights

DATA = points(16)
PER_STEP = 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class LongStream(IterableDataset):
    """Goes on from epoch to epoch, with half of the data in each."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        half = len(DATA) // 2
        for number in range(self.read, (self.read // half + 1) * half):
            self.read = number + 1
            yield DATA[number]

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


STREAMS = {"stream": Stream, "long stream": LongStream}


class Saving(Regression):
    """Saves at the end of each epoch as most recipes do: it believes that the epoch is over."""

    fails_at = 0

    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step + 1 == self.fails_at:
            raise Killed

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is (Stage.VALID if self.progress.validates else Stage.TRAIN):
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


class Noisy(Saving):
    """Draws noise in both stages, as a variational encoder does; may be killed in the
    validation.
    """

    def on_stage_start(self, stage, epoch=None):
        limit = self.run_opts.optimizer_step_limit
        if stage is Stage.VALID and self.fails_in == "validation" and self.optimizer_step >= limit:
            raise Killed

    def compute_objectives(self, predictions, batch, stage):
        noise = torch.randn(predictions.shape, dtype=predictions.dtype)
        return super().compute_objectives(predictions + noise, batch, stage)


def run(
    folder,
    *,
    cls=Saving,
    epochs=1,
    kind="plan",
    valid=True,
    fails_at=0,
    fails_in=None,
    saves_after=False,
    **options,
):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
    counter = EpochCounter(epochs)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    schedule = (
        (lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        if "scheduler_every" in options
        else None
    )
    brain = cls({"net": net}, sgd(momentum=0.9), None, {**QUIET, **options}, checkpointer, schedule)
    brain.fails_at = fails_at
    brain.fails_in = fails_in
    train = {"batch_size": PER_STEP, **({} if kind in STREAMS else {"shuffle": True})}
    train |= {"looped_nominal_epoch": 12} if kind == "looped" else {}
    data = STREAMS[kind]() if kind in STREAMS else DATA
    try:
        brain.result = brain.fit(
            counter,
            data,
            points(3, seed=6) if valid else None,
            train_loader_kwargs=train,
        )
    except Killed:
        if saves_after:
            brain.checkpointer.save_checkpoint(end_of_epoch=False)
    return brain


def trained_rows(*brains):
    return [row for one in brains for batch in seen_in(DATA, one.trained_on) for row in batch]


def meta_of(folder):
    [path] = folder.glob("CKPT*/CKPT.yaml")
    return yaml.safe_load(path.read_text())


@pytest.mark.costly
def test_a_larger_limit_goes_on_inside_of_the_epoch(tmp_path):
    whole = run(tmp_path / "whole")
    parts = []
    for limit in (5, 7, None):
        parts.append(run(tmp_path / "parts", optimizer_step_limit=limit))
        assert meta_of(tmp_path / "parts")["end-of-epoch"] == (limit is None)
    assert [one.optimizer_step for one in parts] == [5, 7, 8]
    assert trained_rows(*parts) == trained_rows(whole)
    assert_same(weights(parts[-1]), weights(whole))
    assert parts[-1].losses == whole.losses
    assert [one.result.reason for one in parts] == [
        "optimizer_step_limit",
        "optimizer_step_limit",
        "epochs",
    ]
    assert run(tmp_path / "parts").result.reason == "done_before"


def test_the_same_limit_again_trains_and_validates_nothing(tmp_path):
    first, again = (run(tmp_path, optimizer_step_limit=5) for _ in range(2))
    assert [name for name, *_ in first.losses] == ["TRAIN", "VALID"]
    assert (again.losses, again.trained_on, again.result.reason) == ([], [], "optimizer_step_limit")
    assert run(tmp_path).optimizer_step == 8


def again_after_a_death_in_the_validation(folder, limit, **options):
    """Run to a limit, die in the validation after it, run to the same limit once more, then on."""
    options = {"cls": Noisy, "ckpt_interval_steps": 1, "ckpt_interval_minutes": 0, **options}
    whole = run(folder / "whole", **options)
    limited = {"optimizer_step_limit": limit, **options}
    validated = run(folder / "validated", **limited)
    killed = run(folder / "parts", fails_in="validation", **limited)
    again = run(folder / "parts", **limited)
    assert again.trained_on == []
    assert again.losses == validated.losses[-len(again.losses) :]
    rest = run(folder / "parts", **options)
    assert trained_rows(killed, rest) == trained_rows(whole)
    assert_same(weights(rest), weights(whole))
    assert rest.losses == whole.losses[len(whole.losses) - len(rest.losses) :]


@pytest.mark.slow
def test_the_validation_after_a_limit_draws_what_it_would_have_drawn(tmp_path):
    again_after_a_death_in_the_validation(tmp_path, 5)


@pytest.mark.slow
def test_a_stream_goes_on_where_it_was_when_a_limit_was_reached(tmp_path):
    again_after_a_death_in_the_validation(tmp_path, 6, kind="long stream", epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, (3, 8)),
        ({"kind": "stream"}, (3, 8)),
        ({"kind": "stream", "grad_accumulation_factor": 2}, (3, 4)),
        ({"kind": "looped"}, (3, 8)),
        ({"kind": "looped", "epochs": 2}, (8, 12)),
        ({"kind": "long stream", "epochs": 2}, (3, 6, 8)),
        ({"grad_accumulation_factor": 3}, (2, 3)),
        ({"ema_decay": 0.5, "evaluate_ema": True}, (3, 8)),
        ({"virtual_ranks": 2}, (2, 4)),
    ],
    ids=str,
)
def test_the_validation_after_a_limit_of_other_runs(tmp_path, options, limits):
    for limit in limits:
        again_after_a_death_in_the_validation(tmp_path / str(limit), limit, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limits"),
    [
        *(({"epochs": 2}, limits) for limits in [(1, 2), (5,), (3, 8), (8,), (10,)]),
        ({"valid": False}, (3, 8)),
        ({"kind": "stream"}, (3, 8)),
        ({"kind": "stream", "epochs": 2}, (3, 8)),
        ({"kind": "looped", "epochs": 2}, (3, 8)),
        ({"grad_accumulation_factor": 3}, (1, 2)),
        ({"grad_accumulation_factor": 3}, (5,)),
        ({"ema_decay": 0.5, "evaluate_ema": True}, (3, 8)),
        ({"ckpt_async": True}, (3, 8)),
        ({"scheduler_every": "epoch", "epochs": 2}, (3, 8)),
        ({"virtual_ranks": 2}, (3, 8)),
    ],
    ids=str,
)
def test_a_limit_inside_of_an_epoch_of_other_runs(tmp_path, options, limits):
    whole = run(tmp_path / "whole", **options)
    parts = [run(tmp_path / "parts", optimizer_step_limit=limit, **options) for limit in limits]
    parts.append(run(tmp_path / "parts", **options))
    assert trained_rows(*parts) == trained_rows(whole)
    assert_same(weights(parts[-1]), weights(whole))
    assert parts[-1].losses == whole.losses[len(whole.losses) - len(parts[-1].losses) :]


@pytest.mark.costly
def test_a_save_after_a_failure_goes_on_behind_the_last_step(tmp_path):
    whole = run(tmp_path / "whole", epochs=2)
    failed = run(tmp_path / "parts", epochs=2, fails_at=12, saves_after=True)
    rest = run(tmp_path / "parts", epochs=2)
    assert trained_rows(failed, rest) == trained_rows(whole)
    assert_same(weights(rest), weights(whole))
    assert rest.losses == whole.losses[2:]


def test_a_run_does_not_go_on_from_what_a_rehearsal_has_saved(tmp_path, caplog):
    debug = {"debug": True, "debug_persistently": True}
    assert run(tmp_path, **debug).optimizer_step == 2
    assert run(tmp_path, **debug).optimizer_step == 2, "a rehearsal goes on from its own"
    whole = run(tmp_path)
    assert "1 checkpoint(s) in" in caplog.text
    assert "were saved with --debug" in caplog.text
    assert whole.optimizer_step == 8
    [moved] = tmp_path.glob("earlier-*/CKPT*")
    caplog.clear()
    assert run(tmp_path / "other", resume=str(moved)).optimizer_step == 2
    assert "was saved with --debug" in caplog.text
