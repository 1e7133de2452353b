"""Metrics as sums and counts: cheap to update, reduced over the ranks last.

A mean of per-rank means is wrong as soon as the ranks hold different numbers of samples; a sum divided by a
count, both added up over the ranks first, is the number that one process would have found. Updating never
waits for the device: sums stay where their tensors are, in float64 (float32 on mps, which has no float64),
until somebody reads them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddpkit.distributed import sum_over_ranks
from ddpkit.errors import ConfigError

__all__ = ["Accuracy", "LossMeter", "Mean", "Sum"]

FLUSH_AFTER = 64


def _wide(device: torch.device) -> torch.dtype:
    """Return the widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


class _Totals:
    """Named running totals, each the sum of a float on the host and a scalar on a device."""

    def __init__(self, *names: str) -> None:
        self._host = dict.fromkeys(names, 0.0)
        self._device: dict[str, Tensor] = {}

    def add(self, name: str, amount: Tensor | float) -> None:
        """Add a number, or a tensor of one element, without waiting for it."""
        if not isinstance(amount, Tensor):
            self._host[name] += amount
            return
        held = self._device.get(name)
        self._device[name] = amount if held is None else held.to(amount.device) + amount

    def read(self) -> dict[str, float]:
        """Return the totals; this waits for the device."""
        for name, amount in self._device.items():
            self._host[name] += float(amount)
        self._device.clear()
        return dict(self._host)

    def load(self, totals: dict[str, float]) -> None:
        """Replace the totals."""
        self._host = {name: float(totals[name]) for name in self._host}
        self._device.clear()


