"""``self.log`` in one process: means of a stage for loggers, in the run's log, and in what ``fit``
returns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math

import numpy as np
import pytest
import torch

from ddpkit.errors import BatchError
from ddpkit.train_logger import FileTrainLogger, TrainLogger, TrainLoggers, set_run_log
from ddpkit.types import Stage
from tests.host_reads import HostReads
from tests.recipes import Regression, make, points

DATA = points(11)
VALID = points(5, seed=6)


class Logging(Regression):
    """Logs what ``what`` says, called with the Brain, the batch and the stage."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.what(self, batch, stage, loss)
        return loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.at_end(self, stage, epoch)

    def at_end(self, *_):
        """Log nothing."""

    what = at_end


def logging(what, at_end=None, **options):
    brain = make(Logging, **options)
    brain.what = what
    brain.at_end = at_end or brain.at_end
    return brain


def fit(brain, epochs=(1,), valid=VALID, **kwargs):
    return brain.fit(epochs, DATA, valid, train_loader_kwargs={"batch_size": 4, **kwargs})


@pytest.fixture
def run_events(tmp_path):
    set_run_log(tmp_path / "metrics.jsonl")
    yield lambda: [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    set_run_log(None)


def test_a_mean_is_weighed_as_the_loss_is_and_a_sum_by_its_count():
    def what(brain, batch, stage, loss):
        brain.log("loss", loss)
        brain.log("first", batch[0][:, 0].sum(), count=len(batch[0]))
        brain.log("all", batch[0].sum().item(), batch[0].numel())

    brain = logging(what)
    result = fit(brain)
    inputs = {
        "train": torch.stack([x for x, _ in DATA]),
        "valid": torch.stack([x for x, _ in VALID]),
    }
    for stage, rows in inputs.items():
        assert result.logged[stage]["first"] == pytest.approx(rows[:, 0].mean().item(), rel=1e-12)
        assert result.logged[stage]["all"] == pytest.approx(rows.mean().item(), rel=1e-12)
    assert result.logged["train"]["loss"] == result.train_loss
    assert result.logged["valid"]["loss"] == pytest.approx(result.valid_loss, rel=1e-15)


class Remembering(TrainLogger):
    def __init__(self):
        self.given = []
        self.steps = []

    def log_stats(
        self,
        stats_meta,
        train_stats=None,
        valid_stats=None,
        test_stats=None,
        verbose=False,
    ):
        self.given.append((stats_meta, train_stats, valid_stats, test_stats))

    def log_step(self, values, step):
        self.steps.append((step, values))


def test_it_is_in_the_statistics_of_the_loggers_and_in_the_log_of_the_run(tmp_path, run_events):
    def what(brain, batch, stage, loss):
        brain.log("one", 1.0 if stage is Stage.TRAIN else 2.0)
        brain.log("loss", -1.0)

    def at_end(brain, stage, epoch):
        if stage is Stage.TRAIN:
            return
        brain.log("score", torch.tensor([3.0]))
        name = stage.name.lower()
        brain.hparams.train_logger.log_stats({"epoch": epoch}, **{f"{name}_stats": {"loss": 9.0}})

    own = Remembering()
    brain = logging(
        what,
        at_end,
        hparams={"train_logger": [FileTrainLogger(tmp_path / "log.txt"), own]},
    )
    assert isinstance(brain.hparams.train_logger, TrainLoggers)
    result = fit(brain, (1, 2))
    train = {"loss": -1.0, "one": 1.0}
    valid = {"loss": 9.0, "one": 2.0, "score": 3.0}
    assert result.logged == {"train": train, "valid": {**valid, "loss": -1.0}}
    brain.evaluate(VALID)
    test = ({"epoch": None}, None, None, valid)
    assert own.given == [
        ({"epoch": 1}, train, valid, None),
        ({"epoch": 2}, train, valid, None),
        test,
    ]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 3
    assert "train one: 1.00e+00" in lines[0]
    assert "valid loss: 9.00, valid one: 2.00, valid score: 3.00" in lines[0]
    assert "train" not in lines[2]
    events = run_events()
    stages = [(one["stage"], one["logged"]) for one in events if one["event"] == "stage"]
    assert stages == [("TRAIN", train), ("VALID", {"loss": -1.0, "one": 2.0})] * 2 + [
        ("TEST", {"loss": -1.0, "one": 2.0})
    ]
    ends = [
        (one["stage"], one["epoch"], one["values"]) for one in events if one["event"] == "logged"
    ]
    assert ends == [
        ("VALID", 1, {"score": 3.0}),
        ("VALID", 2, {"score": 3.0}),
        ("TEST", 2, {"score": 3.0}),
    ]


def test_a_training_is_reported_once_where_both_stages_log(tmp_path):
    def at_end(brain, stage, epoch):
        name = stage.name.lower()
        train_logger.log_stats({"epoch": epoch}, **{f"{name}_stats": {}})

    train_logger = FileTrainLogger(tmp_path / "log.txt")
    brain = logging(lambda brain, *_: brain.log("one", 1), at_end)
    fit(brain, (1, 2))
    both = "epoch: {0} - train one: 1.00e+00\nepoch: {0} - valid one: 1.00e+00\n"
    assert (tmp_path / "log.txt").read_text() == both.format(1) + both.format(2)


def test_steps_are_written_with_the_beat_and_at_the_end(run_events):
    def what(brain, batch, stage, loss):
        brain.log("step", float(brain.step), per_step=True)

    own = Remembering()
    brain = logging(what, hparams={"train_logger": own})
    result = brain.fit([1], DATA, VALID, train_loader_kwargs={"batch_size": 1})
    assert result.logged["train"]["step"] == 6.0
    steps = [one for one in run_events() if one["event"] == "step"]
    assert [(one["optimizer_step"], one["values"]) for one in steps] == own.steps
    assert (steps[0]["epoch"], steps[0]["step"], steps[0]["values"]) == (1, 1, {"step": 1.0}), (
        "the first beat"
    )
    assert steps[-1]["step"] == 11
    ends = [0, *(one["step"] for one in steps)]
    means = [(low + 1 + high) / 2 for low, high in itertools.pairwise(ends)]
    assert [one["values"]["step"] for one in steps] == pytest.approx(means), (
        "each step is in one of them"
    )


def test_no_host_read_in_a_step_and_a_tensor_may_be_changed_afterwards():
    reads = HostReads()

    def what(brain, batch, stage, loss):
        total = batch[0].sum()
        with reads:
            brain.log("sum", total, count=torch.tensor(len(batch[0])), per_step=True)
            brain.log("loss", loss)
        total.zero_()

    result = fit(logging(what))
    assert reads.count == 0
    assert result.logged["train"]["sum"] == pytest.approx(
        sum(x.sum().item() for x, _ in DATA) / len(DATA)
    )


def test_before_the_first_batch_and_outside_of_a_stage(caplog):
    class Early(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            self.log("lost", 1)

        def on_stage_start(self, stage, epoch=None):
            self.log("rate", 0.5 * epoch)

        def compute_forward(self, batch, stage):
            self.log("calls", 1.0)
            return super().compute_forward(batch, stage)

    brain = make(Early)
    result = fit(brain, (1, 2))
    assert result.logged == {name: {"calls": 1.0, "rate": 1.0} for name in ("train", "valid")}
    assert [message for message in caplog.messages if "log(" in message] == [
        "log('lost', ...) was called outside of a stage, and nothing is logged."
    ]
    caplog.clear()
    assert len(brain.predict(list(torch.zeros(3, 1, 3).double()))) == 3
    assert caplog.messages == [], "what the forward pass logs is of no interest there"


def test_a_prediction_in_a_hook_changes_nothing_of_what_its_stage_logs():
    class Predicting(Logging):
        predicts = False

        def look(self):
            if self.predicts:
                self.predict(list(torch.zeros(3, 1, 3).double()))

        def compute_forward(self, batch, stage):
            self.log("calls", 1.0)
            return super().compute_forward(batch, stage)

    found = []
    for predicts in (False, True):
        brain = make(Predicting, hparams={"train_logger": TrainLoggers(own := Remembering())})
        brain.predicts = predicts
        brain.what = lambda brain, batch, stage, loss: brain.log("loss", loss)
        brain.at_end = lambda brain, *_: (brain.look(), brain.hparams.train_logger.log_stats({}))
        result = fit(brain)
        brain.evaluate(VALID)
        assert result.train_loss == result.logged["train"]["loss"]
        found.append((result.train_loss, result.logged, own.given))
    assert found[0] == found[1]


def test_a_recipe_that_saves_before_a_batch_is_trained_on_has_not_counted_it(tmp_path):
    def what(brain, batch, stage, loss):
        brain.log("batches", float(brain.step), 1)
        if brain.step == 4 and not brain.resumes:
            brain.checkpointer.save_checkpoint(end_of_epoch=False)
            raise RuntimeError("once")

    for resumes in (False, True):
        brain = logging(what, folder=tmp_path)
        brain.resumes = resumes
        with contextlib.nullcontext() if resumes else pytest.raises(RuntimeError, match="once"):
            result = fit(brain, batch_size=2)
    assert result.logged["train"] == {"batches": 3.5}


def test_a_recipe_that_logs_nothing_has_nothing():
    result = fit(make())
    assert result.logged == {}
    assert "logged" not in repr(result)
    assert hash(result)


@pytest.mark.parametrize("number", [float("nan"), torch.tensor(math.inf), np.float32("nan")])
def test_what_is_not_finite_is_left_out_and_told(number, caplog):
    def what(brain, batch, stage, loss):
        brain.log("x", number if brain.step == 2 else 1.0)
        brain.log("never", number)

    logged = fit(logging(what), valid=None).logged["train"]
    assert logged["x"] == 1.0
    assert math.isnan(logged["never"])
    words = "TRAIN: values of '%s' that are not finite are left out of its mean."
    assert [one for one in caplog.messages if "finite" in one] == [words % "never", words % "x"]


NUMBER = "give one number, or a tensor of one element"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("x", torch.zeros(3)),
            (
                r"log\('x', ...\) was given as its value a tensor of shape "
                rf"\(3,\) and .*: {NUMBER}"
            ),
        ),
        (
            ("x", torch.zeros((), dtype=torch.complex64)),
            ("its value a tensor of shape .* and torch.complex64"),
        ),
        (
            ("x", torch.zeros((), device="meta")),
            f"on the meta device, which has no values: {NUMBER}",
        ),
        (("x", torch.ones(1).to_sparse()), f"torch.float32, torch.sparse_coo: {NUMBER}"),
        (("x", "0.5"), f"as its value '0.5': {NUMBER}"),
        (("x", None), "as its value None"),
        (("x", [1.0]), r"as its value \[1.0\]"),
        (("x", 1.0, -1), f"as its count -1: {NUMBER}, which is >= 0"),
        (("x", 1.0, math.nan), "as its count nan"),
        (("x", 1.0, "3"), "as its count '3'"),
        ((3, 1.0), "log was given the name 3: give a string"),
        (("", 1.0), "log was given the name '': give a string"),
    ],
)
def test_what_cannot_be_logged(given, message):
    with pytest.raises(BatchError, match=message):
        fit(logging(lambda brain, *_: brain.log(*given)))


def test_a_name_is_used_in_one_way():
    def both(brain, *_):
        brain.log("x", 1.0)
        brain.log("x", 1.0, 2)

    twice = r"log\('x', ...\) was called in two ways in TRAIN: .* Give the two different names"
    with pytest.raises(BatchError, match=twice):
        fit(logging(both))

    def later(brain, batch, stage, loss):
        brain.log("x", 1.0, per_step=brain.progress.epoch == 2)

    with pytest.raises(BatchError, match=twice):
        fit(logging(later), (1, 2))
    with pytest.raises(BatchError, match=twice):
        fit(logging(lambda brain, *_: brain.log("x", 1.0), lambda brain, *_: brain.log("x", 1.0)))


def test_a_list_with_something_else_is_refused():
    with pytest.raises(
        ValueError,
        match="train_logger: 'log.txt' is not a train logger: it has no log_stats",
    ):
        make(hparams={"train_logger": [Remembering(), "log.txt"]})
    with pytest.raises(ValueError, match="Remembering'> is not a train logger: .* or is a class"):
        make(hparams={"train_logger": [Remembering]})
