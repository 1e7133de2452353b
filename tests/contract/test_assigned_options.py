"""Each option that a recipe assigns after it has made its Brain: it is as if it was given, or
refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
from dataclasses import astuple, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError, RunStopped
from ddpkit.run_opts import IN_FIT, MADE, PREPARED, READING, RUN_OPTIONS, WRAPPED, RunOptions
from ddpkit.types import Stage
from tests.house import ROOT
from tests.recipes import Regression, make, points, weights

from .test_predict import handlers_kept

KWARGS = {"batch_size": 2}

#: By option: a value that is not the default, and other options that it needs.
VALUES = {
    "test_only": (True, {}),
    "debug": (True, {}),
    "debug_batches": (1, {"debug": True}),
    "debug_epochs": (1, {"debug": True}),
    "debug_persistently": (True, {"debug": True}),
    "shard_evaluation": (True, {}),
    "check_parity": (2, {}),
    "gc_interval": (2, {}),
    "audit_every": (2, {"virtual_ranks": 1}),
    "hash_every": (2, {}),
    "measure_steps": ("all", {}),
    "count_flops": (True, {}),
    "log_config": ("log.yaml", {}),
    "noprogressbar": (False, {}),
    "tqdm_colored_bar": (True, {}),
    "tqdm_barcolor": ({"train": "RED"}, {}),
    "device": ("meta", {}),
    "data_parallel_backend": (True, {}),
    "data_parallel_count": (3, {}),
    "distributed_backend": ("mpi", {}),
    "distributed_timeout_minutes": (2.0, {}),
    "strategy": ("ddp", {}),
    "fsdp_blocks": (["Linear"], {}),
    "fsdp_min_parameters": (3, {}),
    "fsdp_reshard_after_forward": (False, {}),
    "fsdp_whole_gradients": (True, {}),
    "fsdp_cpu_offload": (True, {}),
    "fsdp_param_dtype": ("bf16", {}),
    "virtual_ranks": (2, {}),
    "find_unused_parameters": (True, {}),
    "static_graph": (True, {}),
    "gradient_as_bucket_view": (True, {}),
    "bucket_cap_mb": (1.0, {}),
    "broadcast_buffers": (True, {}),
    "ddp_comm_hook": ("bf16", {}),
    "matrix_approximation_rank": (2, {}),
    "start_powersgd_iter": (2, {}),
    "local_sgd_start": (2, {}),
    "local_sgd_period": (2, {}),
    "sync_batchnorm": (False, {}),
    "grad_accumulation_factor": (2, {}),
    "global_batch_size": (4, {}),
    "micro_batch_size": (1, {"global_batch_size": 4}),
    "auto_micro_batch": (True, {"global_batch_size": 4}),
    "prefetch_to_device": (True, {}),
    "loss_weighting": ("batches", {"grad_accumulation_factor": 2}),
    "lr_scaling": ("linear", {"reference_batch_size": 4}),
    "reference_batch_size": (4, {"lr_scaling": "linear"}),
    "precision": ("bf16", {}),
    "eval_precision": ("bf16", {}),
    "max_grad_norm": (0.01, {}),
    "optimizer_step_limit": (2, {}),
    "scheduler_every": ("epoch", {}),
    "nonfinite_patience": (0, {}),
    "activation_checkpointing": (["Linear"], {}),
    "skip_nonfinite_grads": (True, {}),
    "remove_vector_weight_decay": (True, {}),
    "ckpt_interval_minutes": (1e-9, {}),
    "ckpt_interval_steps": (1, {}),
    "resume": ("never", {}),
    "resume_with_new": (["weight_decay"], {}),
    "init_from": ("other.pt", {}),
    "init_skip": (["head.*"], {"init_from": "other.pt"}),
    "ckpt_async": (False, {}),
    "ckpt_local": ("scratch", {}),
    "ckpt_verify": ("size", {}),
    "ckpt_load": ("broadcast", {}),
    "ckpt_layout": ("whole", {}),
    "ckpt_errors": ("warn", {}),
    "time_limit": ("1s", {}),
    "stop_signals": (["SIGTERM"], {}),
    "save_signals": ([], {}),
    "hang_warning": (7.0, {}),
    "hang_timeout": (70.0, {}),
    "ema_decay": (0.5, {}),
    "evaluate_ema": (True, {"ema_decay": 0.5}),
    "compile": (True, {}),
    "compile_module_keys": (["net"], {}),
    "compile_blocks": (["Linear"], {}),
    "compile_mode": ("reduce-overhead", {}),
    "compile_using_fullgraph": (True, {}),
    "compile_using_dynamic_shape_tracing": (True, {}),
    "profile_training": (True, {}),
    "profile_warmup": (0, {"profile_training": True}),
    "profile_steps": (1, {"profile_training": True}),
    "memory_snapshot_on_oom": (True, {}),
    "auto_mix_prec": (True, {}),
    "bfloat16_mix_prec": (True, {}),
    "distributed_launch": (True, {}),
    "jit": (True, {}),
    "jit_module_keys": (["net"], {}),
    "param_file": ("other.yaml", {}),
}
#: Of one process on a CPU nothing is seen of these: they are for several, for a GPU, for old
#: command lines, or, as what is measured, change nothing but the run's log.
UNSEEN = {
    *(
        "shard_evaluation",
        "distributed_timeout_minutes",
        "hang_warning",
        "hang_timeout",
        "ckpt_load",
        "ckpt_layout",
    ),
    *("tqdm_colored_bar", "tqdm_barcolor", "prefetch_to_device", "auto_micro_batch", "param_file"),
    *("skip_nonfinite_grads", "nonfinite_patience", "reference_batch_size", "resume"),
    *("data_parallel_count", "jit", "jit_module_keys", "memory_snapshot_on_oom", "measure_steps"),
    "hash_every",  # in the log
    "count_flops",
}
#: These end the process, take long, start others or need files: they are seen in tests of
#: their own.
APART = {
    "audit_every",
    "check_parity",
    "time_limit",
    "init_from",
    "init_skip",
    "resume_with_new",
    *(name for name in VALUES if name.startswith(("compile", "profile"))),
}
AT_ANY_TIME = [name for name, row in RUN_OPTIONS.items() if row.fixed != MADE and name not in APART]


class Seen(Regression):
    """Notes what of a run the options are to change."""

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = [self.optimizer.param_groups[0]["lr"], len(self.optimizer.param_groups)]
        self.seen += [type(self.modules.net).__name__, type(self.modules.net).forward.__qualname__]

    late: ClassVar = {}  # options to assign when the training of the first epoch begins

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN and epoch == 1:
            self.run_opts.update(self.late)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.seen += [len(batch[0]), self.step, self.optimizer_step, gc.isenabled(), self.lr_scale]

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.seen += [stage.name, stage_loss]
        if stage is Stage.TRAIN:
            self.checkpointer.save_checkpoint()

    def _fit_train(self, train_set, epoch, enable):
        self.seen += [enable, self.checkpointer.asynchronous]
        super()._fit_train(train_set, epoch, enable)


halved = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def observed(folder, given, assigned, way):
    torch.manual_seed(5)
    brain = make(Seen, folder=folder, **given)
    brain.scheduler_class = halved
    brain.seen = []
    if way == "in fit":
        brain.late = assigned
    else:
        assign(brain, assigned, way)
    outcome = []
    with contextlib.suppress(ZeroDivisionError):
        result = brain.fit(range(1, 4), points(7), points(3), None, KWARGS, KWARGS)
        outcome = list(astuple(replace(result, newest_checkpoint=None)))
    saver = brain.checkpointer
    is_own_folder = saver.checkpoints_dir == folder
    kept = [
        is_own_folder,
        len(saver.list_checkpoints()),
        saver.verify_mode,
        saver.load_mode,
        saver.on_error,
    ]
    return str(
        [
            brain.seen,
            outcome,
            kept,
            brain.losses,
            {k: v.tolist() for k, v in weights(brain).items()},
        ]
    )


def assign(brain, values, way):
    if way == "run_opts":
        brain.run_opts = {**brain.run_opts, **values}
        return
    for name, value in values.items():
        if way == "attribute" and RUN_OPTIONS[name].is_attribute:
            setattr(brain, name, value)
        else:
            brain.run_opts[name] = value


def test_every_option_is_in_the_table():
    assert VALUES.keys() == RUN_OPTIONS.keys()
    assert {RUN_OPTIONS[name].fixed for name in VALUES} == {
        "",
        MADE,
        WRAPPED,
        PREPARED,
        IN_FIT,
        READING,
    }


@pytest.mark.in_each_check(99)
@pytest.mark.corner
@pytest.mark.parametrize("way", ["attribute", "run_opts"])
@pytest.mark.parametrize("name", AT_ANY_TIME)
def test_it_counts_as_if_it_was_given(name, way, tmp_path):
    value, needs = VALUES[name]
    beside = {key: one for key, one in needs.items() if RUN_OPTIONS[key].fixed == MADE}
    late = {key: one for key, one in needs.items() if key not in beside} | {name: value}
    given = observed(tmp_path / "given", {**beside, **late}, {}, way)
    assert observed(tmp_path / "assigned", beside, late, way) == given
    if name not in UNSEEN and RUN_OPTIONS[name].fixed != WRAPPED:
        plain = observed(tmp_path / "plain", needs, {}, way)
        assert plain != given, "nothing is seen of it"


@pytest.mark.parametrize("way", ["attribute", "item", "run_opts"])
@pytest.mark.parametrize("name", [name for name, row in RUN_OPTIONS.items() if row.fixed == MADE])
def test_what_was_read_when_the_brain_was_made_is_refused_by_name(name, way):
    if (name, way) == ("distributed_launch", "run_opts"):
        return  # the launcher says it, whatever is given there
    brain = make()
    value = VALUES[name][0]
    before = brain.run_opts[name]
    with pytest.raises(ConfigError, match=rf"{name}=.*comes too late: {name}=|{name}"):
        assign(brain, {name: value}, way)
    assert brain.run_opts[name] == before
    assign(brain, {name: before}, "item")  # the same is no change


def refusals_inside(name, value):
    """Assign an option at each hook of ``fit``; return the hooks at which that was refused."""
    refused = []

    class Late(Regression):
        def tries(self, where):
            before = self.run_opts[name]
            refused.append(where)
            with contextlib.suppress(ConfigError):
                self.run_opts[name] = value
                self.run_opts[name] = before
                refused.pop()

        def init_optimizers(self):
            self.tries("init_optimizers")
            super().init_optimizers()

        def on_fit_start(self):
            self.tries("on_fit_start")
            super().on_fit_start()

        def on_stage_start(self, stage, epoch=None):
            self.tries("on_stage_start")

        def on_fit_batch_start(self, batch, should_step):
            self.tries("on_fit_batch_start")

    brain = make(Late, net=nn.Sequential(nn.Linear(3, 1).double()))
    brain.fit([1], points(4), train_loader_kwargs=KWARGS)
    brain.tries("after fit")
    return list(dict.fromkeys(refused))


IN_STAGE = ["on_stage_start", "on_fit_batch_start"]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("max_grad_norm", []),
        ("grad_accumulation_factor", ["on_fit_batch_start"]),
        ("hang_timeout", ["on_fit_start", "init_optimizers", *IN_STAGE]),
        ("static_graph", ["init_optimizers", *IN_STAGE, "after fit"]),
        ("scheduler_every", [*IN_STAGE, "after fit"]),
        ("precision", ["on_fit_start", "init_optimizers", *IN_STAGE, "after fit"]),
    ],
)
def test_what_was_read_for_good_is_refused_from_then_on(name, refused):
    assert refusals_inside(name, VALUES[name][0]) == refused


@pytest.mark.in_each_check(99)
@pytest.mark.slow
@pytest.mark.parametrize("name", AT_ANY_TIME)
def test_every_option_is_refused_from_its_moment_on(name):
    late = {
        WRAPPED: "after fit",
        PREPARED: "after fit",
        IN_FIT: "on_stage_start",
        READING: "on_fit_batch_start",
        "": None,
    }[RUN_OPTIONS[name].fixed]
    assert late is None or late in refusals_inside(name, VALUES[name][0])


def test_options_that_do_not_go_together_are_refused_when_fit_begins():
    brain = make()
    brain.ckpt_interval_minutes = 1.0
    brain.ckpt_interval_steps = 1
    with pytest.raises(
        ConfigError,
        match="ckpt_interval_minutes=1.0 and ckpt_interval_steps=1 are both set",
    ):
        brain.fit([1], points(4), train_loader_kwargs=KWARGS)
    brain = make()
    brain.run_opts.static_graph = brain.find_unused_parameters = True
    with pytest.raises(
        ConfigError,
        match="static_graph=True does not work with find_unused_parameters=True",
    ):
        brain.fit([1], points(4), train_loader_kwargs=KWARGS)


def test_all_options_are_taken_or_none():
    brain = make(max_grad_norm=3.0)
    with pytest.raises(ConfigError, match="precision='bf16' comes too late"):
        brain.run_opts = RunOptions(device="cpu", max_grad_norm=1.0, precision="bf16")
    assert (brain.max_grad_norm, brain.precision) == (3.0, "fp32")
    del brain.run_opts["max_grad_norm"]
    assert brain.max_grad_norm == RUN_OPTIONS["max_grad_norm"].default


def test_a_time_limit_that_is_assigned_stops_the_run(tmp_path):
    class Late(Regression):
        def on_stage_start(self, stage, epoch=None):
            self.time_limit = "1s"

    brain = make(Late, folder=tmp_path)
    with handlers_kept(), pytest.raises(RunStopped) as stopped:
        brain.fit(range(1, 2_000), points(8), train_loader_kwargs=KWARGS)
    assert stopped.value.cause == "time limit"
    [saved] = brain.checkpointer.list_checkpoints()
    assert json.loads((tmp_path / "stopped.json").read_text())["checkpoint"] == str(saved.path)
    again = make(folder=tmp_path)
    again.fit([], points(8), train_loader_kwargs=KWARGS)
    assert not (tmp_path / "stopped.json").exists()
    with pytest.raises(ConfigError, match="time_limit expects a length of time > 0, got 'soon'"):
        brain.time_limit = "soon"


def test_blocks_are_computed_again_as_assigned():
    brain = make(net=nn.Sequential(nn.Linear(3, 1).double()))
    brain.run_opts.activation_checkpointing = ["Missing"]
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        brain.fit([1], points(4), train_loader_kwargs=KWARGS)


@pytest.mark.slow
def test_a_model_is_compiled_as_assigned():
    brain = make()
    brain.compile = True
    brain.fit([1], points(4), train_loader_kwargs=KWARGS)
    assert brain.modules.net._compiled_call_impl is not None


def test_a_training_is_profiled_as_assigned(tmp_path):
    found = []

    class Noting(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            found.append((type(self.profiler).__name__, self.tot_prof_steps))

    brain = make(Noting, hparams={"output_folder": tmp_path})
    brain.profile_training = True
    brain.profile_warmup = 1
    brain.profile_steps = 1
    brain.fit([1], points(6), train_loader_kwargs=KWARGS)
    assert found == [("profile", 2)] * 3


def test_the_page_of_the_options_says_when_each_is_read():
    page = (ROOT / "docs" / "reference" / "run_opts.md").read_text(encoding="utf-8")
    told = page.partition("## Options that a recipe assigns")[2].partition("\n## ")[0]
    listed = [
        set(re.findall(r"`(\w+)`", item))
        for item in re.findall(r"^- [^:]+:(.*?)\.$", told, re.MULTILINE | re.DOTALL)
    ]
    assert listed == [
        {name for name, row in RUN_OPTIONS.items() if row.fixed == moment}
        for moment in (MADE, WRAPPED, PREPARED, IN_FIT, READING)
    ]


def test_an_attribute_that_looks_like_an_option_and_sets_none_is_told_of_once(caplog):
    brain = make()
    brain.strategy = object()  # the recipe's own
    brain.bucket_cap_mb = None  # as it is
    brain.static_graph = True
    for epoch in (1, 2):
        brain.fit([epoch], points(4), train_loader_kwargs=KWARGS)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith(
        "self.static_graph = True does not set the option of this name, which is False."
    )
    assert brain.static_graph is True
    assert brain.run_opts.static_graph is False
