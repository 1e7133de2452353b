"""Optimizers that draw random numbers in their step: others for a part of the parameters."""

from __future__ import annotations

from typing import Any

import torch

from ddpkit.base import map_values
from ddpkit.distributed import exchange
from ddpkit.errors import ConfigError
from ddpkit.seed import rng_state

MARK = "ddpkit_draws"  # attribute of an optimizer that is looked at already


def refuse_draws(optimizer: Any, message: str) -> None:
    """Have the first step of an optimizer fail if it draws random numbers; of one that is torch's.

    Args:
        optimizer: of a recipe.
        message: of the error.

    Ranks: local; the first step is collective.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and MARK not in vars(optimizer):
        vars(optimizer)[MARK] = _Drawing(optimizer, message)


class _Drawing:
    """Compares the random states around the first step of an optimizer.

    A class with a ``step`` around that of its base class is given its hooks around both.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, message: str) -> None:
        self._message = message
        self._before: Any = None
        self._depth = 0
        self._is_compared = False
        optimizer.register_step_pre_hook(self._note)
        optimizer.register_step_post_hook(self._compare)

    def _note(self, *_: Any) -> None:
        if self._is_compared:
            return
        if not self._depth:
            self._before = _drawn()
        self._depth += 1

    def _compare(self, *_: Any) -> None:
        self._depth -= 1
        if self._is_compared or self._depth > 0:
            return
        self._is_compared = True
        drew = self._before != _drawn()
        self._before = None
        # a process may have no parameter to draw for
        if any(exchange(drew, "random numbers of an optimizer")):
            raise ConfigError(self._message)


def _drawn() -> Any:
    """Return what tells whether the process has drawn random numbers."""
    return map_values(
        rng_state(),
        lambda value: value.tolist() if isinstance(value, torch.Tensor) else value,
    )
