"""What a recipe assigns is what every part of the run has, or it is refused by name.

Each option and each attribute of the contract: a new one has to be put into a table here, or into
that of ``test_assigned_options``.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddpkit.brain import run_of
from ddpkit.ema import WeightAverage
from ddpkit.errors import DdpkitError
from ddpkit.optim import rate_factor
from ddpkit.precision import TorchAutocast
from ddpkit.run_opts import RUN_OPTIONS, RunOptions
from ddpkit.types import Stage
from tests.cells import some_of
from tests.recipes import QUIET, Regression, linear, make, points, sgd

from .test_assigned_options import APART, AT_ANY_TIME, VALUES, halved, observed
from .test_own_names import ATTRIBUTES

KWARGS = {"batch_size": 2}

WORLDS = {
    "one device": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "virtual ranks": (2, {"virtual_ranks": 2}),
}


def net(seed=7):
    """Two layers, which have no lonely parameter that a rank could be without."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()


def brain_in(world, seed=7, **given):
    options = {**QUIET, **WORLDS[world][1], **given}
    return Regression({"net": net(seed)}, sgd(), None, options, scheduler_class=halved)


def whole(tensors):
    found = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [one.detach().tolist() for one in found if one.is_floating_point()]


def outcome_of(brain):
    """What a training comes to: losses, steps, weights, their average."""
    result = brain.fit([1, 2], points(7), points(3), None, KWARGS, KWARGS)
    averages = [] if brain.ema is None else whole(brain.ema.state_dict().values())
    result = astuple(replace(result, newest_checkpoint=None))
    return str([result, brain.losses, whole(brain.raw_modules.parameters()), averages])


# ------------------------------------------------------------ what the parts of a run hold


def held_directly(one):
    """Return what an object of ddpkit, or a container, holds."""
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, (list, tuple, set)):
        return list(one)
    is_own = type(one).__module__.startswith("ddpkit.") and not isinstance(one, nn.Module)
    names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
    return [getattr(one, name, None) for name in names] if is_own else []


def held_by(run, kinds):
    """Collect the objects of these kinds that parts of a run hold."""
    waiting = [run]
    known = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in known:
            known[id(one)] = one
            waiting += held_directly(one)
    return {kind: [one for one in known.values() if isinstance(one, kind)] for kind in kinds}


def assert_one_of_each(brain):
    context = run_of(brain).context
    accumulation = context.accumulation
    kinds = (type(context), type(accumulation), RunOptions, nn.ModuleDict, SimpleNamespace)
    found = held_by(run_of(brain), kinds)
    assert found[type(context)] == [context]
    assert [id(one) for one in found[RunOptions]] == [id(context.options)]
    assert found[type(accumulation)] == [accumulation]
    assert [id(one) for one in found[nn.ModuleDict]] == [id(brain.modules)]
    assert [id(one) for one in found[SimpleNamespace]] == [id(brain.hparams)]
    assert brain.run_opts is context.options


def replace_all(world):
    """Replace modules, hparams and options, before ``fit`` and after it; no part has the old."""
    brain = brain_in(world, ema_decay=0.5)
    for seed in (8, 9):
        before = weakref.ref(brain.modules)
        brain.modules = {"net": net(seed)}
        brain.hparams = {"number": seed}
        brain.run_opts = {**brain.run_opts, "max_grad_norm": float(seed)}
        brain.ema.follow()  # at its next step it lists anew what it averages; here at once
        gc.collect()
        assert before() is None, "a part still has the modules of before"
        assert_one_of_each(brain)
        assert run_of(brain).context.options.max_grad_norm == seed
        assert brain.ema.modules is brain.modules
        if seed == 8:
            brain.fit([1], points(6), train_loader_kwargs=KWARGS)
            assert_one_of_each(brain)


def test_no_part_has_a_copy_of_what_a_recipe_replaces():
    replace_all("one device")


@pytest.mark.costly
@pytest.mark.parametrize(
    "world",
    ["ddp", *(pytest.param(one, marks=pytest.mark.slow) for one in [*WORLDS][2:])],
)
def test_no_part_has_a_copy_on_several_ranks(ranks, world):
    ranks.run(replace_all, world, world_size=WORLDS[world][0])


