"""A loss: what it may be, and its backward pass."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.compat import back_propagate
from ddpkit.errors import BatchError
from ddpkit.training.loss_errors import explained_backward, loss_problem

if TYPE_CHECKING:
    from ddpkit.step_times import StepTimer


def backward(
    loss: Any,
    scale: float,
    scaler: torch.amp.GradScaler | None,
    name: str,
    *,
    retain_graph: bool = False,
    has_own_fit_batch: bool = True,
    timer: StepTimer | None = None,
) -> None:
    """Back-propagate a weighted loss; if that fails, raise an error that names the problem with the
    loss.

    Args:
        loss: mean over the micro-batch, shape ``()``.
        scale: its weight in the window.
        scaler: multiplies it further; or None.
        name: of the recipe's class, for the message.
        retain_graph: keep the graph for another backward pass.
        has_own_fit_batch: whether the recipe calls ``backward`` by itself, for the message.
        timer: measures the pass, if it measures the present step; or None.

    Raises:
        BatchError: the loss is not a tensor of one number, or does not depend on any parameter; DDP
            has averaged a part of the gradients already; or FSDP has freed weights that it needs.

    Ranks: collective under DDP.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> backward(weight.sum(), 0.5, None, "Line"); weight.grad
        tensor([0.5000])
    """
    try:
        if timer is not None and timer.measures:
            timer.begin_backward(loss)
        if scaler is not None or loss.numel() != 1 or loss.is_complex():
            loss = loss if scale == 1.0 else loss * scale
            (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=retain_graph)
        else:  # the bits of loss * scale, two products less
            back_propagate(loss, torch.full_like(loss, scale), retain_graph=retain_graph)
        if timer is not None and timer.measures:
            timer.end_backward()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        news = explained_backward(error, loss, name, has_own_fit_batch=has_own_fit_batch)
        if news is None:
            raise
        raise news from error


def one_number(loss: Any, name: str, hook: str = "compute_objectives") -> torch.Tensor | float:
    """Check that a loss is one number, and return it detached.

    Args:
        loss: tensor of one element, or float.
        name: of the recipe's class, for the message.
        hook: which, for the message.

    Raises:
        BatchError: it is something else.

    Ranks: local.

    Example:
        >>> one_number(torch.tensor(2.0), "Line")
        tensor(2.)
    """
    if isinstance(loss, torch.Tensor):
        if not loss.ndim or loss.numel() == 1:
            return loss.detach() if loss.requires_grad else loss
    elif isinstance(loss, (int, float)):
        return float(loss)
    raise BatchError(f"{name}.{hook} returned {loss_problem(loss)}", hook=hook)


def sum_and_count(pair: Any, name: str, hook: str = "compute_objectives") -> tuple[Any, Any]:
    """Check that a loss is a pair of sum and count, and return both.

    Args:
        pair: ``(loss_sum, count)``: a tensor of one element, and a tensor of one element or a
            number that is not negative.
        name: of the recipe's class, for the message.
        hook: which, for the message.

    Returns:
        The sum, attached as it was given; and the count, detached.

    Raises:
        BatchError: it is something else.

    Ranks: local.

    Example:
        >>> sum_and_count((torch.tensor(6.0), 3), "Line")
        (tensor(6.), 3)
    """
    problem = None
    if len(pair) != 2:  # noqa: PLR2004 -- a pair
        problem = f"a tuple of {len(pair)}: return the mean loss, or (loss_sum, count)."
    else:
        loss_sum, count = pair
        if isinstance(count, torch.Tensor):
            count = count.detach()
            if count.numel() != 1:
                problem = (
                    f"a count of shape {tuple(count.shape)}, not one number: return (loss_sum, "
                    "count)."
                )
            elif count.dim():
                count = count.reshape(())
        elif (
            isinstance(count, bool)
            or not isinstance(count, Real)
            or not 0 <= float(count) < math.inf
        ):
            problem = f"the count {count!r}, which is not a number >= 0: return (loss_sum, count)."
        if (
            not isinstance(loss_sum, (torch.Tensor, float, int))
            or getattr(loss_sum, "numel", int)() > 1
        ):
            problem = f"in (loss_sum, count) {loss_problem(loss_sum)}"
    if problem is not None:
        raise BatchError(f"{name}.{hook} returned {problem}", hook=hook)
    return loss_sum, count
