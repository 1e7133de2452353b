"""The Brain's surface as recipes use it, in one process: what exists, what is called when, and with
what.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.dataloader import LoopedLoader, SaveableDataLoader, make_dataloader
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.run_opts import OPTIONS, RunOptions
from ddpkit.types import Stage
from tests.recipes import (
    QUIET,
    FrontAndNet,
    Regression,
    SavesAfterTraining,
    assert_same,
    linear,
    make,
    points,
    seen_in,
    sgd,
    weights,
)

# ------------------------------------------------------------------------------------------ surface

SIGNATURES = {
    # the last is ours
    "__init__": [
        "modules",
        "opt_class",
        "hparams",
        "run_opts",
        "checkpointer",
        "scheduler_class",
        "parts",
    ],
    "compute_forward": ["batch", "stage"],
    "compute_objectives": ["predictions", "batch", "stage"],
    "on_stage_start": ["stage", "epoch"],
    "on_stage_end": ["stage", "stage_loss", "epoch"],
    "make_dataloader": ["dataset", "stage", "ckpt_prefix", "loader_kwargs"],
    "on_fit_start": [],
    "init_optimizers": [],
    "zero_grad": ["set_to_none"],
    "on_evaluate_start": ["max_key", "min_key"],
    "fit_batch": ["batch"],
    "check_loss_isfinite": ["loss"],
    "check_gradients": [],
    "freeze_optimizers": ["optimizers"],
    "optimizers_step": [],
    "on_fit_batch_start": ["batch", "should_step"],
    "on_fit_batch_end": ["batch", "outputs", "loss", "should_step"],
    "evaluate_batch": ["batch", "stage"],
    "fit": [
        "epoch_counter",
        "train_set",
        "valid_set",
        "progressbar",
        "train_loader_kwargs",
        "valid_loader_kwargs",
    ],
    "_fit_train": ["train_set", "epoch", "enable"],
    "_fit_valid": ["valid_set", "epoch", "enable"],
    "evaluate": ["test_set", "max_key", "min_key", "progressbar", "test_loader_kwargs"],
    "update_average": ["loss", "avg_loss"],
    "no_sync": ["use"],
    "print_trainable_parameters": [],
    "_compile": [],
    "_wrap_distributed": [],
    "_save": ["path"],
    "_recover": ["path", "end_of_epoch"],
}
DEFAULTS = {
    ("__init__", "scheduler_class"): None,
    ("__init__", "parts"): None,
    ("on_stage_start", "epoch"): None,
    ("on_stage_end", "epoch"): None,
    ("make_dataloader", "ckpt_prefix"): "dataloader-",
    ("zero_grad", "set_to_none"): False,
    ("on_evaluate_start", "max_key"): None,
    ("on_evaluate_start", "min_key"): None,
    ("fit", "valid_set"): None,
    ("fit", "progressbar"): None,
    ("evaluate", "max_key"): None,
    ("evaluate", "min_key"): None,
    ("evaluate", "progressbar"): None,
    ("no_sync", "use"): True,
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_every_method_has_its_arguments(method):
    parameters = inspect.signature(getattr(Brain, method)).parameters
    assert list(parameters)[1:] == SIGNATURES[method]
    for (owner, name), default in DEFAULTS.items():
        if owner == method:
            assert parameters[name].default == default


@pytest.mark.parametrize("name", ["modules", "opt_class", "hparams", "run_opts", "checkpointer"])
def test_every_argument_may_be_left_out(name):
    assert inspect.signature(Brain).parameters[name].default is None


def test_attributes_after_construction():
    opt_class = sgd()
    brain = Brain({"net": linear()}, opt_class, {"lr": 0.5}, QUIET)
    assert brain.opt_class is opt_class
    assert brain.checkpointer is None
    assert brain.optimizers_dict is None
    assert brain.train_sampler is None
    assert isinstance(brain.modules, nn.ModuleDict)
    assert brain.hparams.lr == 0.5
    assert (brain.device, brain.rank, brain.distributed_launch) == ("cpu", 0, False)
    assert (brain.step, brain.optimizer_step, brain.avg_train_loss) == (0, 0, 0.0)
    assert brain.profiler is None
    assert not brain.scaler.is_enabled()
    with brain.training_ctx, brain.training_ctx, brain.evaluation_ctx:
        assert not torch.is_autocast_enabled("cpu")


def test_tot_prof_steps_counts_warmup_and_recording():
    assert make(profile_training=True, profile_warmup=3, profile_steps=4).tot_prof_steps == 7


def test_stage_names_and_values():
    assert [(stage.name, stage.value) for stage in Stage] == [
        ("TRAIN", 1),
        ("VALID", 2),
        ("TEST", 3),
    ]


def test_hparams_are_an_empty_namespace_where_none_are_given():
    brain = Brain(run_opts=QUIET)
    assert brain.hparams == SimpleNamespace()
    assert not hasattr(brain.hparams, "sorting")


@pytest.mark.parametrize("method", ["compute_forward", "compute_objectives"])
def test_what_must_be_overridden_says_so(method):
    class Half(Regression):
        pass

    setattr(Half, method, getattr(Brain, method))
    with pytest.raises(NotImplementedError, match=f"Half must define {method}"):
        make(Half).fit([1], points(2))


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "run_opts",
    [
        {"device": "cpu", "max_grad_norm": 2.5},
        RunOptions(device="cpu", max_grad_norm=2.5),
        {"device": torch.device("cpu"), "max_grad_norm": "2.5"},
    ],
    ids=["dict", "made by hand", "torch.device and text"],
)
def test_run_opts_in_any_form(run_opts):
    brain = Brain(run_opts=run_opts, hparams={"max_grad_norm": 9.0})
    assert (brain.max_grad_norm, brain.device) == (2.5, "cpu")


def test_run_opts_may_be_left_out():
    brain = Brain({"net": linear()})
    assert brain.precision == "fp32"
    assert brain.device


def test_given_options_win_over_the_yaml_and_that_over_the_defaults():
    hparams = {"nonfinite_patience": 7, "grad_accumulation_factor": 4, "my_own": 1}
    brain = Brain(hparams=hparams, run_opts={"device": "cpu", "nonfinite_patience": 0})
    assert brain.nonfinite_patience == 0  # also where what was given is falsy
    assert brain.grad_accumulation_factor == 4
    assert brain.max_grad_norm == 5.0
    assert brain.hparams.nonfinite_patience == 7  # the namespace is left as the recipe made it
    assert hparams == {"nonfinite_patience": 7, "grad_accumulation_factor": 4, "my_own": 1}


def test_every_option_that_recipes_read_is_an_attribute():
    brain = Brain(run_opts=QUIET)
    for option in OPTIONS:
        if option.is_attribute and option.name in RunOptions():
            assert getattr(brain, option.name) == brain.run_opts[option.name], option.name


def test_run_opts_of_the_caller_are_not_changed():
    run_opts = RunOptions(device="cpu")
    brain = Brain(hparams={"max_grad_norm": 1.0}, run_opts=run_opts)
    brain.max_grad_norm = 0.5
    assert (run_opts.max_grad_norm, run_opts.overridden_args) == (5.0, {"device"})


def test_a_recipe_writes_max_grad_norm():
    class Late(Regression):
        def on_stage_start(self, stage, epoch=None):
            self.max_grad_norm = 1e-3

    brain = make(Late, opt=sgd(lr=1.0))
    data = points(4)
    before = weights(brain)
    brain.fit([1], data, train_loader_kwargs={"batch_size": 4})
    moved = (
        sum(((value - before[name]) ** 2).sum() for name, value in weights(brain).items()) ** 0.5
    )
    assert float(moved) == pytest.approx(1e-3, rel=1e-6)


def test_both_checkpoint_intervals_are_refused():
    with pytest.raises(ConfigError, match="ckpt_interval_minutes=1.0 and ckpt_interval_steps=2"):
        make(ckpt_interval_minutes=1, ckpt_interval_steps=2)


@pytest.mark.parametrize("option", ["precision", "eval_precision"])
def test_fp16_on_a_cpu_is_refused(option):
    with pytest.raises(ConfigError, match=f"{option}='fp16' does not work on device='cpu'"):
        make(**{option: "fp16"})


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")],
)
def test_precision_of_training_and_of_evaluation(train, evaluation):
    seen = {}

    class Watching(Regression):
        def compute_forward(self, batch, stage):
            predictions = super().compute_forward(batch, stage)
            seen[stage.name] = (predictions.dtype, torch.is_autocast_enabled("cpu"))
            return predictions

        def compute_objectives(self, predictions, batch, stage):
            assert torch.is_autocast_enabled("cpu") == seen[stage.name][1]
            return nn.functional.mse_loss(predictions.float(), batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            assert not torch.is_autocast_enabled("cpu")

    data = [(x.float(), y.float()) for x, y in points(4)]
    brain = make(Watching, net=linear().float(), precision=train, eval_precision=evaluation)
    brain.fit([1], data, data)
    brain.evaluate(data)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert seen["TRAIN"] == (dtypes[train], train == "bf16")
    assert seen["VALID"] == seen["TEST"] == (dtypes[evaluation], evaluation == "bf16")
    assert brain.modules.net.weight.dtype == torch.float32


# ------------------------------------------------------------------------------------------ modules


def test_no_modules_at_all():
    class Counting(Brain):
        def fit_batch(self, batch):
            self.total = getattr(self, "total", 0) + int(batch.sum())
            return 0.0

    brain = Counting(run_opts=QUIET)
    brain.fit([1, 2], torch.arange(5), train_loader_kwargs={"batch_size": 2})
    assert brain.total == 20
    assert list(brain.modules) == []


def test_modules_go_through_their_own_to():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.moved = []

        def to(self, *args, **kwargs):
            self.moved.append(args)
            return super().to(*args, **kwargs)

    module = Carrying()
    Brain({"net": module}, run_opts=QUIET)
    assert module.moved == [("cpu",)]


def test_raw_modules_are_the_modules_that_were_given():
    given = {"module": linear(), "act": nn.ReLU()}
    brain = Brain(given, run_opts=QUIET)
    assert list(brain.raw_modules) == ["module", "act"]
    assert all(brain.raw_modules[name] is module for name, module in given.items())


def test_several_modules_are_one_optimizer_without_more_ado():
    front = nn.Linear(3, 3).double()
    frozen = nn.Linear(3, 3).double().requires_grad_(requires_grad=False)
    brain = FrontAndNet({"front": front, "net": linear(), "frozen": frozen}, sgd(), run_opts=QUIET)
    before = weights(brain)
    brain.fit([1], points(4))
    moved = {name for name, value in weights(brain).items() if not torch.equal(value, before[name])}
    assert moved == {"front.weight", "front.bias", "net.weight", "net.bias"}
    held = [id(p) for group in brain.optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in brain.modules.parameters()]


def test_remove_vector_weight_decay_makes_two_groups():
    brain = make(opt=sgd(weight_decay=0.5), remove_vector_weight_decay=True)
    brain.fit([1], points(2))
    vectors, rest = brain.optimizer.param_groups
    assert [p is brain.modules.net.bias for p in vectors["params"]] == [True]
    assert [p is brain.modules.net.weight for p in rest["params"]] == [True]
    assert (vectors["weight_decay"], rest["weight_decay"]) == (0.0, 0.5)


def test_without_an_opt_class_nothing_is_optimized():
    brain = Regression({"net": linear()}, run_opts=QUIET)
    before = weights(brain)
    brain.fit([1], points(4))
    assert_same(weights(brain), before)
    assert (brain.optimizers_dict, brain.optimizer_step, len(brain.trained_on)) == (None, 0, 4)


# ---------------------------------------------------------------------------------------- the order


class Traced(Regression):
    """Writes down every call of a hook, with all that the contract says about it."""

    def __init__(self, *args, **kwargs):
        self.trace = []
        super().__init__(*args, **kwargs)

    def note(self, name, *facts):
        self.trace.append((name, *facts))

    def has_gradients(self):
        return any(p.grad is not None for p in self.modules.parameters())

    def make_dataloader(self, dataset, stage, ckpt_prefix="dataloader-", **loader_kwargs):
        self.note("make_dataloader", stage.name, ckpt_prefix)
        return super().make_dataloader(dataset, stage, ckpt_prefix, **loader_kwargs)

    def on_fit_start(self):
        self.note("on_fit_start")
        super().on_fit_start()

    def _compile(self):
        self.note("_compile")
        super()._compile()

    def _wrap_distributed(self):
        self.note("_wrap_distributed")
        super()._wrap_distributed()

    def init_optimizers(self):
        self.note("init_optimizers")
        super().init_optimizers()

    def on_stage_start(self, stage, epoch=None):
        self.note("on_stage_start", stage.name, epoch, torch.is_grad_enabled())

    def zero_grad(self, set_to_none=False):
        self.note("zero_grad", set_to_none)
        super().zero_grad(set_to_none)

    def fit_batch(self, batch):
        self.note("fit_batch", self.step, self.modules.training)
        return super().fit_batch(batch)

    def on_fit_batch_start(self, batch, should_step):
        self.note("on_fit_batch_start", self.step, should_step)

    def compute_forward(self, batch, stage):
        self.note("compute_forward", stage.name, torch.is_grad_enabled())
        return super().compute_forward(batch, stage)

    def compute_objectives(self, predictions, batch, stage):
        self.note("compute_objectives", stage.name)
        return super().compute_objectives(predictions, batch, stage)

    def optimizers_step(self):
        self.note("optimizers_step", self.has_gradients())
        super().optimizers_step()

    def freeze_optimizers(self, optimizers):
        self.note("freeze_optimizers", list(optimizers))
        return super().freeze_optimizers(optimizers)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        assert loss.grad_fn is not None
        self.note(
            "on_fit_batch_end",
            self.step,
            should_step,
            self.optimizer_step,
            self.has_gradients(),
        )

    def evaluate_batch(self, batch, stage):
        self.note("evaluate_batch", stage.name, self.step, self.modules.training)
        return super().evaluate_batch(batch, stage)

    def on_evaluate_start(self, max_key=None, min_key=None):
        self.note("on_evaluate_start", max_key, min_key)
        super().on_evaluate_start(max_key, min_key)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        assert isinstance(stage_loss, float)
        facts = (torch.is_grad_enabled(), self.step, self.modules.training, self.has_gradients())
        self.note("on_stage_end", stage.name, epoch, *facts)


def expected_batch(step, *, should_step, optimizer_step):
    # The first call of freeze_optimizers is for the gradients that an optimizers_step of the recipe
    # finds.
    frozen = ("freeze_optimizers", ["opt_class"])
    step_calls = [frozen, ("optimizers_step", True), frozen] if should_step else []
    return [
        ("fit_batch", step, True),
        ("on_fit_batch_start", step, should_step),
        ("compute_forward", "TRAIN", True),
        ("compute_objectives", "TRAIN"),
        *step_calls,
        ("on_fit_batch_end", step, should_step, optimizer_step, not should_step),
    ]


def expected_evaluation(stage, epoch, batches):
    each = [
        [
            ("evaluate_batch", stage, step, False),
            ("compute_forward", stage, False),
            ("compute_objectives", stage),
        ]
        for step in range(1, batches + 1)
    ]
    step_at_end = 0 if stage == "VALID" else batches
    return [
        ("on_stage_start", stage, epoch, True),
        *itertools.chain.from_iterable(each),
        ("on_stage_end", stage, epoch, False, step_at_end, False, False),
    ]


def expected_epoch(epoch, optimizer_step):
    return [
        ("on_stage_start", "TRAIN", epoch, True),
        ("zero_grad", False),
        ("freeze_optimizers", ["opt_class"]),
        *expected_batch(1, should_step=False, optimizer_step=optimizer_step),
        *expected_batch(2, should_step=True, optimizer_step=optimizer_step + 1),
        *expected_batch(3, should_step=True, optimizer_step=optimizer_step + 2),
        ("zero_grad", True),
        ("freeze_optimizers", ["opt_class"]),
        ("on_stage_end", "TRAIN", epoch, True, 3, True, False),
        *expected_evaluation("VALID", epoch, 2),
    ]


def test_the_order_of_a_run():
    """Two epochs of three batches in windows of two, two batches of validation, then two of
    test.
    """
    brain = make(Traced, grad_accumulation_factor=2)
    data = points(5)
    kwargs = {"batch_size": 2}
    brain.fit(
        EpochCounter(2),
        data,
        data[:3],
        train_loader_kwargs=kwargs,
        valid_loader_kwargs=kwargs,
    )
    assert (brain.step, brain.avg_train_loss, brain.optimizer_step) == (0, 0.0, 4)
    brain.evaluate(data[:3], max_key="accuracy", test_loader_kwargs=kwargs)
    assert brain.step == 0
    assert brain.trace == [
        ("make_dataloader", "TRAIN", "dataloader-"),
        ("make_dataloader", "VALID", None),
        ("on_fit_start",),
        ("_compile",),
        ("_wrap_distributed",),
        ("init_optimizers",),
        *expected_epoch(1, optimizer_step=0),
        *expected_epoch(2, optimizer_step=2),
        ("make_dataloader", "TEST", None),
        ("on_evaluate_start", "accuracy", None),
        *expected_evaluation("TEST", None, 2),
    ]


def test_hooks_may_name_their_arguments_otherwise():
    """Recipes rename arguments at will, so the loop calls hooks by position."""

    class Renamed(Brain):
        def compute_forward(self, wavs, mode):
            return self.modules.net(wavs[0])

        def compute_objectives(self, logits, wavs, mode):
            return ((logits - wavs[1]) ** 2).mean()

        def on_stage_start(self, mode, current_epoch):
            self.told = [mode, current_epoch]

        def on_stage_end(self, mode, loss, current_epoch):
            self.told += [mode, loss, current_epoch]

        def on_fit_batch_start(self, wavs, step_now):
            pass

        def on_fit_batch_end(self, wavs, logits, loss, step_now):
            pass

    brain = make(Renamed)
    brain.fit([1], points(2), points(2))
    brain.evaluate(points(2))
    assert brain.told[1::3] == [None, None]


def test_an_overridden_fit_valid_gets_its_arguments():
    class OwnValidation(Regression):
        def _fit_valid(self, valid_set, epoch, enable):
            self.told = (len(valid_set), epoch, enable)
            super()._fit_valid(valid_set, epoch, enable)

    brain = make(OwnValidation)
    brain.fit([4], points(2), points(3), progressbar=False)
    assert brain.told == (3, 4, False)
    assert [name for name, _, _ in brain.losses] == ["TRAIN", "VALID"]


def test_no_validation_set_no_validation():
    brain = make()
    brain.fit([1, 2], points(2))
    assert [(name, epoch) for name, epoch, _ in brain.losses] == [("TRAIN", 1), ("TRAIN", 2)]


# --------------------------------------------------------------------------------------- whole runs


def test_fit_twice_continues():
    """The same modules, the same optimizer with its momentum, the checkpoint read once."""
    data = points(8)
    kwargs = {"batch_size": 2, "shuffle": True}

    class Once(Regression):
        def init_optimizers(self):
            self.made = getattr(self, "made", 0) + 1
            super().init_optimizers()

    through = make(Once, opt=sgd(momentum=0.9))
    through.fit([1, 2], data, train_loader_kwargs=kwargs)
    twice = make(Once, opt=sgd(momentum=0.9))
    twice.fit([1], data, train_loader_kwargs=kwargs)
    net = twice.modules.net
    optimizer = twice.optimizer
    twice.fit([2], data, train_loader_kwargs=kwargs)
    assert twice.modules.net is net
    assert twice.optimizer is optimizer
    assert (twice.made, twice.optimizer_step) == (1, 8)
    assert_same(weights(twice), weights(through))


def test_a_second_fit_does_not_go_back_to_a_checkpoint(tmp_path):
    class Saving(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if epoch == 1:
                self.checkpointer.save_checkpoint()

    brain = make(Saving, folder=tmp_path)
    data = points(4)
    brain.fit([1, 2], data)
    before = weights(brain)
    brain.fit([], data)
    assert_same(weights(brain), before)


def test_fit_again_after_an_interrupt_starts_an_epoch_anew():
    class Interrupted(Regression):
        stop_at = 3

        def on_fit_batch_start(self, batch, should_step):
            if self.step == self.stop_at:
                raise KeyboardInterrupt

    brain = make(Interrupted)
    data = points(5)
    with pytest.raises(KeyboardInterrupt):
        brain.fit([1], data)
    brain.stop_at = None
    brain.trained_on = []
    brain.fit([1], data)
    assert seen_in(data, brain.trained_on) == [[0], [1], [2], [3], [4]]


def test_the_callers_dicts_stay_as_they_are():
    brain = make()
    options = {"batch_size": 2, "shuffle": True, "looped_nominal_epoch": 3}
    evaluation = {"batch_size": 2}
    brain.fit(
        [1],
        points(4),
        points(4),
        train_loader_kwargs=options,
        valid_loader_kwargs=evaluation,
    )
    brain.evaluate(points(4), test_loader_kwargs=evaluation)
    brain.fit(
        [1],
        points(4),
        points(4),
        train_loader_kwargs=options,
        valid_loader_kwargs=evaluation,
    )
    assert options == {"batch_size": 2, "shuffle": True, "looped_nominal_epoch": 3}
    assert evaluation == {"batch_size": 2}


def test_floats_may_be_returned():
    class Floats(Regression):
        def fit_batch(self, batch):
            return super().fit_batch(batch).item()

        def evaluate_batch(self, batch, stage):
            return float(super().evaluate_batch(batch, stage))

    data = points(5)
    told = make(Floats)
    plain = make()
    for brain in (told, plain):
        brain.fit([1], data, data, train_loader_kwargs={"batch_size": 2})
        brain.last = brain.evaluate(data)
    assert told.losses == plain.losses
    assert isinstance(told.last, float)
    assert told.last == plain.last


def test_test_only_leaves_fit_out():
    brain = make(Traced, test_only=True)
    brain.fit([1], points(4))
    assert brain.trace == []
    brain.evaluate(points(4))
    assert brain.trace[-1][:2] == ("on_stage_end", "TEST")


@pytest.mark.parametrize(
    ("given", "epochs", "batches"),
    [
        ({}, 2, 2),
        ({"debug_batches": 3, "debug_epochs": 1}, 1, 3),
        ({"debug_batches": 99, "debug_epochs": 0}, 4, 5),
        ({"grad_accumulation_factor": 4}, 2, 2),
    ],
)
def test_debug_runs_few_batches_and_epochs(given, epochs, batches):
    brain = make(Traced, debug=True, **given)
    data = points(5)
    brain.fit(EpochCounter(4), data, data)
    brain.evaluate(data)
    steps = [entry[1] for entry in brain.trace if entry[0] == "fit_batch"]
    assert steps == [*range(1, batches + 1)] * epochs
    valid = [entry[2] for entry in brain.trace if entry[:2] == ("evaluate_batch", "VALID")]
    assert valid == [*range(1, batches + 1)] * epochs
    assert [entry[2] for entry in brain.trace if entry[:2] == ("evaluate_batch", "TEST")] == [
        *range(1, batches + 1)
    ]
    assert brain.optimizer_step >= epochs


@pytest.mark.parametrize(("number", "steps"), [(7, 4), (5, 3)])
def test_debug_takes_what_a_short_stream_has(number, steps):
    brain = make(Traced, debug=True, debug_batches=4, debug_epochs=1)
    brain.fit([1], Stream(points(number)), train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step == steps


@pytest.mark.parametrize("persistently", [False, True])
def test_debug_saves_elsewhere(tmp_path, persistently):
    brain = make(
        SavesAfterTraining, folder=tmp_path / "save", debug=True, debug_persistently=persistently
    )
    brain.fit([1], points(4))
    saved_here = list((tmp_path / "save").glob("CKPT*"))
    assert bool(saved_here) == persistently
    assert brain.checkpointer.find_checkpoint() is not None
    assert (brain.checkpointer.checkpoints_dir == tmp_path / "save") == persistently


class CountingData(Dataset):
    """Counts what is fetched from it."""

    def __init__(self, data):
        self.data = data
        self.fetched = 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.fetched += 1
        return self.data[index]


@pytest.mark.parametrize(
    ("factor", "limit", "batches"),
    [(1, 3, 3), (2, 3, 6), (3, 5, 14), (1, 4, 4)],
)
def test_the_step_limit_is_exact_and_fetches_nothing_more(factor, limit, batches):
    data = CountingData(points(8))
    brain = make(optimizer_step_limit=limit, grad_accumulation_factor=factor)
    brain.fit(EpochCounter(10), data, points(1))
    assert (brain.optimizer_step, data.fetched) == (limit, batches)
    epochs = -(-batches // 8)
    assert [name for name, _, _ in brain.losses] == ["TRAIN", "VALID"] * epochs


def test_a_run_that_has_reached_its_step_limit_says_so_and_does_nothing(tmp_path):
    class Saving(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            super().on_stage_end(stage, stage_loss, epoch)
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})

    for first in (True, False):
        counter = EpochCounter(10)
        options = {
            "folder": tmp_path,
            "recoverables": {"counter": counter},
            "optimizer_step_limit": 3,
        }
        brain = make(Saving, **options)
        brain.fit(counter, points(4))
        assert brain.optimizer_step == 3
        assert bool(brain.losses) == first


def test_profile_training_writes_a_trace_and_ends_cleanly(tmp_path):
    brain = make(
        hparams={"output_folder": str(tmp_path)},
        profile_training=True,
        profile_warmup=1,
        profile_steps=2,
    )
    brain.fit([1, 2], points(5), points(2))
    assert len(brain.losses) == 4
    assert len(brain.trained_on) == 10
    assert len(list(tmp_path.rglob("*.pt.trace.json"))) == 1
    assert brain.profiler is None


def test_the_profiler_says_where_its_trace_is_and_when_there_is_none(tmp_path, caplog):
    caplog.set_level("INFO")
    options = {
        "hparams": {"output_folder": str(tmp_path)},
        "profile_training": True,
        "profile_warmup": 1,
    }
    make(profile_steps=2, **options).fit([1], points(5))
    (trace,) = (tmp_path / "profiler_logs").iterdir()
    assert (
        f"Profile of 2 batches: {trace}\nOpen it at https://ui.perfetto.dev, in chrome://tracing"
    ) in caplog.text
    make(**{**options, "profile_warmup": 9}).fit([1], points(5))
    assert "nothing was recorded: training ended within --profile_warmup=9 batches" in caplog.text
    assert list((tmp_path / "profiler_logs").iterdir()) == [trace]


@pytest.mark.slow
def test_compile_gives_the_same_weights():
    plain = make()
    compiled = make(compile=True)
    for brain in (plain, compiled):
        brain.fit([1, 2], points(6), points(3), train_loader_kwargs={"batch_size": 3})
    assert compiled.modules.net._compiled_call_impl is not None
    found = weights(compiled)
    expected = weights(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


# --------------------------------------------------------------------------------------------- data


def order_of(brain, data):
    return list(itertools.chain.from_iterable(seen_in(data, brain.trained_on)))


def test_without_shuffle_the_order_is_that_of_the_data():
    brain = make()
    data = points(5)
    brain.fit([1, 2], data, train_loader_kwargs={"batch_size": 2})
    assert seen_in(data, brain.trained_on) == [[0, 1], [2, 3], [4]] * 2


def test_shuffle_gives_every_epoch_its_own_order():
    brain = make()
    data = points(12)
    brain.fit([1, 2], data, train_loader_kwargs={"batch_size": 4, "shuffle": True})
    first = order_of(brain, data)[:12]
    second = order_of(brain, data)[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != list(range(12))


@pytest.mark.parametrize(
    ("sorting", "given", "shuffled"),
    [("random", False, True), ("ascending", True, False), ("descending", None, False)],
)
def test_hparams_sorting_decides(sorting, given, shuffled):
    kwargs = {"batch_size": 4} if given is None else {"batch_size": 4, "shuffle": given}
    brain = make(hparams={"sorting": sorting})
    data = points(12)
    brain.fit([1], data, train_loader_kwargs=kwargs)
    assert (order_of(brain, data) != list(range(12))) == shuffled


def test_shuffle_and_a_sampler_exclude_each_other():
    data = points(4)
    with pytest.raises(ConfigError, match="a loader takes one of shuffle=True, sampler"):
        make().fit(
            [1],
            data,
            train_loader_kwargs={"shuffle": True, "sampler": SequentialSampler(data)},
        )


class Backwards(SequentialSampler):
    """A user's sampler, with an order of its own per epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.data_source)))[::-1]
        return iter(order[self.epoch :] + order[: self.epoch])


