"""What a recipe puts in the place of something that the Brain has made is what the whole run
uses.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from ddpkit.ema import WeightAverage
from ddpkit.precision import TorchAutocast
from ddpkit.run_opts import RunOptions
from tests.recipes import QUIET, Regression, linear, make, points, seen_in, sgd

KWARGS = {"batch_size": 4}


def fit(brain, **given):
    return brain.fit(range(1, 3), points(8), train_loader_kwargs=KWARGS, **given)


def test_other_modules_are_trained_and_evaluated_in_their_mode():
    brain = make()
    modes = []
    brain.modules = nn.ModuleDict({"net": linear(seed=1)})
    brain.modules.net.register_forward_hook(lambda module, *_: modes.append(module.training))
    fit(brain, valid_set=points(4), valid_loader_kwargs=KWARGS)
    assert modes == [True, True, False] * 2


def test_a_class_beside_the_brain_may_look_at_what_is_set():
    class Watched:
        def __setattr__(self, name, value):
            vars(self).setdefault("names", []).append(name)
            super().__setattr__(name, value)

    class Own(Regression, Watched):
        pass

    brain = make(Own)
    brain.own = 1
    brain.modules = brain.modules
    assert {"modules", "own"} <= set(brain.names)


def test_values_of_the_class_and_early_ones_count_until_the_brain_is_made():
    seen = []

    class Early(Regression):
        modules = None
        opt_class = torch.optim.SGD
        hparams: ClassVar = {"name": "of the class"}

        def __init__(self, *args, **kwargs):
            seen.extend([self.modules, self.opt_class, self.hparams, hasattr(self, "progress")])
            self.hparams = SimpleNamespace(name="early")
            seen.append(self.hparams.name)
            super().__init__(*args, **kwargs)

    brain = make(Early, hparams={"name": "given"})
    assert seen == [None, torch.optim.SGD, {"name": "of the class"}, False, "early"]
    assert brain.hparams.name == "given"
    assert brain.opt_class is not torch.optim.SGD
    assert Early.opt_class is torch.optim.SGD
    assert fit(brain).optimizer_steps == 4


def test_what_makes_optimizers_and_schedules_may_be_of_the_class():
    class Own(Regression):
        opt_class = functools.partial(torch.optim.SGD, lr=1.0)
        scheduler_class = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

    brain = Own({"net": nn.Linear(3, 1).double()}, run_opts=QUIET)
    assert fit(brain).optimizer_steps == 4
    assert brain.optimizer.param_groups[0]["lr"] == 0.5**4


def test_the_progress_is_not_replaced():
    with pytest.raises(AttributeError, match=r"self.progress = 3: the Brain counts its steps"):
        make().progress = 3


def test_other_hparams_decide_about_sorting():
    brain = make()
    data = points(8)
    brain.hparams = SimpleNamespace(sorting="random")
    brain.fit(range(1, 2), data, train_loader_kwargs=KWARGS)
    assert seen_in(data, brain.trained_on) != [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_other_options_are_those_of_every_part():
    brain = make()
    brain.run_opts = RunOptions(**QUIET, global_batch_size=8).resolved({})
    assert fit(brain).optimizer_steps == 2, (
        "a step takes eight samples, and so one does for an epoch"
    )


def test_an_average_of_the_recipe_follows_the_steps():
    class Own(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            self.ema = WeightAverage(self.modules, 0.5)

    brain = make(Own)
    assert fit(brain).optimizer_steps == brain.ema.updates == 4


def test_a_profiler_of_the_recipe_is_stepped():
    brain = make()
    own = brain.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    fit(brain)
    assert own.step_num == 2, "one for each batch that is followed by another"
    assert brain.profiler is None


def test_the_start_block_names_the_format_of_the_recipe_s_context(caplog):
    brain = make(net=nn.Linear(3, 1).double())
    brain.training_ctx = TorchAutocast("cpu", torch.bfloat16)
    with caplog.at_level("INFO", "ddpkit"):
        fit(brain)
    assert "bf16, evaluation float64" in caplog.text


def test_the_bar_can_be_switched_off_in_on_fit_start():
    asked = []

    class Own(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            self.noprogressbar = True

        def _fit_train(self, train_set, epoch, enable):
            asked.append(enable)
            super()._fit_train(train_set, epoch, enable)

    fit(make(Own, noprogressbar=False))
    assert asked == [False, False]


@pytest.mark.parametrize("placeholder", ["optimizers_dict", "optimizer"])
def test_a_placeholder_of_the_class_hides_nothing(placeholder, tmp_path):
    def init_optimizers(self):
        optimizer = sgd()(self.modules.parameters())
        setattr(
            self,
            placeholder,
            {"own": optimizer} if placeholder == "optimizers_dict" else optimizer,
        )

    own = type(
        "Own",
        (Regression,),
        {placeholder: None, "checkpointer": None, "init_optimizers": init_optimizers},
    )
    brain = make(own, folder=tmp_path)
    assert fit(brain).optimizer_steps == 4
    brain.checkpointer.save_checkpoint()


@pytest.mark.parametrize("name", ["optimizer", "optimizers_dict", "checkpointer", "scaler"])
def test_a_placeholder_may_be_set_before_the_brain_is_made_and_nothing_else(name, tmp_path):
    class Early(Regression):
        value = None

        def __init__(self, *args, **kwargs):
            setattr(self, name, self.value)
            super().__init__(*args, **kwargs)

    assert fit(make(Early, folder=tmp_path)).optimizer_steps == 4
    Early.value = object()
    with pytest.raises(AttributeError, match=r"before super\(\).__init__\(\)"):
        make(Early)


def test_the_checkpoint_hooks_take_a_path_as_text(tmp_path):
    brain = make(folder=tmp_path / "saves")
    path = tmp_path / "brain.ckpt"
    brain._save(str(path))
    brain._recover(str(path), True)
    assert "optimizer_step: 0" in path.read_text()
