"""What a recipe has nearly right, and would do nothing in silence: hooks, saves and steps that
never come.
"""

from __future__ import annotations

import functools

import pytest

from ddpkit.errors import BatchError
from tests.recipes import QUIET, Regression, linear, make, points, sgd

NEVER = "is never called by ddpkit; did you mean"
NO_STEP = "No optimizer step of {} was counted in its first epoch. Give opt_class, or"
NOTHING_SAVED = "A checkpointer was given and fit has saved nothing"


def named(*names, base=Regression):
    """Return a recipe with methods of these names."""
    return type(f"With_{names[0]}", (base,), {name: lambda self, *given: None for name in names})


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_fit_starts", "on_fit_start"),
        ("on_stgae_start", "on_stage_start"),
        ("predict_bach", "predict_batch"),
    ],
)
def test_a_method_with_nearly_the_name_of_a_hook_is_told_once(caplog, name, meant):
    brain = make(named(name))
    brain.fit([1], points(4))
    brain.evaluate(points(2))
    assert caplog.text.count(f"With_{name}.{name} {NEVER} {meant}?") == 1


def test_an_evaluation_tells_of_it_too(caplog):
    make(named("evaluate_bacth")).evaluate(points(2))
    assert f"{NEVER} evaluate_batch?" in caplog.text


def test_a_recipes_own_methods_are_not_told(caplog):
    class Own(
        named(
            "on_epoch_end",
            "compute_objective",
            "compute_metrics",
            "_on_fit_starts",
            "step_optimizer",
        )
    ):
        def fit_batches(self):
            return 0

        def optimizer_steps(self):
            return 0

        def _finish(self):
            self.optimizer_steps()

        @decorated
        def on_stage_start(self, stage, epoch=None):
            self.fit_batches()

    make(Own).fit([1], points(4))
    assert NEVER not in caplog.text, "the hook itself is there, or a method of the recipe calls it"


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_checkpoint()


def test_a_fit_that_has_saved_nothing_is_told_at_its_end(tmp_path, caplog):
    make(folder=tmp_path).fit([1], points(4))
    assert caplog.text.count(NOTHING_SAVED) == 1
    assert "save_and_keep_only() in on_stage_end" in caplog.text


@pytest.mark.parametrize(
    ("cls", "epochs", "options"),
    [(Saving, [1], {}), (Regression, [1], {"debug": True}), (Regression, [], {}),
     (Regression, [1], {"test_only": True}), (Regression, [1], {"ckpt_interval_steps": 1})],
)  # fmt: skip
def test_a_fit_that_has_saved_or_had_nothing_to_save_is_not(tmp_path, caplog, cls, epochs, options):
    make(cls, folder=tmp_path, **options).fit(epochs, points(4))
    assert NOTHING_SAVED not in caplog.text


class Forgetful(Regression):
    """Computes gradients, and steps as it is told to."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        self.backward(loss)
        type(self).steps(self)
        return loss.detach()

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])


def stepping(steps):
    return type("Recipe", (Forgetful,), {"steps": staticmethod(steps)})


@pytest.mark.parametrize("factor", [1, 2])
def test_a_fit_batch_that_never_steps_is_told_after_the_first_epoch(caplog, factor):
    brain = make(stepping(lambda brain: None), grad_accumulation_factor=factor)
    brain.fit([1, 2], points(6), train_loader_kwargs={"batch_size": 2})
    assert caplog.text.count(NO_STEP.format("Recipe")) == 1


def test_a_fit_batch_that_steps_is_not_told(caplog):
    make(stepping(lambda brain: brain.optimizers_step()), opt=sgd(lr=0.01)).fit([1, 2], points(6))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_fit_batch_that_steps_by_itself_is_told_that_this_is_not_counted(caplog):
    brain = make(stepping(lambda brain: brain.optimizer.step()), opt=sgd(lr=0.01))
    brain.fit([1, 2], points(6))
    assert brain.optimizer_step == 0
    assert caplog.text.count(NO_STEP.format("Recipe")) == 1


class Frozen(Regression):
    def freeze_optimizers(self, optimizers):
        return {}


class Forgotten(Regression):
    def freeze_optimizers(self, optimizers):
        """Lack a return."""


@pytest.mark.parametrize(
    ("cls", "opt"),
    [(Regression, None), (Frozen, sgd())],
    ids=[("no optimizer"), ("all frozen")],
)
def test_an_epoch_without_a_step_is_told(caplog, cls, opt):
    brain = cls({"net": linear()}, opt, run_opts=QUIET)
    brain.fit([1, 2], points(6))
    assert caplog.text.count(NO_STEP.format(cls.__name__)) == 1


def test_freeze_optimizers_without_a_return_is_an_error():
    with pytest.raises(
        BatchError,
        match="freeze_optimizers returned None: look for a missing return",
    ):
        make(Forgotten).fit([1], points(6))


def test_skipped_steps_and_an_evaluation_are_not_told(caplog):
    brain = make(stepping(lambda brain: brain.optimizers_step()), opt=sgd())
    brain.fit([1], [(x * float("nan"), y) for x, y in points(3)])
    brain.evaluate(points(2))
    make(stepping(lambda brain: None)).evaluate(points(2))
    assert "No optimizer step" not in caplog.text
