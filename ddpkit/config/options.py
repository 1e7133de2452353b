"""The table of run options: parsing, ``--help``, attributes and documentation are all made from it.

To add an option, add a row to :data:`OPTIONS` and its type to :class:`OptionTypes`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpkit.errors import ConfigError

ON_COMMAND_LINE = "on the command line"
IN_RUN_OPTS = "in run_opts"
IN_YAML = "in the hparams YAML"

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NOTHING = frozenset({"", "none", "null", "~", "auto"})


@dataclass(frozen=True)
class Option:
    """One run option.

    Args:
        name: its name as an attribute, a key and, with two dashes, a flag.
        default: its value where nobody gives one.
        type: ``bool``, ``int``, ``float``, ``str``, ``list`` (of strings) or ``dict``.
        group: the heading of ``--help`` under which it stands; empty for what the command line does not take.
        help: one line.
        choices: the values that are accepted; empty for any.
        form: how its value is shown in ``--help``.
        minimum: the smallest number that makes sense.
        above: a bound that the number must exceed.
        is_optional: whether it may be None.
        default_words: how ``--help`` says the default where the value itself would not tell.

    Ranks: local.

    Example:
        >>> Option("workers", 2, int, "Loading", "processes that load", form="N").coerce("3", "here")
        3
    """

    name: str
    default: Any
    type: type
    group: str
    help: str
    choices: tuple[str, ...] = ()
    form: str = ""
    minimum: float | None = None
    above: float | None = None
    is_optional: bool = False
    default_words: str = ""

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
            converted = _CONVERTERS[self.type](value)
        except (TypeError, ValueError, OverflowError):
            raise self._error(value, where, f"is no {_NOUNS[self.type]}") from None
        if self.choices and converted not in self.choices:
            raise self._error(value, where, f"is not one of {', '.join(self.choices)}")
        if self.minimum is not None and converted < self.minimum:
            raise self._error(value, where, f"is below {self.minimum}, the smallest value that makes sense")
        if self.above is not None and converted <= self.above:
            raise self._error(value, where, f"is not above {self.above:g}")
        return converted

    @property
    def usage(self) -> str:
        """How the option is written on a command line."""
        if self.type is list:
            return f"--{self.name} {self.form}"
        return f"--{self.name}={self.form}" if self.form else f"--{self.name}"

    @property
    def shown_default(self) -> str:
        """The default in words."""
        if self.default_words:
            return self.default_words
        if self.default is None:
            return "none"
        return ("on" if self.default else "off") if self.type is bool else str(self.default)

    def _error(self, value: Any, where: str, reason: str) -> ConfigError:
        example = f"--{self.name}={_EXAMPLES[self.type]}"
        if self.choices:
            close = difflib.get_close_matches(str(value).lower(), self.choices, n=1, cutoff=0.5)
            example = f"--{self.name}={(close or [self.default or self.choices[0]])[0]}"
        elif self.default not in (None, False) and self.type is not dict:
            example = f"--{self.name}={self.default}"
        if where != ON_COMMAND_LINE:
            example = example.removeprefix("--").replace("=", ": " if where == IN_YAML else "=", 1)
        default = "" if self.default is None else f" (the default is {self.default!r})"
        return ConfigError(f"{self.name}={value!r} {where} {reason}. Give {example}{default}: {self.help}.")


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


def _to_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return dict(value)


_CONVERTERS: dict[type, Any] = {
    bool: to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    list: _to_words,
    dict: _to_mapping,
}
_NOUNS = {
    bool: "True or False",
    int: "whole number",
    float: "number",
    str: "text",
    list: "list of names",
    dict: "mapping",
}
_EXAMPLES = {bool: "True", int: "10", float: "5.0", str: "text", list: "a,b", dict: "{}"}

RUNNING = "What is run"
WHERE = "Where it runs"
BATCHES = "Batches, and what they weigh"
GRADIENTS = "Precision, gradients and optimizer steps"
CHECKPOINTS = "Checkpoints and resuming"
STOPPING = "Stopping, and runs that hang"
AVERAGING = "Averaged weights"
COMPILING = "Compilation"
PROFILING = "Profiling"
OLD = "Accepted for old command lines"

_PRECISIONS = ("fp32", "fp16", "bf16")

# fmt: off
#: All run options, in the order of ``--help``.
OPTIONS: tuple[Option, ...] = (
    Option("test_only", False, bool, RUNNING, "skip training: fit returns at once, evaluate runs"),
    Option("debug", False, bool, RUNNING, "few batches and epochs, temporary checkpoints"),
    Option("debug_batches", 2, int, RUNNING, "batches per epoch when debugging", form="N", minimum=1),
    Option("debug_epochs", 2, int, RUNNING, "epochs when debugging; 0 or less: all", form="N"),
    Option("debug_persistently", False, bool, RUNNING, "keep the real checkpoint folder when debugging"),
    Option("shard_evaluation", False, bool, RUNNING, "divide validation and test sets over the processes"),
    Option("check_parity", None, int, RUNNING, "compare the gradients of N processes with one", form="N",
           minimum=2, is_optional=True, default_words="off"),
    Option("log_config", None, str, RUNNING, "YAML with the logging set-up", form="FILE", is_optional=True),
    Option("noprogressbar", False, bool, RUNNING, "no progress bar"),
    Option("tqdm_colored_bar", False, bool, RUNNING, "colour the progress bar by stage"),
    Option("tqdm_barcolor", {"train": "GREEN", "valid": "MAGENTA", "test": "CYAN"}, dict, "",
           "colour of the bar by stage"),

    Option("device", None, str, WHERE, "cpu, cuda, cuda:1, mps, xpu", form="NAME", is_optional=True,
           default_words="own GPU, else cpu"),
    Option("data_parallel_backend", False, bool, WHERE, "all GPUs from one process (nn.DataParallel)"),
    Option("data_parallel_count", -1, int, "", "no effect"),
    Option("nproc", "", str, WHERE, "start N processes of this script on this machine", form="N|gpu|cpu|auto",
           default_words="this one"),
    Option("distributed_backend", None, str, WHERE, "nccl, gloo or mpi", form="NAME", is_optional=True,
           default_words="nccl on GPUs, else gloo"),
    Option("distributed_timeout_minutes", 30.0, float, WHERE, "longest wait for other processes", form="M",
           above=0),
    Option("find_unused_parameters", False, bool, WHERE, "DDP looks for parameters that got no gradient"),

    Option("grad_accumulation_factor", 1, int, BATCHES, "batches per optimizer step", form="N", minimum=1),
    Option("global_batch_size", None, int, BATCHES, "samples per optimizer step, over all processes", form="N",
           minimum=1, is_optional=True),
    Option("micro_batch_size", None, int, BATCHES, "of those, at most N at a time on a process", form="N",
           minimum=1, is_optional=True, default_words="all at once"),
    Option("loss_weighting", "samples", str, BATCHES, "what counts the same: each sample, or each batch",
           form="samples|batches", choices=("samples", "batches")),
    Option("lr_scaling", "none", str, BATCHES, "scale learning rates with the batch per step",
           form="none|linear|sqrt", choices=("none", "linear", "sqrt")),
    Option("reference_batch_size", None, int, BATCHES, "batch per step that the learning rates are meant for",
           form="N", minimum=1, is_optional=True),

    Option("precision", "fp32", str, GRADIENTS, "number format of training", form="fp32|fp16|bf16",
           choices=_PRECISIONS),
    Option("eval_precision", "fp32", str, GRADIENTS, "number format of validation and test",
           form="fp32|fp16|bf16", choices=_PRECISIONS),
    Option("max_grad_norm", 5.0, float, GRADIENTS, "clip gradients to this norm; 0 or less: never", form="X",
           is_optional=True),
    Option("optimizer_step_limit", None, int, GRADIENTS, "stop after N optimizer steps", form="N", minimum=1,
           is_optional=True),
    Option("scheduler_every", "step", str, GRADIENTS, "step scheduler_class's schedule after each", form="step|epoch",
           choices=("step", "epoch")),
    Option("nonfinite_patience", 3, int, GRADIENTS, "non-finite steps to skip per epoch", form="N",
           minimum=0),
    Option("skip_nonfinite_grads", False, bool, GRADIENTS, "drop single gradients that are not finite"),
    Option("remove_vector_weight_decay", False, bool, GRADIENTS, "no weight decay for biases and norms"),

    Option("ckpt_interval_minutes", 0.0, float, CHECKPOINTS, "save every X minutes; 0 or less: never",
           form="X"),
    Option("ckpt_interval_steps", 0, int, CHECKPOINTS, "save every N batches; 0 or less: never", form="N"),
    Option("resume", "auto", str, CHECKPOINTS, "checkpoint to go on from: the newest, none, this one",
           form="auto|never|PATH"),
    Option("ckpt_async", True, bool, CHECKPOINTS, "write checkpoints in the background, if memory allows"),
    Option("ckpt_verify", "full", str, CHECKPOINTS, "what is read of a checkpoint before it is used",
           form="full|size|off", choices=("full", "size", "off")),
    Option("ckpt_load", "all", str, CHECKPOINTS, "every process reads it, or one reads and sends",
           form="all|broadcast", choices=("all", "broadcast")),
    Option("ckpt_errors", "stop", str, CHECKPOINTS, "when one cannot be saved: stop, or warn and go on",
           form="stop|warn", choices=("stop", "warn")),
    Option("ckpt_on_error", False, bool, CHECKPOINTS, "save once more when training fails"),

    Option("time_limit", None, str, STOPPING, "stop, with a checkpoint, after so long", form="H:MM:SS",
           is_optional=True),
    Option("stop_signals", ["SIGTERM", "SIGINT", "SIGUSR1"], list, STOPPING, "stop, with a checkpoint, on these",
           form="A B", default_words="SIGTERM SIGINT SIGUSR1"),
    Option("save_signals", ["SIGUSR2"], list, STOPPING, "save a checkpoint and go on, on these", form="A B",
           default_words="SIGUSR2"),
    Option("hang_warning", 30.0, float, STOPPING, "call the roll after so long without a step; 0: never", form="S",
           minimum=0),
    Option("hang_timeout", 1800.0, float, STOPPING, "end the run after so long without a step; 0: never", form="S",
           minimum=0),

    Option("ema_decay", None, float, AVERAGING, "keep an exponential moving average of the weights", form="X",
           minimum=0, is_optional=True, default_words="off"),
    Option("evaluate_ema", False, bool, AVERAGING, "validate and test with the averaged weights"),

    Option("compile", False, bool, COMPILING, "torch.compile all modules"),
    Option("compile_module_keys", None, list, COMPILING, "compile only these", form="A B", is_optional=True,
           default_words="all"),
    Option("compile_mode", "default", str, COMPILING, "or reduce-overhead, or max-autotune", form="MODE"),
    Option("compile_using_fullgraph", False, bool, COMPILING, "a break in the graph is an error"),
    Option("compile_using_dynamic_shape_tracing", False, bool, COMPILING, "trace with dynamic shapes"),
    Option("jit", False, bool, COMPILING, "torch.jit.script all modules"),
    Option("jit_module_keys", None, list, COMPILING, "script only these", form="A B", is_optional=True,
           default_words="all"),

    Option("profile_training", False, bool, PROFILING, "record a trace for TensorBoard"),
    Option("profile_warmup", 5, int, PROFILING, "steps before the trace", form="N", minimum=0),
    Option("profile_steps", 5, int, PROFILING, "steps in the trace", form="N", minimum=1),

    Option("auto_mix_prec", False, bool, OLD, "means --precision=fp16"),
    Option("bfloat16_mix_prec", False, bool, OLD, "means --precision=bf16"),
    Option("distributed_launch", False, bool, OLD, "no effect: the launcher decides"),
    Option("local_rank", None, int, OLD, "LOCAL_RANK where the environment has none", form="N",
           is_optional=True),

    Option("param_file", "", str, "", "the hyperparameter YAML"),
)
# fmt: on

#: The same by name.
OPTION_BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}

#: Options of the command line that are an instruction to the parser, and no attribute of the run.
PARSER_ONLY = frozenset({"local_rank", "nproc"})


class OptionTypes:
    """The types of the options, for type checkers and readers; the values live elsewhere.

    Ranks: local.

    Example:
        >>> set(OptionTypes.__annotations__) == {option.name for option in OPTIONS} - PARSER_ONLY
        True
    """

    test_only: bool
    debug: bool
    debug_batches: int
    debug_epochs: int
    debug_persistently: bool
    shard_evaluation: bool
    log_config: str | None
    noprogressbar: bool
    tqdm_colored_bar: bool
    tqdm_barcolor: dict[str, str]
    device: str
    data_parallel_backend: bool
    data_parallel_count: int
    distributed_backend: str
    distributed_timeout_minutes: float
    find_unused_parameters: bool
    precision: str
    eval_precision: str
    max_grad_norm: float | None
    grad_accumulation_factor: int
    global_batch_size: int | None
    micro_batch_size: int | None
    loss_weighting: str
    lr_scaling: str
    reference_batch_size: int | None
    check_parity: int | None
    optimizer_step_limit: int | None
    scheduler_every: str
    nonfinite_patience: int
    skip_nonfinite_grads: bool
    remove_vector_weight_decay: bool
    ckpt_interval_minutes: float
    ckpt_interval_steps: int
    resume: str
    ckpt_async: bool
    ckpt_verify: str
    ckpt_load: str
    ckpt_errors: str
    ckpt_on_error: bool
    time_limit: str | None
    stop_signals: list[str]
    save_signals: list[str]
    hang_warning: float
    hang_timeout: float
    ema_decay: float | None
    evaluate_ema: bool
    compile: bool
    compile_module_keys: list[str] | None
    compile_mode: str
    compile_using_fullgraph: bool
    compile_using_dynamic_shape_tracing: bool
    jit: bool
    jit_module_keys: list[str] | None
    profile_training: bool
    profile_warmup: int
    profile_steps: int
    auto_mix_prec: bool
    bfloat16_mix_prec: bool
    distributed_launch: bool
    param_file: str


def options_markdown() -> str:
    """Write the table of options as Markdown, for the documentation.

    Returns:
        One table per group, in the order of ``--help``.

    Ranks: local.

    Example:
        >>> print(options_markdown().splitlines()[0])
        ### What is run
    """
    lines: list[str] = []
    for group in dict.fromkeys(option.group for option in OPTIONS if option.group):
        lines += [f"### {group}", "", "| option | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{o.usage.replace('|', chr(92) + '|')}` | {o.shown_default} | {o.help} |"
            for o in OPTIONS
            if o.group == group
        ]
        lines.append("")
    return "\n".join(lines)
