"""Metrics of a training stage, put back after what is not to count in them: a validation in
between, or a step that is made again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ddpkit.base import StageData
from ddpkit.metrics import Reducing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class KeptMetrics:
    """What some metrics have counted.

    Args:
        metrics: of ddpkit or of torchmetrics.

    Example:
        >>> from ddpkit.metrics import Sum
        >>> hits = Sum()
        >>> kept = KeptMetrics([hits])
        >>> hits.update(3)
        >>> kept.put_back()
        >>> hits.compute()
        0.0
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        holders = [holder for metric in metrics for holder in _holders(metric)]
        self._kept = [(holder, _contents(holder)) for holder in holders]

    def put_back(self) -> None:
        """Have the metrics count what they had."""
        for holder, contents in self._kept:
            vars(holder).update({name: _copied(value) for name, value in contents.items()})


@contextlib.contextmanager
def kept_metrics(*owners: Any) -> Iterator[None]:
    """Return a context after which each metric among the attributes of some objects is the same,
    and has counted what it had; also in a list, a tuple or a dict.

    Args:
        *owners: the recipe, its hparams and the parts.

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
    attributes = [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if _holders(value)
    ]
    kept = KeptMetrics(value for _, _, value in attributes)
    divided = StageData.divided
    steps_together = StageData.steps_together
    try:
        yield
    finally:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        kept.put_back()
        StageData.divided = divided
        StageData.steps_together = steps_together
        if divided:  # a metric that has begun since is of a stage that is divided
            StageData.last_divided = StageData.number


def _holders(value: Any) -> list[Any]:
    """Return the objects in whose attributes a metric, or several, keep what they count."""
    if isinstance(value, Reducing):
        return [value, *_of_torchmetrics(vars(value).get("metric"))]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [holder for inner in value if _is_metric(inner) for holder in _holders(inner)]
    return _of_torchmetrics(value)


def _is_metric(value: Any) -> bool:
    return isinstance(value, (Reducing, nn.Module))


def _of_torchmetrics(value: Any) -> list[Any]:
    """Return the metrics of torchmetrics in a module; a collection has several."""
    if not isinstance(value, nn.Module):
        return []
    return [part for part in value.modules() if hasattr(part, "sync_on_compute")]


def _contents(holder: Any) -> dict[str, Any]:
    # the dicts of a module are torch's own, such as its hooks
    left_out = dict if isinstance(holder, nn.Module) else ()
    return {
        name: _copied(value)
        for name, value in vars(holder).items()
        if not isinstance(value, left_out)
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()  # torchmetrics adds in place
    return value.copy() if isinstance(value, (list, dict)) else value
