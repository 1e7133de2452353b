"""The table of all options, from which parsing, ``--help`` and attributes are made.

To add an option, add a row to :class:`OptionTypes`. A resumed run warns where options changed that
bear on its numbers, as those of the groups ``BATCHES`` and ``GRADIENTS`` do. The row of an option
of these groups that does not, or of another group that does, says so: ``changes_numbers``.
"""

from __future__ import annotations

from typing import Any

from ddpkit.options.option import AS_GIVEN, IN_FIT, MADE, PREPARED, READING, WRAPPED, Option, option

RUNNING = "What is run"
WHERE = "Where it runs"
STRATEGY = "How several processes train one model"
BATCHES = "Batches, and what they weigh"
GRADIENTS = "Precision, gradients and optimizer steps"
CHECKPOINTS = "Checkpoints and resuming"
STOPPING = "Stopping, and runs that hang"
AVERAGING = "Averaged weights"
COMPILING = "Compilation"
PROFILING = "Profiling"
OLD = "Accepted for old command lines"

#: Groups whose options change a run's numbers, but for those that say otherwise.
NUMBERS: tuple[str, ...] = (BATCHES, GRADIENTS)

_PRECISIONS = ("fp32", "fp16", "bf16")
_COMPILED = "compile compile_module_keys compile_blocks"


