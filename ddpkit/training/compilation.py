"""torch.compile for the entries of ``Brain.modules``, or for blocks inside of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.strategies import blocks_of
from ddpkit.training.activation_checkpointing import recomputed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpkit.run_opts import RunOptions

logger = get_logger(__name__)

# What torch.compile raises when it is asked to wrap: an unknown mode, a Python or platform that it does not
# support, a missing part of the compiler. What the compiler itself raises comes later, at the first call, and
# is not caught.
_WRAP_ERRORS = (RuntimeError, ImportError, ValueError, TypeError, AttributeError, OSError)

_GRAPH_MODES = {"reduce-overhead", "max-autotune"}


def compile_modules(modules: torch.nn.ModuleDict, options: RunOptions) -> None:
    """Compile the modules, or the blocks, that the options name. A second call changes nothing.

    Compiling happens in place (``module.compile``, that is ``torch.compile`` of what calling the module
    runs): class, attributes and state-dict keys stay, there is no ``_orig_mod``. A module that could not be
    wrapped by torch.compile is left as it is, with a warning that gives the reason.

    Call it before a module is wrapped for data parallelism.

    Args:
        modules: the entries.
        options: the ``compile`` options are read.

    Raises:
        ConfigError: a key that is not in ``modules``; a class that no part of them has; or blocks to be compiled inside
            of modules that are to be compiled themselves.

    Ranks: local, but all ranks must do the same.

    Source: https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.compile.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> modules = torch.nn.ModuleDict({"net": torch.nn.Linear(2, 1)})
        >>> compile_modules(modules, RunOptions(compile=True, compile_module_keys=["nett"]))
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: compile_module_keys=['nett'] names 'nett', and the modules are: 'net'.
    """
    to_compile = _chosen(modules, "compile_module_keys", options.compile_module_keys, every=options.compile)
    _compile_blocks(modules, options, others=to_compile)
    if to_compile and not options.compile:
        logger.warning(
            "compile_module_keys=%s is given without compile: these modules are compiled all the same.", to_compile
        )
    for key in to_compile:
        if not (_is_compiled(modules[key]) or isinstance(modules[key], torch.jit.ScriptModule)):
            _compile(key, modules[key], options)


def has_cuda_graphs(options: RunOptions) -> bool:
    """Say whether steps are computed by CUDA graphs, whose outputs are overwritten when they run again.

    Args:
        options: of the run.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> has_cuda_graphs(RunOptions(device="cpu", compile=True, compile_mode="reduce-overhead"))
        False
    """
    compiles = options.compile or options.compile_module_keys or options.compile_blocks
    return bool(compiles) and options.compile_mode in _GRAPH_MODES and str(options.device).startswith("cuda")


def require_module_keys(modules: torch.nn.ModuleDict, options: RunOptions) -> None:
    """Make sure that the options name modules that there are.

    Args:
        modules: the entries.
        options: those that name entries, or classes of their parts.

    Raises:
        ConfigError: a key that is not in ``modules``, or a class that no part of them has.

    Ranks: local.
    """
    _chosen(modules, "compile_module_keys", options.compile_module_keys, every=False)
    for option in ("activation_checkpointing", "compile_blocks", "fsdp_blocks"):
        blocks_of(modules, options[option] or (), option)


def _chosen(modules: torch.nn.ModuleDict, option: str, keys: Iterable[str] | None, *, every: bool) -> list[str]:
    """Return the names of the modules that an option chooses, in the order of the modules."""
    if keys is None:
        return list(modules) if every else []
    wanted = {key.strip() for key in keys.split(",")} if isinstance(keys, str) else set(keys)
    unknown = sorted(wanted.difference(modules))
    if unknown:
        raise ConfigError(
            f"{option}={sorted(wanted)!r} names {', '.join(map(repr, unknown))}, and the modules are: "
            f"{', '.join(map(repr, modules)) or 'none'}."
        )
    return [key for key in modules if key in wanted]


def _compile_blocks(modules: torch.nn.ModuleDict, options: RunOptions, *, others: list[str]) -> None:
    classes = options.compile_blocks
    if classes and others:
        raise ConfigError(
            f"compile_blocks={classes!r} compiles blocks and leaves the rest as it is: leave it out, or --compile and "
            "--compile_module_keys."
        )
    for name, block in blocks_of(modules, classes or (), "compile_blocks").items():
        if not _is_compiled(block):
            _compile(name, block, options)


def _is_compiled(module: torch.nn.Module) -> bool:
    wrapped = hasattr(module, "_orig_mod")  # torch.compile(module) by the user
    checkpointed = recomputed(module)
    inside = checkpointed is not None and checkpointed.is_compiled
    return wrapped or inside or getattr(module, "_compiled_call_impl", None) is not None


def _compile(key: str, module: torch.nn.Module, options: RunOptions) -> None:
    if any(recomputed(one) is not None for one in module.modules() if one is not module):
        raise ConfigError(
            f"{key!r} cannot be compiled as a whole, as activation_checkpointing={options.activation_checkpointing!r} "
            "names blocks of it. Compile these blocks: give the same classes to --compile_blocks, and no --compile."
        )
    try:
        with warnings.catch_warnings():
            # The compiler is imported here, and torch 2.13 and later warn of their own use of a deprecated function.
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.script_method")
            (recomputed(module) or module).compile(
                mode=options.compile_mode,
                fullgraph=options.compile_using_fullgraph,
                dynamic=options.compile_using_dynamic_shape_tracing,
            )
    except _WRAP_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("module %r could not be wrapped by torch.compile and goes on without: %s", key, reason)
