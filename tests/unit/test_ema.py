"""Averaged weights: the arithmetic, what is averaged, the stages that see them, and checkpoints
that hold them.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer, safe_load
from ddpkit.ema import WeightAverage
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.strategies.data_parallel import WrappedDataParallel
from ddpkit.syncbn import convert_sync_batchnorm
from ddpkit.types import Stage
from tests.host_reads import HostReads
from tests.recipes import (
    QUIET,
    Gan,
    Killed,
    Poisoned,
    SavesAfterValidation,
    assert_same,
    gan_modules,
    linear,
    make,
    points,
    sgd,
    weights,
)

DECAY = 0.9
KWARGS = {"batch_size": 2, "shuffle": True}


class Net(nn.Module):
    """A layer, a normalisation, a mask that no average survives, a counter, and a frozen layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.last = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.double()

    def forward(self, inputs):
        return self.last(self.frozen(self.norm(self.first(inputs)))) + self.mask[0]


def changed(modules, seed):
    """Change what a step of the training would: parameters that are trained, and the buffers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in modules.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.1)
        for name, buffer in modules.named_buffers():
            if "running" in name or "num_batches" in name:
                buffer.add_(1)


def averaged(modules, decay=DECAY, steps=4, seed=0):
    average = WeightAverage(modules, decay)
    for step in range(steps):
        changed(modules, seed + step)
        average.update()
    return average


def tensors(modules):
    return {name: value.detach().clone() for name, value in modules.state_dict().items()}


def lerped(values, decay=DECAY):
    """Return the average as the formula has it."""
    total = values[0].clone()
    for value in values[1:]:
        total = decay * total + (1 - decay) * value
    return total


# ----------------------------------------------------------------------------------- the arithmetic


def test_parameters_are_averaged_as_torch_averages_them():
    modules = nn.ModuleDict({"net": Net(), "other": nn.Linear(2, 2)})
    reference = AveragedModel(modules, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average = WeightAverage(modules, DECAY)
    for step in range(6):
        changed(modules, step)
        average.update()
        reference.update_parameters(modules)
    assert average.updates == int(reference.n_averaged) == 6
    state = average.state_dict()
    for name, value in reference.module.named_parameters():
        assert torch.equal(state[name], value), name
    assert not torch.equal(state["net.first.weight"], modules.net.first.weight)


def test_running_statistics_are_averaged_and_other_buffers_copied():
    modules = nn.ModuleDict({"net": Net()})
    average = averaged(modules, steps=4)
    state = average.state_dict()
    torch.testing.assert_close(
        state["net.norm.running_mean"],
        lerped([torch.full((4,), float(n)).double() for n in (1, 2, 3, 4)]),
    )
    assert state["net.norm.num_batches_tracked"] == modules.net.norm.num_batches_tracked == 4
    assert state["net.mask"].tolist() == [0.0, -math.inf]
    assert "net.scratch" not in state
    with average.applied():
        assert torch.equal(modules.net.norm.running_mean, state["net.norm.running_mean"])
        assert modules.net.mask.tolist() == [0.0, -math.inf]


def test_statistics_that_a_layer_replaces_are_still_followed():
    modules = nn.ModuleDict({"norm": nn.BatchNorm1d(1)})
    average = WeightAverage(modules, 0.5)
    average.follow()
    for value in (1.0, 3.0):
        modules.norm.running_mean = torch.tensor([value])
        average.update()
    assert average.state_dict()["norm.running_mean"].item() == 2.0


@pytest.mark.parametrize("decay", [1.0, 1.5, -0.1, math.nan])
def test_a_decay_that_cannot_be_one_is_refused(decay):
    with pytest.raises(ConfigError, match="ema_decay="):
        WeightAverage(nn.ModuleDict(), decay)


def test_a_decay_of_zero_has_the_newest_weights():
    modules = nn.ModuleDict({"net": nn.Linear(2, 2)})
    average = averaged(modules, decay=0.0)
    assert torch.equal(average.state_dict()["net.weight"], modules.net.weight)


class Operations(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_an_update_is_one_operation_that_allocates_nothing_and_waits_for_nothing():
    modules = nn.ModuleDict({"net": Net(), "other": nn.Linear(2, 2).double()})
    average = averaged(modules, steps=1)
    places = [value.data_ptr() for value in average.state_dict().values()]
    with HostReads() as reads:
        average.update()
    assert reads.count == 0
    with Operations() as operations:
        average.update()
    assert operations.names == ["aten._foreach_lerp_.Scalar"]
    assert [value.data_ptr() for value in average.state_dict().values()][1:] == places[1:]


def test_half_precision_weights_have_an_average_that_moves():
    modules = nn.ModuleDict({"net": nn.Linear(1, 1, bias=False).bfloat16()})
    average = WeightAverage(modules, 0.999)
    for value in (1.0, 2.0, 2.0, 2.0):
        nn.init.constant_(modules.net.weight, value)
        average.update()
    assert average.state_dict()["net.weight"].dtype is torch.float32
    assert average.state_dict()["net.weight"].item() == pytest.approx(2 - 0.999**3, abs=1e-6)
    with average.applied():
        assert modules.net.weight.dtype is torch.bfloat16
        assert modules.net.weight.item() == 1.0  # rounded
    assert modules.net.weight.item() == 2.0


# ------------------------------------------------------------------------------------ which weights


def test_quantized_weights_that_are_frozen_stay_as_they_are():
    modules = nn.ModuleDict(
        {"net": nn.Linear(2, 1, bias=False), "base": nn.Linear(2, 1, bias=False)}
    )
    codes = torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn)
    modules.base.weight = nn.Parameter(codes, requires_grad=False)
    average = WeightAverage(modules, 0.5)
    for value in (1.0, 3.0):
        nn.init.constant_(modules.net.weight, value)
        average.update()
    state = average.state_dict()
    assert state["net.weight"].tolist() == [[2.0, 2.0]]
    assert torch.equal(state["base.weight"].view(torch.uint8), codes.view(torch.uint8))
    again = WeightAverage(modules, 0.5)
    again.load_state_dict(state)
    with again.applied():
        assert modules.net.weight.tolist() == [[2.0, 2.0]]
        assert modules.base.weight.dtype is codes.dtype


def test_frozen_layers_cost_nothing_and_one_that_is_trained_later_is_averaged_as_if_it_always_had_been():  # noqa: E501
    modules = nn.ModuleDict({"net": Net()})
    always = nn.ModuleDict({"net": Net()})
    for parameter in always.parameters():
        parameter.requires_grad_()
    average = WeightAverage(modules, DECAY)
    reference = WeightAverage(always, DECAY)
    for step in range(6):
        if step == 3:
            for part in (average, reference):
                assert ("net.frozen.weight" in part._averages) is (part is reference)
            modules.net.frozen.requires_grad_()
            average.follow()  # as the Brain does when an epoch begins
        changed(modules, step)
        always.load_state_dict(modules.state_dict())
        average.update()
        reference.update()
    assert_same(average.state_dict(), reference.state_dict())
    modules.net.first.requires_grad_(requires_grad=False)  # what was trained is averaged on
    average.follow()
    average.update()
    reference.update()
    assert_same(average.state_dict(), reference.state_dict())


def test_what_is_frozen_is_still_compared_with_what_was_saved():
    """A layer was trained, then frozen: after a resume its average goes on towards it."""
    modules = nn.ModuleDict({"net": Net()})
    average = averaged(modules)
    modules.net.first.requires_grad_(requires_grad=False)
    average.follow()
    resumed_modules = copy.deepcopy(modules)
    resumed = WeightAverage(resumed_modules, DECAY)
    resumed.load_state_dict(average.state_dict())
    for part in (average, resumed):
        part.update()
        part.update()
    assert_same(resumed.state_dict(), average.state_dict())
    assert resumed._averages.keys() == average._averages.keys()
    assert "net.frozen.weight" not in resumed._averages


def of_entry(state, entry):
    return {
        key.removeprefix(f"{entry}."): value
        for key, value in state.items()
        if key.startswith(f"{entry}.")
    }


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3, bias=False)
        self.outside = nn.Linear(3, 3, bias=False)
        self.outside.weight = self.inside.weight


def test_tied_weights_have_one_average_under_both_names():
    modules = nn.ModuleDict({"net": Tied()})
    average = averaged(modules)
    assert list(average._averages) == ["net.inside.weight"]
    state = average.state_dict()
    assert state["net.inside.weight"] is state["net.outside.weight"]
    Tied().load_state_dict(of_entry(state, "net"))
    resumed = WeightAverage(copy.deepcopy(modules), DECAY)
    resumed.load_state_dict(state)
    assert_same(resumed.state_dict(), state)
    own = modules.net.inside.weight.detach().clone()
    with average.applied():
        assert modules.net.outside.weight is modules.net.inside.weight
        assert torch.equal(modules.net.inside.weight, state["net.inside.weight"])
    assert torch.equal(modules.net.inside.weight, own)


@pytest.mark.parametrize(
    "modules",
    [{}, {"relu": nn.ReLU()}, {"frozen": nn.Linear(1, 1).requires_grad_(False)}],
)
def test_modules_without_anything_to_train(modules):
    average = averaged(nn.ModuleDict(modules), steps=2)
    with average.applied():
        pass
    restored = WeightAverage(nn.ModuleDict(modules), DECAY)
    restored.load_state_dict(average.state_dict())
    assert restored.updates == 2


def test_weights_that_are_made_in_the_first_batch():
    modules = nn.ModuleDict({"net": nn.LazyLinear(1)})
    average = WeightAverage(modules, DECAY)
    average.follow()
    modules.net(torch.ones(1, 3))
    average.update()
    assert set(average.state_dict()) == {"n_averaged", "net.weight", "net.bias"}
    assert average.state_dict()["net.weight"] is not modules.net.weight


@pytest.mark.corner
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "how",
    ["plain", "parallel", "compiled", "nested", "synchronised", "scripted"],
)
def test_names_are_those_without_wrappers(how):
    """The compiled ones are never run: only their names matter here."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = {
        "plain": lambda: inner,
        "parallel": lambda: WrappedDataParallel(inner),
        "compiled": lambda: torch.compile(inner),
        "nested": lambda: WrappedDataParallel(nn.Sequential(torch.compile(inner[0]), inner[1])),
        "synchronised": lambda: convert_sync_batchnorm(inner),
        "scripted": lambda: torch.jit.script(inner),
    }[how]()
    average = averaged(nn.ModuleDict({"module": wrapped}))
    plain = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))})
    assert average.state_dict().keys() - {"n_averaged"} == plain.state_dict().keys()
    assert len(average._averages) == 6
    other = WeightAverage(plain, DECAY)
    other.load_state_dict(average.state_dict())
    plain.module.load_state_dict(of_entry(average.state_dict(), "module"))
    before = tensors(average.modules)
    with average.applied():
        inside = tensors(average.modules)
    assert_same(
        dict(zip(plain.state_dict(), inside.values(), strict=True)),
        dict(plain.state_dict()),
    )
    assert any(not torch.equal(inside[name], before[name]) for name in before)
    assert_same(tensors(average.modules), before)


