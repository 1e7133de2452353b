"""A recipe may call its own methods and attributes what it likes: it cannot replace a step of the
library by a name.

The names that mean something to the Brain are those of the contract and the documentation; they are
listed here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.run_opts import RUN_OPTIONS, RunOptions

# What a recipe overrides or calls. Everything else on the Brain is private.
METHODS = {
    "backward", "check_gradients", "check_loss_isfinite", "compute_forward", "compute_objectives",
    "evaluate",
    "evaluate_batch", "fit", "fit_batch", "freeze_optimizers", "gather", "init_optimizers", "log",
    "make_dataloader",
    "no_sync", "on_evaluate_start", "on_fit_batch_end", "on_fit_batch_start", "on_fit_start",
    "on_set_end", "on_stage_end",
    "on_stage_start", "optimizers_step", "predict", "predict_batch", "print_trainable_parameters",
    "stop_training", "update_average", "zero_grad",
}  # fmt: skip
ATTRIBUTES = {
    "avg_train_loss", "checkpointer", "device_type", "ema", "evaluation_ctx", "hparams", "logged",
    "lr_scale",
    "modules",
    "nonfinite_count", "opt_class", "optimizer", "optimizer_step", "optimizers_dict", "profiler",
    "progress", "rank",
    "raw_modules", "run_opts", "scaler", "set_name", "scheduler_class", "should_step", "step",
    "steps_per_epoch", "tot_prof_steps",
    "total_steps", "train_sampler", "training_ctx",
}  # fmt: skip
OPTIONS = {name for name in dir(RunOptions()) if not name.startswith("_")} | set(
    RunOptions().as_dict()
)
# a recipe may use these names
OPTIONS -= {one.name for one in RUN_OPTIONS.values() if not one.is_attribute}

# What a recipe might well call something of its own: the names of the Brain's parts and steps,
# today's and former ones.
NAMES = """
    accumulate accumulation agree apply_options attended average batch batches before_recovery beat begin begin_epoch begin_pass
    choose_factor choose_seed choose_start choosing_start clip close collect_own_state collect_state compare_data compare_ranks config
    control counts criterion data dataset ddp drop_frozen_gradients end end_epoch end_pass end_streams epoch
    epoch_counter evaluator every failure finish finish_gradients flags flush flush_window follow_options freezes
    guard heartbeat history hook_optimizers host signals is_done is_done_before is_fitting is_main is_ready keep_global_batch labels
    last_loss leave let_go limits lineage load loader load_state load_state_dict local_rank lock logger losses
    losses_so_far main mean meter metrics mode model move name names net no_failure_saved note_trainer opt options
    order outputs pace part parts place_in_calls plan policy position preflight prepare prepare_ending prepare_fit
    process_group queue rank_state recover recover_for_evaluation recover_place register register_with report
    report_evaluation report_training require_no_other require_no_training restore resume_from results run run_state
    sampler save save_checkpoint save_intra_epoch save_now saving saving_inside saving_session scale schedule scheduler
    scores seed session set_epoch settle setup shard signals stage start state state_dict stats step_to_save stop
    stop_cause stop_in_evaluation stop_now strategy sums take_checkpointer take_flags take_marker_away take_step take_up
    teardown tell tell_not_taken test_set timer train train_loader train_set train_step trainer valid_set validate
    watch watchdog weigh weights window world world_size wrap
"""  # noqa: E501
PRIVATE = """
    _bar_enabled _check_parity _check_prepared _fit_loaders _fit_result _is_step_limit_reached _loader _parts
    _plan_steps _prepare_modules _prepare_optimizers _require_no_training _run _run_epochs _runner
    _scale_learning_rates _state _step _take_length _test_loader
"""  # such as self._run = wandb.init()  # noqa: E501
PLAUSIBLE = [*NAMES.split(), *PRIVATE.split()]
# docs/porting.md names these, which have one underscore and may be overridden all the same.
OVERRIDABLE = {"_fit_train", "_fit_valid", "_compile", "_wrap_distributed", "_save", "_recover"}


class Line(ddpkit.Brain):
    """Dropout and shuffling, so that a seed or a place that is skipped shows in the weights."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        if (
            stage is ddpkit.Stage.TRAIN
            and self.killed_at is not None
            and self.optimizer_step >= self.killed_at
        ):
            raise KeyboardInterrupt
        return nn.functional.mse_loss(predictions, batch[1])

    killed_at = None


def refuse(self, *_, **__):
    raise AssertionError("the library has called a recipe's own method")


def weights_after(brain_class, folder, *, killed_at=None):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    inputs = torch.linspace(-1, 1, 46).reshape(23, 2)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "grad_accumulation_factor": 2,
        "ckpt_interval_steps": 1,
    }
    counter = EpochCounter(3)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = brain_class(
        {"net": net},
        lambda p: torch.optim.Adam(p, lr=0.05),
        None,
        options,
        checkpointer,
    )
    brain.killed_at = killed_at
    kwargs = {"batch_size": 3, "shuffle": True}
    brain.fit(
        counter,
        data,
        data,
        train_loader_kwargs=kwargs,
        valid_loader_kwargs={"batch_size": 4},
    )
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_the_public_names_of_the_brain_are_those_of_the_contract_and_the_documentation():
    brain = ddpkit.Brain(run_opts={"device": "cpu"})
    names = {name for name in dir(brain) if not name.startswith("_")}
    assert names - METHODS - ATTRIBUTES - OPTIONS == set()
    assert sum(not name.startswith("_") for name in dir(ddpkit.Brain)) <= 109


def test_what_is_no_override_point_has_a_mangled_name():
    own = {
        name
        for name in vars(ddpkit.Brain)
        if name.startswith("_") and not name.startswith(("__", "_Brain__"))
    }
    assert own == OVERRIDABLE
    page = (Path(__file__).parents[2] / "docs/porting.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in OVERRIDABLE)


def test_a_recipe_named_brain_cannot_replace_a_step_of_fit_either():
    with pytest.raises(
        ConfigError,
        match="a class named Brain cannot define __fit_loaders: rename the class",
    ):
        type("Brain", (ddpkit.Brain,), {"_Brain__fit_loaders": None, "_Brain__own": None})
    type("Brain", (ddpkit.Brain,), {"_Brain__own": None})


def test_no_plausible_name_is_one_of_the_contract():
    assert set(PLAUSIBLE) & (METHODS | ATTRIBUTES | OPTIONS) == set()


@pytest.mark.slow
@pytest.mark.parametrize("as_attribute", [False, True], ids=["methods", "attributes"])
def test_a_recipe_that_defines_every_plausible_name_trains_and_resumes_as_without_them(
    tmp_path,
    as_attribute,
):
    own = dict.fromkeys(PLAUSIBLE, object() if as_attribute else refuse)
    busy = type("Busy", (Line,), own)
    plain = weights_after(Line, tmp_path / "plain")
    assert torch.equal(weights_after(busy, tmp_path / "busy"), plain)

    with pytest.raises(KeyboardInterrupt):
        weights_after(busy, tmp_path / "killed", killed_at=6)  # of 12 steps; in the second epoch
    assert torch.equal(weights_after(busy, tmp_path / "killed"), plain)
