"""A recipe saves in any hook, the run ends right there, and the same command goes on: it ends as if
never stopped.
"""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import ddp_barrier, if_main_process
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.recipes import QUIET, Killed, Regression, assert_same, points, weights

DATA = points(11)
VALID = points(5, seed=6)
EVALUATES = ("TEST batch", "on_stage_end TEST", "predict_batch")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Going(Stream):
    """Goes on from epoch to epoch, and can say where it is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        is_over = False
        while not is_over:
            self.place += 1
            is_over = not self.place % 8
            yield DATA[self.place % len(DATA)]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Probe(Regression):
    """Saves once in the hook that ``saves_in`` names, at its ``at``-th call, and ends the process
    there.
    """

    saves_in: str | None = None
    at = 1
    end_of_epoch = False
    is_alone = False
    saves_between = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reported = {}
        self.calls = 0
        self.fits = 0

    def here(self, hook):
        if hook != self.saves_in:
            return
        self.calls += 1
        if self.calls == self.at:
            if if_main_process() or not self.is_alone:
                self.checkpointer.save_checkpoint(end_of_epoch=self.end_of_epoch)
                self.checkpointer.wait()
            ddp_barrier()
            raise Killed

    def save_between_calls(self):
        """Save as recipes do that train in two calls."""
        if self.saves_between:
            self.checkpointer.save_and_keep_only()

    def compute_forward(self, batch, stage):
        self.here(f"{stage.name} batch")
        return super().compute_forward(batch, stage)

    def on_fit_start(self):
        super().on_fit_start()
        self.fits += 1
        self.here("on_fit_start")

    def on_fit_batch_start(self, batch, should_step):
        self.here("on_fit_batch_start")

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.here("on_fit_batch_end")

    def optimizers_step(self):
        super().optimizers_step()
        self.here("optimizers_step")

    def evaluate_batch(self, batch, stage):
        loss = super().evaluate_batch(batch, stage)
        if stage is Stage.VALID:
            self.here("evaluate_batch")
        return loss

    def predict_batch(self, batch):
        self.here("predict_batch")
        return super().predict_batch(batch)

    def on_stage_start(self, stage, epoch=None):
        self.here(f"on_stage_start {stage.name}")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.reported[self.fits, stage.name, epoch] = stage_loss
        self.here(f"on_stage_end {stage.name}")


class OwnBatches(Probe):
    """Trains in a ``fit_batch`` of its own, and may save before, between and after its parts."""

    def fit_batch(self, batch):
        self.here("fit_batch begins")
        predictions = self.compute_forward(batch, Stage.TRAIN)
        loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            self.here("before the step")
            self.optimizers_step()
        return loss.detach()


class StepsLater(Probe):
    """Saves in ``optimizers_step`` before the step."""

    def optimizers_step(self):
        self.here("before the step")
        super().optimizers_step()


def epochs_of(brain, counter):
    """Yield the epochs of a counter; between two of them is the place of a save."""
    for epoch in counter:
        yield epoch
        brain.here("between epochs")


def make_probe(folder, *, kind=Probe, **options):
    torch.manual_seed(3)
    layers = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)
    net = nn.Sequential(*layers).double()
    counters = EpochCounter(2), EpochCounter(2)
    brain = kind(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        run_opts={**QUIET, **options},
        checkpointer=Checkpointer(
            folder,
            {"net": net, "first": counters[0], "second": counters[1]},
        ),
    )
    return brain, counters


def script(
    folder,
    *,
    saves_in=None,
    at=1,
    end_of_epoch=False,
    is_alone=False,
    num_calls=1,
    valid=VALID,
    batch_size=3,
    looped=None,
    is_stream=False,
    has_state=False,
    saves_between=False,
    **options,
):
    """Run the whole script of a user once; return the Brain, which may have been killed."""
    brain, counters = make_probe(folder, **options)
    brain.saves_in = saves_in
    brain.at = at
    brain.end_of_epoch = end_of_epoch
    brain.is_alone = is_alone
    brain.saves_between = saves_between
    data = Going() if has_state else Stream() if is_stream else DATA
    train = {"batch_size": batch_size}
    if data is DATA:
        train["shuffle"] = True
    if looped is not None:
        train["looped_nominal_epoch"] = looped
    kwargs = {"train_loader_kwargs": train, "valid_loader_kwargs": {"batch_size": 2}}
    try:
        for counter in counters[:num_calls]:
            brain.fit(epochs_of(brain, counter), data, valid, **kwargs)
            brain.here("after fit")
            brain.save_between_calls()
        if saves_in in EVALUATES:
            brain.on_evaluate_start = lambda **_: None  # nothing is recovered
            brain.evaluate(VALID, test_loader_kwargs={"batch_size": 2})
            brain.predict(VALID, loader_kwargs={"batch_size": 2})
    except Killed:
        pass
    else:
        assert saves_in is None, "the place of the save was not reached"
    return brain


@functools.cache
def uninterrupted(**options):
    with tempfile.TemporaryDirectory() as folder:
        return script(folder, **options)


def assert_goes_on(folder, *stops, **options):
    """Compare the run that ``stops``, each a place and its number, have ended with the one that
    nothing has ended.
    """
    plain = uninterrupted(**options)
    for saves_in, at, end_of_epoch in stops:
        script(folder, saves_in=saves_in, at=at, end_of_epoch=end_of_epoch, **options)
    resumed = script(folder, **options)
    assert resumed.optimizer_step == plain.optimizer_step
    assert_same(weights(resumed), weights(plain))
    if plain.ema is not None:
        assert_same(resumed.ema.state_dict(), plain.ema.state_dict())
    assert resumed.reported.items() <= plain.reported.items()
    return resumed


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


AVERAGED = {"ema_decay": 0.5, "evaluate_ema": True}
HOOKS = {
    "on_fit_start": 1,
    "on_stage_start TRAIN": 2,
    "on_fit_batch_start": 6,
    "TRAIN batch": 6,
    "optimizers_step": 6,
    "on_fit_batch_end": 6,
    "on_stage_end TRAIN": 2,
    "on_stage_start VALID": 2,
    "VALID batch": 5,
    "evaluate_batch": 5,
    "on_stage_end VALID": 2,
    "between epochs": 1,
    "after fit": 1,
    "TEST batch": 2,
    "on_stage_end TEST": 1,
    "predict_batch": 2,
}
WERE_WRONG = (
    "optimizers_step",
    "on_stage_start VALID",
    "VALID batch",
    "on_stage_end VALID",
    "between epochs",
    "after fit",
    "predict_batch",
)


@pytest.mark.parametrize("saves_in", [hook if hook in WERE_WRONG else slow(hook) for hook in HOOKS])
def test_a_save_in_any_hook_has_the_position_of_the_training(tmp_path, saves_in):
    assert_goes_on(tmp_path, (saves_in, HOOKS[saves_in], False), **AVERAGED)


VALIDATIONS = ("VALID batch", "on_stage_end VALID")
OTHER_RUNS = (
    {"ema_decay": 0.5},
    {"grad_accumulation_factor": 2},
    {"valid": None},
    {"ckpt_async": True},
    {"num_calls": 2},
    {"looped": 6},
    {"is_stream": True},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves_in", "options"),
    [
        (hook, options)
        for options in OTHER_RUNS
        for hook in ("on_stage_start TRAIN", "on_fit_batch_end", "on_stage_end TRAIN", *VALIDATIONS)
        if "valid" not in options or hook not in VALIDATIONS
    ],
    ids=str,
)
def test_a_save_in_any_hook_of_other_runs(tmp_path, saves_in, options):
    at = HOOKS[saves_in]
    if "grad_accumulation_factor" in options:  # outside of a window, where gradients wait
        at = {"optimizers_step": 3, "on_fit_batch_start": 7, "TRAIN batch": 7}.get(saves_in, at)
    assert_goes_on(tmp_path, (saves_in, at, False), **options)


LOOPED_STREAM = {"has_state": True, "looped": 4}


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (4, {"has_state": True}),
        slow(1, {"has_state": True}),
        slow(3, {"has_state": True, "grad_accumulation_factor": 2}),
        slow(4, {"has_state": True, "grad_accumulation_factor": 2}),
        (7, {"looped": 6}),
        slow(1, {"looped": 6}),
        slow(2, {"looped": 1}),
        slow(1, LOOPED_STREAM),
        slow(4, LOOPED_STREAM),  # a pass over the stream begins inside of the epoch
        slow(5, LOOPED_STREAM),
        slow(4, {"has_state": True, "looped": 3}),  # and here with it
        slow(4, {"has_state": True, "kind": OwnBatches, "saves_in": "fit_batch begins"}),
    ],
)
def test_a_save_in_the_first_batch_of_an_epoch_has_the_data_begin_there_again(
    tmp_path,
    at,
    options,
):
    options = dict(options)
    saves_in = options.pop("saves_in", "on_fit_batch_start")
    assert_goes_on(tmp_path, (saves_in, at, False), **options)


OWN = {"kind": OwnBatches}


@pytest.mark.parametrize(
    ("saves_in", "at", "options"),
    [
        ("fit_batch begins", 6, OWN),
        slow("fit_batch begins", 1, OWN),
        slow("fit_batch begins", 5, OWN),
        slow("fit_batch begins", 7, {**OWN, "grad_accumulation_factor": 2}),
        slow("fit_batch begins", 6, {**OWN, "ema_decay": 0.5}),
        slow("optimizers_step", 6, OWN),
    ],
)
def test_a_save_in_an_own_fit_batch_before_its_step_loses_no_batch(
    tmp_path,
    caplog,
    saves_in,
    at,
    options,
):
    """After the step, the mean loss alone is another."""
    plain = uninterrupted(**options)
    script(tmp_path, saves_in=saves_in, at=at, **options)
    resumed = script(tmp_path, **options)
    assert resumed.optimizer_step == plain.optimizer_step
    assert_same(weights(resumed), weights(plain))
    has_stepped = saves_in == "optimizers_step"
    assert ("will be without batch" in caplog.text) == has_stepped
    assert has_stepped or resumed.reported.items() <= plain.reported.items()


@pytest.mark.parametrize(
    ("saves_in", "at", "kind"),
    [
        ("on_fit_batch_start", 2, Probe),
        slow("TRAIN batch", 2, Probe),
        slow("before the step", 1, StepsLater),
        ("fit_batch begins", 2, OwnBatches),
        slow("before the step", 1, OwnBatches),
    ],
)
def test_a_save_in_the_last_batch_of_a_window_tells_that_its_gradients_are_lost(
    tmp_path,
    caplog,
    saves_in,
    at,
    kind,
):
    script(tmp_path, saves_in=saves_in, at=at, kind=kind, grad_accumulation_factor=2)
    assert "the gradients of 2 batch(es) are not in it" in caplog.text


IN_TRAINING = {
    "on_stage_start TRAIN",
    "on_fit_batch_start",
    "TRAIN batch",
    "optimizers_step",
    "on_fit_batch_end",
}


@pytest.mark.slow
@pytest.mark.parametrize("saves_in", [hook for hook in HOOKS if hook not in IN_TRAINING])
def test_a_save_that_says_an_epoch_has_ended_keeps_the_training(tmp_path, saves_in):
    """Where the training of the epoch is over, its validation alone is left out."""
    assert_goes_on(tmp_path, (saves_in, HOOKS[saves_in], True), **AVERAGED)


@pytest.mark.parametrize(
    ("saves_in", "words"),
    [
        ("on_stage_start TRAIN", "leaves out the rest of the epoch"),
        slow("on_stage_start VALID", "leaves that validation out"),
        slow("on_stage_end VALID", None),
    ],
)
def test_a_save_that_says_too_early_that_an_epoch_has_ended_is_warned_of(
    tmp_path,
    caplog,
    saves_in,
    words,
):
    script(tmp_path, saves_in=saves_in, at=1, end_of_epoch=True)
    told = [one.getMessage() for one in caplog.records if "end_of_epoch=True" in one.getMessage()]
    assert [text for text in told if words is None or words not in text] == []
    assert bool(told) == (words is not None)


BEFORE = ("TRAIN batch", 6, False)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("stops", "options"),
    [
        ([BEFORE, ("on_fit_start", 1, False)], {}),
        slow([BEFORE, ("on_fit_start", 1, True), ("on_fit_start", 1, False)], {"looped": 6}),
        slow([BEFORE, ("on_stage_start TRAIN", 1, False)], AVERAGED),
        slow([("VALID batch", 2, False), ("on_stage_start TRAIN", 1, False)], {"is_stream": True}),
        ([("on_fit_batch_end", 14, False), ("after fit", 1, False)], {"num_calls": 2}),
        slow([("on_fit_batch_end", 14, False), ("after fit", 1, True)], {"num_calls": 2}),
        slow([("VALID batch", 5, False), ("on_fit_start", 2, False)], {"num_calls": 2}),
    ],
)
def test_a_save_before_a_resumed_run_has_gone_on_keeps_its_position(tmp_path, stops, options):
    assert_goes_on(tmp_path, *stops, **options)


@pytest.mark.costly
def test_a_recipe_that_saves_between_two_calls_goes_on_in_the_second(tmp_path):
    """Started again it saves there once more, and that save replaces the one that it goes on
    from.
    """
    options = {"num_calls": 2, "saves_between": True}
    assert_goes_on(tmp_path, ("on_fit_batch_end", 14, False), **options)