# ------------------------------------------------------------------------------------------ applied


def test_applied_writes_in_place_and_back_also_after_an_exception():
    modules = nn.ModuleDict({"net": Net()})
    average = averaged(modules)
    before = tensors(modules)
    held = modules.net.first.weight
    place = held.data_ptr()
    state = {name: value.clone() for name, value in average.state_dict().items()}

    def fail():
        assert held is modules.net.first.weight
        assert held.data_ptr() == place
        assert torch.equal(held, state["net.first.weight"])
        with average.applied():
            assert torch.equal(held, state["net.first.weight"])
        assert torch.equal(held, state["net.first.weight"])  # the inner one gives nothing back
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), average.applied():
        fail()
    assert_same(tensors(modules), before)
    assert_same(average.state_dict(), state)


def test_an_update_inside_of_applied_is_refused():
    average = averaged(nn.ModuleDict({"net": nn.Linear(1, 1)}))
    with (
        average.applied(),
        pytest.raises(
            ConfigError,
            match=r"inside `with "
            r"brain.ema.applied\(\)`",
        ),
    ):
        average.update()


def test_before_the_first_update_the_weights_stay_as_they_are():
    modules = nn.ModuleDict({"net": nn.Linear(1, 1)})
    average = WeightAverage(modules, DECAY)
    average.follow()
    changed(modules, 1)
    before = tensors(modules)
    with average.applied():
        assert_same(tensors(modules), before)
    assert_same(
        {name: value for name, value in average.state_dict().items() if name != "n_averaged"},
        {f"net.{name}": value for name, value in modules.net.state_dict().items()},
    )