# ------------------------------------------------------------ attributes, by name


def at(path):
    """Return what looks up an attribute of the parts."""

    def look(brain):
        found = run_of(brain)
        for name in path.split("."):
            found = getattr(found, name)
        return found

    return look


#: By attribute: what is assigned, and what the parts then have in its place.
ASSIGNED = {
    "modules": (lambda: nn.ModuleDict({"net": linear(seed=1)}), at("context.modules")),
    "hparams": (lambda: SimpleNamespace(number=1), at("context.hparams")),
    "opt_class": (lambda: sgd(lr=0.5), at("context.opt_class")),
    "scheduler_class": (lambda: halved, at("context.scheduler_class")),
    "checkpointer": (lambda: None, at("policy.checkpointer")),
    "scaler": (lambda: torch.amp.GradScaler("cpu", enabled=False), at("train_step.scaler")),
    "ema": (
        lambda: WeightAverage(nn.ModuleDict({"net": linear()}), 0.5),
        at("train_step.average.weights"),
    ),
    "optimizer": (lambda: sgd()(linear().parameters()), at("train_step.optimizer")),
    "optimizers_dict": (
        lambda: {"own": sgd()(linear().parameters())},
        at("train_step.optimizers"),
    ),
    "profiler": (object, at("stages.observers.profile.profiler")),
    "step": (lambda: 3, at("context.progress.step")),
    "optimizer_step": (lambda: 4, at("context.progress.optimizer_step")),
    "nonfinite_count": (lambda: 5, at("context.progress.nonfinite")),
    "avg_train_loss": (lambda: 0.25, at("context.progress.avg_train_loss")),
}
#: Options are compared one by one below; ``fit`` looks at contexts where it enters them.
SEEN_ELSEWHERE = {"run_opts", "training_ctx", "evaluation_ctx"}
#: Nothing can be put in their place.
REFUSED = {"logged", "lr_scale", "progress", "raw_modules", "set_name", "should_step"}
#: What the Brain tells a recipe: it writes them, and reads them nowhere.
TOLD = {
    "device_type",
    "rank",
    "steps_per_epoch",
    "tot_prof_steps",
    "total_steps",
    "train_sampler",
}


def test_every_attribute_of_the_contract_is_in_one_table():
    tables = [set(ASSIGNED), SEEN_ELSEWHERE, REFUSED, TOLD]
    assert set.union(*tables) == ATTRIBUTES
    assert sum(map(len, tables)) == len(ATTRIBUTES)


@pytest.mark.parametrize("name", [*ASSIGNED])
def test_an_attribute_that_is_assigned_is_that_of_the_parts(name, tmp_path):
    given, look = ASSIGNED[name]
    brain = make(folder=tmp_path)
    value = given()
    setattr(brain, name, value)
    assert look(brain) is value
    assert getattr(brain, name) is value


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_attribute_that_cannot_be_replaced_is_refused(name):
    with pytest.raises(AttributeError, match=name):
        setattr(make(), name, object())


def test_contexts_that_are_assigned_are_entered():
    brain = make(net=nn.Linear(3, 1).double())
    seen = []
    brain.modules.net.register_forward_hook(
        lambda *_: seen.append(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else 0
        )
    )
    brain.training_ctx = TorchAutocast("cpu", torch.bfloat16)
    brain.evaluation_ctx = TorchAutocast("cpu", torch.float16)
    with contextlib.suppress(RuntimeError):  # of the kernel, after the hook
        brain.fit([1], points(2), points(2), None, KWARGS, KWARGS)
    assert torch.bfloat16 in seen


class Anew(Regression):
    """Makes its optimizer anew when the second epoch begins."""

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and epoch == 2:
            self.optimizer = torch.optim.Adam(self.modules.parameters(), lr=0.01)
            self.optimizers_dict = {"opt_class": self.optimizer}


def train_anew(world, **options):
    options = {**QUIET, **WORLDS[world][1], **options}
    brain = Anew({"net": net()}, sgd(), None, options)
    brain.fit([1, 2, 3], points(8), train_loader_kwargs=KWARGS)
    state = brain.optimizer.state
    return whole(brain.raw_modules.parameters()), rate_factor(brain.optimizer), len(state)


