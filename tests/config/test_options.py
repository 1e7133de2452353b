from __future__ import annotations

from ddpkit.brain import Brain
from ddpkit.config.options import OPTION_BY_NAME, OPTIONS, PARSER_ONLY, OptionTypes
from ddpkit.run_opts import RunOptions


def test_the_table_is_whole():
    contract = {
        "param_file",
        "test_only",
        "debug",
        "debug_batches",
        "debug_epochs",
        "debug_persistently",
        "log_config",
        "device",
        "data_parallel_backend",
        "data_parallel_count",
        "distributed_backend",
        "distributed_launch",
        "find_unused_parameters",
        "jit",
        "jit_module_keys",
        "compile",
        "compile_module_keys",
        "compile_mode",
        "compile_using_fullgraph",
        "compile_using_dynamic_shape_tracing",
        "precision",
        "eval_precision",
        "auto_mix_prec",
        "bfloat16_mix_prec",
        "max_grad_norm",
        "skip_nonfinite_grads",
        "nonfinite_patience",
        "noprogressbar",
        "ckpt_interval_minutes",
        "ckpt_interval_steps",
        "grad_accumulation_factor",
        "optimizer_step_limit",
        "scheduler_every",
        "tqdm_colored_bar",
        "tqdm_barcolor",
        "remove_vector_weight_decay",
        "profile_training",
        "profile_warmup",
        "profile_steps",
        "shard_evaluation",
        "distributed_timeout_minutes",
        "global_batch_size",
        "micro_batch_size",
        "loss_weighting",
        "lr_scaling",
        "reference_batch_size",
        "check_parity",
        "resume",
        "ckpt_async",
        "ckpt_verify",
        "ckpt_load",
        "ckpt_errors",
        "ckpt_on_error",
        "time_limit",
        "stop_signals",
        "save_signals",
        "hang_warning",
        "hang_timeout",
        "ema_decay",
        "evaluate_ema",
        "strategy",
        "virtual_ranks",
        "activation_checkpointing",
        "compile_blocks",
    }
    assert set(RunOptions()) == contract
    assert set(OPTION_BY_NAME) - PARSER_ONLY == contract == set(OptionTypes.__annotations__)
    for option in OPTIONS:
        assert option.default is None or option.coerce(option.default, "here") == option.default, option.name
        assert option.default is not None or option.is_optional, option.name
        assert hasattr(Brain, option.name) == (option.is_attribute and option.name not in PARSER_ONLY)
