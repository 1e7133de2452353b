"""Metrics as sums and counts: cheap to update, reduced over the ranks last.

A mean of per-rank means is wrong as soon as the ranks hold different numbers of samples; a sum
divided by a count, both added up over the ranks first, is the number that one process would have
found. Updating never waits for the device: sums stay where their tensors are, in float64 (float32
on mps, which has no float64), until somebody reads them.

``compute()`` adds up over the ranks where that is right, and only there: after training, and after
an evaluation whose set was divided (``--shard_evaluation``). In an evaluation that is not divided
every rank has seen every sample, and adding up would count each as often as there are ranks.
:mod:`ddpkit.run.stage_runner` says which it is, alike on all ranks, with :func:`begin_stage`.
"""

from __future__ import annotations

import contextlib
import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ddpkit.base import StageData, get_world_size, reads_device, widest_float
from ddpkit.errors import ConfigError, DataError
from ddpkit.training import LossMeter

__all__ = [
    "Accuracy",
    "LossMeter",
    "Mean",
    "Reduced",
    "Reducing",
    "Sum",
    "begin_stage",
    "counted_by",
    "is_repeating",
]


def begin_stage(*, divided: bool, steps_together: bool = False) -> None:
    """Say that a stage begins, and whether each rank sees a part of its data only. For loops; the
    Brain's say it.

    Args:
        divided: alike on every rank, also on one whose part is empty.
        steps_together: whether each rank has as many batches as the others, as in training.

    Ranks: local, but all ranks must say the same.

    State: this process's; it holds until the next stage begins.

    Example:
        >>> begin_stage(divided=False)
        >>> Sum().compute()  # of this rank's own
        0.0
    """
    StageData.number += 1
    StageData.divided = divided
    StageData.steps_together = steps_together
    if divided:
        StageData.last_divided = StageData.number


def counted_by(window: Any) -> contextlib.AbstractContextManager[None]:
    """Let metrics and batch statistics ignore batches of a pass that this rank repeats only to keep
    step.

    So such a rank runs the same lines of code as the others, by which a call of ``run_on_main`` in
    a batch is known.

    Args:
        window: has ``count``, the samples of the current batch that count: a
            :class:`ddpkit.training.window.Window`.

    Ranks: local.

    State: this process's, while the context lasts.

    Example:
        >>> from types import SimpleNamespace
        >>> total, window = Sum(), SimpleNamespace(count=1)
        >>> with counted_by(window):
        ...     for window.count in (1, 0):
        ...         total.update(5)
        >>> total.compute()
        5.0
    """
    from ddpkit.base import temporarily

    return temporarily(StageData, window=window)


def is_repeating() -> bool:
    """Say whether the current batch counts nothing.

    Ranks: local.

    Example:
        >>> is_repeating()
        False
    """
    return not StageData.window.count


class Reducing:
    """What decides whether a metric is of all ranks, alike on all of them; a base class.

    Where something was counted, the stage of the last update decides. A rank that has counted
    nothing asks whether any stage was divided since the metric began: if another rank has counted
    something and this one has not, one was.

    Attributes:
        growing_lists: names of lists that are only appended to, or replaced by other ones. A step
            that is repeated, with ``--auto_micro_batch``, needs a copy of what a metric has
            counted before it; of these lists it copies what is new. Those that change in another
            way stand for nothing here.

    Ranks: local.
    """

    growing_lists: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._since = StageData.number
        self._divided: bool | None = None
        self._mixed = False

    def _counts(self) -> bool:
        """Say whether an update counts; note under which division the metric counts."""
        if not StageData.window.count:
            return False
        if self._divided not in (None, StageData.divided):
            self._mixed = True
        self._divided = StageData.divided
        return True

    def _reduces(self, reduce: bool | None) -> bool:
        if get_world_size() == 1:
            return False
        if reduce is None and self._mixed:
            raise ConfigError(
                f"this {type(self).__name__} has counted in stages whose data is divided over the "
                "ranks (training) and in stages whose data every rank sees in full: no single sum "
                "is right. Call reset() on every rank in on_stage_start, or use "
                "--shard_evaluation."
            )
        if reduce is None:
            reduce = (
                StageData.last_divided >= self._since if self._divided is None else self._divided
            )
        if reduce:
            from ddpkit.distributed import require_all_ranks

            require_all_ranks(f"{type(self).__name__}.compute")
        return reduce


