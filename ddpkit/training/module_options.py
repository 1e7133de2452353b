"""Options on modules before they are wrapped: activation checkpointing of blocks, and
torch.compile.

With activation checkpointing what is inside of a block is not kept, but computed again in the
backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from ddpkit.compat import is_compiled
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.strategies import NO_CONTEXT, blocks_of, refuse_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from ddpkit.run_opts import RunOptions

logger = get_logger(__name__)

# What torch.compile raises when it is asked to wrap: an unknown mode, a Python or platform that it
# does not support, a missing part of the compiler. What the compiler itself raises comes later, at
# the first call, and is not caught.
_WRAP_ERRORS = (RuntimeError, ImportError, ValueError, TypeError, AttributeError, OSError)

_GRAPH_MODES = {"reduce-overhead", "max-autotune"}

_OPTION = "activation_checkpointing"
MOVED = (
    "{}={!r}: the forward pass of a {} changes its buffer {!r}, and would compute something else "
    "when it is run again in the backward pass. Choose blocks without such a buffer (the "
    "statistics of a BatchNorm are no trouble)."
)


def checkpoint_blocks(modules: nn.ModuleDict, options: RunOptions) -> None:
    """Recompute blocks in the backward pass, so that only their inputs stay in memory.

    Classes, attributes and state-dict keys stay as they are, and so does every bit of the losses:
    random numbers of torch are drawn again as they were, batch statistics move once. A second call
    changes nothing.

    Call it before a module is compiled, or wrapped for data parallelism.

    Args:
        modules: the entries.
        options: ``activation_checkpointing`` names the classes; ``data_parallel_backend`` is
            refused.

    Raises:
        ConfigError: a class that no part of the modules has, a BatchNorm, or an option that does
            not go with it.

    Ranks: local, but all ranks must do the same.

    Source: non-reentrant checkpoints of https://pytorch.org/docs/stable/checkpoint.html.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
        >>> modules = torch.nn.ModuleDict({"net": net})
        >>> checkpoint_blocks(modules, RunOptions(activation_checkpointing=["Attention"]))
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: ...names 'Attention', and the classes ... are: Linear,
        Sequential, Tanh.
    """
    classes = options.activation_checkpointing or []
    refuse_with(
        f"{_OPTION}={classes!r}",
        options,
        {"data_parallel_backend": ("each GPU would run the first one's blocks")},
    )
    for block in blocks_of(modules, classes, _OPTION).values():
        if isinstance(block, _BatchNorm):
            raise ConfigError(
                f"{_OPTION}={classes!r}: a BatchNorm keeps its input only. Name the block it is in."
            )
        if recomputed(block) is None:
            vars(block)["forward"] = Recomputed(block, classes)


def recomputed(module: nn.Module) -> Recomputed | None:
    """Return the :class:`Recomputed` of a checkpointed block; None for other modules.

    Ranks: local.
    """
    found = vars(module).get("forward")
    return found if isinstance(found, Recomputed) else None


class Recomputed:
    """The ``forward`` of a block that is run again in the backward pass.

    Args:
        block: the module.
        classes: what the option names, for messages.

    Attributes:
        is_recomputing: whether the block runs again now, in a backward pass.

    Ranks: as the block.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> torch.equal(Recomputed(layer, ["Linear"])(torch.ones(1)), layer(torch.ones(1)))
        True
    """

    def __init__(self, block: nn.Module, classes: list[str]) -> None:
        self.block = block
        self.classes = classes
        self.is_checked = False
        self.is_recomputing = False
        self.run = self.forward = block.forward

    @property
    def is_compiled(self) -> bool:
        """Whether what is run twice is compiled."""
        return self.run is not self.forward

    def compile(self, **options: Any) -> None:
        """Compile what is run twice: a compiler that saw the checkpoint would not know that buffers
        move once.
        """
        self.run = torch.compile(self.forward, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is compiled, which is bound to this very block."""
        return {**vars(self), "run": self.forward}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the block."""
        if not torch.is_grad_enabled():
            return self.run(*inputs, **named)
        run = functools.partial(self.run, **named)
        with NO_CONTEXT if self.is_checked else self._checking_buffers():
            return checkpoint(
                run,
                *inputs,
                use_reentrant=False,
                context_fn=lambda: (NO_CONTEXT, self._on_copies()),
            )

    @contextlib.contextmanager
    def _on_copies(self) -> Iterator[None]:
        """Run on copies of the batch statistics, which the first pass has moved."""
        layers = [layer for layer in self.block.modules() if isinstance(layer, _NormBase)]
        moved = [
            (layer, name, buffer)
            for layer in layers
            for name, buffer in layer.named_buffers(recurse=False)
        ]
        for layer, name, buffer in moved:
            setattr(layer, name, buffer.clone())
        self.is_recomputing = True
        try:
            yield
        finally:
            self.is_recomputing = False
            for layer, name, buffer in moved:
                setattr(layer, name, buffer)

    @contextlib.contextmanager
    def _checking_buffers(self) -> Iterator[None]:
        """Refuse a block whose other buffers change in its first pass."""
        owners = {
            name: module
            for name, module in self.block.named_modules()
            if not isinstance(module, _NormBase)
        }
        before = {
            f"{path}.{name}".lstrip("."): (owner, name, buffer.clone())
            for path, owner in owners.items()
            for name, buffer in owner.named_buffers(recurse=False)
        }
        yield
        self.is_checked = True
        for path, (owner, name, buffer) in before.items():
            if not torch.equal(getattr(owner, name), buffer):
                raise ConfigError(
                    MOVED.format(
                        _OPTION,
                        self.classes,
                        type(self.block).__name__,
                        path,
                    )
                )


# ------------------------------------------------------------------------------------ torch.compile


def compile_modules(modules: torch.nn.ModuleDict, options: RunOptions) -> None:
    """Compile the modules, or the blocks, that the options name. A second call changes nothing.

    Compiling happens in place (``module.compile``, that is ``torch.compile`` of what calling the
    module runs): class, attributes and state-dict keys stay, there is no ``_orig_mod``. A module
    that could not be wrapped by torch.compile is left as it is, with a warning that gives the
    reason.

    Call it before a module is wrapped for data parallelism.

    Args:
        modules: the entries.
        options: the ``compile`` options are read.

    Raises:
        ConfigError: a key that is not in ``modules``; a class that no part of them has; or blocks
            to be compiled inside of modules that are to be compiled themselves.

    Ranks: local, but all ranks must do the same.

    Source: https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.compile.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> modules = torch.nn.ModuleDict({"net": torch.nn.Linear(2, 1)})
        >>> compile_modules(modules, RunOptions(compile=True, compile_module_keys=["nett"]))
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: compile_module_keys=['nett'] names 'nett', and the modules are:
        'net'.
    """
    to_compile = _chosen(
        modules,
        "compile_module_keys",
        options.compile_module_keys,
        every=options.compile,
    )
    _compile_blocks(modules, options, others=to_compile)
    if to_compile and not options.compile:
        logger.warning(
            "compile_module_keys=%s is given without compile: these modules are compiled all the "
            "same.",
            to_compile,
        )
    for key in to_compile:
        if not (_is_compiled(modules[key]) or isinstance(modules[key], torch.jit.ScriptModule)):
            _compile(key, modules[key], options)


def has_cuda_graphs(options: RunOptions) -> bool:
    """Say whether steps are computed by CUDA graphs, whose outputs are overwritten when they run
    again.

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
    return (
        bool(compiles)
        and options.compile_mode in _GRAPH_MODES
        and str(options.device).startswith("cuda")
    )


