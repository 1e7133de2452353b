"""What all loggers of trackers do alike: open, go on in the same run, and outlive a failure."""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest

from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.train_logger import MLflowLogger, TrackioLogger, WandBLogger
from ddpkit.train_logger.batch_sender import MOST_WAITING, BatchSender, within
from ddpkit.train_logger.tracker import TrackerLogger
from tests.train_logger.recipes import ENDS, KILLED, train


class InMemory(TrackerLogger):
    """A tracker that is a dict of runs."""

    tracker = "Memory"
    package = "json"

    def __init__(self, runs, *, fails=0):
        super().__init__()
        self.runs = runs
        self.fails = fails

    def open_run(self):
        run_id = self.run_id or f"run{len(self.runs)}"
        self.runs.setdefault(run_id, [])
        return run_id

    def write(self, values, step):
        if self.fails:
            self.fails -= 1
            raise ConnectionError(f"no route to the tracker ({self.fails + 1} tries left)")
        self.runs[self.run_id].append((step, dict(values)))


@pytest.mark.costly
def test_a_run_that_is_started_again_goes_on_in_the_run_of_the_tracker(tmp_path):
    runs = {}
    train(tmp_path, InMemory(runs), KILLED)
    assert list(runs) == ["run0"]
    train(tmp_path, [InMemory(runs)])
    assert list(runs) == ["run0"]
    assert [step for step, _ in runs["run0"]] == [4, 8, 8, 12]
    assert runs["run0"][-1][1].keys() == {
        "epoch",
        "train/loss",
        "train/error",
        "valid/loss",
        "valid/error",
    }


def test_a_tracker_that_fails_is_told_once_and_training_goes_on(tmp_path, caplog):
    runs = {}
    train_logger = InMemory(runs, fails=2)
    assert train(tmp_path, train_logger).progress.optimizer_step == ENDS[-1]
    assert [step for step, _ in runs["run0"]] == ENDS[-1:]
    assert train_logger.lost == 2
    said = [message for message in caplog.messages if "does not take values" in message]
    assert len(said) == 1
    assert "no route to the tracker (2 tries left)" in said[0]


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_its_first_epoch(tmp_path):
    class Closed(InMemory):
        def open_run(self):
            raise PermissionError("no key")

    with pytest.raises(ConfigError, match="Memory cannot be opened: PermissionError: no key"):
        train(tmp_path, Closed({}))


def test_other_ranks_open_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    runs = {}
    InMemory(runs).log_stats({"epoch": 1})
    assert not runs


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: MLflowLogger("a"), "mlflow"),
        (lambda: TrackioLogger("a"), "trackio"),
        (lambda: WandBLogger(project="a"), "wandb"),
    ],
)
def test_a_tracker_that_is_not_installed_is_named(monkeypatch, make, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"Run `pip install {package}`"):
        make()


# ------------------------------------------------------------------------- the thread of a tracker


def wait_until(is_so, seconds=20.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it never came"
        threading.Event().wait(0.001)


def test_what_fails_is_sent_again_in_its_order():
    got = []
    fails = [ConnectionError("away"), ConnectionError("away")]

    def send(values):
        if fails:
            raise fails.pop()
        got.extend(values)

    sender = BatchSender("a list", send, first_pause=0.001)
    sender.add([1, 2])
    sender.add([3])
    wait_until(lambda: not fails)
    assert sender.close(seconds=10) == 0
    assert got == [1, 2, 3]


class Receiver:
    """Takes values but for some, all or none of a call; may be away for some calls."""

    def __init__(self, *refused, error=ValueError):
        self.refused = set(refused)
        self.error = error
        self.got = []
        self.calls_away = 0

    def __call__(self, values):
        if self.calls_away:
            self.calls_away -= 1
            raise ConnectionError(f"away, connection {self.calls_away}")
        if bad := self.refused & set(values):
            raise self.error(f"no value may be {bad}")
        self.got.extend(values)


def is_value_error(error):
    return isinstance(error, ValueError)


def test_a_value_that_is_refused_is_named_once_and_holds_up_no_other(caplog):
    receiver = Receiver(3, 7)
    sender = BatchSender("a list", receiver, refuses=is_value_error, name="number {}".format)
    sender.add([*range(10), 7])
    assert sender.close(seconds=10) == 0
    assert receiver.got == [0, 1, 2, 4, 5, 6, 8, 9]
    assert sender.refused == 3
    assert [message.split(":")[0] for message in caplog.messages] == [
        "a list refuses the value 'number 3'",
        "a list refuses the value 'number 7'",
    ]


def test_a_value_that_fails_while_others_get_through_is_left_out(caplog):
    receiver = Receiver(3, error=RuntimeError)
    sender = BatchSender("a list", receiver, first_pause=0.0001)
    sender.add(range(10))
    wait_until(lambda: len(receiver.got) == 9)
    assert sender.close(seconds=10) == 0
    assert sorted(receiver.got) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert "a list refuses the value '3'" in caplog.text


def test_a_receiver_that_is_away_loses_no_value_and_is_told_once(caplog):
    receiver = Receiver(3)
    receiver.calls_away = 20
    sender = BatchSender("a list", receiver, first_pause=0.0001, refuses=is_value_error)
    sender.add([*range(50)])
    wait_until(lambda: len(receiver.got) == 49)
    assert sender.close(seconds=10) == 0
    assert sorted(receiver.got) == [n for n in range(50) if n != 3]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "a list does not take values",
        "a list refuses the value '3'",
    ]


def test_what_a_receiver_does_not_take_at_the_end_is_counted():
    receiver = Receiver()
    receiver.calls_away = 10**6
    sender = BatchSender("a list", receiver, first_pause=60.0)
    sender.add(range(30))
    assert sender.close(seconds=10) == 30


def test_what_does_not_answer_holds_up_nobody():
    is_over = threading.Event()
    sender = BatchSender("a wall", lambda values: is_over.wait())
    sender.add([1])
    assert sender.close(seconds=0.05) == 1
    is_over.set()


def test_the_oldest_values_give_way():
    is_over = threading.Event()
    sender = BatchSender("a wall", lambda values: is_over.wait())
    sender.add(range(MOST_WAITING + 5))
    assert sender.dropped == 5
    is_over.set()
    assert sender.close(seconds=10) == 5


def test_an_answer_that_does_not_come_in_time():
    is_over = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in 0 seconds"):
        within(0.01, is_over.wait)
    is_over.set()
    with pytest.raises(KeyError, match="gone"):
        within(5.0, lambda: {}["gone"])
