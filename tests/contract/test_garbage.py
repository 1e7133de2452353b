"""``gc_interval``: when Python collects garbage."""

from __future__ import annotations

import gc

import pytest

from tests.recipes import Regression, make, points


class Watched(Regression):
    """Notes whether Python collects by itself, and after which optimizer steps all garbage is
    collected.
    """

    fails_at = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic = []
        self.collected = []

    def note(self, phase, info):
        if phase == "start" and info["generation"] == 2:
            self.collected.append(self.optimizer_step)

    def on_fit_start(self):
        super().on_fit_start()
        gc.callbacks.append(self.note)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.automatic.append(gc.isenabled())
        if self.optimizer_step == self.fails_at:
            raise ValueError("it fails")


@pytest.fixture
def fit():
    def run(epochs=2, **options):
        brain = make(Watched, **options)
        brain.fit(range(epochs), points(10), points(4), train_loader_kwargs={"batch_size": 2})
        return brain

    before = list(gc.callbacks)
    yield run
    gc.callbacks[:] = before


@pytest.mark.costly
def test_all_garbage_is_collected_after_every_nth_optimizer_step_and_not_by_python(fit):
    brain = fit(gc_interval=3)
    assert (brain.collected, set(brain.automatic)) == ([3, 6, 9], {False})
    assert gc.isenabled()


def test_by_default_python_collects_when_it_does(fit):
    assert set(fit().automatic) == {True}


def test_python_collects_again_after_a_run_that_failed(fit, monkeypatch):
    monkeypatch.setattr(Watched, "fails_at", 4)
    with pytest.raises(ValueError, match="it fails"):
        fit(gc_interval=3)
    assert gc.isenabled()


@pytest.mark.costly
def test_a_script_that_switched_it_off_finds_it_off(fit):
    gc.disable()
    try:
        fit(gc_interval=3)
        assert not gc.isenabled()
    finally:
        gc.enable()