def require_module_keys(modules: torch.nn.ModuleDict, options: RunOptions) -> None:
    """Make sure that the options name modules that there are.

    Args:
        modules: the entries.
        options: name entries, or classes of their parts.

    Raises:
        ConfigError: a key that is not in ``modules``, or a class that no part of them has.

    Ranks: local.
    """
    _chosen(modules, "compile_module_keys", options.compile_module_keys, every=False)
    for option in ("activation_checkpointing", "compile_blocks", "fsdp_blocks"):
        blocks_of(modules, options[option] or (), option)


def _chosen(
    modules: torch.nn.ModuleDict,
    option: str,
    keys: Iterable[str] | None,
    *,
    every: bool,
) -> list[str]:
    """Return the names of the modules that an option chooses, in the order of the modules."""
    if keys is None:
        return list(modules) if every else []
    wanted = {key.strip() for key in keys.split(",")} if isinstance(keys, str) else set(keys)
    unknown = sorted(wanted.difference(modules))
    if unknown:
        raise ConfigError(
            f"{option}={sorted(wanted)!r} names {', '.join(map(repr, unknown))}, and the modules "
            f"are: {', '.join(map(repr, modules)) or 'none'}."
        )
    return [key for key in modules if key in wanted]


def _compile_blocks(
    modules: torch.nn.ModuleDict,
    options: RunOptions,
    *,
    others: list[str],
) -> None:
    classes = options.compile_blocks
    if classes and others:
        raise ConfigError(
            f"compile_blocks={classes!r} compiles blocks and leaves the rest as it is: leave it "
            "out, or --compile and --compile_module_keys."
        )
    for name, block in blocks_of(modules, classes or (), "compile_blocks").items():
        if not _is_compiled(block):
            _compile(name, block, options)


def _is_compiled(module: torch.nn.Module) -> bool:
    checkpointed = recomputed(module)
    inside = checkpointed is not None and checkpointed.is_compiled
    return inside or is_compiled(module)  # torch.compile(module), or module.compile(), by the user


def _compile(key: str, module: torch.nn.Module, options: RunOptions) -> None:
    if any(recomputed(part) is not None for part in module.modules() if part is not module):
        raise ConfigError(
            f"{key!r} cannot be compiled as a whole, as "
            f"activation_checkpointing={options.activation_checkpointing!r} names blocks of it. "
            "Compile these blocks: give the same classes to --compile_blocks, and no --compile."
        )
    try:
        with warnings.catch_warnings():
            # The compiler is imported here, and torch 2.13 and later warn of their own use of a
            # deprecated function.
            warnings.filterwarnings("ignore", message=r".*torch\.jit\.script_method")
            (recomputed(module) or module).compile(
                mode=options.compile_mode,
                fullgraph=options.compile_using_fullgraph,
                dynamic=options.compile_using_dynamic_shape_tracing,
            )
    except _WRAP_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "module %r could not be wrapped by torch.compile and goes on without: %s",
            key,
            reason,
        )