def test_an_optimizer_that_is_made_anew_has_scaled_rates():
    options = {"lr_scaling": "linear", "reference_batch_size": 1}
    assert train_anew("one device", **options)[1] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("world", ["ddp", "zero1"])
def test_an_optimizer_that_is_made_anew_is_prepared_by_the_strategy(ranks, world):
    first, second = ranks.run(train_anew, world, world_size=2)
    assert first[0] == second[0]
    assert first[2] + second[2] == (4 if world == "zero1" else 8), "parts of the state, or copies"
    assert first[0] == ranks.run(train_anew, "ddp", world_size=2)[0][0]


# ------------------------------------------------------------ options, by name

#: Read when a call begins, for what it starts from; or shown a stage later; or their effect in a
#: first epoch is that of another option. ``test_assigned_options`` shows them.
NOT_INSIDE = {
    "resume": "it says what a call starts from",
    "noprogressbar": "of a stage that has begun the bar is there",
    "time_limit": "it ends the run",
}
LATE = [name for name, row in RUN_OPTIONS.items() if not row.fixed and name not in NOT_INSIDE]


@pytest.mark.costly
@pytest.mark.parametrize("name", LATE)
def test_an_option_that_is_not_read_for_good_counts_inside_of_fit(name, tmp_path):
    value, needs = VALUES[name]
    given = observed(tmp_path / "given", {**needs, name: value}, {}, "item")
    assert observed(tmp_path / "late", needs, {name: value}, "in fit") == given


@pytest.mark.parametrize(
    "name",
    [name for name, row in RUN_OPTIONS.items() if row.fixed == "reading"],
)
def test_what_was_read_with_the_data_of_an_epoch_is_refused_until_they_are_read(name):
    value, needs = VALUES[name]
    told = []

    class Late(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            try:
                self.run_opts[name] = value
            except DdpkitError as error:
                told.append(str(error))

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.TRAIN:
                self.run_opts[name] = value

    brain = make(Late, **needs)
    brain.fit([1], points(2), train_loader_kwargs=KWARGS)
    [message] = told
    assert message.startswith(f"{name}={value!r} comes too late: {name}=")
    assert message.endswith("Assign it in on_stage_start.")
    assert brain.run_opts[name] == value


def outcome_with(world, given, assigned):
    """Return what a training comes to, or how its options are refused."""
    try:
        brain = brain_in(world, ema_decay=0.5, **given)
        for name, value in assigned.items():
            brain.run_opts[name] = value
        return outcome_of(brain)
    except DdpkitError as error:
        return f"{type(error).__name__}: {error}"


def compare(world, names):
    """Return the options that count in another way where they are assigned than where given."""
    wrong = {}
    for name in names:
        value, needs = VALUES[name]
        beside = {key: one for key, one in needs.items() if key not in AT_ANY_TIME}
        late = {key: one for key, one in needs.items() if key not in beside} | {name: value}
        beside.pop("ema_decay", None)
        given = outcome_with(world, {**beside, **late}, {})
        assigned = outcome_with(world, beside, late)
        if given != assigned:
            wrong[name] = given, assigned
    return wrong


#: Two of them in every world; all of them with DDP, and before a release in every world.
GLANCE = ["max_grad_norm", "grad_accumulation_factor"]


@pytest.mark.costly
@pytest.mark.parametrize("world", some_of(WORLDS, ["ddp"], pytest.mark.slow))
def test_options_count_on_several_ranks_as_if_they_were_given(ranks, world):
    number = WORLDS[world][0]
    assert ranks.run(compare, world, GLANCE, world_size=number) == [{}] * number


@pytest.mark.slow
@pytest.mark.parametrize("world", some_of(WORLDS, ["ddp"]))
def test_every_option_counts_in_every_world_as_if_it_was_given(ranks, world):
    names = [name for name in AT_ANY_TIME if name not in APART]
    found = ranks.run(compare, world, names, world_size=WORLDS[world][0])
    assert found == [{}] * WORLDS[world][0]
