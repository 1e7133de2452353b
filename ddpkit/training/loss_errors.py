"""The error messages for a loss that cannot be trained on, and for a backward pass that fails."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

from ddpkit.base import kind_of
from ddpkit.errors import BatchError

READY_TWICE_SAYS = "mark a variable ready only once"  # so DDP says, in torch 2.13
FREED_SAYS = "storage of size 0"  # so a tensor whose memory was freed says, in torch 2.13
ONCE = "DDP averages each gradient once in a step"

PARTS = (
    f"{{}}.fit_batch called backward() twice on losses that share a part of one module, and "
    f"{ONCE}: "
    '"{}". Add the losses up and call self.backward once; or put all passes under `with '
    "self.no_sync():`."
)
REENTRANT = (
    f"{{}}: activation checkpointing with use_reentrant=True ran the same part of a module again, "
    f"and {ONCE}: "
    '"{}". Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False). Where that is out of '
    "reach, as in a "
    "library, give --static_graph, if every step uses the same parameters."
)
OUTSIDE = (
    f"{{}}: the backward pass came to a parameter of one module twice, and {ONCE}: "
    '"{}". Call the entry of modules, self.modules.net(inputs), and not a layer of it or its '
    "weight from outside. "
    "Or give --static_graph, if every step uses the same parameters."
)
FREED = (
    '{}: the backward pass came to weights that --strategy=fsdp has freed: "{}". Four things lead '
    "there. An operation "
    "in place on the output of a module (outputs += 1, outputs.masked_fill_(...)), which cuts off "
    "what gathers them: write outputs = outputs + 1. A module that returns an object, in which "
    "torch does not find the tensors: return them, or a tuple, list, dict or dataclass of them. "
    "Gradients of gradients (torch.autograd.grad with create_graph=True, as for a gradient "
    "penalty): use --strategy=zero1 or ddp. A second backward pass over one forward pass: add the "
    "losses up, or call the module once more."
)
IN_FIT_BATCH = (
    "{}.fit_batch passed None to backward(). compute_objectives may return None to skip a batch "
    "where the library's own fit_batch calls it. In a fit_batch of your own pass (torch.zeros(()), "
    "0) to self.backward, and (loss_sum, count) for the other batches."
)
SHOWN_KEYS = 5


def explained_backward(
    error: Exception,
    loss: Any,
    name: str,
    *,
    has_own_fit_batch: bool,
) -> BatchError | None:
    """Return what to raise instead of an exception of a backward pass; None: the exception itself.

    Args:
        error: with its traceback.
        loss: what was back-propagated.
        name: of the recipe's class.
        has_own_fit_batch: whether the recipe calls ``backward`` by itself.

    Example:
        >>> print(explained_backward(TypeError("no tensor"), 3.0, "Line", has_own_fit_batch=False))
        Line.compute_objectives returned a float, not a tensor: return the loss itself, without
        .item().
    """
    if loss is None:
        return BatchError(IN_FIT_BATCH.format(name), hook="fit_batch")
    text = str(error)
    if READY_TWICE_SAYS in text:
        said = text.partition(".")[0]
        if _is_reentrant(error):
            return BatchError(REENTRANT.format(name, said))
        if has_own_fit_batch:
            return BatchError(PARTS.format(name, said), hook="fit_batch")
        return BatchError(OUTSIDE.format(name, said))
    if FREED_SAYS in text:
        return BatchError(FREED.format(name, text.partition("\n")[0]))
    problem = loss_problem(loss)
    if problem is None:
        return None
    return BatchError(f"{name}.compute_objectives returned {problem}", hook="compute_objectives")


def loss_problem(loss: Any) -> str | None:
    """Return the problem with a loss in words, or None.

    Example:
        >>> loss_problem(3.0)
        'a float, not a tensor: return the loss itself, without .item().'
    """
    if isinstance(loss, torch.Tensor):
        return _tensor_problem(loss)
    kind = kind_of(loss)
    if loss is None:
        return f"{kind}, not a tensor: look for a missing return."
    if isinstance(loss, Mapping):
        keys = [repr(key) for key in loss]
        shown = ", ".join(keys[:SHOWN_KEYS]) + (", ..." if len(keys) > SHOWN_KEYS else "")
        what = f"with the keys {shown}" if keys else "without a key"
        return (
            f"{kind} {what}: return one loss, such as the sum of its parts, and give the parts to "
            "self.log."
        )
    if isinstance(loss, (list, tuple)):
        return f"{kind} of {len(loss)}: return the mean loss, or the tuple (loss_sum, count)."
    if isinstance(loss, (int, float)):
        return f"{kind}, not a tensor: return the loss itself, without .item()."
    return f"{kind}, not a tensor: return the mean loss of the batch, a tensor of one number."


def _tensor_problem(loss: torch.Tensor) -> str | None:
    if loss.numel() != 1:
        return (
            f"a tensor of shape {tuple(loss.shape)}, not one number: return its mean over the "
            "batch."
        )
    if loss.requires_grad:
        return None
    return (
        "a loss that does not require a gradient: it does not depend on a trainable parameter. "
        "Look for torch.no_grad(), .detach() and frozen parameters."
    )


def _is_reentrant(error: Exception) -> bool:
    """Say whether an exception comes from the backward pass inside a checkpointed part."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        frame.name == "backward"
        and PurePath(frame.filename).parts[-3:] == ("torch", "utils", "checkpoint.py")
        for frame in frames
    )
