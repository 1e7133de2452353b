"""The options of a run: one table, from which parsing, ``--help`` and attributes are made, and the object of one run.

To add an option, add a row to :class:`OptionTypes`. The reading of words is in :mod:`ddpkit.command_line`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ddpkit.control import SignalListener, usage_errors, watch_uncaught
from ddpkit.device import default_backend, resolve_device
from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.launch import NPROC, PARITY, LaunchInfo, become_torchrun, find_launch, options_of_slice
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from ddpkit.command_line import CommandLine

__all__ = ["OPTIONS", "Option", "OptionTypes", "RunOptions", "option_attributes", "parse_arguments", "parse_duration"]

logger = get_logger(__name__)

T = TypeVar("T")

ON_COMMAND_LINE = "on the command line"
IN_RUN_OPTS = "in run_opts"
IN_YAML = "in the hparams YAML"

#: Moments of a run at which options are read for good.
MADE, WRAPPED, PREPARED, IN_FIT = "made", "wrapped", "prepared", "in fit"
_TOO_LATE = {
    MADE: "it was read when the Brain was made. Give it before: to Brain(run_opts=...), on the command line or in the "
    "YAML",
    WRAPPED: "it was read when fit prepared the modules. Assign it before the first call of fit",
    PREPARED: "it was read when fit made the optimizers. Assign it before the first call of fit, or in init_optimizers",
    IN_FIT: "it was read when this call of fit began. Assign it before fit, or after it",
}

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NOTHING = frozenset({"", "none", "null", "~", "auto"})

_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhd]?)")


@dataclass(eq=False)
class Option:
    """One run option; of an object that has options as items, the attribute that reads it.

    Its name, its type and whether it may be None come from the line of :class:`OptionTypes` on which it stands.

    Args:
        default: its value if none is given.
        group: the heading of ``--help`` under which it stands; empty for what the command line does not take.
        help: one line.
        form: how its value is shown in ``--help``.
        choices: the values that are accepted; empty for any.
        minimum: the smallest number that makes sense.
        above: a bound that the number must exceed.
        shown: how ``--help`` says the default where the value itself would not tell.
        is_attribute: whether a Brain has an attribute of this name. What no recipe reads or sets needs none: a
            recipe's own attribute of the name then means what it likes. It is read at ``brain.run_opts``.
        needs: the options of which one must be given, and with this value, if it is to have an effect.
        fixed: the moment from which it cannot be changed, since it has been read; empty: it is read whenever it counts.

    Ranks: local.

    Example:
        >>> OPTION_BY_NAME["debug_batches"].coerce("3", "here")
        3
    """

    default: Any
    group: str
    help: str
    form: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    shown: str = ""
    is_attribute: bool = True
    needs: str = ""
    fixed: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        annotation = owner.__annotations__[name]
        self.name = name
        self.type, self._convert, self._noun = _KINDS[annotation.removesuffix(" | None").partition("[")[0]]
        self.is_optional = self.default is None or annotation.endswith(" | None")
        self.form = self.form or "|".join(self.choices)

    def __get__(self, owner: Any, _kind: type) -> Any:
        return self if owner is None else owner[self.name]

    def coerce(self, value: Any, where: str) -> Any:
        """Check a value from any source and bring it to this option's type.

        Args:
            value: text from a command line, or an object from a YAML file or from Python.
            where: the source in words, for the error.

        Returns:
            The value as ``type``, or None where that is allowed.

        Raises:
            ConfigError: the value cannot be used; the message says what to give instead.

        Ranks: local.
        """
        if self.is_optional and ("" if value is None else str(value)).strip().lower() in _NOTHING:
            return None
        try:
            converted = self._convert(value)
        except (TypeError, ValueError, OverflowError):
            noun = "on, off or auto" if self.type is bool and self.is_optional else self._noun
            raise self._error(value, where, noun) from None
        if self.choices and converted not in self.choices:
            raise self._error(value, where, f"one of {', '.join(self.choices)}")
        if self.minimum is not None and converted < self.minimum:
            raise self._error(value, where, f"a number >= {self.minimum}")
        if self.above is not None and converted <= self.above:
            raise self._error(value, where, f"a number > {self.above:g}")
        return converted

    @property
    def shown_default(self) -> str:
        """The default in words."""
        if self.shown or self.default is None:
            return self.shown or "none"
        return ("on" if self.default else "off") if self.type is bool else str(self.default)

    def _error(self, value: Any, where: str, expected: str) -> ConfigError:
        name, place = (f"--{self.name}", "") if where == ON_COMMAND_LINE else (self.name, f" {where}")
        meaning = f"{name}: {self.help} (default: {self.shown_default})."
        return ConfigError(f"{name} expects {expected}, got {value!r}{place}. {meaning}")


option: Any = Option  # for type checkers, a row is a value of the type that is written before it


def to_bool(value: Any) -> bool:
    """Read a switch: True or False, 1 or 0, or a word for one of them in any case.

    Args:
        value: the switch or its text.

    Raises:
        ValueError: it is neither.

    Ranks: local.

    Example:
        >>> to_bool("False"), to_bool("yes"), to_bool(1)
        (False, True, True)
    """
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(value)
    return word in _TRUE


def parse_duration(text: str) -> float:
    """Read a length of time.

    Args:
        text: ``"11:50:00"``, ``"1-06:00:00"`` (days first), ``"90m"``, ``"20h"``, or a number of seconds, which is also
            what YAML makes of ``11:50:00``.

    Returns:
        Seconds.

    Raises:
        ConfigError: the text is not a length of time, or not above 0.

    Ranks: local.

    Example:
        >>> parse_duration("11:50:00"), parse_duration("1-00:00:10"), parse_duration("90m"), parse_duration("42600")
        (42600.0, 86410.0, 5400.0, 42600.0)
    """
    word = str(text).strip().lower()
    clock, number = _CLOCK.fullmatch(word), _NUMBER.fullmatch(word)
    seconds = 0.0
    if clock is not None:
        seconds = sum(int(clock[unit] or 0) * _UNITS[unit] for unit in "dhms")
    elif number is not None:
        seconds = float(number["number"]) * _UNITS[number["unit"] or "s"]
    if seconds <= 0:
        raise ConfigError(
            f"time_limit expects a length of time > 0, got {text!r}. Give H:MM:SS such as 11:50:00, "
            "with days 1-06:00:00, or 90m, 20h, or seconds."
        )
    return seconds


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or math.isnan(float(value)):
        raise ValueError(value)
    return float(value)


def _to_int(value: Any) -> int:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:  # "1e5"
            pass
    number = _to_float(value)  # a float that is whole: what `!ref <a> / <b>` gives in YAML
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


def _to_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, dict, list, tuple)):
        raise TypeError(value)
    return str(value)


def _to_words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple, set)):
        raise TypeError(value)
    return [_to_text(word) for word in value]


_KINDS: dict[str, tuple[type, Any, str]] = {
    "bool": (bool, to_bool, "true or false"),
    "int": (int, _to_int, "a whole number"),
    "float": (float, _to_float, "a number"),
    "str": (str, _to_text, "text"),
    "list": (list, _to_words, "a list of names"),
    "dict": (dict, lambda value: {**value}, "a mapping"),
}

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

    test_only: bool = option(False, RUNNING, "skip training: fit returns at once, evaluate runs", fixed=IN_FIT)
    debug: bool = option(False, RUNNING, "few batches and epochs, temporary checkpoints", fixed=IN_FIT)
    debug_batches: int = option(2, RUNNING, "batches per epoch when debugging", form="N", minimum=1, needs="debug")
    debug_epochs: int = option(2, RUNNING, "epochs when debugging; 0 or less: all", form="N", needs="debug")
    debug_persistently: bool = option(False, RUNNING, "keep the real checkpoint folder when debugging", needs="debug",
        fixed=IN_FIT)
    shard_evaluation: bool = option(False, RUNNING, "divide validation and test sets over the processes", fixed=IN_FIT)
    check_parity: int | None = option(None, RUNNING, "compare the gradients of N processes with one", form="N",
        minimum=2, shown="off", fixed=IN_FIT)
    gc_interval: int = option(0, RUNNING, "collect Python garbage every N steps; 0: by itself", form="N",
        minimum=0, is_attribute=False, fixed=IN_FIT)
    measure_steps: str = option("sampled", RUNNING, "which steps are timed, part by part",
        choices=("sampled", "all", "off"), is_attribute=False, fixed=IN_FIT)
    count_flops: bool = option(False, RUNNING, "count the floating-point operations of one early step",
        is_attribute=False, fixed=IN_FIT)
    log_config: str | None = option(None, RUNNING, "YAML with the logging set-up", form="FILE", fixed=MADE)
    noprogressbar: bool = option(False, RUNNING, "no progress bar")
    tqdm_colored_bar: bool = option(False, RUNNING, "colour the progress bar by stage")
    tqdm_barcolor: dict[str, str] = option({"train": "GREEN", "valid": "MAGENTA", "test": "CYAN"}, "",
        "colour of the bar by stage")

    device: str = option(None, WHERE, "cpu, cuda, cuda:1, mps, xpu", form="NAME", shown="own GPU, else cpu", fixed=MADE)
    data_parallel_backend: bool = option(False, WHERE, "all GPUs from one process (nn.DataParallel)", fixed=MADE)
    data_parallel_count: int = option(-1, "", "no effect")
    distributed_backend: str = option(None, WHERE, "nccl, gloo or mpi", form="NAME", shown="nccl on GPUs, else gloo",
        fixed=MADE)
    distributed_timeout_minutes: float = option(30.0, WHERE, "longest wait for other processes", form="M", above=0,
        shown="30.5", fixed=IN_FIT)

    strategy: str = option("auto", STRATEGY, "what each process holds of the model",
        choices=("auto", "ddp", "fsdp", "zero1", "single"), is_attribute=False, fixed=MADE)
    fsdp_blocks: list[str] | None = option(None, STRATEGY, "fsdp: classes of the blocks gathered at a time", form="A B",
        shown="by size", is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_min_parameters: int = option(5_000_000, STRATEGY, "fsdp: least number of parameters of a block", form="N",
        minimum=1, is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_reshard_after_forward: bool = option(True, STRATEGY, "free a block between forward and backward pass",
        is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_whole_gradients: bool = option(False, STRATEGY, "accumulate whole gradients, exchanged once per step",
        is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_cpu_offload: bool = option(False, STRATEGY, "keep weights and optimizer state in host memory",
        is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    fsdp_param_dtype: str = option("own", STRATEGY, "number format in which blocks are computed",
        choices=("own", "bf16"), is_attribute=False, needs="strategy=fsdp", fixed=WRAPPED)
    virtual_ranks: int | None = option(None, STRATEGY, "same bits on any number of processes; they divide N",
        form="N", minimum=1, shown="off", is_attribute=False, fixed=MADE)
    find_unused_parameters: bool = option(False, STRATEGY, "DDP looks for parameters that got no gradient",
        fixed=WRAPPED)
    static_graph: bool = option(False, STRATEGY, "DDP: all steps use the same parameters", is_attribute=False,
        fixed=WRAPPED)
    gradient_as_bucket_view: bool | None = option(None, STRATEGY, "DDP: no copies of gradients", form="on|off",
        shown="on; own fit_batch: off", is_attribute=False, fixed=WRAPPED)
    bucket_cap_mb: float | None = option(None, STRATEGY, "DDP: gradients travel in pieces of X MiB", form="X", above=0,
        shown="25", is_attribute=False, fixed=WRAPPED)
    broadcast_buffers: bool | None = option(None, STRATEGY, "DDP: buffers of rank 0 in each step", form="on|off",
        shown="if they may differ", is_attribute=False, fixed=WRAPPED)
    ddp_comm_hook: str | None = option(None, STRATEGY, "DDP sends less: fp16, bf16, powersgd, post_local_sgd",
        choices=("fp16", "bf16", "powersgd", "post_local_sgd"), form="HOW", is_attribute=False, fixed=MADE)
    matrix_approximation_rank: int = option(1, STRATEGY, "powersgd: columns of the matrices", form="N", minimum=1,
        is_attribute=False, needs="ddp_comm_hook=powersgd", fixed=WRAPPED)
    start_powersgd_iter: int = option(1000, STRATEGY, "powersgd: steps before it begins", form="N", minimum=2,
        is_attribute=False, needs="ddp_comm_hook=powersgd", fixed=WRAPPED)
    local_sgd_start: int | None = option(None, STRATEGY, "post_local_sgd: steps before it begins", form="N",
        minimum=0, shown="0", is_attribute=False, needs="ddp_comm_hook=post_local_sgd", fixed=MADE)
    local_sgd_period: int | None = option(None, STRATEGY, "post_local_sgd: steps from one average to the next",
        form="N", minimum=1, is_attribute=False, needs="ddp_comm_hook=post_local_sgd", fixed=MADE)
    sync_batchnorm: bool | None = option(None, STRATEGY, "BatchNorm over the rows of all processes",
        form="auto|on|off", shown="auto: on", is_attribute=False, fixed=WRAPPED)

    grad_accumulation_factor: int = option(1, BATCHES, "batches per optimizer step", form="N", minimum=1)
    global_batch_size: int | None = option(None, BATCHES, "samples per optimizer step, over all processes", form="N",
        minimum=1, fixed=IN_FIT)
    micro_batch_size: int | None = option(None, BATCHES, "most samples at a time on a process", form="N",
        minimum=1, shown="all at once", fixed=IN_FIT)
    auto_micro_batch: bool = option(False, BATCHES, "divide global_batch_size into micro-batches that fit",
        is_attribute=False, fixed=IN_FIT)
    prefetch_to_device: bool = option(False, BATCHES, "move the next batch to the GPU during a step",
        is_attribute=False, fixed=IN_FIT)
    loss_weighting: str = option("samples", BATCHES, "what counts the same: each sample, or each batch",
        choices=("samples", "batches"))
    lr_scaling: str = option("none", BATCHES, "scale learning rates with the batch per step",
        choices=("none", "linear", "sqrt"), fixed=IN_FIT)
    reference_batch_size: int | None = option(None, BATCHES, "batch per step that the learning rates are meant for",
        form="N", minimum=1, needs="lr_scaling", fixed=IN_FIT)

    precision: str = option("fp32", GRADIENTS, "number format of training", choices=_PRECISIONS, fixed=MADE)
    eval_precision: str = option("fp32", GRADIENTS, "number format of validation and test", choices=_PRECISIONS,
        fixed=MADE)
    max_grad_norm: float | None = option(5.0, GRADIENTS, "clip gradients to this norm; 0 or less: never", form="X")
    optimizer_step_limit: int | None = option(None, GRADIENTS, "stop after N optimizer steps", form="N", minimum=1)
    scheduler_every: str = option("step", GRADIENTS, "when the schedule of scheduler_class steps",
        choices=("step", "epoch"), fixed=PREPARED)
    nonfinite_patience: int = option(3, GRADIENTS, "non-finite steps to skip per epoch", form="N", minimum=0)
    activation_checkpointing: list[str] | None = option(None, GRADIENTS, "recompute blocks of these classes",
        form="A B", is_attribute=False, fixed=WRAPPED)
    skip_nonfinite_grads: bool = option(False, GRADIENTS, "drop single gradients that are not finite")
    remove_vector_weight_decay: bool = option(False, GRADIENTS, "no weight decay for biases and norms", fixed=PREPARED)

    ckpt_interval_minutes: float = option(0.0, CHECKPOINTS, "save every X minutes; 0 or less: never", form="X")
    ckpt_interval_steps: int = option(0, CHECKPOINTS, "save every N batches; 0 or less: never", form="N")
    resume: str = option("auto", CHECKPOINTS, "checkpoint to go on from: the newest, none, this one",
        form="auto|never|PATH")
    ckpt_async: bool = option(True, CHECKPOINTS, "write checkpoints in the background, if memory allows", fixed=IN_FIT)
    ckpt_verify: str = option("full", CHECKPOINTS, "what is read of a checkpoint before it is used",
        choices=("full", "size", "off"))
    ckpt_load: str = option("all", CHECKPOINTS, "every process reads a checkpoint, or one sends it",
        choices=("all", "broadcast"))
    ckpt_errors: str = option("stop", CHECKPOINTS, "if a checkpoint cannot be saved: stop, or warn",
        choices=("stop", "warn"))

    time_limit: str | None = option(None, STOPPING, "save a checkpoint and stop, after so long", form="H:MM:SS")
    stop_signals: list[str] = option(["SIGTERM", "SIGINT", "SIGUSR1"], STOPPING, "signals that save and end a run",
        form="A B", shown="SIGTERM SIGINT SIGUSR1", fixed=MADE)
    save_signals: list[str] = option(["SIGUSR2"], STOPPING, "signals that save a checkpoint", form="A B",
        shown="SIGUSR2", fixed=MADE)
    hang_warning: float = option(30.0, STOPPING, "warn after so long without a step; 0: never", form="S", minimum=0,
        fixed=IN_FIT)
    hang_timeout: float = option(1800.0, STOPPING, "end the run after so long without a step; 0: never", form="S",
        minimum=0, fixed=IN_FIT)

    ema_decay: float | None = option(None, AVERAGING, "keep an exponential moving average of the weights", form="X",
        minimum=0, shown="off", fixed=MADE)
    evaluate_ema: bool = option(False, AVERAGING, "validate and test with the averaged weights")

    compile: bool = option(False, COMPILING, "torch.compile all modules", fixed=WRAPPED)
    compile_module_keys: list[str] | None = option(None, COMPILING, "compile only these entries of modules", form="A B",
        shown="all", fixed=WRAPPED)
    compile_blocks: list[str] | None = option(None, COMPILING, "compile only blocks of these classes",
        form="A B", shown="none", is_attribute=False, fixed=WRAPPED)
    compile_mode: str = option("default", COMPILING, "torch's mode, e.g. reduce-overhead", form="MODE", needs=_COMPILED,
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"), fixed=WRAPPED)
    compile_using_fullgraph: bool = option(False, COMPILING, "a break in the graph is an error", needs=_COMPILED,
        fixed=WRAPPED)
    compile_using_dynamic_shape_tracing: bool = option(False, COMPILING, "trace with dynamic shapes", needs=_COMPILED,
        fixed=WRAPPED)

    profile_training: bool = option(False, PROFILING, "record a trace, log what takes longest", fixed=IN_FIT)
    profile_warmup: int = option(5, PROFILING, "steps before the trace", form="N", minimum=0, needs="profile_training",
        fixed=IN_FIT)
    profile_steps: int = option(5, PROFILING, "steps in the trace", form="N", minimum=1, needs="profile_training",
        fixed=IN_FIT)
    memory_snapshot_on_oom: bool = option(False, PROFILING, "record who fills the GPU, for when it is full",
        is_attribute=False, fixed=IN_FIT)

    auto_mix_prec: bool = option(False, OLD, "means --precision=fp16", fixed=MADE)
    bfloat16_mix_prec: bool = option(False, OLD, "means --precision=bf16", fixed=MADE)
    distributed_launch: bool = option(False, OLD, "no effect: the launcher decides", fixed=MADE)
    jit: bool = option(False, OLD, "no effect: use --compile")
    jit_module_keys: list[str] | None = option(None, OLD, "no effect: use --compile_module_keys", form="A B")
    param_file: str = option("", "", "the hyperparameter YAML")


class ParserOptions:
    """Options of the command line that are an instruction to the parser, and no attribute of the run.

    Ranks: local.

    Example:
        >>> PARSER_ONLY == {"nproc", "local_rank"}
        True
    """

    nproc: str = option("", WHERE, "start N processes of this script on this machine", form="N|gpu|cpu|auto",
        shown="this one")
    local_rank: int | None = option(None, OLD, "LOCAL_RANK where the environment has none", form="N")


# fmt: on


#: The options that a run has, and all, by name and in the order of ``--help``.
RUN_OPTIONS: dict[str, Option] = {o.name: o for o in vars(OptionTypes).values() if isinstance(o, Option)}
OPTION_BY_NAME = RUN_OPTIONS | {o.name: o for o in vars(ParserOptions).values() if isinstance(o, Option)}
OPTIONS = tuple(OPTION_BY_NAME.values())
PARSER_ONLY = OPTION_BY_NAME.keys() - RUN_OPTIONS.keys()

_OWN_ATTRIBUTES = frozenset({"_values", "_reached", "overridden_args"})
_FOUND_OUT = ("device", "distributed_backend")  # None means: find it out, and so counts as not given
_OF_THIS_START = frozenset({"param_file", "distributed_launch"})  # where it was started from; no choice of settings


class RunOptions(OptionTypes, MutableMapping[str, Any]):
    """The options of a run, as attributes and as items.

    Every option of ``OPTIONS`` is there. Keys of a recipe's own may be added; those are
    not checked. What is passed here or assigned later counts as given, and so wins over the YAML.

    ``device`` and ``distributed_backend`` are concrete (``"cuda:1"``, ``"nccl"``) in what
    :func:`parse_arguments` and :meth:`resolved` return: "nccl" where the device is a CUDA device, "gloo"
    otherwise, unless given. In an object made by hand they are None until then.

    Args:
        **options: values by name. ``device`` may be a ``torch.device``.

    Attributes:
        overridden_args: names of the options that were given, on the command line or in code.

    Raises:
        ConfigError: a value cannot be used.

    Ranks: local.

    Example:
        >>> run_opts = RunOptions(precision="bf16")
        >>> run_opts.precision, run_opts["max_grad_norm"], run_opts.overridden_args
        ('bf16', 5.0, {'precision'})
        >>> run_opts["my_key"] = 1
        >>> run_opts.get("my_key"), "other" in run_opts
        (1, False)
    """

    _values: dict[str, Any]
    _reached: set[str]
    overridden_args: set[str]

    def __init__(self, **options: Any) -> None:
        self._reached = set()
        self._values = {name: copy.copy(option.default) for name, option in RUN_OPTIONS.items()}
        self.overridden_args = set()
        also_given = options.pop("overridden_args", ())
        self.update(options)
        self.overridden_args |= set(also_given)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._set(name, self._checked(name, value))

    def _set(self, name: str, value: Any) -> None:
        self._values[name] = value
        self.overridden_args.add(name)

    def _checked(self, name: str, value: Any) -> Any:
        """Return a value in the type of its option, if it can still be changed."""
        option = RUN_OPTIONS.get(name)
        if option is None:
            return value
        value = option.coerce(value, IN_RUN_OPTS)
        if name == "time_limit" and value is not None:
            parse_duration(value)
        if option.fixed in self._reached and value != self._values[name]:
            now = f"{name}={self._values[name]!r} is in use"
            raise ConfigError(f"{name}={value!r} comes too late: {now}, as {_TOO_LATE[option.fixed]}.")
        return value

    def __delitem__(self, name: str) -> None:
        if name in RUN_OPTIONS:
            self._checked(name, RUN_OPTIONS[name].default)
        del self._values[name]
        self.overridden_args.discard(name)
        if name in RUN_OPTIONS:  # an option goes back to its default, and is never missing
            self._values[name] = copy.copy(RUN_OPTIONS[name].default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:  # options are found before this; these are the rest
            return self._values[name]
        raise AttributeError(f"there is no run option {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __repr__(self) -> str:
        given = ", ".join(f"{n}={self._values[n]!r}" for n in self._values if n in self.overridden_args)
        return f"RunOptions({given})"

    @classmethod
    def from_command_line_args(cls, arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
        """Read a command line: the same as :func:`parse_arguments`.

        Args:
            arg_list: the words after the script's name; None takes ``sys.argv[1:]``.

        Returns:
            The YAML file, the options, and the overrides as YAML text.

        Raises:
            DdpkitError: as :func:`parse_arguments`.

        Ranks: local.
        """
        return parse_arguments(arg_list)

    @classmethod
    def from_dictionary(cls, args_dict: Mapping[str, Any]) -> RunOptions:
        """Make options from a plain dict; each key counts as given, unknown ones are kept.

        Args:
            args_dict: values by name.

        Raises:
            ConfigError: a value cannot be used.

        Ranks: local.

        Example:
            >>> RunOptions.from_dictionary({"debug": True, "mine": 3})
            RunOptions(debug=True, mine=3)
        """
        return args_dict.copy() if isinstance(args_dict, RunOptions) else cls(**args_dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all options and keys as a plain dict.

        Ranks: local.

        Example:
            >>> RunOptions().as_dict()["debug_batches"]
            2
        """
        return dict(self._values)

    def changed(self) -> dict[str, Any]:
        """Return the options whose values are not their defaults, for the record of a run.

        A device or a backend that was found out, and not given, is left out.

        Ranks: local.

        Example:
            >>> RunOptions(debug=True, max_grad_norm=5.0).changed()
            {'debug': True}
        """
        found_out = {name for name in _FOUND_OUT if name not in self.overridden_args}
        left_out = _OF_THIS_START | found_out
        return {
            name: self[name]
            for name, row in RUN_OPTIONS.items()
            if name not in left_out and self[name] != row.default
        }

    def copy(self) -> RunOptions:
        """Return options that can be changed without changing these.

        Ranks: local.

        Example:
            >>> RunOptions(debug=True).copy()
            RunOptions(debug=True)
        """
        twin = type(self)(**self._values)
        twin.overridden_args = set(self.overridden_args)
        return twin

    # ------------------------------------------------------------------ in a run

    def reach(self, moment: str) -> None:
        """Let the options that are read for good at a moment be changed no more.

        Args:
            moment: ``MADE``, ``WRAPPED``, ``PREPARED`` or ``IN_FIT`` of this module.

        Ranks: local.

        Example:
            >>> run_opts = RunOptions(precision="bf16")
            >>> run_opts.reach(MADE)
            >>> run_opts.precision = "fp32"
            Traceback (most recent call last):
            ddpkit.errors.ConfigError: precision='fp32' comes too late: precision='bf16' is in use, as it was read ...
        """
        self._reached.add(moment)

    @contextlib.contextmanager
    def held(self, moment: str) -> Iterator[None]:
        """Return a context in which a moment is reached.

        Args:
            moment: as for :meth:`reach`.

        Ranks: local.

        Example:
            >>> run_opts = RunOptions()
            >>> with run_opts.held(IN_FIT):
            ...     run_opts.max_grad_norm = 1.0
            >>> run_opts.debug = True
        """
        was_reached = moment in self._reached
        self._reached.add(moment)
        try:
            yield
        finally:
            if not was_reached:
                self._reached.discard(moment)

    def derive(self, name: str, value: Any) -> None:
        """Set an option that follows from others, also where a recipe cannot any more.

        Args:
            name: of the option.
            value: of its type.

        Ranks: local; alike on every rank.

        Example:
            >>> run_opts = RunOptions()
            >>> run_opts.derive("micro_batch_size", 4)
            >>> run_opts.micro_batch_size
            4
        """
        self._set(name, RUN_OPTIONS[name].coerce(value, IN_RUN_OPTS))

    def take(self, others: RunOptions) -> None:
        """Take the values of other options over, if all of them can still be changed.

        Args:
            others: they stay apart: what is set in them later does not count here.

        Raises:
            ConfigError: an option with another value has been read for good. Then nothing is changed.

        Ranks: local; alike on every rank.

        Example:
            >>> run_opts = RunOptions(debug=True)
            >>> run_opts.take(RunOptions(max_grad_norm=1.0))
            >>> run_opts
            RunOptions(max_grad_norm=1.0)
        """
        values = {name: self._checked(name, value) for name, value in others.items()}
        self._values.clear()
        self._values.update(values)
        self.overridden_args = set(others.overridden_args)

    def check(self) -> None:
        """Refuse options that do not go together, after single ones have been assigned.

        Raises:
            ConfigError: naming the options.

        Ranks: local.

        Example:
            >>> RunOptions(device="cpu").check()
        """
        _check_together(self, find_launch())

    def resolved(self, hparams: Mapping[str, Any] | None = None) -> RunOptions:
        """Bring the sources together: what was given wins over the YAML, and that over the defaults.

        Args:
            hparams: the loaded YAML; its keys that are not options are not looked at.

        Returns:
            New options, checked, with a concrete ``device`` and ``distributed_backend``, and with
            ``distributed_launch`` as the launcher has it. ``overridden_args`` is unchanged.

        Raises:
            ConfigError: a value cannot be used, or two do not go together.
            LaunchError: the launcher's environment contradicts itself.

        Ranks: local.

        Example:
            >>> run_opts = RunOptions(debug=True).resolved({"debug": False, "max_grad_norm": 1, "lr": 0.1})
            >>> run_opts.debug, run_opts.max_grad_norm, "lr" in run_opts
            (True, 1.0, False)
        """
        _warn_of_misspelt({**(hparams or {}), **self})
        from_yaml = {name: (hparams or {})[name] for name in RUN_OPTIONS if name in (hparams or {})}
        from_yaml.pop("param_file", None)
        if from_yaml:
            set_by_yaml = [f"{name}={value!r}" for name, value in from_yaml.items() if name not in self.overridden_args]
            logger.info("Run options from the YAML: %s", ", ".join(set_by_yaml) or "none, as all were given")
        if self.overridden_args:
            plain = {name for name, row in RUN_OPTIONS.items() if name not in from_yaml and self[name] == row.default}
            given = ", ".join(f"{name}={self[name]!r}" for name in self if name in self.overridden_args - plain)
            logger.info("Run options that were given: %s", given or "none but defaults")
        with usage_errors():
            return _merged(self, from_yaml, find_launch())


