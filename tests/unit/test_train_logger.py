"""Train loggers and the run's log, in one process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpkit.checkpointing import find_load_hook, find_save_hook
from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.train_logger import (
    FileTrainLogger,
    ProgressSampleLogger,
    RunLog,
    TensorboardLogger,
    TrainLogger,
    TrainLoggers,
    WandBLogger,
    run_event,
    set_run_log,
)


@pytest.fixture(autouse=True)
def _no_run_log():
    yield
    set_run_log(None)


def read(path):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in Path(path).read_text().splitlines()]


# ------------------------------------------------------------------------------------ the run's log


def test_one_complete_json_line_per_event(tmp_path):
    log = RunLog(tmp_path / "new" / "metrics.jsonl")
    log.write("start", command=["train.py", "a b"], text="line\nbreak é")
    log.write("step", number=3)
    first, second = read(log.path)
    assert list(first) == ["event", "time", "command", "text"]
    assert (first["event"], first["command"], first["text"]) == (
        "start",
        ["train.py", "a b"],
        "line\nbreak é",
    )
    assert second["number"] == 3
    assert first["time"] <= second["time"]


def test_values_are_plain_and_precise(tmp_path):
    class Odd:
        def __str__(self):
            return "odd"

    values = {
        "scalar": torch.tensor(0.1, dtype=torch.float64, requires_grad=True),
        "one": torch.tensor([3]),
        "vector": torch.tensor([1.0, 2.0]),
        "bf16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "numpy": np.float64(0.1),
        "float32": np.float32(0.5),
        "bool": np.bool_(True),
        "array": np.array([[1, 2]]),
        "empty": torch.zeros(0),
        "path": Path("a/b"),
        "nested": {1: (None, {"a": True})},
        "object": Odd(),
        "third": 1 / 3,
        "big": 2**70,
    }
    log = RunLog(tmp_path / "metrics.jsonl")
    log.write("values", **values)
    written = read(log.path)[0]
    assert {name: written[name] for name in values} == {
        "scalar": 0.1,
        "one": 3,
        "vector": [1.0, 2.0],
        "bf16": [1.0, 2.0],
        "numpy": 0.1,
        "float32": 0.5,
        "bool": True,
        "array": [[1, 2]],
        "empty": [],
        "path": "a/b",
        "nested": {"1": [None, {"a": True}]},
        "object": "odd",
        "third": 1 / 3,
        "big": 2**70,
    }


def test_floats_that_json_does_not_know(tmp_path):
    log = RunLog(tmp_path / "metrics.jsonl")
    log.write("loss", values=[math.nan, math.inf, -math.inf], tensor=torch.tensor(math.nan))
    written = read(log.path)[0]
    assert written["values"] == ["NaN", "Infinity", "-Infinity"]
    assert written["tensor"] == "NaN"
    assert [float(value) for value in written["values"][1:]] == [math.inf, -math.inf]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count writes")
def test_a_line_is_written_in_one_piece(tmp_path):
    def writes():
        return int(Path("/proc/self/io").read_text().partition("syscw: ")[2].split()[0])

    log = RunLog(tmp_path / "metrics.jsonl")
    before = writes()
    log.write("a", numbers=list(range(10000)))
    assert writes() - before == 1
    assert json.loads(log.path.read_text())["numbers"][-1] == 9999


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_names_the_file():
    with pytest.raises(
        ConfigError,
        match="the run's log '/dev/full' cannot be written: No space left",
    ):
        RunLog("/dev/full").write("a")
    with pytest.raises(ConfigError, match="save_file='/dev/full' cannot be written: No space left"):
        FileTrainLogger("/dev/full").log_stats({"epoch": 1})


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    set_run_log(tmp_path / "metrics.jsonl")
    run_event("a")
    FileTrainLogger(tmp_path / "log.txt").log_stats({"epoch": 1})
    board = TensorboardLogger(tmp_path / "board")
    board.log_stats({"epoch": 1})
    assert board.writer is None
    WandBLogger(pytest.fail).log_stats({"epoch": 1})
    assert not list(tmp_path.iterdir())


def test_events_go_to_the_log_that_is_set(tmp_path):
    run_event("nowhere")
    log = set_run_log(tmp_path / "metrics.jsonl")
    run_event("a", number=1)
    assert log.path == tmp_path / "metrics.jsonl"
    assert set_run_log(None) is None
    run_event("nowhere")
    assert [line["event"] for line in read(tmp_path / "metrics.jsonl")] == ["a"]


# ------------------------------------------------------------------------------------ the text file


def test_the_format_of_the_text_file(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "new" / "train_log.txt"
    train_logger = FileTrainLogger(path)
    train_logger.log_stats(
        {"epoch": 1, "lr": 1e-4},
        train_stats={"loss": 2.314, "low": 1.0, "high": 100.0},
        valid_stats={"loss": torch.tensor(0.5), "WER": np.float32(12.34), "name": "a"},
        test_stats={"loss": float("nan"), "minus": -5.0, "count": torch.tensor(7)},
    )
    train_logger.log_stats({"epoch": 2}, verbose=False)
    first = (
        "epoch: 1, lr: 1.00e-04 - train loss: 2.31, train low: 1.00e+00, train high: 1.00e+02"
        " - valid loss: 5.00e-01, valid WER: 12.34, valid name: a - test loss: nan,"
        " test minus: -5.00e+00, test count: 7"
    )
    assert path.read_text() == f"{first}\nepoch: 2\n"
    assert caplog.messages == [first]


def test_precision(tmp_path):
    train_logger = FileTrainLogger(tmp_path / "log.txt", precision=4)
    train_logger.log_stats({"a": 2.0, "b": 0.5})
    assert (tmp_path / "log.txt").read_text() == "a: 2.0000, b: 5.0000e-01\n"
    for precision in ("many", -1, True, 1.5):
        with pytest.raises(ConfigError, match="precision=.* must be a whole number >= 0"):
            FileTrainLogger(tmp_path / "log.txt", precision=precision)


def test_the_caller_s_statistics_are_not_changed(tmp_path):
    stats = {"loss": torch.tensor(0.5)}
    FileTrainLogger(tmp_path / "log.txt").log_stats({"epoch": 1}, stats)
    assert list(stats) == ["loss"]
    assert isinstance(stats["loss"], torch.Tensor)


def test_without_a_run_log_the_statistics_go_beside_the_file(tmp_path):
    FileTrainLogger(tmp_path / "log.txt").log_stats({"epoch": 1}, {"loss": 1 / 3})
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["event"], line["meta"], line["train"]) == ("stats", {"epoch": 1}, {"loss": 1 / 3})
    assert "valid" not in line


def test_with_a_run_log_they_go_there_only(tmp_path):
    set_run_log(tmp_path / "run.jsonl")
    FileTrainLogger(tmp_path / "log.txt").log_stats({"epoch": 1}, {"loss": 0.5})
    assert len(read(tmp_path / "run.jsonl")) == 1
    assert not (tmp_path / "metrics.jsonl").exists()


def test_statistics_given_to_several_loggers_are_one_event(tmp_path):
    set_run_log(tmp_path / "run.jsonl")
    loggers = [
        FileTrainLogger(tmp_path / "a.txt"),
        TensorboardLogger(tmp_path / "board"),
        FileTrainLogger(tmp_path / "b.txt"),
    ]
    for epoch in (1, 2):
        for train_logger in loggers:
            train_logger.log_stats({"epoch": epoch}, {"loss": float("nan")})
    loggers[1].close()
    assert [line["meta"]["epoch"] for line in read(tmp_path / "run.jsonl")] == [1, 2]


def test_a_subclass_must_log():
    with pytest.raises(NotImplementedError, match="Mine must override log_stats"):
        type("Mine", (TrainLogger,), {})().log_stats({})


# -------------------------------------------------------------------------------------- TensorBoard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_writes_and_goes_on_after_a_restart(tmp_path):
    first = TensorboardLogger(tmp_path / "board")
    first.log_stats({"epoch": 1, "note": "text"}, {"loss": [3.0, 2.0]}, {"loss": torch.tensor(1.5)})
    first.log_stats({"epoch": 2}, {"loss": torch.tensor([1.0, 0.5])})
    find_save_hook(first)(first, tmp_path / "board.ckpt")
    first.close()
    second = TensorboardLogger(tmp_path / "board")
    find_load_hook(second)(second, tmp_path / "board.ckpt", True)
    second.log_stats({"epoch": 3}, {"loss": 0.25}, test_stats={"loss": 9.0})
    second.close()
    second.close()
    assert scalars(tmp_path / "board") == {
        "epoch": [(1, 1.0), (2, 2.0), (3, 3.0)],
        "loss/train": [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5), (5, 0.25)],
        "loss/valid": [(1, 1.5)],
        "loss/test": [(1, 9.0)],
    }


def test_tensorboard_writes_sounds_and_pictures(tmp_path):
    board = TensorboardLogger(tmp_path)
    board.log_audio("sound", torch.zeros(100), 8000)
    board.log_figure("picture", torch.rand(4, 5))
    board.close()
    assert list(tmp_path.iterdir())


def test_tensorboard_makes_nothing_before_it_is_used(tmp_path):
    board = TensorboardLogger(tmp_path / "board")
    board.close()
    assert not (tmp_path / "board").exists()


def test_tensorboard_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="Run `pip install tensorboard`"):
        TensorboardLogger(tmp_path)


# --------------------------------------------------------------------------------- Weights & Biases


class Run:
    def __init__(self, *args, **kwargs):
        self.given = args, kwargs
        self.logged = []

    def log(self, stats, **options):
        self.logged.append((stats, options))


def test_wandb():
    picture = object()
    train_logger = WandBLogger(initializer=Run, project="p")
    train_logger.log_stats(
        {"epoch": 3, "lr": 0.1},
        {"loss": torch.tensor(0.5)},
        {"picture": picture},
    )
    train_logger.log_stats({"lr": np.float64(0.1)}, test_stats={"loss": 1})
    assert train_logger.run.given == ((), {"project": "p"})
    assert train_logger.run.logged == [
        (
            {"train": {"loss": 0.5}, "valid": {"picture": picture}, "epoch": 3, "lr": 0.1},
            {"step": 3},
        ),
        ({"test": {"loss": 1}, "lr": 0.1}, {}),
    ]


def test_2_5_wandb_s_own_error_is_shown():
    def initializer():
        raise RuntimeError("no API key")

    with pytest.raises(ConfigError, match="failed with RuntimeError: no API key") as caught:
        WandBLogger(initializer)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_wandb_without_an_initializer(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="WandBLogger needs wandb"):
        WandBLogger(None)


def test_tensorboard_draws_steps_beside_epochs(tmp_path):
    board = TensorboardLogger(tmp_path)
    board.log_step({"loss": 0.75}, 7)
    board.log_stats({"epoch": 1}, {"loss": 0.5})
    board.close()
    assert scalars(tmp_path) == {
        "loss/train_step": [(7, 0.75)],
        "epoch": [(1, 1.0)],
        "loss/train": [(1, 0.5)],
    }


def test_several_loggers_report_the_same(tmp_path, caplog):
    caplog.set_level("INFO")
    given = []

    class Own(TrainLogger):
        def log_stats(self, stats_meta, **stats):
            given.append((stats_meta, stats))

    files = [FileTrainLogger(tmp_path / name) for name in ("a.txt", "b.txt")]
    both = TrainLoggers(*files, Own(), type("Duck", (), {"log_stats": lambda *_, **__: None})())
    set_run_log(tmp_path / "run.jsonl")
    both.log_stats(stats_meta={"epoch": 1}, valid_stats={"loss": 2.5}, verbose=False)
    both.log_stats({"epoch": 2})
    both.log_step({"x": 1.0}, 3)
    assert list(both)[:2] == files
    assert (tmp_path / "a.txt").read_text() == "epoch: 1 - valid loss: 2.50\nepoch: 2\n"
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "b.txt").read_text()
    assert given == [
        ({"epoch": 1}, {"valid_stats": {"loss": 2.5}, "verbose": False}),
        ({"epoch": 2}, {}),
    ]
    assert caplog.messages == ["epoch: 2"] * 2
    assert len(read(tmp_path / "run.jsonl")) == 2


# --------------------------------------------------------------------------------- progress samples


def test_progress_samples_are_saved_by_epoch_and_name(tmp_path):
    def write(data, path, end):
        Path(path).write_text(f"{data}{end}")

    text = {"extension": "txt", "saver": write, "kwargs": {"end": "!"}}
    samples = ProgressSampleLogger(
        tmp_path / "out",
        {"batch": "raw", "words": "text"},
        {"text": text},
        2,
    )
    weight = torch.ones(3, requires_grad=True)
    batch = {"x": weight * 2, "names": ["a", "b", "c"], "lengths": (1, 2, 3)}
    samples.remember(batch=samples.get_batch_sample(batch), words="first")
    samples.remember(words="second")
    samples.save(epoch=4)
    assert sorted(path.name for path in (tmp_path / "out" / "4").iterdir()) == [
        "batch.pth",
        "words.txt",
    ]
    saved = torch.load(tmp_path / "out" / "4" / "batch.pth")
    assert torch.equal(saved["x"], torch.full((2,), 2.0))
    assert not saved["x"].requires_grad
    assert (saved["names"], saved["lengths"]) == (["a", "b"], (1, 2, 3))
    assert (tmp_path / "out" / "4" / "words.txt").read_text() == "second!"
    samples.reset()
    samples.save(epoch=5)
    assert not (tmp_path / "out" / "5").exists()


def test_progress_samples_that_cannot_be_saved(tmp_path, monkeypatch):
    with pytest.raises(KeyError, match="wav"):
        ProgressSampleLogger(tmp_path, {"x": "wav"}).save_item("x", 1, 1)
    monkeypatch.setitem(sys.modules, "torchvision.utils", None)
    with pytest.raises(MissingExtraError, match="Run `pip install torchvision`"):
        ProgressSampleLogger(tmp_path).save_item("picture", torch.ones(3, 2, 2), 1)
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match="output_path='.*file': '.*x.pth' cannot be written: Not a directory",
    ):
        ProgressSampleLogger(tmp_path / "file", {"x": "raw"}).save_item("x", 1, 1)