# fmt: off
class OptionTypes:
    """The table: each option with its type, default, group and help, in the order of ``--help``.

    Ranks: local.

    Example:
        >>> OptionTypes.debug_batches.default
        2
    """

    test_only: bool = option(False, RUNNING, "skip training: fit returns at once, evaluate runs",
        fixed=IN_FIT, in_slice=False)
    debug: bool = option(False, RUNNING, "few batches and epochs, temporary checkpoints",
        fixed=IN_FIT, in_slice=False)
    debug_batches: int = option(2, RUNNING, "batches per epoch when debugging", form="N", minimum=1,
        needs="debug", fixed=READING)
    debug_epochs: int = option(2, RUNNING, "epochs when debugging; 0 or less: all", form="N",
        needs="debug")
    debug_persistently: bool = option(False, RUNNING,
        "keep the real checkpoint folder when debugging", needs="debug", fixed=IN_FIT)
    shard_evaluation: bool = option(False, RUNNING,
        "divide validation and test sets over the processes", fixed=IN_FIT)
    check_parity: int | None = option(None, RUNNING,
        "compare the gradients of N processes with one", form="N", minimum=2, shown="off",
        fixed=IN_FIT, in_slice=None)
    gc_interval: int = option(0, RUNNING, "collect Python garbage every N steps; 0: by itself",
        form="N", minimum=0, is_attribute=False, fixed=IN_FIT)
    audit_every: int = option(0, RUNNING,
        "audit a shard of the next rank every N steps; 0: never", form="N", minimum=0,
        is_attribute=False, fixed=IN_FIT)
    hash_every: int = option(0, RUNNING, "hash weights and optimizers every N steps; 0: never",
        form="N", minimum=0, is_attribute=False, fixed=IN_FIT)
    measure_steps: str = option("sampled", RUNNING, "which steps are timed, part by part",
        choices=("sampled", "all", "off"), is_attribute=False, fixed=IN_FIT, in_slice="all")
    count_flops: bool = option(False, RUNNING,
        "count the floating-point operations of one early step", is_attribute=False, fixed=IN_FIT,
        in_slice=False)
    log_config: str | None = option(None, RUNNING, "YAML with the logging set-up", form="FILE",
        fixed=MADE)
    noprogressbar: bool = option(False, RUNNING, "no progress bar", in_slice=True)
    tqdm_colored_bar: bool = option(False, RUNNING, "colour the progress bar by stage")
    tqdm_barcolor: dict[str, str] = option({"train": "GREEN", "valid": "MAGENTA", "test": "CYAN"},
        "", "colour of the bar by stage")

    device: str = option(None, WHERE, "cpu, cuda, cuda:1, mps, xpu", form="NAME",
        shown="own GPU, else cpu", fixed=MADE)
    data_parallel_backend: bool = option(False, WHERE,
        "all GPUs from one process (nn.DataParallel)", fixed=MADE)
    data_parallel_count: int = option(-1, "", "no effect")
    distributed_backend: str = option(None, WHERE, "nccl, gloo or mpi", form="NAME",
        shown="nccl on GPUs, else gloo", fixed=MADE)
    distributed_timeout_minutes: float = option(30.0, WHERE, "longest wait for other processes",
        form="M", above=0, shown="30.5", fixed=IN_FIT)

    strategy: Any = option("auto", STRATEGY,
        "what each process holds; your own: module:Class",
        form="auto|ddp|fsdp|zero1|single", is_attribute=False, fixed=MADE)
    fsdp_blocks: list[str] | None = option(None, STRATEGY,
        "fsdp: classes of the blocks gathered at a time", form="A B", shown="by size",
        is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_min_parameters: int = option(5_000_000, STRATEGY,
        "fsdp: least number of parameters of a block", form="N", minimum=1, is_attribute=False,
        needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_reshard_after_forward: bool = option(True, STRATEGY,
        "free a block between forward and backward pass", is_attribute=False, needs="strategy=fsdp",
        fixed=WRAPPED)
    fsdp_whole_gradients: bool = option(False, STRATEGY,
        "accumulate whole gradients, exchanged once per step", is_attribute=False,
        needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_cpu_offload: bool = option(False, STRATEGY,
        "keep weights and optimizer state in host memory", is_attribute=False,
        needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_param_dtype: str = option("own", STRATEGY, "number format in which blocks are computed",
        choices=("own", "bf16"), is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    virtual_ranks: int | None = option(None, STRATEGY,
        "same bits on any number of processes; they divide N", form="N", minimum=1, shown="off",
        is_attribute=False, fixed=MADE, changes_numbers=True)
    find_unused_parameters: bool = option(False, STRATEGY,
        "DDP looks for parameters that got no gradient", fixed=WRAPPED, sets_speed=True)
    static_graph: bool = option(False, STRATEGY, "DDP: all steps use the same parameters",
        is_attribute=False, fixed=WRAPPED, sets_speed=True)
    gradient_as_bucket_view: bool | None = option(None, STRATEGY, "DDP: no copies of gradients",
        form="on|off", shown="on; own fit_batch: off", is_attribute=False, fixed=WRAPPED)
    bucket_cap_mb: float | None = option(None, STRATEGY, "DDP: gradients travel in pieces of X MiB",
        form="X", above=0, shown="25", is_attribute=False, fixed=WRAPPED, sets_speed=True)
    broadcast_buffers: bool | None = option(None, STRATEGY, "DDP: buffers of rank 0 in each step",
        form="on|off", shown="if they may differ", is_attribute=False, fixed=WRAPPED)
    ddp_comm_hook: str | None = option(None, STRATEGY,
        "DDP sends less: fp16, bf16, powersgd, post_local_sgd",
        choices=("fp16", "bf16", "powersgd", "post_local_sgd"), form="HOW", is_attribute=False,
        fixed=MADE, changes_numbers=True, sets_speed=True)
    matrix_approximation_rank: int = option(1, STRATEGY, "powersgd: columns of the matrices",
        form="N", minimum=1, is_attribute=False, needs="ddp_comm_hook=powersgd", fixed=WRAPPED)
    start_powersgd_iter: int = option(1000, STRATEGY, "powersgd: steps before it begins", form="N",
        minimum=2, is_attribute=False, needs="ddp_comm_hook=powersgd", fixed=WRAPPED)
    local_sgd_start: int | None = option(None, STRATEGY, "post_local_sgd: steps before it begins",
        form="N", minimum=0, shown="0", is_attribute=False, needs="ddp_comm_hook=post_local_sgd",
        fixed=MADE, changes_numbers=True)
    local_sgd_period: int | None = option(None, STRATEGY,
        "post_local_sgd: steps from one average to the next", form="N", minimum=1,
        is_attribute=False, needs="ddp_comm_hook=post_local_sgd", fixed=MADE, changes_numbers=True)
    sync_batchnorm: bool | None = option(None, STRATEGY, "BatchNorm over the rows of all processes",
        form="auto|on|off", shown="auto: on", is_attribute=False, fixed=WRAPPED,
        changes_numbers=True, sets_speed=True)

    grad_accumulation_factor: int = option(1, BATCHES, "batches per optimizer step", form="N",
        minimum=1, fixed=READING, changes_numbers=False, sets_speed=True)
    global_batch_size: int | None = option(None, BATCHES,
        "samples per optimizer step, over all processes", form="N", minimum=1, fixed=IN_FIT,
        changes_numbers=False)
    micro_batch_size: int | None = option(None, BATCHES, "most samples at a time on a process",
        form="N", minimum=1, shown="all at once", fixed=IN_FIT, changes_numbers=False)
    auto_micro_batch: bool = option(False, BATCHES,
        "divide global_batch_size into micro-batches that fit", is_attribute=False, fixed=IN_FIT,
        changes_numbers=False)
    prefetch_to_device: bool = option(False, BATCHES,
        "move the next batch to the GPU during a step", is_attribute=False, fixed=IN_FIT)
    loss_weighting: str = option("samples", BATCHES,
        "what counts the same: each sample, or each batch", choices=("samples", "batches"),
        fixed=READING)
    lr_scaling: str = option("none", BATCHES, "scale learning rates with the batch per step",
        choices=("none", "linear", "sqrt"), fixed=IN_FIT)
    reference_batch_size: int | None = option(None, BATCHES,
        "batch per step that the learning rates are meant for", form="N", minimum=1,
        needs="lr_scaling", fixed=IN_FIT)

    precision: str = option("fp32", GRADIENTS, "number format of training", choices=_PRECISIONS,
        fixed=MADE, sets_speed=True)
    eval_precision: str = option("fp32", GRADIENTS, "number format of validation and test",
        choices=_PRECISIONS, fixed=MADE)
    max_grad_norm: float | None = option(5.0, GRADIENTS,
        "clip gradients to this 2-norm; 0 or less: never", form="X")
    optimizer_step_limit: int | None = option(None, GRADIENTS, "stop after N optimizer steps",
        form="N", minimum=1, fixed=READING, changes_numbers=False, in_slice=None)
    scheduler_every: str = option("step", GRADIENTS, "when the schedule of scheduler_class steps",
        choices=("step", "epoch"), fixed=PREPARED)
    nonfinite_patience: int = option(3, GRADIENTS, "non-finite steps to skip per epoch", form="N",
        minimum=0)
    activation_checkpointing: list[str] | None = option(None, GRADIENTS,
        "recompute blocks of these classes", form="A B", is_attribute=False, fixed=WRAPPED,
        changes_numbers=False, sets_speed=True, saves_activations=True)
    skip_nonfinite_grads: bool = option(False, GRADIENTS,
        "drop single gradients that are not finite")
    remove_vector_weight_decay: bool = option(False, GRADIENTS,
        "no weight decay for biases and norms", fixed=PREPARED)

    ckpt_interval_minutes: float = option(0.0, CHECKPOINTS,
        "save every X minutes; 0 or less: never", form="X", in_slice=0.0)
    ckpt_interval_steps: int = option(0, CHECKPOINTS, "save every N batches; 0 or less: never",
        form="N", fixed=READING, in_slice=0)
    resume: str = option("auto", CHECKPOINTS,
        "checkpoint to go on from: the newest, none, this one", form="auto|never|PATH",
        in_slice="auto")
    resume_with_new: list[str] | None = option(None, CHECKPOINTS,
        "of the script: lr, weight_decay, schedule, optimizer", form="A B",
        choices=("lr", "weight_decay", "schedule", "optimizer"), is_attribute=False, fixed=IN_FIT)
    init_from: str | None = option(None, CHECKPOINTS,
        "a new run's first weights: a checkpoint, or a file", form="PATH", is_attribute=False,
        fixed=IN_FIT)
    init_skip: list[str] | None = option(None, CHECKPOINTS,
        "init_from: what is left out if it does not fit; all", form="A B", is_attribute=False,
        needs="init_from", fixed=IN_FIT)
    ckpt_async: bool = option(True, CHECKPOINTS,
        "write checkpoints in the background, if memory allows", fixed=IN_FIT)
    ckpt_local: str | None = option(None, CHECKPOINTS,
        "output_folder is a URL: save here, copy up later", form="FOLDER",
        is_attribute=False, fixed=MADE)
    ckpt_verify: str = option("full", CHECKPOINTS, "what is read of a checkpoint before it is used",
        choices=("full", "size", "off"), fixed=IN_FIT)
    ckpt_load: str = option("all", CHECKPOINTS, "every process reads a checkpoint, or one sends it",
        choices=("all", "broadcast"), fixed=IN_FIT)
    ckpt_layout: str = option("shards", CHECKPOINTS,
        "divided states: shards of all, or one whole",
        choices=("shards", "whole"), is_attribute=False, fixed=IN_FIT)
    ckpt_errors: str = option("stop", CHECKPOINTS, "if a checkpoint cannot be saved: stop, or warn",
        choices=("stop", "warn"), fixed=IN_FIT)

    time_limit: str | None = option(None, STOPPING, "save a checkpoint and stop, after so long",
        form="H:MM:SS", in_slice=None)
    stop_signals: list[str] = option(["SIGTERM", "SIGINT", "SIGUSR1"], STOPPING,
        "signals that save and end a run", form="A B", shown="SIGTERM SIGINT SIGUSR1", fixed=MADE)
    save_signals: list[str] = option(["SIGUSR2"], STOPPING, "signals that save a checkpoint",
        form="A B", shown="SIGUSR2", fixed=MADE)
    hang_warning: float = option(30.0, STOPPING, "warn after so long without a step; 0: never",
        form="S", minimum=0, fixed=IN_FIT)
    hang_timeout: float = option(1800.0, STOPPING,
        "end the run after so long without a step; 0: never", form="S", minimum=0, fixed=IN_FIT)

    ema_decay: float | None = option(None, AVERAGING,
        "keep an exponential moving average of the weights", form="X", minimum=0, shown="off",
        fixed=MADE, changes_numbers=True)
    evaluate_ema: bool = option(False, AVERAGING, "validate and test with the averaged weights")

    compile: bool = option(False, COMPILING, "torch.compile all modules", fixed=WRAPPED,
        sets_speed=True)
    compile_module_keys: list[str] | None = option(None, COMPILING,
        "compile only these entries of modules", form="A B", shown="all", fixed=WRAPPED)
    compile_blocks: list[str] | None = option(None, COMPILING,
        "compile only blocks of these classes", form="A B", shown="none", is_attribute=False,
        fixed=WRAPPED)
    compile_mode: str = option("default", COMPILING, "torch's mode, e.g. reduce-overhead",
        form="MODE", needs=_COMPILED,
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
            "lite"),
        fixed=WRAPPED)
    compile_using_fullgraph: bool = option(False, COMPILING, "a break in the graph is an error",
        needs=_COMPILED, fixed=WRAPPED)
    compile_using_dynamic_shape_tracing: bool = option(False, COMPILING,
        "trace with dynamic shapes", needs=_COMPILED, fixed=WRAPPED)

    profile_training: bool = option(False, PROFILING, "record a trace, log what takes longest",
        fixed=IN_FIT, in_slice=False)
    profile_warmup: int = option(5, PROFILING, "steps before the trace", form="N", minimum=0,
        needs="profile_training", fixed=IN_FIT)
    profile_steps: int = option(5, PROFILING, "steps in the trace", form="N", minimum=1,
        needs="profile_training", fixed=IN_FIT)
    memory_snapshot_on_oom: bool = option(False, PROFILING,
        "record who fills the GPU, for when it is full", is_attribute=False, fixed=IN_FIT)

    auto_mix_prec: bool = option(False, OLD, "means --precision=fp16", fixed=MADE)
    bfloat16_mix_prec: bool = option(False, OLD, "means --precision=bf16", fixed=MADE)
    distributed_launch: bool = option(False, OLD, "no effect: the launcher decides", fixed=MADE)
    jit: bool = option(False, OLD, "no effect: use --compile")
    jit_module_keys: list[str] | None = option(None, OLD, "no effect: use --compile_module_keys",
        form="A B")
    param_file: str = option("", "", "the hyperparameter YAML")


class ParserOptions:
    """Options of the command line that are an instruction to the parser, and no attribute of the
    run.

    Example:
        >>> PARSER_ONLY == {"estimate", "nproc", "local_rank"}
        True
    """

    estimate: str = option("", RUNNING, "say what memory each process would take, and end",
        form="N,24GB", shown="off", bare="1,2,4,8")
    nproc: str = option("", WHERE, "start N processes of this script on this node",
        form="N|gpu|cpu|auto", shown="this one")
    local_rank: int | None = option(None, OLD, "LOCAL_RANK where the environment has none",
        form="N")


# fmt: on


#: The options that a run has, and all, by name and in the order of ``--help``.
RUN_OPTIONS: dict[str, Option] = {
    o.name: o for o in vars(OptionTypes).values() if isinstance(o, Option)
}
OPTION_BY_NAME = RUN_OPTIONS | {
    o.name: o for o in vars(ParserOptions).values() if isinstance(o, Option)
}
#: The values that options have in each measured slice of a run.
OF_SLICES: dict[str, Any] = {
    o.name: o.in_slice for o in RUN_OPTIONS.values() if o.in_slice is not AS_GIVEN
}
OPTIONS: tuple[Option, ...] = tuple(OPTION_BY_NAME.values())
PARSER_ONLY = OPTION_BY_NAME.keys() - RUN_OPTIONS.keys()