def _warn_of_misspelt(names: Iterable[str]) -> None:
    """Warn of keys of the YAML and of ``run_opts`` that are nearly options, and set none."""
    flags = {name.replace("_", ""): name for name in RUN_OPTIONS}
    for key in [name for name in names if name not in OPTION_BY_NAME]:
        plain = key.replace("_", "").replace("-", "").lower()
        for meant in difflib.get_close_matches(plain, flags, n=1, cutoff=0.94):
            logger.warning_once("The key %r is not a run option, and sets none; did you mean %r?", key, flags[meant])


def _merged(run_opts: RunOptions, from_yaml: Mapping[str, Any], info: LaunchInfo) -> RunOptions:
    """Merge the sources, and choose the values that none of them gives."""
    from_yaml = {name: RUN_OPTIONS[name].coerce(value, IN_YAML) for name, value in from_yaml.items()}
    given = {name: value for name, value in run_opts.items() if name in run_opts.overridden_args}
    for source in (from_yaml, given):
        _apply_old_options(source)
        for name in _FOUND_OUT:
            if source.get(name, "") is None:
                del source[name]
    merged = run_opts.copy()
    merged.update({**from_yaml, **given, **options_of_slice(RUN_OPTIONS)})
    device = resolve_device(merged["device"], info)
    chosen = "distributed_backend" in from_yaml or "distributed_backend" in given
    if merged["distributed_backend"] is None or (device != run_opts["device"] and not chosen):
        merged["distributed_backend"] = default_backend(device)
    if PARITY in os.environ:  # its ranks may share a GPU, which NCCL refuses
        merged["distributed_backend"] = "gloo"
    merged.update(device=device, distributed_launch=info.is_distributed)
    merged.overridden_args = set(run_opts.overridden_args)
    SignalListener(merged["stop_signals"], merged["save_signals"])  # refuses names that cannot work
    if merged["time_limit"] is not None:
        parse_duration(merged["time_limit"])
    _check_together(merged, info)
    return merged


