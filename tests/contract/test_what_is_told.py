"""What a person is told without asking: what becomes of gradients, what is trained on how much,
where it is kept.
"""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path

import pytest
import torch

from ddpkit.base import POSITION
from ddpkit.epoch_loop import EpochCounter
from ddpkit.experiment import close_experiment, create_experiment_directory
from ddpkit.optim import take_step
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage
from tests.launching import Run, python
from tests.reading_blocks import block_rows
from tests.recipes import Killed, Mortal, Regression, make, points, sgd


@pytest.fixture
def events(tmp_path):
    """Return a function that reads what the run has written down so far."""
    path = tmp_path / "metrics.jsonl"
    set_run_log(path)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    set_run_log(None)


def rows(caplog):
    """Return the rows of all blocks that were printed, by name."""
    texts = [
        record.getMessage() for record in caplog.records if record.name == "ddpkit.run.preflight"
    ]
    return block_rows("\n".join(texts))


# ---------------------------------------------------------------------------------------- the block


def test_the_start_says_what_optimizes_and_what_is_validated(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="ddpkit")
    create_experiment_directory("results/1", save_env_desc=False)
    try:
        brain = make(opt=sgd(lr=0.03))
        brain.fit([1], points(6), points(5), valid_loader_kwargs={"batch_size": 2})
    finally:
        close_experiment()
    said = rows(caplog)
    assert said["optimizer"] == "SGD, lr 0.03"
    assert said["valid set"] == "5 samples in 3 batches of 2"
    assert "per step" not in said
    assert "  optimizer  SGD, lr 0.03\n" in Path("results/1/log.txt").read_text()


def test_the_start_says_each_groups_learning_rate_and_each_optimizers(caplog):
    class Several(Regression):
        def init_optimizers(self):
            net = self.modules.net
            groups = [{"params": [net.bias], "lr": 0.1}, {"params": [net.weight], "lr": 0.01}]
            self.optimizers_dict = {
                "sgd": torch.optim.SGD(groups),
                "adam": torch.optim.Adam([net.bias], lr=0.5),
            }

    class Single(Regression):
        def init_optimizers(self):
            self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=0.25)

    caplog.set_level("INFO", logger="ddpkit")
    make(Several).fit([1], points(4))
    assert rows(caplog)["optimizer"] == "sgd: SGD, lr 0.1, 0.01; adam: Adam, lr 0.5"
    make(Single).fit([1], points(4))
    assert rows(caplog)["optimizer"] == "SGD, lr 0.25"
    assert "valid set" not in rows(caplog)


# -------------------------------------------------------------------------------------- where it is


def here():
    return POSITION.own_status(0, 0.0, look=False).place()


def test_a_table_says_what_fit_and_evaluate_do_before_their_first_stage(tmp_path):
    class Recovering(torch.nn.Linear):
        def load_state_dict(self, *args, **kwargs):
            places.append(here())
            return super().load_state_dict(*args, **kwargs)

    class Placed(Regression):
        def make_dataloader(self, *args, **kwargs):
            places.append(here())
            return super().make_dataloader(*args, **kwargs)

        def init_optimizers(self):
            places.append(here())
            super().init_optimizers()

        def on_stage_start(self, stage, epoch=None):
            places.append(here())

        def fit_batch(self, batch):
            places.append(here())
            return super().fit_batch(batch)

    def run(epochs):
        counter = EpochCounter(epochs)
        brain = make(
            Placed,
            net=Recovering(3, 1).double(),
            folder=tmp_path,
            recoverables={"counter": counter},
        )
        brain.fit(counter, points(2), points(2), train_loader_kwargs={"batch_size": 2})
        brain.checkpointer.save_checkpoint()
        return brain

    places = []
    run(1)
    before = "in fit, before the first stage"
    loaders = [f"{before}: making the loader of {name}" for name in ("TRAIN", "VALID")]
    batch = "in TRAIN of epoch %d at step 1"
    assert places[:5] == [*loaders, f"{before}: on_fit_start", before, batch % 1]
    places.clear()
    brain = run(2)
    recovering = f"{before}: recovering a checkpoint"
    assert places[:6] == [*loaders, f"{before}: on_fit_start", recovering, before, batch % 2]
    places.clear()
    brain.evaluate(points(2))
    before = "in evaluate, before the first stage"
    assert places == [
        f"{before}: making the loader of TEST",
        (f"{before}: recovering a checkpoint"),
        before,
    ]
    assert here() == ""