class _Metric:
    """What the metrics share: named totals, their sum over the ranks, their state."""

    _names: tuple[str, ...] = ("total", "count")

    def __init__(self) -> None:
        self._totals = _Totals(*self._names)

    def reset(self) -> None:
        """Forget everything, at the start of an epoch.

        Ranks: local.
        """
        self._totals = _Totals(*self._names)

    def state_dict(self) -> dict[str, float]:
        """Return this rank's totals as plain floats. Waits for the device.

        Ranks: local.
        """
        return self._totals.read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from totals that :meth:`state_dict` returned.

        Ranks: local.
        """
        self._totals.load(state_dict)

    def _read(self, *, reduce: bool) -> list[float]:
        totals = self._totals.read()
        values = [totals[name] for name in self._names]
        return sum_over_ranks(values) if reduce else values


class Mean(_Metric):
    """A mean weighted by counts.

    Ranks: local, but ``compute(reduce=True)``, which is collective.

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
            values: a number, or a tensor of any shape.
            counts: how many samples each value stands for: a number, or a tensor that broadcasts to
                ``values``.

        Ranks: local.
        """
        if not isinstance(values, Tensor):
            self._totals.add("total", values * counts)
            self._totals.add("count", counts)
            return
        values = values.detach()
        values = values.to(_wide(values.device))
        if isinstance(counts, Tensor):
            counts = counts.detach().to(values.device, values.dtype).expand_as(values)
            self._totals.add("total", (values * counts).sum())
            self._totals.add("count", counts.sum())
        else:
            self._totals.add("total", values.sum() * counts)
            self._totals.add("count", values.numel() * counts)

    def compute(self, reduce: bool = False) -> float:
        """Return the mean; NaN where nothing was counted. Waits for the device.

        Args:
            reduce: over all ranks, in one small all-reduce, instead of over this rank.

        Returns:
            The mean; with ``reduce`` the same number on every rank.

        Ranks: collective with ``reduce``, else local.
        """
        total, count = self._read(reduce=reduce)
        return total / count if count else math.nan


class Sum(_Metric):
    """A sum.

    Ranks: local, but ``compute(reduce=True)``, which is collective.

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
            values: a number, or a tensor of any shape and dtype.

        Ranks: local.
        """
        if isinstance(values, Tensor):
            values = values.detach().to(_wide(values.device)).sum()
        self._totals.add("total", values)

    def compute(self, reduce: bool = False) -> float:
        """Return the sum. Waits for the device.

        Args:
            reduce: over all ranks, in one small all-reduce, instead of over this rank.

        Returns:
            The sum; with ``reduce`` the same number on every rank.

        Ranks: collective with ``reduce``, else local.
        """
        return self._read(reduce=reduce)[0]


class Accuracy(_Metric):
    """The share of predictions that equal their labels.

    Ranks: local, but ``compute(reduce=True)`` and ``error(reduce=True)``, which are collective.

    State: two floats, ``total`` (the right ones) and ``count``.

    Example:
        >>> accuracy = Accuracy()
        >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
        >>> accuracy.update(logits, torch.tensor([1, 0, 0]))
        >>> accuracy.update(torch.tensor([3]), torch.tensor([3]))
        >>> accuracy.compute(), accuracy.error()
        (0.75, 0.25)
    """

    def update(self, predictions: Tensor, labels: Tensor, dim: int = -1) -> None:
        """Compare predictions with labels. Does not wait for the device.

        Args:
            predictions: class numbers, of the labels' shape; or scores (logits, probabilities) of the labels'
                shape with one more dimension, in which the largest is the prediction.
            labels: class numbers, of any shape.
            dim: which dimension of the scores holds the classes: the last, or 1 for scores ``(N, C, ...)``.

        Raises:
            ConfigError: the shapes fit neither way.

        Ranks: local.
        """
        shape = tuple(predictions.shape)
        if predictions.dim() == labels.dim() + 1:
            predictions = predictions.detach().argmax(dim)
        if predictions.shape != labels.shape:
            raise ConfigError(
                f"predictions of shape {shape} do not fit labels of shape {tuple(labels.shape)} (dim={dim}): "
                "give class numbers of the labels' shape, or scores with one more dimension, the classes."
            )
        right = predictions == labels.to(predictions.device)
        self._totals.add("total", right.sum().to(_wide(right.device)))
        self._totals.add("count", right.numel())

    def compute(self, reduce: bool = False) -> float:
        """Return the accuracy, between 0 and 1; NaN where nothing was counted. Waits for the device.

        Args:
            reduce: over all ranks, in one small all-reduce, instead of over this rank.

        Returns:
            The accuracy; with ``reduce`` the same number on every rank.

        Ranks: collective with ``reduce``, else local.
        """
        total, count = self._read(reduce=reduce)
        return total / count if count else math.nan

    def error(self, reduce: bool = False) -> float:
        """Return 1 - accuracy, counted from the wrong ones. Otherwise as :meth:`compute`.

        Args:
            reduce: over all ranks instead of over this rank.

        Returns:
            The error rate, between 0 and 1.

        Ranks: collective with ``reduce``, else local.
        """
        total, count = self._read(reduce=reduce)
        return (count - total) / count if count else math.nan


class LossMeter:
    """The running loss of a stage: what the loop pays per step is one ``append``.

    Losses are kept as they come and added up every 64, on their device, so no step waits for it. A loss that
    is not finite counts in neither the sum nor the samples; it is counted by itself.

    Ranks: local.

    Example:
        >>> meter = LossMeter()
        >>> for loss in (1.0, float("nan"), 3.0):
        ...     meter.append(torch.tensor(loss), 8)
        >>> meter.sums()
        (32.0, 16.0, 1)
    """

    __slots__ = ("_counts", "_host", "_losses", "_partial")

    def __init__(self) -> None:
        self._losses: list[Tensor | float] = []
        self._counts: list[float] = []
        self._partial: Tensor | None = None
        self._host = [0.0, 0.0, 0.0]

    def append(self, loss: Tensor | float, count: float) -> None:
        """Take in one step's loss. Does not wait for the device.

        Args:
            loss: the mean over ``count`` samples: a **detached** tensor of one element on any device, or a
                float. It is read up to 64 steps later, so nobody may write into the tensor.
            count: number of samples (or tokens, or whatever the loss is a mean over).

        Ranks: local.
        """
        self._losses.append(loss)
        self._counts.append(count)
        if len(self._losses) >= FLUSH_AFTER:
            self._flush()

    def sums(self) -> tuple[float, float, int]:
        """Return the sums since the last reset. Waits for the device.

        Returns:
            (sum of loss times count, sum of counts, number of losses that were not finite). The first two are
            over finite losses only, so their quotient is the mean loss per sample.

        Ranks: local; add them up over the ranks before dividing.
        """
        self._flush()
        if self._partial is not None:
            self._add_on_host(*self._partial.tolist())
            self._partial = None
        loss, count, nonfinite = self._host
        return loss, count, int(nonfinite)

    def reset(self) -> None:
        """Forget everything.

        Ranks: local.
        """
        self.restore(0.0, 0.0)

    def restore(self, loss_sum: float, count: float, nonfinite: int = 0) -> None:
        """Go on from sums that :meth:`sums` returned before, instead of from what is there now.

        Args:
            loss_sum: sum of loss times count.
            count: sum of counts.
            nonfinite: number of losses that were not finite.

        Ranks: local.
        """
        self._losses, self._counts, self._partial = [], [], None
        self._host = [loss_sum, count, float(nonfinite)]

    def _add_on_host(self, *amounts: float) -> None:
        self._host = [held + amount for held, amount in zip(self._host, amounts, strict=True)]

    def _flush(self) -> None:
        """Add the waiting losses to the sums: tensors on their device, floats here."""
        tensors, weights = [], []
        for loss, count in zip(self._losses, self._counts, strict=True):
            if isinstance(loss, Tensor):
                tensors.append(loss if loss.dim() == 0 else loss.reshape(()))
                weights.append(count)
            elif math.isfinite(loss):
                self._add_on_host(loss * count, count, 0.0)
            else:
                self._add_on_host(0.0, 0.0, 1.0)
        self._losses.clear()
        self._counts.clear()
        if tensors:
            partial = _finite_sums(tensors, weights)
            held = self._partial
            self._partial = partial if held is None else held.to(partial.device) + partial


def _finite_sums(losses: list[Tensor], weights: list[float]) -> Tensor:
    """Return three numbers on the losses' device: sum of loss times weight, of weights, number not finite."""
    device = losses[0].device
    if any(loss.device != device for loss in losses):
        losses = [loss.to(device) for loss in losses]
    values = torch.stack(losses).detach().to(_wide(device))
    # A copy from pageable memory with non_blocking is staged at once and makes nobody wait; torch.tensor(...,
    # device=) would wait for the device.
    counts = torch.tensor(weights, dtype=values.dtype).to(device, non_blocking=True)
    bad = ~torch.isfinite(values)
    counts = counts.masked_fill(bad, 0.0)
    values = values.masked_fill(bad, 0.0)
    return torch.stack([values.dot(counts), counts.sum(), bad.sum().to(values.dtype)])