def option_attributes(owner: type[T]) -> type[T]:
    """Give a class one property per option that a Brain shows, which reads and writes ``self.run_opts``.

    Args:
        owner: a class whose objects have ``run_opts``.

    Returns:
        The class.

    Ranks: local.

    Example:
        >>> @option_attributes
        ... class Host:
        ...     run_opts = RunOptions()
        >>> host = Host()
        >>> host.max_grad_norm = 3
        >>> host.run_opts["max_grad_norm"], host.run_opts.overridden_args
        (3.0, {'max_grad_norm'})
    """
    for name, option in RUN_OPTIONS.items():
        if option.is_attribute:
            setattr(owner, name, _option_property(name))
    return owner


def _option_property(name: str) -> property:
    def read(self: Any) -> Any:
        return self.run_opts[name]

    def write(self: Any, value: Any) -> None:
        self.run_opts[name] = value

    return property(read, write, doc=f"Run option: {RUN_OPTIONS[name].help}.")


def parse_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
    """Read a recipe's command line.

    The hyperparameter YAML may stand anywhere. ``--help`` shows the options; each ``--name=value`` that is no
    option overrides a key of the YAML, and must match one. Options that the YAML sets as plain values are
    seen in the result too, unless the command line gives others.

    Args:
        arg_list: the words after the script's name; None takes ``sys.argv[1:]``.

    Returns:
        The YAML file, the options (with a concrete ``device`` and ``distributed_backend``), and the overrides
        as YAML text for :func:`ddpkit.hparams.load_hparams`.

    Raises:
        MissingFileError: the YAML file does not exist.
        ConfigError: an argument, a value or the YAML file cannot be used.
        LaunchError: the launcher's environment contradicts itself.
        SystemExit: with code 0, after ``--help`` or ``--version`` has been printed.

    An error that nobody catches ends the process with exit code 2 and one sentence, ``train.py: error: ...``, which the
    first rank of a machine says, and under torchrun its summary. So does every later ConfigError of the script.

    Ranks: local.

    State: sets ``LOCAL_RANK`` in the environment for an old ``--local_rank=N`` where the launcher did not, and
        ``sys.excepthook``. With ``--nproc`` this process becomes torch's launcher, which
        starts the script once per rank.

    Example:
        >>> parse_arguments(["--precision=fp8", "hparams.yaml"])
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: --precision expects one of fp32, fp16, bf16, got 'fp8'...
    """
    from ddpkit.command_line import read_command_line  # loads ruamel.yaml: not for a Brain alone

    words = list(sys.argv[1:] if arg_list is None else arg_list)
    with usage_errors():
        line = read_command_line(words)
        given = dict(line.given)
        local_rank = given.pop("local_rank", None)
        if local_rank is not None and local_rank >= 0:
            os.environ.setdefault("LOCAL_RANK", str(local_rank))
        if given.pop("distributed_launch", False):
            logger.warning_once("--distributed_launch has no effect any more: the launcher decides. Leave it out.")
        info = find_launch()
        nproc = given.pop("nproc", None)
        if nproc is not None and not (info.is_distributed and NPROC in os.environ):
            _start_ranks(nproc, line, arg_list)
        watch_uncaught()
        run_opts = RunOptions(**given, param_file=line.param_file)
        run_opts.overridden_args = set(given)
        run_opts = _merged(run_opts, line.in_yaml, info)
    if words == sys.argv[1:]:
        _READ[tuple(words)] = run_opts.copy()
    return line.param_file, run_opts, line.overrides


