"""Checks that the parameter groups of an optimizer hold the same numbers on all ranks."""

from __future__ import annotations

from torch.optim import Optimizer

from ddpkit.comm import optimizer_facts, require_agreement
from ddpkit.errors import ConfigError, RankMismatchError


def require_equal_groups(refusal: str, name: str, optimizer: Optimizer) -> None:
    """Raise if an optimizer's parameter groups hold different numbers on different ranks.

    Args:
        refusal: words with three places: for the name, the class and the reason.
        name: of the optimizer.
        optimizer: has made a step on every rank.

    Raises:
        ConfigError: the numbers of two ranks differ. On every rank.

    Ranks: collective.
    """
    try:
        require_agreement(optimizer_facts({name: optimizer}), site="the groups of an optimizer")
    except RankMismatchError as error:
        reason = f"keeps numbers in its groups that are not the same on all ranks.\n{error}"
        raise ConfigError(refusal.format(name, type(optimizer).__name__, reason)) from error