def test_a_users_sampler_is_followed_and_told_the_epoch():
    brain = make()
    data = points(4)
    kwargs = {"batch_size": 3, "sampler": Backwards(data), "drop_last": True}
    brain.fit([1, 2], data, train_loader_kwargs=kwargs)
    assert seen_in(data, brain.trained_on) == [[2, 1, 0], [1, 0, 3]]


def test_a_users_batch_sampler_is_followed_and_told_the_epoch():
    brain = make()
    data = points(4)
    brain.fit(
        [1, 2],
        data,
        train_loader_kwargs={"batch_sampler": BatchSampler(Backwards(data), 3, drop_last=False)},
    )
    assert seen_in(data, brain.trained_on) == [[2, 1, 0], [3], [1, 0, 3], [2]]


def test_train_sampler_is_what_decides_the_order():
    brain = make()
    brain.fit([3], points(4), train_loader_kwargs={"batch_size": 2})
    assert brain.train_sampler.epoch == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_ready_made_loader_reshuffles_every_epoch(shuffle):
    brain = make()
    data = points(12)
    brain.fit([1, 2], DataLoader(data, batch_size=4, shuffle=shuffle))
    first = order_of(brain, data)[:12]
    second = order_of(brain, data)[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert (first != second) == shuffle
    assert [len(inputs) for inputs in brain.trained_on] == [4] * 6


def test_a_loader_made_by_make_dataloader_is_planned_like_its_dataset():
    data = points(7)
    kwargs = {"batch_size": 2, "shuffle": True}
    direct = make()
    ready = make()
    own = make()
    direct.fit([1, 2], data, train_loader_kwargs=kwargs)
    ready.fit([1, 2], make_dataloader(data, **kwargs))
    own.fit([1, 2], own.make_dataloader(data, Stage.TRAIN, **kwargs))
    assert (
        seen_in(data, ready.trained_on)
        == seen_in(data, own.trained_on)
        == seen_in(data, direct.trained_on)
    )


def test_collate_and_workers_of_a_ready_made_loader_are_kept():
    def collate(examples):
        inputs, targets = zip(*examples, strict=True)
        return torch.stack(inputs) * 0, torch.stack(targets)

    brain = make()
    brain.fit([1], DataLoader(points(4), batch_size=2, collate_fn=collate, num_workers=2))
    assert [int(inputs.count_nonzero()) for inputs in brain.trained_on] == [0, 0]


class Stream(IterableDataset):
    """A stream that divides itself over its workers, as torch's documentation says."""

    def __init__(self, data):
        self.data = data
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(self.data if info is None else self.data[info.id :: info.num_workers])


@pytest.mark.corner
@pytest.mark.parametrize("ready_made", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_gives_every_item_once(workers, ready_made):
    brain = make(grad_accumulation_factor=2)
    data = points(7)
    stream = Stream(data)
    kwargs = {"batch_size": 2, "num_workers": workers}
    if ready_made:
        brain.fit([1, 2], DataLoader(stream, **kwargs), stream)
    else:
        brain.fit([1, 2], stream, stream, train_loader_kwargs=kwargs)
    assert sorted(order_of(brain, data)) == sorted([*range(7)] * 2)
    assert brain.optimizer_step == 4  # four batches per epoch, in windows of two
    assert [len(inputs) for inputs in brain.trained_on].count(1) == 2
    assert stream.epochs[:2] == [1, 1] or stream.epochs[:2] == [1, 2]


def test_debug_cuts_a_stream_short_as_well():
    brain = make(debug=True)
    brain.fit(EpochCounter(5), Stream(points(7)), Stream(points(7)))
    assert len(brain.trained_on) == 4


def test_sorting_does_not_forbid_a_stream():
    brain = make(hparams={"sorting": "random"})
    brain.fit([1], Stream(points(3)))
    assert len(brain.trained_on) == 3


class WholeBatches(Dataset):
    """Gives whole batches, of different sizes."""

    def __init__(self, sizes):
        rows = points(sum(sizes))
        inputs = torch.stack([x for x, _ in rows])
        targets = torch.stack([y for _, y in rows])
        self.batches = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize("ready_made", [False, True])
def test_a_dataset_of_whole_batches(ready_made):
    data = WholeBatches([3, 1, 2])
    kwargs = {"batch_size": None, "shuffle": True}
    brain = make()
    if ready_made:
        brain.fit([1, 2, 3], DataLoader(data, **kwargs), data)
    else:
        brain.fit([1, 2, 3], data, train_loader_kwargs=kwargs)
    orders = [
        [len(inputs) for inputs in brain.trained_on[start : start + 3]] for start in (0, 3, 6)
    ]
    assert all(sorted(order) == [1, 2, 3] for order in orders)
    assert len(set(map(tuple, orders))) > 1


@pytest.mark.costly
def test_workers_give_the_same_batches():
    data = points(9)
    kwargs = {"batch_size": 2, "shuffle": True}
    alone = make()
    helped = make()
    alone.fit([1, 2], data, data, train_loader_kwargs=kwargs)
    helped.fit([1, 2], data, data, train_loader_kwargs={**kwargs, "num_workers": 2})
    assert seen_in(data, helped.trained_on) == seen_in(data, alone.trained_on)
    assert_same(weights(helped), weights(alone))


@pytest.mark.parametrize("ready_made", [False, True])
def test_a_nominal_epoch_is_as_long_as_it_says(ready_made):
    """Every nominal epoch has its four batches, and the data goes round and round."""
    brain = make()
    data = points(6)
    if ready_made:
        brain.fit([1, 2, 3], LoopedLoader(make_dataloader(data, batch_size=1), 4))
    else:
        brain.fit([1, 2, 3], data, train_loader_kwargs={"looped_nominal_epoch": 4})
    assert order_of(brain, data) == [0, 1, 2, 3, 4, 5] * 2
    assert [name for name, _, _ in brain.losses] == ["TRAIN"] * 3
    assert all(math.isfinite(loss) for _, _, loss in brain.losses)


def test_a_nominal_epoch_cut_short_by_debug_starts_again_in_full():
    brain = make(debug=True, debug_batches=3, debug_epochs=3)
    data = points(9)
    brain.fit(EpochCounter(5), data, train_loader_kwargs={"looped_nominal_epoch": 4})
    assert len(brain.trained_on) == 9


def test_make_dataloader_registers_what_it_makes(tmp_path):
    brain = make(folder=tmp_path)
    data = points(4)
    assert isinstance(brain.make_dataloader(data, Stage.TRAIN), SaveableDataLoader)
    brain.make_dataloader(data, Stage.VALID, ckpt_prefix=None)
    brain.make_dataloader(data, Stage.TEST, ckpt_prefix="loader-", looped_nominal_epoch=2)
    assert sorted(brain.checkpointer.recoverables) == [
        "brain",
        "dataloader-TRAIN",
        "loader-TEST",
        "net",
        "ranks",
    ]


def test_an_overridden_make_dataloader_is_used():
    class OwnLoader(Regression):
        def make_dataloader(self, dataset, stage, **kwargs):
            return DataLoader(dataset, batch_size=4)

    brain = make(OwnLoader)
    data = points(8)
    brain.fit([1], data)
    assert seen_in(data, brain.trained_on) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --------------------------------------------------------------------------------------------- talk


def test_parameters_are_counted_in_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="ddpkit"):
        frozen = nn.Linear(9, 10).requires_grad_(requires_grad=False)
        Brain({"net": nn.Linear(9, 100), "frozen": frozen}, run_opts=QUIET)
    assert "1.0k of 1.1k parameters are trained" in caplog.text


def test_checkpointer_gets_brain_and_optimizer(tmp_path):
    brain = Regression({"net": linear()}, sgd(), None, QUIET, Checkpointer(tmp_path))
    assert set(brain.checkpointer.recoverables) == {"brain", "ranks"}
    brain.fit([1], points(2))
    assert set(brain.checkpointer.recoverables) == {
        "brain",
        "ranks",
        "optimizer",
        "dataloader-TRAIN",
    }