_READ: dict[tuple[str, ...], RunOptions] = {}  # from this process's own command line, by its words


def command_line_options() -> RunOptions | None:
    """Return the options of this process's own command line; None where :func:`parse_arguments` has not read it.

    Ranks: local.

    Example:
        >>> command_line_options() is None
        True
    """
    return _READ.get(tuple(sys.argv[1:]))


def _start_ranks(nproc: str, line: CommandLine, arg_list: Sequence[str] | None) -> NoReturn:
    """Become torch's launcher, which starts the script again as several ranks."""
    if arg_list is not None and list(arg_list) != sys.argv[1:]:
        raise ConfigError(
            f"nproc={nproc!r} restarts the script with sys.argv, but parse_arguments was given other arguments. Leave "
            "--nproc out, and start the script with torchrun."
        )
    become_torchrun(nproc, line.given.get("device", line.in_yaml.get("device")))


def _apply_old_options(source: dict[str, Any]) -> None:
    """Turn the old switches of one source into its ``precision``; say which have no effect."""
    if source.get("jit") or source.get("jit_module_keys"):
        words = "--jit and --jit_module_keys have no effect: TorchScript is deprecated in torch. Use --compile."
        logger.warning_once(words)
    for old, precision in (("bfloat16_mix_prec", "bf16"), ("auto_mix_prec", "fp16")):
        if source.get(old):
            logger.warning_once(f"{old} is deprecated: give --precision={precision} instead.")
            source.setdefault("precision", precision)


