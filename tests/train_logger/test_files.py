"""A table, JSON lines and TensorBoard: at optimizer steps, and of a killed run each step once."""

from __future__ import annotations

import csv
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpkit.checkpointing import find_load_hook, find_save_hook
from ddpkit.errors import ConfigError
from ddpkit.train_logger import (
    CSVTrainLogger,
    FileTrainLogger,
    JSONLTrainLogger,
    TensorboardLogger,
)
from ddpkit.train_logger.event_files import EVENT_FILES, events_after
from ddpkit.train_logger.step_file import StandingRows
from tests.disks import fill, mounted
from tests.train_logger.recipes import ENDS, KILLED, NEWEST, STEPS, SavesFirst, train
from tests.unit.test_train_logger import scalars


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.costly
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


def loggers_in(folder):
    return [
        CSVTrainLogger(folder / "log.csv"),
        JSONLTrainLogger(folder / "log.jsonl"),
        TensorboardLogger(folder / "board"),
    ]


def shown_in(folder):
    """What each kind of file shows of losses: step and value, by stage."""
    table = rows_of(folder / "log.csv")
    lines = lines_of(folder / "log.jsonl")
    board = scalars(folder / "board")
    assert [row for row in table if any(row.values())] == table
    return [
        {stage: sorted(found) for stage in ("train", "valid", "test") if (found := of_stage(stage))}
        for of_stage in (
            lambda stage: [
                (int(row["optimizer_step"]), round(float(row[f"{stage}_loss"]), 5))
                for row in table
                if row.get(f"{stage}_loss")
            ],
            lambda stage: [
                (line["optimizer_step"], round(line[stage]["loss"], 5))
                for line in lines
                if stage in line
            ],
            lambda stage: board.get(f"loss/{stage}", []),
        )
    ]


@pytest.mark.costly
def test_a_validation_after_the_checkpoint_of_its_step_stands_once(tmp_path):
    train(tmp_path / "through", loggers_in(tmp_path / "through"), save_every=STEPS)
    expected = shown_in(tmp_path / "through")
    steps = {stage: [step for step, _ in values] for stage, values in expected[0].items()}
    assert steps == {"train": ENDS, "valid": ENDS}
    assert expected[1] == expected[2] == expected[0]
    killed = tmp_path / "killed"
    train(killed, loggers_in(killed), KILLED, save_every=STEPS)
    assert [row["optimizer_step"] for row in rows_of(killed / "log.csv")] == ["4", "8"]
    train(killed, loggers_in(killed), save_every=STEPS)
    assert shown_in(killed) == expected
    assert (killed / "log.csv").read_text() == (tmp_path / "through" / "log.csv").read_text()


@pytest.mark.costly
def test_a_row_that_is_logged_after_the_save_of_its_epoch_stays(tmp_path):
    how = {"recipe": SavesFirst, "save_every": 0}
    train(tmp_path, loggers_in(tmp_path), KILLED, **how)
    train(tmp_path, loggers_in(tmp_path), **how)
    for found in shown_in(tmp_path):
        steps = {stage: [step for step, _ in values] for stage, values in found.items()}
        assert steps == {"train": ENDS, "valid": ENDS}


@pytest.mark.costly
def test_a_test_of_the_checkpoint_stays_where_training_goes_on(tmp_path):
    train(tmp_path, loggers_in(tmp_path), epochs=2, save_every=STEPS, is_tested=True)
    tested = [found.pop("test") for found in shown_in(tmp_path)]
    assert [step for step, _ in tested[0]] == [ENDS[1]]
    train(tmp_path, loggers_in(tmp_path), epochs=3, save_every=STEPS, is_tested=True)
    for found, before in zip(shown_in(tmp_path), tested, strict=True):
        assert found["test"][:1] == before
        assert [step for step, _ in found["test"]] == ENDS[1:]
        assert [step for step, _ in found["valid"]] == ENDS
        assert [step for step, _ in found["train"]] == ENDS


