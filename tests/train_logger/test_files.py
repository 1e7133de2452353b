"""A table, JSON lines and TensorBoard: at optimizer steps, and of a killed run each step once."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ddpkit.errors import ConfigError
from ddpkit.train_logger import CSVTrainLogger, JSONLTrainLogger, TensorboardLogger
from tests.train_logger.recipes import ENDS, KILLED, NEWEST, train
from tests.unit.test_train_logger import scalars


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_killed_run_has_each_step_once_in_files(tmp_path):
    def loggers():
        return [
            CSVTrainLogger(tmp_path / "log.csv"),
            JSONLTrainLogger(tmp_path / "log.jsonl"),
            TensorboardLogger(tmp_path / "board"),
        ]

    train(tmp_path, loggers(), KILLED)
    assert [row["optimizer_step"] for row in rows_of(tmp_path / "log.csv")] == ["4", "8"]
    train(tmp_path, loggers(), is_tested=True)
    rows = rows_of(tmp_path / "log.csv")
    assert [int(row["optimizer_step"]) for row in rows] == [*ENDS, NEWEST]
    assert [row["epoch"] for row in rows] == ["1", "2", "3", ""]
    assert rows[-1]["test_loss"]
    assert not rows[0]["test_loss"]
    assert [line["optimizer_step"] for line in lines_of(tmp_path / "log.jsonl")] == [*ENDS, NEWEST]
    drawn = scalars(tmp_path / "board")
    steps = {tag: [step for step, _ in values] for tag, values in drawn.items()}
    assert steps == {
        **dict.fromkeys(("epoch", "loss/train", "error/train", "loss/valid", "error/valid"), ENDS),
        "loss/test": [NEWEST],
        "error/test": [NEWEST],
    }


def test_a_run_that_begins_leaves_what_is_there(tmp_path):
    CSVTrainLogger(tmp_path / "log.csv").log_stats({"epoch": 9, "optimizer_step": 99})
    line = '{"event": "stats", "optimizer_step": 99}\n'
    (tmp_path / "log.jsonl").write_text(line)
    train(
        tmp_path, [CSVTrainLogger(tmp_path / "log.csv"), JSONLTrainLogger(tmp_path / "log.jsonl")]
    )
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["9", "1", "2", "3"]
    assert (tmp_path / "log.jsonl").read_text().startswith(line)


def test_names_that_come_later_have_a_column_of_their_own(tmp_path):
    table = CSVTrainLogger(tmp_path / "new" / "log.csv")
    table.log_stats({"epoch": 1, "note": "a, b"}, {"loss": 1 / 3})
    table.log_stats({"epoch": 2}, valid_stats={"loss": float("nan")})
    assert rows_of(tmp_path / "new" / "log.csv") == [
        {"epoch": "1", "note": "a, b", "train_loss": str(1 / 3), "valid_loss": ""},
        {"epoch": "2", "note": "", "train_loss": "", "valid_loss": "nan"},
    ]


def test_a_file_that_is_no_table_is_refused_before_training(tmp_path):
    (tmp_path / "log.csv").write_text("a\n1,2\n")
    with pytest.raises(ConfigError, match=r"log\.csv' has a row with more values"):
        CSVTrainLogger(tmp_path / "log.csv").require_writable()
    (tmp_path / "log.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as a table"):
        CSVTrainLogger(tmp_path / "log.csv").require_writable()
    for cls in (CSVTrainLogger, JSONLTrainLogger):
        with pytest.raises(ConfigError, match="it is a folder"):
            cls(tmp_path).require_writable()


def test_a_line_that_a_crash_has_torn_is_left_and_ended(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "stats", "optimizer_step": 5}\n{"event": "st')
    JSONLTrainLogger(path).begin_fit(4)
    assert path.read_text() == '{"event": "st\n'


def test_a_new_run_moves_tables_and_lines_away(tmp_path):
    for train_logger in (
        CSVTrainLogger(tmp_path / "log.csv"),
        JSONLTrainLogger(tmp_path / "log.jsonl"),
    ):
        train_logger.log_stats({"epoch": 1})
        train_logger.begin_anew()  # it has written in this process
        assert Path(train_logger.save_file).exists()
        type(train_logger)(train_logger.save_file).begin_anew()
        assert not Path(train_logger.save_file).exists()


def test_curves_in_json_lines(tmp_path):
    train_logger = JSONLTrainLogger(tmp_path / "log.jsonl")
    train_logger.log_step({"loss": 0.5}, 7)
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert (line["event"], line["optimizer_step"], line["values"]) == ("step", 7, {"loss": 0.5})


def test_elements_of_a_list_are_counted_and_stay_after_a_restart(tmp_path):
    from ddpkit.checkpointing import find_load_hook, find_save_hook

    first = TensorboardLogger(tmp_path / "board")
    first.log_stats({}, {"losses": [3.0, 2.0, 1.0]})
    find_save_hook(first)(first, tmp_path / "state")
    first.close()
    second = TensorboardLogger(tmp_path / "board")
    find_load_hook(second)(second, tmp_path / "state", True)
    second.begin_fit(1)  # fewer optimizer steps than elements: none of them may be hidden
    second.log_stats({}, {"losses": [0.5]})
    second.close()
    assert scalars(tmp_path / "board")["losses/train"] == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)]
