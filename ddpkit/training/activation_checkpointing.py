"""Activation checkpointing by class: what is inside of a block is not kept, but computed again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from ddpkit.errors import ConfigError
from ddpkit.strategies import NO_CONTEXT, blocks_of, refuse_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from ddpkit.run_opts import RunOptions

_OPTION = "activation_checkpointing"
MOVED = (
    "{}={!r}: the forward pass of a {} changes its buffer {!r}, and would compute something else when it is run again "
    "in the backward pass. Choose blocks without such a buffer (the statistics of a BatchNorm are no trouble)."
)


def checkpoint_blocks(modules: nn.ModuleDict, options: RunOptions) -> None:
    """Have blocks computed again in the backward pass, so that only their inputs stay in memory.

    Classes, attributes and state-dict keys stay as they are, and so does every bit of the losses: random numbers of
    torch are drawn again as they were, batch statistics move once. A second call changes nothing.

    Call it before a module is compiled, or wrapped for data parallelism.

    Args:
        modules: the entries.
        options: ``activation_checkpointing`` names the classes; ``data_parallel_backend`` is refused.

    Raises:
        ConfigError: a class that no part of the modules has, a BatchNorm, or an option that does not go with it.

    Ranks: local, but all ranks must do the same.

    Source: non-reentrant checkpoints of https://pytorch.org/docs/stable/checkpoint.html.

    Example:
        >>> from ddpkit.run_opts import RunOptions
        >>> net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
        >>> modules = torch.nn.ModuleDict({"net": net})
        >>> checkpoint_blocks(modules, RunOptions(activation_checkpointing=["Attention"]))
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: ...names 'Attention', and the classes ... are: Linear, Sequential, Tanh.
    """
    classes = options.activation_checkpointing or []
    refuse_with(
        f"{_OPTION}={classes!r}", options, {"data_parallel_backend": "each GPU would run the first one's blocks"}
    )
    for block in blocks_of(modules, classes, _OPTION).values():
        if isinstance(block, _BatchNorm):
            raise ConfigError(f"{_OPTION}={classes!r}: a BatchNorm keeps its input only. Name the block it is in.")
        if recomputed(block) is None:
            vars(block)["forward"] = Recomputed(block, classes)


def recomputed(module: nn.Module) -> Recomputed | None:
    """Return what runs a checkpointed block; None for another module.

    Ranks: local.

    Example:
        >>> recomputed(torch.nn.Linear(1, 1)) is None
        True
    """
    found = vars(module).get("forward")
    return found if isinstance(found, Recomputed) else None


class Recomputed:
    """The ``forward`` of a block that is run again in the backward pass.

    Args:
        block: the module.
        classes: what the option names, for messages.

    Ranks: as the block.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> torch.equal(Recomputed(layer, ["Linear"])(torch.ones(1)), layer(torch.ones(1)))
        True
    """

    def __init__(self, block: nn.Module, classes: list[str]) -> None:
        self.block, self.classes, self.is_checked = block, classes, False
        self.run = self.forward = block.forward

    @property
    def is_compiled(self) -> bool:
        """Whether what is run twice is compiled."""
        return self.run is not self.forward

    def compile(self, **options: Any) -> None:
        """Compile what is run twice: a compiler that saw the checkpoint would not know that buffers move once."""
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
            return checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return NO_CONTEXT, self._on_copies()

    @contextlib.contextmanager
    def _on_copies(self) -> Iterator[None]:
        """Run on copies of the batch statistics, which the first pass has moved."""
        layers = [one for one in self.block.modules() if isinstance(one, _NormBase)]
        moved = [(one, name, buffer) for one in layers for name, buffer in one.named_buffers(recurse=False)]
        for layer, name, buffer in moved:
            setattr(layer, name, buffer.clone())
        try:
            yield
        finally:
            for layer, name, buffer in moved:
                setattr(layer, name, buffer)

    @contextlib.contextmanager
    def _checking_buffers(self) -> Iterator[None]:
        """Refuse a block whose other buffers change in its first pass."""
        owners = {name: one for name, one in self.block.named_modules() if not isinstance(one, _NormBase)}
        before = {
            f"{path}.{name}".lstrip("."): (one, name, buffer.clone())
            for path, one in owners.items()
            for name, buffer in one.named_buffers(recurse=False)
        }
        yield
        self.is_checked = True
        for path, (owner, name, buffer) in before.items():
            if not torch.equal(getattr(owner, name), buffer):
                raise ConfigError(MOVED.format(_OPTION, self.classes, type(self.block).__name__, path))