@pytest.mark.costly
def test_an_older_checkpoint_replaces_what_came_after_it_and_nothing_else(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,optimizer_step,train_loss\n9,99,1.5\n")
    how = {"recipe": SavesFirst, "save_every": 0}
    train(tmp_path, loggers_in(tmp_path), **how)
    for folder in sorted((tmp_path / "save").glob("CKPT+*"))[1:]:
        shutil.rmtree(folder)
    train(tmp_path, loggers_in(tmp_path), **how)
    rows = rows_of(tmp_path / "log.csv")
    steps = [int(row["optimizer_step"]) for row in rows]
    assert steps == [99, *ENDS]  # the first is of an earlier run
    assert [line["optimizer_step"] for line in lines_of(tmp_path / "log.jsonl")] == ENDS


@pytest.mark.costly
def test_a_table_that_the_checkpoint_has_not_seen_loses_later_steps_alone(tmp_path):
    train(tmp_path, loggers_in(tmp_path), KILLED, save_every=STEPS)
    table = "epoch,optimizer_step,train_loss\n7,4,0.5\n7,8,0.5\n7,12,0.5\n"
    (tmp_path / "log.csv").write_text(table)
    train(tmp_path, loggers_in(tmp_path), save_every=STEPS)
    rows = rows_of(tmp_path / "log.csv")
    places = [(row["epoch"], row["optimizer_step"]) for row in rows]
    assert places == [("7", "4"), ("7", "8"), ("2", "8"), ("3", "12")]


def test_a_checkpoint_that_is_evaluated_takes_no_row_out(tmp_path):
    table = CSVTrainLogger(tmp_path / "log.csv")
    find_save_hook(table)(table, tmp_path / "state")
    table.log_stats({"epoch": 1, "optimizer_step": STEPS}, {"loss": 0.5})
    find_load_hook(table)(table, tmp_path / "state", True)  # no call of fit runs
    table.begin_fit(STEPS)
    table.log_stats({"epoch": 2, "optimizer_step": STEPS}, {"loss": 0.25})
    assert [row["epoch"] for row in rows_of(tmp_path / "log.csv")] == ["1", "2"]


def test_a_table_without_rows_keeps_its_names(tmp_path):
    table = CSVTrainLogger(tmp_path / "log.csv")
    table.log_stats({"epoch": 1, "optimizer_step": 9}, {"loss": 0.5})
    table.begin_fit(4)
    find_save_hook(table)(table, tmp_path / "state")
    assert (tmp_path / "log.csv").read_text() == "epoch,optimizer_step,train_loss\n"
    table.log_stats({"epoch": 1}, {"error": 0.5})
    assert rows_of(tmp_path / "log.csv") == [{"epoch": "1", "train_error": "0.5"}]


@pytest.mark.costly
def test_a_line_that_a_kill_has_torn_after_the_checkpoint_is_taken_out(tmp_path):
    train(tmp_path, loggers_in(tmp_path), KILLED, save_every=STEPS)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "st')
    train(tmp_path, loggers_in(tmp_path), save_every=STEPS)
    assert len(lines_of(tmp_path / "log.jsonl")) == len(ENDS)


def trained_one_after_another(folder, dies_at=None):
    """Train two Brains that have the same loggers; the second may be killed."""
    loggers = loggers_in(folder)[:2]
    train(folder / "first", loggers, epochs=1, recipe=SavesFirst)
    train(folder / "second", loggers, dies_at, recipe=SavesFirst)
    loss = "train_loss"
    return [(row["epoch"], row["optimizer_step"], row[loss]) for row in rows_of(folder / "log.csv")]


@pytest.mark.costly
def test_a_brain_that_is_done_leaves_the_rows_of_another_that_goes_on(tmp_path):
    """The first is done after 4 optimizer steps; the second had come to 11."""
    wanted = trained_one_after_another(tmp_path / "whole")
    killed = tmp_path / "killed"
    trained_one_after_another(killed, dies_at=11)
    assert trained_one_after_another(killed) == wanted
    steps = [line["optimizer_step"] for line in lines_of(killed / "log.jsonl")]
    assert steps == [STEPS, *ENDS]


@pytest.mark.costly
def test_a_row_between_two_calls_of_fit_leaves_those_of_a_brain_that_goes_on(tmp_path):
    """The script writes it where the first Brain is done."""
    for dies_at in (11, None):
        loggers = loggers_in(tmp_path)[:2]
        train(tmp_path / "first", loggers, epochs=1, recipe=SavesFirst)
        for train_logger in loggers:
            train_logger.log_stats({"note": "done"})
        train(tmp_path / "second", loggers, dies_at, recipe=SavesFirst)
    rows = [row for row in rows_of(tmp_path / "log.csv") if row["train_loss"]]
    assert [int(row["optimizer_step"]) for row in rows] == [STEPS, *ENDS]
    lines = [line for line in lines_of(tmp_path / "log.jsonl") if "train" in line]
    assert [line["optimizer_step"] for line in lines] == [STEPS, *ENDS]


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


def test_a_long_value_is_read_again(tmp_path):
    usual = csv.field_size_limit()
    table = CSVTrainLogger(tmp_path / "log.csv")
    matrix = [[0.5] * 300] * 300
    for epoch in (1, 2):
        table.log_stats({"epoch": epoch}, valid_stats={"confusion": torch.tensor(matrix)})
    assert (tmp_path / "log.csv").read_text().count(str(matrix)) == 2
    assert csv.field_size_limit() == usual


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
    lines = JSONLTrainLogger(path)
    lines.begin_fit(4)
    find_save_hook(lines)(lines, tmp_path / "state")
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


def test_logs_of_an_earlier_run_are_moved_to_one_folder_and_told_once(tmp_path, caplog):
    caplog.set_level("INFO")
    loggers = [
        CSVTrainLogger(tmp_path / "log.csv"),
        JSONLTrainLogger(tmp_path / "log.jsonl"),
        FileTrainLogger(tmp_path / "log.txt"),
    ]
    for train_logger in loggers:
        Path(train_logger.save_file).touch()
        os.utime(train_logger.save_file, (0, 0))
    for train_logger in loggers:
        train_logger.begin_anew()
        Path(train_logger.save_file).touch()
    (folder,) = tmp_path.glob("earlier-*")
    assert sorted(path.name for path in folder.iterdir()) == ["log.csv", "log.jsonl", "log.txt"]
    assert caplog.messages == [f"--resume=never: logs of an earlier run were moved to {folder}."]
    loggers[0].begin_anew()  # of a second run: that folder has such a file
    assert len([*tmp_path.glob("earlier-*")]) == 2


def await_clock_of_files(folder):
    """Wait until what is written is later than what was: that clock has few steps a second."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == before:
        probe.touch()


def test_each_new_run_of_a_process_moves_logs_to_a_folder_of_its_own(tmp_path):
    """The first run finds a table alone, and writes lines as well."""
    table = tmp_path / "log.csv"
    lines = tmp_path / "log.jsonl"
    table.write_text("of an earlier process")
    os.utime(table, (0, 0))
    for number in (1, 2):
        loggers = [JSONLTrainLogger(lines), CSVTrainLogger(table)]
        for train_logger in loggers:
            train_logger.begin_anew()
        await_clock_of_files(tmp_path)
        for train_logger in loggers:
            train_logger.log_stats({"epoch": number})
        await_clock_of_files(tmp_path)
    first, second = sorted(tmp_path.glob("earlier-*"), key=lambda folder: len([*folder.iterdir()]))
    assert [path.read_text() for path in first.iterdir()] == ["of an earlier process"]
    assert sorted(path.name for path in second.iterdir()) == ["log.csv", "log.jsonl"]


def test_tensors_without_numbers_in_memory_end_no_training(tmp_path, caplog):
    given = {
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.tensor([0.0, 2.0]).to_sparse(),
        "one": torch.tensor([3.0]).to_sparse(),
    }
    loggers = loggers_in(tmp_path)
    for train_logger in loggers:
        train_logger.log_stats({"epoch": 1}, given)
    loggers[-1].close()
    (line,) = lines_of(tmp_path / "log.jsonl")
    meta = "a tensor of shape (2,) without values"
    assert line["train"] == {"meta": meta, "sparse": [0.0, 2.0], "one": 3.0}
    (said,) = caplog.messages
    assert said.startswith("log_stats: train_stats['meta'] is a tensor on the meta device")


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path):
    told = r"^save_file='.*log.(csv|jsonl)' cannot be written: No space left on device\. Free some"
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=200k", "tmpfs") as folder:
        loggers = loggers_in(folder)[:2]
        fill(folder)
        for train_logger in loggers:
            with pytest.raises(ConfigError, match=told):
                train_logger.log_stats({"epoch": 1}, {"loss": 0.5})


def log_much(train_logger):
    for epoch in range(2, 100):
        train_logger.log_stats({"epoch": epoch}, {"note": "long" * 1000})


# TensorBoard's thread ends with the error, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_is_told_with_the_folder_of_tensorboard(tmp_path):
    threads_before = set(threading.enumerate())
    words = ("-t", "tmpfs", "-o", "size=200k", "tmpfs")
    told = r"save_dir='.*small' cannot be written: No space left on device\. Free some space"
    with mounted(tmp_path / "small", *words) as folder:
        train_logger = TensorboardLogger(folder)
        train_logger.log_stats({"epoch": 1}, {"loss": 0.5})
        fill(folder)
        with pytest.raises(ConfigError, match=told):
            log_much(train_logger)
        with pytest.raises(ConfigError, match=told):
            train_logger.close()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join()  # its error belongs to this test


def test_values_that_no_file_has_a_form_for_end_no_training(tmp_path):
    odd = {"half": "a\ud800b", "complex": torch.tensor(1 + 2j), "huge": 10**400}
    loggers = loggers_in(tmp_path)
    for train_logger in loggers:
        train_logger.log_stats({"epoch": 1}, odd)
    loggers[-1].close()
    (row,) = rows_of(tmp_path / "log.csv")
    assert row["train_half"] == r"a\ud800b"
    assert row["train_complex"] == "(1+2j)"
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert line["train"] == {"half": odd["half"], "complex": "(1+2j)", "huge": 10**400}


def test_two_loggers_of_one_file_are_refused_before_training(tmp_path):
    table = CSVTrainLogger(tmp_path / "log.csv")
    others = [
        CSVTrainLogger(tmp_path / "." / "log.csv"),
        FileTrainLogger(tmp_path / "log.csv"),
    ]
    for other in others:
        with pytest.raises(ConfigError, match="TrainLogger both have save_file='.*log.csv'"):
            train(tmp_path, [other, table])
    assert not (tmp_path / "log.csv").exists()


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"\xff" * 40, id="no length"),
        pytest.param(b"\x08" + b"\0" * 11 + b"\xff" * 12, id="no event"),
    ],
)
def test_what_a_crash_leaves_at_the_end_of_an_event_file_ends_no_start(tmp_path, rest):
    TensorboardLogger(tmp_path).log_stats({"epoch": 1}, {"loss": 0.5})
    known = len([*events_after(tmp_path, {})])
    (file,) = tmp_path.glob(EVENT_FILES)
    with file.open("ab") as end:
        end.write(rest)
    assert known > 1
    assert len([*events_after(tmp_path, {})]) == known


def test_curves_in_json_lines(tmp_path):
    train_logger = JSONLTrainLogger(tmp_path / "log.jsonl")
    train_logger.log_step({"loss": 0.5}, 7)
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert (line["event"], line["optimizer_step"], line["values"]) == ("step", 7, {"loss": 0.5})


def test_elements_of_a_list_are_counted_and_stay_after_a_restart(tmp_path):
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


def test_a_row_that_is_gone_from_the_file_needs_no_room():
    """Somebody has taken it out while the run went on."""
    kind = SimpleNamespace(names_of=lambda _: frozenset({"loss"}), step_of=lambda _: 4)
    standing = StandingRows(kind, ["a", "b"], known=1, step=4)
    assert standing.has(4, frozenset({"loss"}))
    assert standing.without(["a"], frozenset({"loss"})) == ["a"]
    assert not standing.has(4, frozenset({"loss"}))


def test_a_row_whose_names_the_table_has_is_added_at_its_end(tmp_path):
    """The table is not written anew for each row, which would take longer with each."""
    path = tmp_path / "log.csv"
    table = CSVTrainLogger(path)
    table.log_stats({"epoch": 1}, {"loss": 0.5, "error": 1})
    file = path.stat().st_ino
    table.log_stats({"epoch": 2}, {"error": 'a "word", or two\nlines'})
    assert path.stat().st_ino == file
    table.log_stats({"epoch": 3}, {"rate": 0.25})  # a new name
    assert [[*row.values()] for row in rows_of(path)] == [
        ["1", "0.5", "1", ""],
        ["2", "", 'a "word", or two\nlines', ""],
        ["3", "", "", "0.25"],
    ]


def test_a_row_comes_on_a_line_of_its_own(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,train_loss\n9,1.5")  # edited by hand, or torn
    CSVTrainLogger(path).log_stats({"epoch": 1}, {"loss": 0.5})
    assert path.read_text() == "epoch,train_loss\n9,1.5\n1,0.5\n"


@pytest.mark.costly
def test_a_row_that_a_crash_has_torn_after_the_checkpoint_is_taken_out(tmp_path):
    train(tmp_path, loggers_in(tmp_path), KILLED, save_every=STEPS)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("2")  # the epoch, and no more
    train(tmp_path, loggers_in(tmp_path), save_every=STEPS)
    assert all(row["optimizer_step"] for row in rows_of(tmp_path / "log.csv"))


@pytest.mark.costly
@pytest.mark.parametrize("last", ["", "0."])
def test_a_row_whose_last_value_a_crash_has_torn_is_taken_out(tmp_path, last):
    """It has a value for each name, and stands at the checkpoint's own step."""
    train(tmp_path / "through", loggers_in(tmp_path / "through"), save_every=STEPS)
    killed = tmp_path / "killed"
    train(killed, loggers_in(killed), KILLED, save_every=STEPS)
    whole = (killed / "log.csv").read_text()
    (killed / "log.csv").write_text(whole[: whole.rindex(",") + 1] + last)
    train(killed, loggers_in(killed), save_every=STEPS)
    assert (killed / "log.csv").read_text() == (tmp_path / "through" / "log.csv").read_text()


def test_a_row_is_added_under_its_own_name_where_a_table_has_a_name_twice(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,epoch,train_loss\n1,1,0.5\n")
    CSVTrainLogger(path).log_stats({"epoch": 2}, {"loss": 0.25})
    assert path.read_text() == "epoch,train_loss\n1,0.5\n2,0.25\n"


def test_statistics_without_a_value_need_no_folder(tmp_path):
    table = CSVTrainLogger(tmp_path / "new" / "log.csv")
    table.log_stats({})
    table.log_stats({"epoch": 1})
    assert rows_of(tmp_path / "new" / "log.csv") == [{"epoch": "1"}]