def test_autocast_does_not_remember_the_other_weights():
    modules = nn.ModuleDict({"net": nn.Linear(1, 1, bias=False)})
    average = WeightAverage(modules, 0.5)
    for value in (1.0, 3.0):
        nn.init.constant_(modules.net.weight, value)
        average.update()
    inputs = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert modules.net(inputs).item() == 3.0
        with average.applied():
            assert modules.net(inputs).item() == 2.0
        assert modules.net(inputs).item() == 3.0


# ------------------------------------------------------------------------------------- in the Brain


class Watched(Poisoned, SavesAfterValidation):
    """Remembers the weight at the start of each stage, in its batches and at its end; and after
    every step.
    """

    keeping: ClassVar = {"num_to_keep": 9}
    fails_in = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {}
        self.after_steps = []

    def note(self, stage, when):
        self.seen.setdefault((stage.name, when), []).append(
            self.raw_modules.net.weight.detach().clone()
        )

    def on_stage_start(self, stage, epoch=None):
        self.note(stage, "start")

    def compute_forward(self, batch, stage):
        self.note(stage, "batch")
        if stage is self.fails_in:
            raise ZeroDivisionError
        return super().compute_forward(batch, stage)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step and self.step not in self.bad_steps:
            self.after_steps.append(self.raw_modules.net.weight.detach().clone())

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.note(stage, "end")
        super().on_stage_end(stage, stage_loss, epoch)


