"""The learning rates of a run in words: as it began, and as the next step uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddpkit.optim import rate_factor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MOST_SHOWN = 4


def rates_row(optimizer: Any, begun: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the learning rates that an optimizer was given, and those of its next step where they
    differ.

    Args:
        optimizer: whose groups have a learning rate, or not.
        begun: settings of the groups with which the run began; empty where that is not known.

    Returns:
        The words; nothing where no group has a rate.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> rates_row(sgd)
        'lr 0.1'
        >>> _ = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.25)
        >>> rates_row(sgd)
        'lr 0.1 (now 0.025, schedule)'
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    if not groups:
        return ""
    settings = begun if len(begun) == len(optimizer.param_groups) else ({},) * len(groups)
    pairs = zip(groups, settings, strict=False)
    given = [float(group.get("initial_lr", known.get("lr", group["lr"]))) for group, known in pairs]
    own = [float(group["lr"]) for group in groups]
    now = [rate * rate_factor(optimizer) for rate in own]
    reasons = []
    if _listed(own) != _listed(given):
        has_schedule = any("initial_lr" in group for group in groups)
        reasons.append("schedule" if has_schedule else "set since the run began")
    if _listed(now) != _listed(own):
        reasons.append("--lr_scaling")
    shown = f"lr {_listed(given)}"
    return f"{shown} (now {_listed(now)}, {' and '.join(reasons)})" if reasons else shown


def rate_of_bar(optimizers: Iterable[Any]) -> str:
    """Return the learning rates of the next step for a progress bar, without a wait for a GPU.

    Args:
        optimizers: of the run.

    Returns:
        One rate, or the lowest and the highest. Nothing where none is known to the host.

    Example:
        >>> groups = [
        ...     {"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01)
        ... ]
        >>> rate_of_bar([torch.optim.SGD(groups)])
        '0.01 to 0.1'
    """
    rates = [
        float(group["lr"]) * rate_factor(optimizer)
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())
        if "lr" in group and _is_on_host(group["lr"])
    ]
    if not rates:
        return ""
    lowest = f"{min(rates):.3g}"
    highest = f"{max(rates):.3g}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _is_on_host(rate: Any) -> bool:
    return not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"


def _listed(rates: Iterable[float]) -> str:
    shown = list(dict.fromkeys(f"{rate:.6g}" for rate in rates))
    left = len(shown) - MOST_SHOWN
    return ", ".join(shown if left <= 0 else [*shown[:MOST_SHOWN], f"and {left} more"])