class _Metric(Reducing):
    """What the metrics share: named totals, each a number or a scalar on a device; their sum over
    the ranks.
    """

    _names: tuple[str, ...] = ("total", "count")
    is_of_each_rank = True  # no recoverable: the main process's totals are a part

    def __init__(self) -> None:
        super().__init__()
        self._totals: dict[str, Any] = dict.fromkeys(self._names, 0.0)

    def reset(self) -> None:
        """Forget everything, at the start of an epoch.

        Ranks: local; call it on every rank.
        """
        self._totals = dict.fromkeys(self._names, 0.0)
        self._forget()

    @reads_device
    def state_dict(self) -> dict[str, float]:
        """Return this rank's totals as plain floats. Waits for the device.

        Ranks: local.
        """
        return {name: float(total) for name, total in self._totals.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from totals that :meth:`state_dict` returned.

        Ranks: local.
        """
        self._totals = {name: float(state_dict[name]) for name in self._names}

    def _add(self, *amounts: Tensor | float) -> None:
        for name, amount in zip(self._names, amounts, strict=True):
            held = self._totals[name]
            if isinstance(held, Tensor) and isinstance(amount, Tensor):
                held = held.to(amount.device)
            self._totals[name] = held + amount

    def _read(self, reduce: bool | None) -> list[float]:
        reduces = self._reduces(reduce)
        values = list(self.state_dict().values())
        if not reduces:
            return values
        from ddpkit.distributed import sum_over_ranks

        return sum_over_ranks(values, f"{type(self).__name__}.compute")


def metrics_of(*owners: Any) -> dict[str, _Metric]:
    """Return the metrics among the attributes of some objects, by the place of the object and the
    attribute's name.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> [*metrics_of(SimpleNamespace(acc=Sum(), epoch=1))]
        ['0.acc']
    """
    attributes = [
        (f"{place}.{name}", attribute)
        for place, owner in enumerate(owners)
        for name, attribute in vars(owner).items()
    ]
    return {name: attribute for name, attribute in attributes if isinstance(attribute, _Metric)}


def _tensor_or_number(values: Any) -> Any:
    return values if isinstance(values, (Tensor, Real)) else torch.as_tensor(values)


def _wide(values: Tensor) -> Tensor:
    return values.detach().to(widest_float(values.device))


class Mean(_Metric):
    """A mean weighted by counts.

    Ranks: local, but ``compute``.

    State: two floats, ``total`` and ``count``.

    Example:
        >>> mean = Mean()
        >>> mean.update(torch.tensor(2.0), 3)  # the mean of three samples
        >>> mean.update(torch.tensor([4.0, 6.0]))  # two samples
        >>> mean.compute()
        3.2
    """

    def update(self, values: Tensor | float, counts: Tensor | float = 1) -> None:
        """Take in values, each a mean over its count of samples. Does not wait for the device.

        Args:
            values: a number, a tensor of any shape, or what ``torch.as_tensor`` takes.
            counts: how many samples each value stands for: a number, or a tensor that broadcasts to
                ``values``, or what ``torch.as_tensor`` takes.

        Ranks: local.
        """
        if not self._counts():
            return
        values = _tensor_or_number(values)
        counts = _tensor_or_number(counts)
        if not isinstance(values, Tensor):
            values = values * counts
        elif isinstance(counts, Tensor):
            values = _wide(values)
            counts = counts.detach().to(values).expand_as(values)
            values = (values * counts).sum()
            counts = counts.sum()
        else:
            values, counts = _wide(values).sum() * counts, values.numel() * counts
        self._add(values, counts)

    def compute(self, reduce: bool | None = None) -> float:
        """Return the mean; NaN where nothing was counted. Waits for the device.

        Args:
            reduce: over all ranks, in one small all-reduce (True), or over this rank (False). None:
                over all ranks if and only if each has seen a part of the data (module docstring).

        Returns:
            The mean; the same number on every rank, unless ``reduce`` is False.

        Raises:
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where it reduces, else local. Call it on every rank.
        """
        total, count = self._read(reduce)
        return total / count if count else math.nan


class Sum(_Metric):
    """A sum.

    Ranks: local, but ``compute``.

    State: one float, ``total``.

    Example:
        >>> total = Sum()
        >>> total.update(torch.tensor([1, 2, 3]))
        >>> total.update(0.5)
        >>> total.compute()
        6.5
    """

    _names = ("total",)

    def update(self, values: Tensor | float) -> None:
        """Add a number, or all elements of a tensor. Does not wait for the device.

        Args:
            values: a number, a tensor of any shape and dtype, or what ``torch.as_tensor`` takes.

        Ranks: local.
        """
        if self._counts():
            values = _tensor_or_number(values)
            self._add(_wide(values).sum() if isinstance(values, Tensor) else values)

    def compute(self, reduce: bool | None = None) -> float:
        """Return the sum. Waits for the device.

        Args:
            reduce: over all ranks, in one small all-reduce (True), or over this rank (False). None:
                over all ranks if and only if each has seen a part of the data (module docstring).

        Returns:
            The sum; the same number on every rank, unless ``reduce`` is False.

        Raises:
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where it reduces, else local. Call it on every rank.
        """
        return self._read(reduce)[0]


class Accuracy(_Metric):
    """The share of predictions that equal their labels.

    Ranks: local, but ``compute`` and ``error``.

    State: two floats, ``total`` (the right ones) and ``count``.

    Example:
        >>> accuracy = Accuracy()
        >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
        >>> accuracy.update(logits, torch.tensor([1, 0, 0]))
        >>> accuracy.update(torch.tensor([3]), torch.tensor([3]))
        >>> accuracy.compute(), accuracy.error()
        (0.75, 0.25)
    """

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        dim: int = -1,
    ) -> None:
        """Compare predictions with labels. Does not wait for the device.

        Args:
            predictions: class numbers, of the labels' shape; or scores (logits, probabilities) of
                the labels' shape with one more dimension, in which the largest is the prediction.
            labels: class numbers, of any shape.
            dim: which dimension of the scores holds the classes: the last, or 1 for scores
                ``(N, C, ...)``.

        Raises:
            ConfigError: the shapes fit neither way.

        Ranks: local.
        """
        shape = tuple(predictions.shape)
        if predictions.dim() == labels.dim() + 1:
            predictions = predictions.detach().argmax(dim)
        if predictions.shape != labels.shape:
            raise ConfigError(
                f"predictions of shape {shape} do not fit labels of shape {tuple(labels.shape)} "
                f"(dim={dim}): give class numbers of the labels' shape, or scores with one more "
                "dimension, the classes."
            )
        if self._counts():
            right = predictions == labels.to(predictions.device)
            self._add(_wide(right).sum(), right.numel())

    def compute(self, reduce: bool | None = None) -> float:
        """Return the accuracy, between 0 and 1; NaN where nothing was counted. Waits for the
        device.

        Args:
            reduce: over all ranks, in one small all-reduce (True), or over this rank (False). None:
                over all ranks if and only if each has seen a part of the data (module docstring).

        Returns:
            The accuracy; the same number on every rank, unless ``reduce`` is False.

        Raises:
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where it reduces, else local. Call it on every rank.
        """
        total, count = self._read(reduce)
        return total / count if count else math.nan

    def error(self, reduce: bool | None = None) -> float:
        """Return 1 - accuracy, counted from the wrong ones. Otherwise as :meth:`compute`.

        Args:
            reduce: as there.

        Returns:
            The error rate, between 0 and 1.

        Ranks: as there.
        """
        total, count = self._read(reduce)
        return (count - total) / count if count else math.nan


class Reduced(Reducing):
    """A metric of torchmetrics, or a collection of them, reduced where ddpkit's own metrics would
    be.

    By itself such a metric joins its states in every ``compute``, also where every rank has seen
    every sample, and its own exchange needs a state of the same form on every rank. Here it is told
    when, and how to exchange states of any form.

    Args:
        metric: on the device of the tensors it is updated with.

    Attributes:
        metric: the same.

    Raises:
        ConfigError: the metric is another one, or was made with ``sync_on_compute=False``.

    Ranks: local, but ``compute``.

    State: the metric's. In a torchmetrics metric ``dist_sync_fn``, ``distributed_available_fn`` and
        ``compute_with_cache`` are set: its own ``compute`` uses this rank's state alone.

    Source: ``torchmetrics.Metric`` of torchmetrics 1.9: what its arguments ``dist_sync_fn``,
        ``distributed_available_fn`` and ``compute_with_cache`` mean.

    Example:
        >>> Reduced(Mean())
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: Mean cannot be reduced over the ranks: it is not a metric of
        torchmetrics, ...
    """

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric
        self._is_reducing = False
        inside = metric.modules() if isinstance(metric, torch.nn.Module) else [metric]
        synced = [part for part in inside if hasattr(part, "sync_on_compute")]
        if not synced or not all(part.sync_on_compute for part in synced):
            raise ConfigError(
                f"{type(metric).__name__} cannot be reduced over the ranks: it is not a metric of "
                "torchmetrics, or was made with sync_on_compute=False. Count what is a sum in "
                "ddpkit.metrics.Sum or Mean, or collect the samples' results and use Brain.gather."
            )
        for part in synced:
            part.dist_sync_fn = _all_tensors
            part.distributed_available_fn = self._is_asked
            part.compute_with_cache = False  # a value may be of this rank alone

    def _is_asked(self) -> bool:  # a method: a copy asks itself
        return self._is_reducing

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Pass on to the metric's ``update``.

        Ranks: local.
        """
        if self._counts():
            self.metric.update(*args, **kwargs)

    def reset(self) -> None:
        """Pass on to the metric's ``reset``, at the start of an epoch.

        Ranks: local; call it on every rank.
        """
        self.metric.reset()
        self._forget()

    def compute(self, reduce: bool | None = None) -> Any:
        """Return what the metric computes, over all ranks or over this one.

        Args:
            reduce: as in :meth:`Mean.compute`. The states of all ranks travel to every rank.

        Returns:
            What the metric returns; the same on every rank, unless ``reduce`` is False.

        Raises:
            LaunchError: in main-only code, where the other ranks' part would be missing.
            DataError: the ranks' states do not fit together. On all ranks.

        Ranks: collective where it reduces, else local. Call it on every rank.
        """
        if not self._reduces(reduce):
            return self.metric.compute()
        self._is_reducing = True
        try:
            value = self.metric.compute()
        finally:
            self._is_reducing = False
        _all_tensors(None)  # all ranks have exchanged as many
        return value


@reads_device
def _all_tensors(tensor: Tensor | None, group: Any = None) -> list[Tensor]:  # noqa: ARG001 -- torchmetrics passes both
    """Give every rank the list of all ranks' tensors, whatever their shapes; None: this rank has no
    further tensor.
    """
    from ddpkit.distributed import gather_objects

    found: list[Any] = gather_objects(lambda: None if tensor is None else tensor.detach().cpu())
    if len({value is None for value in found}) > 1:
        raise DataError(
            "a metric cannot be reduced: it keeps a list that is not concatenated, of different "
            "lengths on the ranks. Collect the samples' results instead, and use Brain.gather."
        )
    if tensor is None:
        return []
    found = [value.to(tensor.device) for value in found]
    # an empty list of a rank without samples
    if len({(value.dim(), value.dtype) for value in found}) > 1:
        found = [value for value in found if value.numel()] or found
    return found
