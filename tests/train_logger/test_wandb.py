"""What W&B refuses is named and left out; all else of the row is there."""

from __future__ import annotations

import json

from ddpkit.train_logger import WandBLogger


class Run:
    """Takes what JSON has a form for, as W&B does."""

    def __init__(self):
        self.rows = {}
        self.is_away = False
        self.calls = 0

    def log(self, stats, step=None):
        self.calls += 1
        if self.is_away:
            raise ConnectionError("no route to W&B")
        json.dumps(stats)
        if "picture.png" in str(stats):
            raise FileNotFoundError("picture.png is not there")
        row = self.rows.setdefault(step, {})
        for name, value in stats.items():
            if isinstance(value, dict):
                row.setdefault(name, {}).update(value)
            else:
                row[name] = value


def test_a_value_that_wandb_refuses_is_named_once_and_the_rest_of_the_row_is_there(caplog):
    train_logger = WandBLogger(Run)
    for epoch in (1, 2):
        train_logger.log_stats({"epoch": epoch}, {"loss": 0.5, "odd": object()}, {"loss": 0.25})
    wanted = {"train": {"loss": 0.5}, "valid": {"loss": 0.25}}
    assert train_logger.run.rows == {epoch: {**wanted, "epoch": epoch} for epoch in (1, 2)}
    (said,) = caplog.messages
    assert said.startswith("W&B refuses the value 'train/odd': TypeError: Object of type object")
    assert not train_logger.lost


def test_a_row_without_a_step_is_there_without_what_is_refused():
    train_logger = WandBLogger(Run)
    train_logger.log_stats({}, {"loss": 0.5, "odd": object(), "error": 0.25})
    train_logger.log_stats({}, {"loss": 0.5, "picture": "picture.png"})
    assert train_logger.run.rows == {None: {"train": {"loss": 0.5, "error": 0.25}}}


def test_where_wandb_takes_nothing_no_value_is_blamed(caplog):
    train_logger = WandBLogger(Run)
    train_logger.log_stats({"epoch": 1}, {"odd": object()}, {"odd": object()})
    train_logger.log_stats({}, {"odd": object()})
    train_logger.run.is_away = True
    before = train_logger.run.calls
    train_logger.log_stats({"epoch": 2}, {"loss": 0.5, "error": 0.25})
    assert train_logger.run.calls == before + 1  # which may have waited for long
    assert train_logger.lost == 2
    assert any("does not take values" in message for message in caplog.messages)
