"""The options of one run: an object with the values, what a recipe assigns, and what the command
line gives.

The table of all options is in :mod:`ddpkit.options`; to add an option, add a row there. The reading
of words is in :mod:`ddpkit.command_line`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ddpkit.control import SignalListener, usage_errors, watch_uncaught
from ddpkit.device import default_backend, resolve_device
from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.launch import (
    NPROC,
    PARITY,
    LaunchInfo,
    become_estimate,
    become_torchrun,
    find_launch,
    find_slice,
    options_of_slice,
    refuse_lonely_node,
)
from ddpkit.logger import get_logger
from ddpkit.object_store import is_url
from ddpkit.options import (
    IN_FIT,
    IN_RUN_OPTS,
    IN_YAML,
    MADE,
    OF_SLICES,
    OPTION_BY_NAME,
    OPTIONS,
    PREPARED,
    READING,
    RUN_OPTIONS,
    WRAPPED,
    Option,
    OptionTypes,
    parse_duration,
)

if TYPE_CHECKING:
    from ddpkit.command_line import CommandLine

__all__ = [
    "OPTIONS",
    "Option",
    "OptionTypes",
    "RunOptions",
    "option_attributes",
    "parse_arguments",
    "parse_duration",
]

logger = get_logger(__name__)

T = TypeVar("T")


_TOO_LATE = {
    MADE: (
        "it was read when the Brain was made. Give it before: to Brain(run_opts=...), on the "
        "command line or in the YAML"
    ),
    WRAPPED: "it was read when fit prepared the modules. Assign it before the first call of fit",
    PREPARED: (
        "it was read when fit made the optimizers. Assign it before the first call of fit, or in "
        "init_optimizers"
    ),
    IN_FIT: "it was read when this call of fit began. Assign it before fit, or after it",
    READING: (
        "it was read when the training began to read the data of this epoch. Assign it in "
        "on_stage_start"
    ),
}

_OWN_ATTRIBUTES = frozenset({"_values", "_reached", "overridden_args"})
# None means: find it out, and so counts as not given
_FOUND_OUT = ("device", "distributed_backend")
# it has had its effect before there are options
_ON_THE_COMMAND_LINE_ALONE = ("estimate", "nproc")
# where it was started from; no choice of settings
_OF_THIS_START = frozenset({"param_file", "distributed_launch"})


class RunOptions(OptionTypes, MutableMapping[str, Any]):
    """The options of a run, as attributes and as items.

    Every option of ``OPTIONS`` is there. Keys of a recipe's own may be added. Those are not
    checked, and a Brain that gets them names them in a warning. What is passed here or assigned
    later counts as given, and so wins over the YAML.

    ``device`` and ``distributed_backend`` are concrete (``"cuda:1"``, ``"nccl"``) in what
    :func:`parse_arguments` and :meth:`resolved` return: "nccl" where the device is a CUDA device,
    "gloo" otherwise, unless given. In an object made by hand they are None until then.

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
            raise ConfigError(
                f"{name}={value!r} comes too late: {now}, as {_TOO_LATE[option.fixed]}."
            )
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
        # options are found before this; these are the rest
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        raise AttributeError(f"there is no run option {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __repr__(self) -> str:
        given = ", ".join(
            f"{n}={self._values[n]!r}" for n in self._values if n in self.overridden_args
        )
        return f"RunOptions({given})"

    @classmethod
    def from_command_line_args(
        cls,
        arg_list: Sequence[str] | None = None,
    ) -> tuple[str, RunOptions, str]:
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

    def changed(
        self,
        in_use: Mapping[str, Any] | None = None,
        among: Iterable[str] = tuple(RUN_OPTIONS),
    ) -> dict[str, Any]:
        """Return the options whose values are not their defaults, for the record of a run.

        A device or a backend that was found out, and not given, is left out.

        Args:
            in_use: values by name that a run uses in the place of those that were given.
            among: names of the options that are looked at.

        Ranks: local.

        Example:
            >>> RunOptions(debug=True, max_grad_norm=5.0).changed()
            {'debug': True}
        """
        found_out = {name for name in _FOUND_OUT if name not in self.overridden_args}
        left_out = _OF_THIS_START | found_out
        values = {**self._values, **(in_use or {})}
        found = {
            name: values[name]
            for name in among
            if name not in left_out and values[name] != RUN_OPTIONS[name].default
        }
        strategy = found.get("strategy", "")  # an object, where it is not the library's
        return found if isinstance(strategy, str) else {**found, "strategy": repr(strategy)}

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
            moment: ``MADE``, ``WRAPPED``, ``PREPARED``, ``IN_FIT`` or ``READING`` of this module.

        Ranks: local.

        Example:
            >>> run_opts = RunOptions(precision="bf16")
            >>> run_opts.reach(MADE)
            >>> run_opts.precision = "fp32"
            Traceback (most recent call last):
            ddpkit.errors.ConfigError: precision='fp32' comes too late: precision='bf16' is in use,
            as it was read ...
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

    def take(self, others: RunOptions) -> None:
        """Take the values of other options over, if all of them can still be changed.

        Args:
            others: they stay apart: what is set in them later does not count here.

        Raises:
            ConfigError: an option with another value has been read for good. Then nothing is
                changed.

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
        """Bring the sources together: what was given wins over the YAML, and that over the
        defaults.

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
            >>> run_opts = RunOptions(debug=True).resolved(
            ...     {"debug": False, "max_grad_norm": 1, "lr": 0.1}
            ... )
            >>> run_opts.debug, run_opts.max_grad_norm, "lr" in run_opts
            (True, 1.0, False)
        """
        misspelt = _warn_of_misspelt({**(hparams or {}), **self})
        _warn_of_unread(name for name in self if name not in misspelt)
        _warn_of_late(hparams or {})
        _warn_of_unheard({*(hparams or {}), *self.overridden_args})
        from_yaml = {name: (hparams or {})[name] for name in RUN_OPTIONS if name in (hparams or {})}
        from_yaml.pop("param_file", None)
        if from_yaml:
            set_by_yaml = [
                f"{name}={value!r}"
                for name, value in from_yaml.items()
                if name not in self.overridden_args
            ]
            logger.info(
                "Run options from the YAML: %s",
                ", ".join(set_by_yaml) or ("none, as all were given"),
            )
        if self.overridden_args:
            plain = {
                name
                for name, row in RUN_OPTIONS.items()
                if name not in from_yaml and self[name] == row.default
            }
            given = ", ".join(
                f"{name}={self[name]!r}" for name in self if name in self.overridden_args - plain
            )
            logger.info("Run options that were given: %s", given or "none but defaults")
        with usage_errors():
            return _merged(self, from_yaml, find_launch())


def _warn_of_misspelt(names: Iterable[str]) -> set[str]:
    """Warn of keys of the YAML and of ``run_opts`` that are nearly options, and set none; return
    them.
    """
    flags = {name.replace("_", ""): name for name in RUN_OPTIONS}
    found = set()
    for key in [name for name in names if name not in OPTION_BY_NAME]:
        plain = key.replace("_", "").replace("-", "").lower()
        for meant in difflib.get_close_matches(plain, flags, n=1, cutoff=0.94):
            found.add(key)
            logger.warning_once(
                "The key %r is not a run option, and sets none; did you mean %r?",
                key,
                flags[meant],
            )
    return found


def _warn_of_unread(names: Iterable[str]) -> None:
    """Warn of keys of ``run_opts`` that are no options: of a recipe's own, or meant as one."""
    unread = [
        name for name in names if name not in OPTION_BY_NAME or name in _ON_THE_COMMAND_LINE_ALONE
    ]
    if unread:
        logger.warning_once(
            f"run_opts: no run option is named {', '.join(map(repr, unread))}. ddpkit reads no "
            "such key; your own code may."
        )


def _warn_of_unheard(known: Collection[str]) -> None:
    """Warn of options on the command line that the script has not read.

    Args:
        known: what was given to the Brain, by options or by the YAML.
    """
    words = [word[2:].partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    unheard = [
        name for name in words if name in OPTION_BY_NAME and name not in {*known, "local_rank"}
    ]
    if unheard and command_line_options() is None:
        logger.warning_once(
            f"The command line has --{', --'.join(unheard)}, and the script has not read it: "
            "nothing follows it. Call ddpkit.parse_arguments(), which reads options and a YAML "
            f"file, or give the Brain run_opts={{{unheard[0]!r}: ...}}."
        )


def _warn_of_late(hparams: Mapping[str, Any]) -> None:
    """Warn of keys of the YAML that are options on the command line alone, where a process is the
    only one.
    """
    late = [name for name in _ON_THE_COMMAND_LINE_ALONE if name in hparams]
    if late and not find_launch().is_distributed:
        logger.warning_once(
            f"The YAML has {', '.join(late)}, which starts no processes: this one was there before "
            f"it was read. Give --{late[0]}=N on the command line, or rename a key of your own."
        )


def _merged(run_opts: RunOptions, from_yaml: Mapping[str, Any], info: LaunchInfo) -> RunOptions:
    """Merge the sources, and choose the values that none of them gives."""
    from_yaml = {
        name: RUN_OPTIONS[name].coerce(value, IN_YAML) for name, value in from_yaml.items()
    }
    given = {name: value for name, value in run_opts.items() if name in run_opts.overridden_args}
    for source in (from_yaml, given):
        _apply_old_options(source)
        for name in _FOUND_OUT:
            if source.get(name, "") is None:
                del source[name]
    merged = run_opts.copy()
    merged.update({**from_yaml, **given, **options_of_slice(OF_SLICES, RUN_OPTIONS)})
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
    """Give a class one property per option that a Brain shows, which reads and writes
    ``self.run_opts``.

    Args:
        owner: a class whose objects have ``run_opts``; what it defines itself stays.

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
        if option.is_attribute and name not in vars(owner):
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

    The hyperparameter YAML may stand anywhere. ``--help`` shows the options; each ``--name=value``
    that is no option overrides a key of the YAML, and must match one. Options that the YAML sets as
    plain values are seen in the result too, unless the command line gives others.

    Args:
        arg_list: the words after the script's name; None takes ``sys.argv[1:]``.

    Returns:
        The YAML file, the options (with a concrete ``device`` and ``distributed_backend``), and the
        overrides as YAML text for :func:`ddpkit.hparams.load_hparams`. Where ``output_folder`` is a
        URL of an object store, such as ``s3://bucket/run``, they put the folder of this machine in
        its place that mirrors it.

    Raises:
        MissingFileError: the YAML file does not exist.
        ConfigError: an argument, a value or the YAML file cannot be used.
        LaunchError: the launcher's environment contradicts itself, or this is one process on each
            of several nodes.
        SystemExit: with code 0, after ``--help`` or ``--version`` has been printed.

    An error that nobody catches ends the process with exit code 2 and one sentence,
    ``train.py: error: ...``, which the first rank of a machine says, and under torchrun its
    summary. So does every later ConfigError of the script.

    Ranks: local.

    State: sets ``LOCAL_RANK`` in the environment for an old ``--local_rank=N`` where the launcher
        did not, and ``sys.excepthook``. With ``--nproc`` this process becomes torch's launcher,
        which starts the script once per rank. With ``--estimate`` it becomes
        ``python -m ddpkit estimate``, which runs the script for a few steps.

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
            logger.warning_once(
                "--distributed_launch has no effect any more: the launcher decides. Leave it out."
            )
        nproc = given.pop("nproc", None)
        estimate = given.pop("estimate", None)
        if estimate is not None and find_slice() is None:
            _start_estimate(estimate, nproc, arg_list)
        if nproc is not None and not (NPROC in os.environ and find_launch().is_distributed):
            _start_ranks(nproc, line, arg_list)
        info = find_launch()
        if not info.is_distributed:
            refuse_lonely_node()  # before the recipe prepares its data
        watch_uncaught()
        run_opts = RunOptions(**given, param_file=line.param_file)
        run_opts.overridden_args = set(given)
        run_opts = _merged(run_opts, line.in_yaml, info)
        overrides = _with_local_output(line, run_opts)
    if words == sys.argv[1:]:
        _READ[tuple(words)] = run_opts.copy()
    return line.param_file, run_opts, overrides


def _with_local_output(line: CommandLine, run_opts: RunOptions) -> str:
    """Return the overrides; where the output folder is a URL, with the folder of this machine that
    mirrors it in its place.
    """
    from ddpkit.recipe_yaml import output_folder_of, with_output_folder

    if not line.may_name_urls:
        return line.overrides
    url = output_folder_of(line.param_file, line.overrides)
    if not is_url(url):
        return line.overrides
    from ddpkit.mirror import mirror_of

    rehearses = run_opts.debug and not run_opts.debug_persistently
    folder = mirror_of(str(url), run_opts.ckpt_local, travels=not rehearses)
    return str(with_output_folder(line.overrides, str(folder)))


_READ: dict[tuple[str, ...], RunOptions] = {}  # from this process's own command line, by its words


def command_line_options() -> RunOptions | None:
    """Return the options of this process's own command line; None where :func:`parse_arguments` has
    not read it.

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
            f"nproc={nproc!r} restarts the script with sys.argv, but parse_arguments was given "
            "other arguments. Leave --nproc out, and start the script with torchrun."
        )
    become_torchrun(nproc, line.given.get("device", line.in_yaml.get("device")))


def _start_estimate(
    asked: str,
    nproc: str | None,
    arg_list: Sequence[str] | None,
) -> NoReturn:
    """Become the command that estimates the memory of this script."""
    if arg_list is not None and list(arg_list) != sys.argv[1:]:
        raise ConfigError(
            f"estimate={asked!r} restarts the script with sys.argv, but parse_arguments was given "
            "other arguments. Leave --estimate out, and use `python -m ddpkit estimate`."
        )
    become_estimate(asked, nproc)


def _apply_old_options(source: dict[str, Any]) -> None:
    """Turn the old switches of one source into its ``precision``; say which have no effect."""
    if source.get("jit") or source.get("jit_module_keys"):
        words = (
            "--jit and --jit_module_keys have no effect: TorchScript is deprecated in torch. Use "
            "--compile."
        )
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
            f"log_config={log_config!r}: there is no such file. It has the form of "
            "logging.config.dictConfig, in YAML."
        )
    minutes = values["ckpt_interval_minutes"]
    steps = values["ckpt_interval_steps"]
    if minutes > 0 and steps > 0:
        raise ConfigError(
            f"ckpt_interval_minutes={minutes!r} and ckpt_interval_steps={steps!r} are both set, "
            "and only one can be. Turn one off with --ckpt_interval_minutes=0 or "
            "--ckpt_interval_steps=0."
        )
    if values["data_parallel_backend"] and (info.is_distributed or values["device"] == "cpu"):
        alone = "One process, all GPUs:  python train.py hparams.yaml --data_parallel_backend"
        raise ConfigError(
            "data_parallel_backend=True means all GPUs from one process: it needs a GPU, and no "
            f"launcher. This is on {values['device']}, launcher {info.launcher}, "
            f"{info.world_size} process(es). Use one of these:\n"
            f"{alone if info.is_distributed else 'One process, no GPU:    python train.py hparams.yaml'}\n"  # noqa: E501
            "Several processes:      torchrun --standalone --nproc_per_node=N train.py "
            "hparams.yaml"
        )
