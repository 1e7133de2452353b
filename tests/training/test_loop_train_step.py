"""The hooks of a recipe without a Brain around them: one batch, one optimizer step, and what
surrounds them.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ddpkit.brain import Brain, run_of
from ddpkit.errors import BatchError, NonFiniteLossError
from ddpkit.types import Stage


class Line(Brain):
    """y = w x with a squared error; remembers what was called."""

    def __init__(self, scaler=None, **given):
        options = {"device": "cpu", "max_grad_norm": 0, **given}
        modules = {"net": nn.Linear(1, 1, bias=False)}
        super().__init__(modules, lambda those: torch.optim.SGD(those, lr=0.1), run_opts=options)
        self.modules.net.weight.data.fill_(2.0)
        self.progress.epoch = self.progress.step = 1
        self.scaler = scaler or self.scaler
        self.called = []

    @property
    def weight(self):
        return self.modules.net.weight.item()

    def compute_forward(self, batch, stage):
        self.called.append(("forward", stage.name, self.step))
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions**2).mean() / 2

    def on_fit_batch_start(self, batch, should_step):
        self.called.append(("start", should_step))

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.called.append(("end", loss.requires_grad, should_step, self.weight))


def line(**given):
    made = Line(**given)
    made.init_optimizers()
    return made


ONE = torch.ones(1, 1)


class Offset(Line):
    """Its loss has a term whose gradient is a view of what the backward pass starts from."""

    def __init__(self):
        super().__init__(grad_accumulation_factor=4)
        self.modules.net.register_parameter("offset", nn.Parameter(torch.zeros(1)))
        self.modules.net.register_parameter("other", nn.Parameter(torch.zeros(1)))

    def compute_objectives(self, predictions, batch, stage):
        net = self.modules.net
        return (
            super().compute_objectives(predictions, batch, stage)
            + net.other.sum()
            + net.offset.squeeze()
        )


def test_gradients_that_share_memory_with_the_weight_of_the_loss_are_right():
    brain = Offset()
    brain.fit([1, 2], [ONE] * 8, train_loader_kwargs={"batch_size": None})
    net = brain.modules.net
    assert (net.offset.item(), net.other.item()) == pytest.approx((-0.4, -0.4))


class Tripled(torch.autograd.Function):
    """Writes to the gradient that it is given where autograd does not see it, as a collective
    does.
    """

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.data.mul_(3)
        return grad


def test_a_backward_pass_that_writes_to_the_gradient_of_the_loss_changes_that_batch_only():
    class Writes(Line):
        def compute_objectives(self, predictions, batch, stage):
            return Tripled.apply(super().compute_objectives(predictions, batch, stage))

    brain = Writes(grad_accumulation_factor=4)
    brain.fit([1, 2], [ONE] * 4, train_loader_kwargs={"batch_size": None})
    assert brain.weight == pytest.approx(2.0 * (1 - 0.1 * 3) ** 2)


def test_a_hook_that_writes_to_a_gradient_of_the_loss_changes_that_batch_only():
    class Doubles(Line):
        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            if self.step == 2:
                loss.register_hook(lambda grad: grad.mul_(2))
            return loss

    brain = Doubles(grad_accumulation_factor=4)
    brain.fit([1], [ONE] * 4, train_loader_kwargs={"batch_size": None})
    assert brain.weight == pytest.approx(2.0 - 0.1 * 2.0 * (1 + 2 + 1 + 1) / 4)


def test_one_batch():
    brain = line()
    loss = brain.fit_batch(ONE)
    assert loss.item() == 2.0
    assert not loss.requires_grad
    assert brain.weight == pytest.approx(1.8)
    assert brain.called == [
        ("start", True),
        ("forward", "TRAIN", 1),
        ("end", True, True, pytest.approx(1.8)),
    ]
    assert (brain.step, brain.optimizer_step, brain.nonfinite_count) == (1, 1, 0)
    assert brain.modules.net.weight.grad is None


def test_a_window_of_batches():
    brain = line()
    window = brain.progress.window
    for step, (closes, scale) in enumerate([(False, 0.25), (False, 0.25), (True, 0.5)], 1):
        brain.step = step
        window.closes = closes
        window.loss_scale = scale
        brain.fit_batch(ONE)
    assert brain.optimizer_step == 1
    assert brain.weight == pytest.approx(1.8), "the weights of the window add up to one"
    assert window.num_deferred(3) == 0


def test_the_correction_of_a_stream_is_for_losses_that_were_weighed():
    brain = line()
    window = brain.progress.window
    window.loss_scale = 0.5
    window.correction = 2.0
    brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(1.8)
    own = line()
    own.progress.window.correction = 2.0
    (own.modules.net(ONE) ** 2 / 2).sum().backward()
    own.optimizers_step()
    assert own.weight == pytest.approx(1.8), (
        "a fit_batch of the recipe's own has not used the scale"
    )


class Sums(Line):
    """Returns a sum and a count, of which the test decides the kind."""

    counts: list

    def compute_objectives(self, predictions, batch, stage):
        count = self.counts.pop(0)
        return (predictions**2).sum() / 2 * float(count), count


def sums(*counts, **given):
    made = Sums(**given)
    made.init_optimizers()
    made.counts = list(counts)
    return made


@pytest.mark.parametrize(
    "kind",
    [int, float, torch.tensor, lambda count: torch.tensor([float(count)])],
)
def test_a_window_of_sums_is_divided_by_what_it_counts(kind):
    brain = sums(kind(3), kind(5))
    window = brain.progress.window
    results = []
    for step, closes in enumerate([False, True], 1):
        brain.step = step
        window.closes = closes
        window.loss_scale = 99.0
        results.append(brain.fit_batch(ONE))
    assert brain.weight == pytest.approx(1.8), "the gradient of the mean"
    assert [float(loss) for loss, _ in results] == [6.0, 10.0]
    assert [float(count) for _, count in results] == [3.0, 5.0]
    assert not any(loss.requires_grad for loss, _ in results)
    assert brain.called[2] == ("end", True, False, 2.0)
    assert window.counted is None, "the next window begins anew"


def test_sums_with_a_loss_scale_are_unscaled_before_they_are_divided():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    brain = sums(torch.tensor(3), 5, scaler=scaler)
    window = brain.progress.window
    for step, closes in enumerate([False, True], 1):
        brain.step = step
        window.closes = closes
        brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(1.8)
    assert (brain.optimizer_step, brain.nonfinite_count) == (1, 0)


def test_a_repeated_batch_counts_nothing():
    brain = sums(torch.tensor(3))
    brain.progress.window.count = 0
    (loss, count) = brain.fit_batch(ONE)
    assert (loss.item(), count) == (6.0, 0.0)
    assert brain.weight == 2.0


def test_a_step_that_counts_nothing_is_left_out(caplog):
    for nothing in (0, torch.tensor(0)):
        brain = sums(nothing)
        brain.fit_batch(ONE)
        assert (brain.weight, brain.optimizer_step, brain.nonfinite_count) == (2.0, 0, 0)
    assert "was 0 over all batches" in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_means_and_sums_do_not_mix_in_a_window(first):
    brain = sums(2)
    window = brain.progress.window
    right = brain.compute_objectives
    for step, closes in enumerate([False, True], 1):
        brain.step = step
        window.closes = closes
        mean = (step == 1) == first
        brain.compute_objectives = (
            (lambda predictions, batch, stage: predictions.mean()) if mean else right
        )
        if closes:
            with pytest.raises(
                BatchError,
                match=r"^Sums\.compute_objectives returned a mean "
                r"loss for some",
            ):
                brain.fit_batch(ONE)
        else:
            brain.fit_batch(ONE)


def test_a_mean_between_two_sums():
    brain = sums(2, 2)
    right = brain.compute_objectives
    window = brain.progress.window
    brain.step = 1
    window.closes = False
    brain.fit_batch(ONE)
    brain.step = 2
    brain.compute_objectives = lambda predictions, batch, stage: predictions.mean()
    with pytest.raises(BatchError, match="for some micro-batches of an optimizer step and"):
        brain.fit_batch(ONE)
    assert right


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.bool])
def test_counts_are_added_up_in_the_widest_float(dtype):
    one = torch.tensor(1 if dtype is torch.bool else 200, dtype=dtype)
    brain = sums(one, one)
    window = brain.progress.window
    for step, closes in enumerate([False, True], 1):
        brain.step = step
        window.closes = closes
        brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(1.8)


def test_counts_that_make_no_sense():
    brain = sums(torch.tensor(-3.0))
    with pytest.raises(BatchError, match="with counts that add up to less than 0"):
        brain.fit_batch(ONE)
    assert brain.weight == 2.0
    for wrong in (math.inf, math.nan, True, "2"):
        brain = sums(1)
        brain.compute_objectives = lambda predictions, batch, stage, wrong=wrong: (
            predictions.sum(),
            wrong,
        )
        with pytest.raises(BatchError, match="which is not a number >= 0"):
            brain.fit_batch(ONE)
    brain = sums(np.int64(2))
    brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(1.8)


def test_evaluation_of_sums():
    brain = sums(4)
    with torch.no_grad():
        loss, count = brain.evaluate_batch(ONE, Stage.VALID)
    assert (loss.item(), count) == (8.0, 4)


def test_hooks_that_must_be_overridden():
    class Bare(Brain):
        pass

    bare = Bare(run_opts={"device": "cpu"})
    for call in (
        lambda: bare.compute_forward(1, Stage.TRAIN),
        lambda: bare.compute_objectives(1, 1, Stage.TRAIN),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"^Bare must define "
            r"compute_(forward|objectives)\(self, ",
        ):
            call()
    for call in (bare.on_stage_start, bare.on_fit_batch_start):
        assert call(None, None) is None
    assert bare.on_stage_end(Stage.VALID, 0.0) is None
    assert bare.on_fit_batch_end(None, None, None, should_step=True) is None


def test_losses_that_cannot_be_used_name_the_recipe():
    class Wrong(Line):
        loss = 3.0

        def compute_objectives(self, predictions, batch, stage):
            return self.loss

    wrong = Wrong()
    wrong.init_optimizers()
    with pytest.raises(BatchError, match=r"^Wrong\.compute_objectives returned a float"):
        wrong.fit_batch(ONE)
    assert wrong.evaluate_batch(ONE, Stage.VALID) == 3.0
    Wrong.loss = "text"
    with pytest.raises(BatchError, match=r"^Wrong\.compute_objectives returned a str"):
        wrong.evaluate_batch(ONE, Stage.VALID)


def test_evaluation():
    brain = line()
    with torch.no_grad():
        assert brain.evaluate_batch(ONE, Stage.TEST).item() == 2.0
    assert brain.called == [("forward", "TEST", 1)]
    assert brain.weight == 2.0


# ---------------------------------------------------------------------------------- optimizer steps


def test_a_skipped_step_is_counted_and_patience_ends(caplog):
    brain = line(nonfinite_patience=1)
    bad = torch.full((1, 1), math.inf)
    with caplog.at_level(logging.WARNING):
        brain.fit_batch(bad)
    assert (brain.weight, brain.optimizer_step, brain.nonfinite_count) == (2.0, 0, 1)
    assert "step skipped on all ranks" in caplog.text
    brain.fit_batch(ONE)
    assert brain.optimizer_step == 1
    with pytest.raises(NonFiniteLossError, match="2 steps of epoch 1"):
        brain.fit_batch(bad)
    assert brain.weight == pytest.approx(1.8)


def test_gradients_that_are_not_finite_may_be_left_out(caplog):
    brain = Line(skip_nonfinite_grads=True)
    brain.modules["other"] = nn.Linear(1, 1, bias=False)
    brain.init_optimizers()
    brain.modules.net.weight.grad = torch.tensor([[math.nan]])
    brain.modules.other.weight.grad = torch.tensor([[1.0]])
    before = brain.modules.other.weight.item()
    with caplog.at_level(logging.WARNING):
        brain.optimizers_step()
    assert brain.weight == 2.0
    assert brain.modules.other.weight.item() == pytest.approx(before - 0.1)
    assert (brain.optimizer_step, brain.nonfinite_count) == (1, 0)
    assert "The gradient of net.weight is not finite and is left out of step 1." in caplog.messages


def test_the_scaler_looks_for_its_scale_without_being_counted_at_first():
    """Overflows while the scale comes down are its business; below one it is not the scale that
    overflows.
    """
    brain = line(scaler=torch.amp.GradScaler("cpu", init_scale=4.0), nonfinite_patience=1)
    bad = torch.full((1, 1), math.inf)
    for scale, counted in ((2.0, 0), (1.0, 0), (0.5, 1)):
        brain.fit_batch(bad)
        assert (brain.scaler.get_scale(), brain.nonfinite_count) == (scale, counted)
    assert brain.optimizer_step == 0
    with pytest.raises(NonFiniteLossError):
        brain.fit_batch(bad)
    assert brain.weight == 2.0


def test_clipping_is_an_option():
    brain = line(max_grad_norm=0.5)
    brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(2.0 - 0.1 * 0.5)


def test_without_optimizers_nothing_steps():
    brain = Line()
    brain.opt_class = None
    brain.init_optimizers()
    brain.fit_batch(ONE)
    brain.zero_grad()
    assert (brain.weight, brain.optimizer_step) == (2.0, 0)


def test_an_optimizer_set_by_hand_steps():
    """Some recipes set ``self.optimizer`` and no dict."""
    brain = Line()
    brain.optimizer = torch.optim.SGD(brain.modules.parameters(), lr=0.5)
    brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(1.0)


def test_frozen_optimizers_do_not_step_and_what_a_window_gave_them_ends_with_it():
    """Else it would be in the first step after the freezing, from all the windows before; and in no
    checkpoint.
    """

    class Freezing(Line):
        def freeze_optimizers(self, optimizers):
            return {name: one for name, one in optimizers.items() if name != "other"}

    brain = Freezing()
    other = nn.Parameter(torch.ones(1))
    brain.init_optimizers()
    brain.optimizers_dict["other"] = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(1)
    brain.fit_batch(ONE)
    assert run_of(brain).train_step.freezes
    assert not run_of(line()).train_step.freezes
    assert other.grad is not None, "another step of the same batch may be to come"
    run_of(brain).train_step.drop_frozen_gradients()
    assert other.item() == 1.0
    assert other.grad is None
    assert brain.weight == pytest.approx(1.8)


def test_zero_grad():
    brain = line()
    brain.modules.net.weight.grad = torch.ones(1, 1)
    brain.zero_grad()
    assert brain.modules.net.weight.grad.item() == 0.0
    brain.zero_grad(set_to_none=True)
    assert brain.modules.net.weight.grad is None


def test_init_optimizers_tells_the_checkpointer():
    told = {}
    brain = Line(remove_vector_weight_decay=True)
    run_of(brain).policy.checkpointer = SimpleNamespace(add_recoverable=told.__setitem__)
    brain.init_optimizers()
    assert told == {"optimizer": brain.optimizer}
    assert brain.optimizers_dict == {"opt_class": brain.optimizer}
    assert len(brain.optimizer.param_groups) == 2


# ------------------------------------------------------------------------- a fit_batch of one's own


def flush(brain):
    """What the end of a training epoch does."""
    if run_of(brain).train_step.prepare_flush(brain):
        brain.optimizers_step()
    brain.progress.window.stepped()


class Classic(Line):
    """Accumulates as recipes do that were written before: by the step's number and the factor."""

    def fit_batch(self, batch):
        should_step = self.step % self.grad_accumulation_factor == 0
        with self.no_sync(not should_step):
            loss = self.compute_objectives(self.modules.net(batch), batch, Stage.TRAIN)
            (loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        return loss.detach()


@pytest.mark.parametrize(("batches", "updates"), [(4, 2), (5, 3), (1, 1), (0, 0)])
def test_an_epochs_short_last_window_is_stepped(batches, updates):
    brain = Classic(grad_accumulation_factor=2)
    brain.init_optimizers()
    expected = []
    weight = 2.0
    for step in range(1, batches + 1):
        brain.step = step
        brain.fit_batch(ONE)
        if step % 2 == 0 or step == batches:
            weight -= 0.1 * weight
            expected.append(weight)
    flush(brain)
    assert brain.optimizer_step == updates == len(expected)
    assert brain.weight == pytest.approx(weight), "with the divisor of the short window"
    flush(brain)
    assert brain.optimizer_step == updates, "once"


def test_nothing_is_flushed_without_gradients():
    brain = Classic(grad_accumulation_factor=4)
    brain.init_optimizers()
    with brain.no_sync():
        pass
    flush(brain)
    assert brain.optimizer_step == 0
    assert brain.progress.window.num_deferred(1) == 0


# ------------------------------------------------------------------------------------- small things


def test_update_average():
    brain = line()
    average = 0.0
    for brain.step, loss in enumerate([1.0, torch.tensor(3.0), math.nan, math.inf, 8.0], 1):
        average = brain.update_average(loss, average)
    assert average == pytest.approx(2.0 + (8.0 - 2.0) / 5)
    brain.step = 0
    assert brain.update_average(5.0, 0.0) == 5.0


def test_check_loss_isfinite_says_where(caplog):
    brain = line()
    brain.step = 7
    brain.rank = 3
    with caplog.at_level(logging.WARNING):
        brain.check_loss_isfinite(torch.tensor(1.0))
        assert caplog.messages == []
        brain.check_loss_isfinite(torch.tensor(math.inf))
    assert caplog.messages == ["The loss of step 7 is inf on rank 3."]


def test_counters_are_the_progress():
    brain = line()
    brain.step = 3
    brain.optimizer_step = 4
    brain.nonfinite_count = 5
    assert (brain.progress.step, brain.progress.optimizer_step, brain.progress.nonfinite) == (
        3,
        4,
        5,
    )
    assert Brain.step.__doc__


class Named(Line):
    """Uses the two public names; ``losses`` are what it passes to backward, in order."""

    losses = ()

    def fit_batch(self, batch):
        rows = self.modules.net(batch)
        for place, make in enumerate(self.losses):
            self.backward(make(rows), retain_graph=place + 1 < len(self.losses))
        if self.should_step:
            self.optimizers_step()


def named(*losses, **given):
    made = Named(**given)
    made.init_optimizers()
    made.losses = losses
    return made


def mean(rows):
    return (rows**2).mean() / 2


def with_count(rows):
    return (rows**2).sum() / 2 * 3.0, 3


def test_gradients_of_several_losses_add_up():
    brain = named(mean, lambda rows: rows.sum())
    brain.fit_batch(ONE)
    assert brain.weight == pytest.approx(2.0 - 0.1 * 3.0)


def test_two_sums_before_one_step_are_refused():
    brain = named(with_count, with_count)
    with pytest.raises(
        BatchError,
        match=r"^Named\.fit_batch passed two \(loss_sum, count\) to "
        r"backward\(\)",
    ):
        brain.fit_batch(ONE)


@pytest.mark.parametrize("losses", [(mean, with_count), (with_count, mean)])
def test_means_and_sums_do_not_mix_in_an_own_fit_batch(losses):
    with pytest.raises(BatchError, match="for some micro-batches of an optimizer step and"):
        named(*losses).fit_batch(ONE)


def test_sums_that_nothing_divides_are_told():
    brain = named(with_count)
    brain.optimizers_step = brain.optimizer.step
    window = brain.progress.window
    window.begin()
    brain.fit_batch(ONE)
    window.begin()
    brain.step = 2
    with pytest.raises(BatchError, match=r"let the window end without optimizers_step\(\)"):
        brain.fit_batch(ONE)


def test_sums_may_be_stepped_before_the_window_closes():
    brain = named(with_count)
    brain.progress.window.closes = False
    brain.fit_batch(ONE)
    brain.optimizers_step()
    assert brain.weight == pytest.approx(1.8)


def test_gradients_wait_until_the_recipe_is_told_that_the_window_closes():
    brain = Named(grad_accumulation_factor=2)
    brain.init_optimizers()
    brain.losses = (mean,)
    window = brain.progress.window
    window.begin()
    for step, closes in enumerate([False, True], 1):
        brain.step = step
        window.closes = closes
        window.loss_scale = 0.5
        rows = brain.modules.net(ONE)
        brain.backward(mean(rows))
        assert window.num_deferred(step) == step
    assert brain.should_step
    assert window.num_deferred(2) == 0, "it makes the step itself"