def test_off_by_default():
    brain = make()
    assert brain.ema is None
    brain.fit([1], points(4))


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="evaluate_ema=True needs --ema_decay"):
        make(evaluate_ema=True)
    with pytest.raises(ConfigError, match="ema_decay=1"):
        make(ema_decay=1.0)
    with pytest.raises(ConfigError, match="ema_decay expects a number >= 0, got -1"):
        make(ema_decay=-1)


@pytest.mark.parametrize("factor", [1, 2])
def test_the_average_is_updated_once_per_step_that_was_made(factor):
    class SecondPoisoned(Watched):
        bad_steps = (2,)

    brain = make(SecondPoisoned, ema_decay=DECAY, grad_accumulation_factor=factor)
    brain.fit([1, 2], points(10), train_loader_kwargs=KWARGS)
    steps = {1: 8, 2: 4}[factor]
    assert brain.ema.updates == brain.optimizer_step == len(brain.after_steps) == steps
    torch.testing.assert_close(
        brain.ema.state_dict()["net.weight"],
        lerped(brain.after_steps),
        rtol=0,
        atol=1e-14,
    )


def test_a_layer_that_is_unfrozen_when_an_epoch_begins_is_averaged_from_there():
    class Thawing(Watched):
        def on_stage_start(self, stage, epoch=None):
            self.modules.net.weight.requires_grad_(epoch > 1)

    brain = make(Thawing, ema_decay=DECAY)
    brain.fit([1, 2], points(6), train_loader_kwargs=KWARGS)
    assert torch.equal(brain.after_steps[0], brain.after_steps[2])
    assert not torch.equal(brain.after_steps[2], brain.after_steps[3])
    torch.testing.assert_close(
        brain.ema.state_dict()["net.weight"],
        lerped(brain.after_steps),
        rtol=0,
        atol=1e-14,
    )