def _check_together(values: Mapping[str, Any], info: LaunchInfo) -> None:
    """Refuse options that do not go together, or name what is not there."""
    log_config = values["log_config"]
    if log_config is not None and not Path(log_config).is_file():
        raise MissingFileError(
            f"log_config={log_config!r}: there is no such file. It has the form of logging.config.dictConfig, in YAML."
        )
    minutes, steps = values["ckpt_interval_minutes"], values["ckpt_interval_steps"]
    if minutes > 0 and steps > 0:
        raise ConfigError(
            f"ckpt_interval_minutes={minutes!r} and ckpt_interval_steps={steps!r} are both set, and only one "
            "can be. Turn one off with --ckpt_interval_minutes=0 or --ckpt_interval_steps=0."
        )
    if values["data_parallel_backend"] and (info.is_distributed or values["device"] == "cpu"):
        alone = "One process, all GPUs:  python train.py hparams.yaml --data_parallel_backend"
        raise ConfigError(
            "data_parallel_backend=True means all GPUs from one process: it needs a GPU, and no launcher. This is on "
            f"{values['device']}, launcher {info.launcher}, {info.world_size} process(es). Use one of these:\n"
            f"{alone if info.is_distributed else 'One process, no GPU:    python train.py hparams.yaml'}\n"
            "Several processes:      torchrun --standalone --nproc_per_node=N train.py hparams.yaml"
        )
