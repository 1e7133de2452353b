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
    from collections.abc import Collection, Iterable, Iterator


class _GrowingList:
    """A copy of a list that is only appended to, or replaced: what is new is copied, not all."""

    def __init__(self) -> None:
        self._list: list[Any] = []
        self._copy: list[Any] = []

    def copied(self, current: list[Any]) -> list[Any]:
        """Return the copy with what the list has now."""
        if not self._has_only_grown(current):
            self._list = current
            self._copy = []
        self._copy += current[len(self._copy) :]
        return self._copy

    def _has_only_grown(self, current: list[Any]) -> bool:
        count = len(self._copy)
        if current is not self._list or len(current) < count:
            return False
        # torchmetrics empties its lists in a reset, and may have filled them again
        return not count or current[count - 1] is self._copy[-1]


class KeptMetrics:
    """What some metrics have counted.

    Args:
        metrics: of ddpkit or of torchmetrics; also in a list, a tuple or a dict.

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
        self._holders = [holder for metric in metrics for holder in _holders(metric)]
        self._lists: dict[tuple[int, str], _GrowingList] = {}
        self.keep()

    def keep(self) -> None:
        """Note what the metrics have counted by now."""
        self._kept = [self._contents(number) for number in range(len(self._holders))]

    def put_back(self) -> None:
        """Have the metrics count what they had."""
        for holder, contents in zip(self._holders, self._kept, strict=True):
            vars(holder).update({name: _copied(value) for name, value in contents.items()})

    def _contents(self, number: int) -> dict[str, Any]:
        holder = self._holders[number]
        growing = _growing_lists(holder)
        # the dicts of a module are torch's own, such as its hooks
        left_out = dict if isinstance(holder, nn.Module) else ()
        contents = {}
        for name, value in vars(holder).items():
            if name in growing and type(value) is list:
                known = self._lists.setdefault((number, name), _GrowingList())
                contents[name] = known.copied(value)
            elif not isinstance(value, left_out):
                contents[name] = _copied(value)
        return contents


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
    attributes = _attributes(owners)
    kept = KeptMetrics(value for _, _, value in attributes)
    divided = StageData.divided
    steps_together = StageData.steps_together
    try:
        yield
    finally:
        for owner, name, value in attributes:
            if vars(owner).get(name) is not value:  # a frozen part can set none
                setattr(owner, name, value)
        kept.put_back()
        StageData.divided = divided
        StageData.steps_together = steps_together
        if divided:  # a metric that has begun since is of a stage that is divided
            StageData.last_divided = StageData.number


def metrics_among(*owners: Any) -> KeptMetrics:
    """Return what the metrics among the attributes of some objects have counted by now.

    Args:
        *owners: as of :func:`kept_metrics`.

    Example:
        >>> from types import SimpleNamespace
        >>> from ddpkit.metrics import Sum
        >>> recipe = SimpleNamespace(hits=Sum())
        >>> kept = metrics_among(recipe)
        >>> recipe.hits.update(3)
        >>> kept.put_back()
        >>> recipe.hits.compute()
        0.0
    """
    return KeptMetrics(value for _, _, value in _attributes(owners))


def _attributes(owners: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    return [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if _holders(value)
    ]


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


def _growing_lists(holder: Any) -> Collection[str]:
    """Return the names of lists that are only appended to, or replaced: a copy of all of them in
    each step would take longer and longer.
    """
    if isinstance(holder, Reducing):
        return holder.growing_lists
    defaults = vars(holder).get("_defaults")  # of torchmetrics: the states, as they begin
    if not isinstance(defaults, dict):
        return ()
    return [name for name, begun in defaults.items() if isinstance(begun, list)]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()  # torchmetrics adds in place
    return value.copy() if isinstance(value, (list, dict)) else value