def test_several_optimizers_make_one_step():
    class Together(Gan):
        fit_batch = Brain.fit_batch

        def compute_objectives(self, predictions, batch, stage):
            return self.modules.discriminator(predictions).mean()

    brain = Together(gan_modules(), None, None, {**QUIET, "ema_decay": DECAY})
    brain.fit([1], points(6), train_loader_kwargs={"batch_size": 2})
    assert brain.ema.updates == brain.optimizer_step == 3
    assert len(brain.ema._averages) == 6


def test_a_recipe_that_steps_by_itself_is_told_and_can_update_by_itself(caplog):
    class Updating(Gan):
        def fit_batch(self, batch):
            loss = super().fit_batch(batch)
            self.ema.update()
            return loss

    options = {**QUIET, "ema_decay": DECAY, "evaluate_ema": True}
    brain = Updating(gan_modules(), None, None, options)
    brain.fit([1], points(6), points(2), train_loader_kwargs={"batch_size": 2})
    assert brain.ema.updates == 3
    assert "ema.update()" not in caplog.text
    Gan(gan_modules(), None, None, options).fit(
        [1],
        points(6),
        points(2),
        train_loader_kwargs={"batch_size": 2},
    )
    assert "calls self.ema.update()" in caplog.text


def test_pretrained_weights_that_are_loaded_after_the_brain_is_made():
    brain = make(ema_decay=0.5)
    nn.init.constant_(brain.modules.net.weight, 1000.0)
    brain.fit([1], points(2), train_loader_kwargs={"batch_size": 2})
    assert_same(
        {f"net.{name}": value for name, value in brain.modules.net.state_dict().items()},
        {name: value for name, value in brain.ema.state_dict().items() if name != "n_averaged"},
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("evaluate", [True, False])
def test_validation_and_test_see_the_average_and_hooks_see_the_weights(evaluate, precision):
    net = nn.Linear(3, 1)
    data = [(inputs.float(), targets.float()) for inputs, targets in points(10)]
    options = {
        "ema_decay": DECAY,
        "evaluate_ema": evaluate,
        "precision": precision,
        "eval_precision": precision,
    }
    brain = make(Watched, net=net, **options)
    brain.fit([1, 2], data, data[:4], train_loader_kwargs=KWARGS, valid_loader_kwargs=KWARGS)
    assert net.weight.dtype is torch.float32
    for epoch in (0, 1):
        own = brain.after_steps[5 * epoch + 4]
        average = lerped(brain.after_steps[: 5 * epoch + 5])
        assert not torch.equal(own, average)
        assert torch.equal(brain.seen["VALID", "start"][epoch], own)
        assert torch.equal(brain.seen["VALID", "end"][epoch], own)
        for batch in (0, 1):
            torch.testing.assert_close(
                brain.seen["VALID", "batch"][2 * epoch + batch],
                average if evaluate else own,
            )
    loss = brain.evaluate(data[:4])
    torch.testing.assert_close(brain.seen["TEST", "batch"][0], average if evaluate else own)
    assert torch.equal(brain.seen["TEST", "end"][0], own)
    outputs = torch.stack(brain.predict(data[:4]))
    torch.testing.assert_close(brain.seen["TEST", "batch"][-1], average if evaluate else own)
    targets = torch.stack([target for _, target in data[:4]])
    assert nn.functional.mse_loss(outputs.float(), targets).item() == pytest.approx(loss, rel=1e-5)
    assert torch.equal(net.weight, own)


def test_a_stage_that_fails_leaves_the_weights_of_the_training():
    brain = make(Watched, ema_decay=DECAY, evaluate_ema=True)
    brain.fails_in = Stage.VALID
    with pytest.raises(ZeroDivisionError):
        brain.fit([1], points(10), points(2), train_loader_kwargs=KWARGS)
    assert torch.equal(brain.modules.net.weight, brain.after_steps[-1])
    assert not torch.equal(brain.seen["VALID", "batch"][0], brain.after_steps[-1])


# -------------------------------------------------------------------------------------- checkpoints


def trained(folder, *, epochs=(1, 2), cls=Watched, **options):
    options = {"ema_decay": DECAY, "evaluate_ema": True, **options}
    brain = make(cls, net=linear(), folder=folder, **options)
    brain.fit(epochs, points(10), points(4, seed=6), train_loader_kwargs=KWARGS)
    return brain


def test_a_checkpoint_holds_both_and_nothing_of_wrappers(tmp_path):
    brain = trained(tmp_path)
    newest = brain.checkpointer.find_checkpoint()
    state = torch.load(newest.paramfiles["ema"], weights_only=True)
    assert list(state) == ["n_averaged", "net.weight", "net.bias"]
    assert state["n_averaged"].item() == 10
    assert torch.equal(safe_load(newest.paramfiles["net"])["weight"], brain.after_steps[-1])
    torch.testing.assert_close(state["net.weight"], lerped(brain.after_steps), rtol=0, atol=1e-14)
    loaded = linear(seed=1)
    loaded.load_state_dict(of_entry(state, "net"))
    assert torch.equal(loaded.weight, state["net.weight"])


@pytest.mark.costly
def test_the_average_of_a_checkpoint_is_evaluated_in_a_process_of_its_own(tmp_path):
    brain = trained(tmp_path)
    by_epoch = [loss for stage, _, loss in brain.losses if stage == "VALID"]
    best = min(range(2), key=by_epoch.__getitem__)
    other = make(
        Watched,
        net=linear(seed=1),
        folder=tmp_path,
        ema_decay=DECAY,
        evaluate_ema=True,
        test_only=True,
    )
    assert other.evaluate(points(4, seed=6)) == by_epoch[1]
    assert torch.equal(other.modules.net.weight, brain.after_steps[-1])
    assert other.evaluate(points(4, seed=6), min_key="loss") == by_epoch[best]
    assert brain.evaluate(points(4, seed=6), max_key="loss") == by_epoch[1 - best]
    plain = make(Watched, net=linear(seed=1), folder=tmp_path)
    # a file for what is off does not matter
    assert plain.evaluate(points(4, seed=6)) != by_epoch[1]
    assert torch.equal(plain.seen["TEST", "batch"][0], brain.after_steps[-1])


@pytest.mark.costly
def test_a_checkpoint_without_an_average_is_no_average_to_evaluate(tmp_path):
    trained(tmp_path, ema_decay=None, evaluate_ema=False)
    brain = make(Watched, folder=tmp_path, ema_decay=DECAY, evaluate_ema=True)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        brain.evaluate(points(4))
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        brain.predict(points(4))
    nothing = make(Watched, ema_decay=DECAY, evaluate_ema=True)
    with pytest.raises(CheckpointError, match="there is no average of the weights"):
        nothing.evaluate(points(4))
    # without being asked for, it is not missed
    make(Watched, folder=tmp_path, ema_decay=DECAY).evaluate(points(4))


@pytest.mark.costly
def test_a_run_without_an_average_goes_on_with_one(tmp_path, caplog):
    before = trained(tmp_path, ema_decay=None, evaluate_ema=False)
    caplog.set_level(logging.INFO)
    brain = trained(tmp_path, epochs=(3,))
    assert brain.optimizer_step == 15
    assert brain.ema.updates == 5
    assert "has no file for 'ema'" in caplog.text
    assert "The average of the weights (ema_decay=0.9) starts" in caplog.text
    assert torch.equal(brain.seen["TRAIN", "start"][0], before.after_steps[-1])
    torch.testing.assert_close(
        brain.ema.state_dict()["net.weight"],
        lerped(brain.after_steps),
        rtol=0,
        atol=1e-14,
    )


class Normalised(Watched):
    """Dies in the middle of the second epoch."""

    dies = False

    def on_fit_batch_start(self, batch, should_step):
        if self.dies and self.progress.epoch == 2 and self.step == 4:
            raise Killed


def normalised_run(folder, *, seed=7, dies=False, interval=2):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    net.weight = net[0].weight
    counter = EpochCounter(3)
    options = {**QUIET, "ema_decay": DECAY, "evaluate_ema": True, "ckpt_interval_steps": interval}
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Normalised({"net": net}, sgd(momentum=0.9), None, options, checkpointer)
    brain.dies = dies
    brain.fit(counter, points(10), points(4, seed=6), train_loader_kwargs=KWARGS)
    return brain


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("interval", [0, 2])
def test_a_resumed_average_is_the_uninterrupted_one(tmp_path, interval):
    whole = normalised_run(tmp_path / "whole", interval=interval)
    with pytest.raises(Killed):
        normalised_run(tmp_path / "killed", dies=True, interval=interval)
    resumed = normalised_run(tmp_path / "killed", seed=8, interval=interval)
    assert len(resumed.after_steps) == {0: 10, 2: 8}[interval]
    assert_same(weights(resumed), weights(whole))
    assert_same(resumed.ema.state_dict(), whole.ema.state_dict())
    assert resumed.ema.updates == 15
    assert resumed.losses[-1] == whole.losses[-1]


@pytest.mark.corner
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("net.bias"), "net.bias"),
        (lambda state: state.update({"net.more": torch.ones(1)}), "net.more"),
        (lambda state: state.update({"net.bias": torch.ones(2)}), "net.bias"),
        (lambda state: state.update({3: torch.ones(1)}), "3"),
        (lambda state: state.pop("n_averaged"), "n_averaged"),
    ],
)
def test_an_average_of_something_else_is_refused_by_name(tmp_path, change, words):
    brain = trained(tmp_path)
    state = brain.ema.state_dict()
    change(state)
    torch.save(state, tmp_path / "other.ckpt")
    other = WeightAverage(nn.ModuleDict({"net": linear()}), DECAY)
    with pytest.raises(CheckpointError, match=words):
        other.load_state_dict(state)
    assert other.updates == 0
    with pytest.raises(CheckpointError, match="not an average of weights"):
        other.load_state_dict([1])


def test_a_loaded_state_shares_nothing_with_its_source_and_can_be_saved_at_once():
    modules = nn.ModuleDict({"net": Net()})
    average = averaged(modules)
    saved = {name: value.clone() for name, value in average.state_dict().items()}
    other = WeightAverage(nn.ModuleDict({"net": Net()}), DECAY)
    other.load_state_dict(average.state_dict())
    changed(modules, 9)
    average.update()
    found = other.state_dict()
    trained_names = [
        name
        for name in saved
        if "frozen" not in name and "num_batches" not in name and "mask" not in name
    ]
    assert_same(
        {name: found[name] for name in trained_names},
        {name: saved[name] for name in trained_names},
    )


def test_a_recipes_own_recoverable_of_this_name_is_not_replaced_without_a_word(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"'ema' is reserved for the average of the weights "
        r".*; rename your Linear",
    ):
        make(folder=tmp_path, recoverables={"ema": nn.Linear(1, 1)}, ema_decay=DECAY)
    make(folder=tmp_path, recoverables={"ema": nn.Linear(1, 1)})
