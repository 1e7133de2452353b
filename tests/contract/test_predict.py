"""Predictions: every batch is a step, and a run that is asked to stop does."""

from __future__ import annotations

import contextlib
import json
import signal

import pytest

from ddpkit.base import POSITION
from ddpkit.control.signals import _Listeners
from ddpkit.errors import RunStopped
from tests.recipes import Regression, make, points


@contextlib.contextmanager
def handlers_kept():
    """Put back the handlers that stay after a stop."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        _Listeners.before = {}
        _Listeners.active.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Noting(Regression):
    """Notes where it is in every batch, and may be sent a signal in one."""

    at = 0
    number = signal.SIGTERM

    def predict_batch(self, batch):
        self.marks = [*getattr(self, "marks", []), POSITION.mark()]
        self.places = [
            *getattr(self, "places", []),
            POSITION.own_status(0, 0.0, look=False).place(),
        ]
        if self.step == self.at:
            signal.raise_signal(self.number)
        return super().predict_batch(batch)


def test_every_batch_of_predict_counts_as_a_step():
    brain = make(Noting)
    brain.step = 7
    brain.predict(points(8), loader_kwargs={"batch_size": 2})
    assert len(set(brain.marks)) == 4, "or the watchdog would take a long prediction for a hang"
    assert brain.places == [f"in TEST at step {step}" for step in (1, 2, 3, 4)]
    assert brain.step == 7


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_stops_predict(tmp_path, name, code):
    class Asked(Noting):
        at = 2
        number = getattr(signal, name)

    brain = make(Asked, hparams={"output_folder": str(tmp_path)})
    brain.step = 7
    with handlers_kept(), pytest.raises(RunStopped) as caught:
        brain.predict(points(20), loader_kwargs={"batch_size": 2})
    assert (caught.value.code, caught.value.cause) == (code, name)
    assert len(brain.marks) <= 3, (
        "it is asked after the first batch, and after two more: batches take no time here"
    )
    found = json.loads((tmp_path / "stopped.json").read_text())
    assert (found["reason"], found["exit_code"]) == (name, code)
    assert (found["stage"], found["step"]) == ("TEST", len(brain.marks))
    assert (brain.step, brain.progress.stage_batches) == (7, None)


def test_the_time_limit_stops_predict():
    brain = make(Noting, time_limit="0.01")
    with handlers_kept(), pytest.raises(RunStopped, match="75"):
        brain.predict(points(20), loader_kwargs={"batch_size": 2})
    assert len(brain.marks) == 1