# ----------------------------------------------------------------------------------------- clipping


def steep(number, large):
    """Return samples of which the first ``large`` have gradients far beyond 5, and the others
    hardly any.
    """
    data = points(number)
    return [
        (x * (1000 if n < large else 1e-9), y * (1 if n < large else 1e-9))
        for n, (x, y) in enumerate(data)
    ]


class Telling(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.TRAIN:
            self.shares = [*getattr(self, "shares", []), self.progress.clipped_share]


def test_the_start_says_that_gradients_are_clipped_and_the_epoch_how_often(caplog, events):
    caplog.set_level("INFO", logger="ddpkit")
    brain = make(Telling, opt=sgd(lr=1e-9))
    data = steep(8, large=2)
    brain.fit([1, 2], data, data, train_loader_kwargs={"batch_size": 1})
    assert rows(caplog)["clipping"] == "gradient norm at most 5.0 (--max_grad_norm)"
    said = (
        "epoch %d: the gradients of 2 of 8 optimizer steps were clipped to norm 5.0 "
        "(--max_grad_norm)."
    )
    assert [said % 1 in caplog.messages, said % 2 in caplog.messages] == [True, True]
    assert brain.shares == [0.25, 0.25]
    stages = [event for event in events() if event["event"] == "stage"]
    assert [event.get("clipped_share") for event in stages] == [0.25, None, 0.25, None]


@pytest.mark.costly
def test_a_test_is_written_with_the_epoch_and_the_steps_of_its_weights(events, tmp_path):
    class Saving(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.TEST:
                self.log("score", 1.0)
            elif self.checkpointer is not None:
                self.checkpointer.save_and_keep_only(meta={"order": -epoch}, num_to_keep=9)

    def last_test():
        stage, logged = [one for one in events() if one.get("stage") == "TEST"][-2:]
        assert (stage["event"], logged["event"]) == ("stage", "logged")
        assert stage["epoch"] == logged["epoch"]
        return stage["epoch"], stage["optimizer_step"]

    def evaluated(brain, **keys):
        brain.evaluate(data, **keys)
        return last_test()

    counter = EpochCounter(3)
    data = points(8)
    brain = make(Saving, folder=tmp_path / "save", recoverables={"counter": counter})
    assert evaluated(brain) == (None, 0)
    brain.fit(counter, data, train_loader_kwargs={"batch_size": 4})
    assert evaluated(brain, max_key="order") == (1, 2)
    assert evaluated(brain) == (3, 6)
    assert evaluated(make(Saving, folder=tmp_path / "save"), max_key="order") == (1, 2)
    without = make(Saving)
    without.fit([1, 2], data, train_loader_kwargs={"batch_size": 4})
    assert evaluated(without) == (2, 4)


def test_the_share_of_clipped_steps_is_that_of_torch_by_hand(events):
    """Plain linear regression by hand, with torch's own clipping: the same number of steps is
    clipped.
    """
    data = [(3 * x, y) for x, y in points(40)]
    clipped = 0
    brain = make(opt=sgd(lr=0.01), max_grad_norm=7.0)
    twin = torch.nn.Linear(3, 1).double()
    twin.load_state_dict(brain.raw_modules["net"].state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for start in range(0, 40, 4):
        inputs, targets = (torch.stack(part) for part in zip(*data[start : start + 4], strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(inputs), targets).backward()
        clipped += bool(torch.nn.utils.clip_grad_norm_(twin.parameters(), 7.0) > 7.0)
        optimizer.step()
    assert 0 < clipped < 10
    brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    assert [one["clipped_share"] for one in events() if one["event"] == "stage"] == [clipped / 10]


@pytest.mark.parametrize("max_grad_norm", [None, 0.0, -1.0])
def test_no_clipping_is_said_too(caplog, events, max_grad_norm):
    caplog.set_level("INFO", logger="ddpkit")
    make(max_grad_norm=max_grad_norm, opt=sgd(lr=1e-9)).fit([1], steep(4, large=4))
    assert rows(caplog)["clipping"] == f"none, as max_grad_norm={max_grad_norm} says"
    assert [one["clipped_share"] for one in events() if one["event"] == "stage"] == [0.0]
    assert "clipped" not in caplog.text


def test_without_an_optimizer_nothing_is_said_of_clipping(caplog):
    class Unoptimized(Regression):
        def fit_batch(self, batch):
            return super().evaluate_batch(batch, Stage.VALID)

    caplog.set_level("INFO", logger="ddpkit")
    brain = make(Unoptimized)
    brain.opt_class = None
    brain.fit([1], points(4))
    assert "clipping" not in rows(caplog)


@pytest.mark.slow
def test_the_share_of_an_epoch_that_was_resumed_is_that_of_the_whole_epoch(tmp_path, events):
    def run(folder, dies_at=None):
        counter = EpochCounter(2)
        brain = make(
            Mortal,
            opt=sgd(lr=1e-9),
            folder=folder,
            recoverables={"counter": counter},
            ckpt_interval_steps=1,
        )
        brain.dies_at = dies_at
        brain.fit(counter, steep(8, large=3), train_loader_kwargs={"batch_size": 1})

    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", dies_at=6)
    run(tmp_path / "killed")
    shares = [event["clipped_share"] for event in events() if event["event"] == "stage"]
    assert shares == [3 / 8] * 4


@pytest.mark.parametrize(
    ("norm", "max_norm", "clipped"),
    [(3, 5.0, False), (5, 5.0, False), (6, 5.0, True)],
)
def test_a_step_that_is_skipped_or_within_the_norm_is_not_clipped(norm, max_norm, clipped):
    for value in (float(norm), math.inf):
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([value])
        result = take_step([torch.optim.SGD([weight], lr=1.0)], max_norm)
        assert result.clipped is (clipped and result.stepped)


@pytest.mark.parametrize(
    ("size", "words"),
    [(1, "1 sample in 1 batch of 1"), (2, ("2 samples in 2 batches of 1"))],
)
def test_the_block_counts_in_english(size, words, caplog):
    caplog.set_level("INFO", logger="ddpkit")
    make().fit([1], points(6), points(size), valid_loader_kwargs={"batch_size": 1})
    assert rows(caplog)["valid set"] == words


def test_clipping_is_said_once_where_logging_is_not_set_up(tmp_path):
    script = """
        import torch, ddpkit
        class Steep(ddpkit.Brain):
            def compute_forward(self, batch, stage):
                return self.modules.net(batch[0])
            def compute_objectives(self, predictions, batch, stage):
                return 1e4 * (predictions - batch[1]).square().mean()
        data = [(torch.ones(1), torch.ones(1))] * 4
        options = {"device": "cpu", "noprogressbar": True}
        brain = Steep({"net": torch.nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=1e-3), run_opts=options)
        brain.fit(range(1, 4), data)
    """  # noqa: E501
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    run = Run(python("train.py"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert run.err.count("4 of 4 optimizer steps were clipped to norm 5.0") == 1, run.err


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({}, None),
        ({"ema_decay": 0.9}, "of the weights, decay 0.9, not used in evaluation"),
        ({"ema_decay": 0.9, "evaluate_ema": True}, "of the weights, decay 0.9, used in evaluation"),
    ],
)
def test_the_start_tells_whether_weights_are_averaged(caplog, options, row):
    caplog.set_level("INFO")
    make(Regression, **options).fit([1], points(4))
    assert rows(caplog).get("average") == row
