"""Metrics of a training stage, while a validation runs in between."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ddpkit.base import StageData
from ddpkit.metrics import Reducing

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def kept_metrics(*owners: Any) -> Iterator[None]:
    """Return a context after which each metric among the attributes of some objects is the same,
    and has counted what it had.

    A metric of torchmetrics is the same object; what is in it is not kept.

    Args:
        *owners: the recipe and its hparams.

    Example:
        >>> from types import SimpleNamespace
        >>> from ddpkit.metrics import Sum
        >>> recipe = SimpleNamespace(hits=Sum())
        >>> recipe.hits.update(3)
        >>> with kept_metrics(recipe):
        ...     recipe.hits.reset()
        >>> recipe.hits.compute()
        3.0
    """
    kept = [
        (owner, name, metric, _contents(metric))
        for owner in owners
        for name, metric in vars(owner).items()
        if isinstance(metric, Reducing)
    ]
    divided = StageData.divided
    steps_together = StageData.steps_together
    try:
        yield
    finally:
        for owner, name, metric, contents in kept:
            setattr(owner, name, metric)
            vars(metric).update(_copied(contents))
        StageData.divided = divided
        StageData.steps_together = steps_together
        if divided:  # a metric that has begun since is of a stage that is divided
            StageData.last_divided = StageData.number


def _contents(metric: Reducing) -> dict[str, Any]:
    return _copied(vars(metric))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, (list, dict)) else value
        for name, value in values.items()
    }
