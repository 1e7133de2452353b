"""The running loss of a stage: kept as it comes, and added up now and then on its device."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ddpkit.base import reads_device, widest_float

if TYPE_CHECKING:
    from collections.abc import Sequence

FLUSH_AFTER = 64
_Entry = tuple[Tensor | float, Tensor | float]  # loss sum and count


class LossMeter:
    """The running loss of a stage: what the loop pays per step is one ``append``.

    Losses are kept as they come and added up every 64, on their device, so no step waits for it. A
    loss that is not finite counts in neither the sum nor the count; it is counted by itself.

    Args:
        copies: keep copies of losses, where the next step overwrites them: outputs of CUDA graphs.

    Attributes:
        samples: samples seen, whatever their losses count; written by the loop.
        skipped: batches that had no loss.

    Ranks: local.

    Example:
        >>> meter = LossMeter()
        >>> for loss in (1.0, float("nan"), 3.0):
        ...     meter.append(torch.tensor(loss), 8)
        >>> meter.sums()
        (32.0, 16.0, 1)
    """

    __slots__ = ("_copies", "_host", "_means", "_partial", "_sums", "samples", "skipped")

    def __init__(self, *, copies: bool = False) -> None:
        self.samples = 0
        self.skipped = 0
        self._copies = copies
        self._means: list[_Entry] = []
        self._sums: list[_Entry] = []
        self._partial: Tensor | None = None
        self._host = [0.0, 0.0, 0.0]

    def append(self, loss: Tensor | float, count: float) -> None:
        """Take in one step's loss. Does not wait for the device.

        Args:
            loss: the mean over ``count`` samples: a **detached** tensor of one element on any
                device, or a float. It is read up to 64 steps later, so the tensor must not
                be written to.
            count: number of samples (or tokens, or whatever the loss is a mean over).

        Ranks: local.
        """
        if not isinstance(loss, Tensor):
            self._add(loss * count, count)
            return
        self._means.append((loss.clone() if self._copies else loss, count))
        if len(self._means) >= FLUSH_AFTER:
            self._flush()

    def append_sum(self, loss_sum: Tensor | float, count: Tensor | float) -> None:
        """Add a sum of losses and its count. Does not wait for the device.

        Args:
            loss_sum: over ``count`` things: a **detached** tensor of one element on any device, or
                a float.
            count: how many; a tensor of one element, or a number. Where it is 0 nothing is taken
                in.

        Ranks: local.
        """
        if not (isinstance(loss_sum, Tensor) or isinstance(count, Tensor)):
            self._add(loss_sum, count)
            return
        self._sums.append(
            (_copied(loss_sum), _copied(count)) if self._copies else (loss_sum, count)
        )
        if len(self._sums) >= FLUSH_AFTER:
            self._flush()

    @reads_device
    def sums(self) -> tuple[float, float, int]:
        """Return the sums since the last reset. Waits for the device; changes nothing, however
        often it is called.

        Returns:
            (sum of loss times count, sum of counts, number of losses that were not finite). The
            first two are over finite losses only, so their quotient is the mean loss per sample.

        Ranks: local; add them up over the ranks before dividing.
        """
        partial = self._added()
        on_device = [0.0, 0.0, 0.0] if partial is None else partial.tolist()
        loss, count, nonfinite = (
            held + more for held, more in zip(self._host, on_device, strict=True)
        )
        return loss, count, int(nonfinite)

    def totals(self) -> list[Any]:
        """Return :meth:`sums` as they are to be added up over the ranks.

        Ranks: local.
        """
        return list(self.sums())

    def restore(
        self,
        loss_sum: Any,
        count: Any,
        nonfinite: int = 0,
        samples: int = 0,
    ) -> None:
        """Go on from sums that :meth:`sums` returned before, instead of from what is there now.

        Args:
            loss_sum: sum of loss times count.
            count: sum of counts.
            nonfinite: number of losses that were not finite.
            samples: samples seen.

        Ranks: local.
        """
        self.load_state_dict({"added": [loss_sum, count, float(nonfinite)], "samples": samples})

    def copy(self) -> LossMeter:
        """Return a meter with the same losses. Does not wait for the device.

        Ranks: local.
        """
        copied = LossMeter(copies=self._copies)
        copied.samples = self.samples
        copied.skipped = self.skipped
        copied._host = self._host
        copied._partial = self._partial
        copied._means = list(self._means)
        copied._sums = list(self._sums)
        return copied

    @reads_device
    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on to the last bit: the order in which numbers are added
        up is part of it.

        Returns:
            Lists of floats, and the samples. Waits for the device.

        Ranks: local.
        """
        return {
            "added": list(self._host),
            "added_on_device": None if self._partial is None else self._partial.tolist(),
            "means": [[_frozen(amount) for amount in entry] for entry in self._means],
            "sums": [[_frozen(amount) for amount in entry] for entry in self._sums],
            "samples": self.samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Args:
            state_dict: made by :meth:`state_dict`.

        Ranks: local.
        """
        self._host = [float(number) for number in state_dict["added"]]
        partial = state_dict.get("added_on_device")
        self._partial = None if partial is None else torch.tensor(partial, dtype=torch.float64)
        self._means = []
        self._sums = []
        for name, append in (("means", self.append), ("sums", self.append_sum)):
            for loss, count in state_dict.get(name, []):
                append(_thawed(loss), _thawed(count))
        self.samples = state_dict.get("samples", 0)

    def _add(self, total: float, count: float) -> None:
        if count:
            amounts = (total, count, 0.0) if math.isfinite(total) else (0.0, 0.0, 1.0)
            self._host = [total + amount for total, amount in zip(self._host, amounts, strict=True)]

    def _added(self) -> Tensor | None:
        """Return the sums of tensors on their device, with the waiting losses added."""
        held = self._partial
        for entries, are_means in ((self._means, True), (self._sums, False)):
            if entries:
                more = _finite_sums(entries, are_means=are_means)
                held = more if held is None else held.to(more.device, more.dtype) + more
        return held

    def _flush(self) -> None:
        self._partial = self._added()
        self._means.clear()
        self._sums.clear()


class ExactMeter(LossMeter):
    """A :class:`LossMeter` that rounds nothing: its sums depend neither on their order nor on who
    has added up what.

    It reads losses from their device every 64.

    Args:
        copies: as for a :class:`LossMeter`.

    Attributes:
        samples: samples seen, whatever their losses count; written by the loop.

    Example:
        >>> meter = ExactMeter()
        >>> for loss in (1e100, 1.0, float("nan"), -1e100):
        ...     meter.append(torch.tensor(loss, dtype=torch.float64), 8)
        >>> meter.sums()
        (8.0, 24.0, 1)
    """

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__(copies=copies)
        self._exact: tuple[Fraction, Fraction, int] = Fraction(), Fraction(), 0

    def sums(self) -> tuple[float, float, int]:
        """Return the sums, each rounded once, and the number of losses that were not finite."""
        loss, count, nonfinite = self.totals()
        return float(loss), float(count), nonfinite

    def totals(self) -> list[Any]:
        """Return the sums as fractions, to be added up over the ranks, and the number of losses
        left out.
        """
        self._flush()
        return list(self._exact)

    def restore(
        self,
        loss_sum: Any,
        count: Any,
        nonfinite: int = 0,
        samples: int = 0,
    ) -> None:
        """Go on from sums: numbers, fractions, or fractions written out."""
        self._means = []
        self._sums = []
        self.samples = samples
        self._exact = Fraction(loss_sum), Fraction(count), nonfinite

    def copy(self) -> ExactMeter:
        """Return a meter with the same losses."""
        copied = ExactMeter(copies=self._copies)
        self._flush()
        copied._exact = self._exact
        copied.samples = self.samples
        copied.skipped = self.skipped
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on; also as a :class:`LossMeter`."""
        loss, count, nonfinite = self.totals()
        rounded = [float(loss), float(count), float(nonfinite)]
        return {
            "added": rounded,
            "exact": [str(loss), str(count)],
            "samples": self.samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, also from a :class:`LossMeter`'s."""
        meter = LossMeter()
        meter.load_state_dict(state_dict)
        rounded = meter.sums()
        loss, count = state_dict.get("exact", rounded[:2])
        self.restore(loss, count, rounded[2], meter.samples)

    def _add(self, total: float, count: float) -> None:
        loss_sum, counted, nonfinite = self._exact
        if count and math.isfinite(total) and math.isfinite(count):
            self._exact = loss_sum + Fraction(total), counted + Fraction(count), nonfinite
        elif count:
            self._exact = loss_sum, counted, nonfinite + 1

    @reads_device
    def _flush(self) -> None:
        for entries, are_means in ((self._means, True), (self._sums, False)):
            numbers = [number for entry in entries for number in entry]
            device = next(
                (number.device for number in reversed(numbers) if isinstance(number, Tensor)),
                None,
            )
            # all at once
            read: list[float] = [] if device is None else _column(numbers, device).tolist()
            for loss, count in zip(
                read[::2],
                read[1::2],
                strict=True,
            ):
                self._add(loss * count if are_means else loss, count)
            entries.clear()


def _copied(number: Tensor | float) -> Tensor | float:
    return number.clone() if isinstance(number, Tensor) else number


@reads_device
def _frozen(number: Tensor | float) -> list[Any]:
    """Write a number down, and whether it is a tensor; those are added up in another way."""
    return [float(number), isinstance(number, Tensor)]


def _thawed(entry: list[Any]) -> Any:
    number, is_tensor = entry
    return torch.tensor(number, dtype=torch.float64) if is_tensor else number


def _finite_sums(entries: Sequence[_Entry], *, are_means: bool) -> Tensor:
    """Return three numbers on the losses' device: sum of losses, of what they count, number not
    finite.
    """
    # The last one is new, and where all will be; the first may have been read from a checkpoint.
    device = next(
        number.device
        for entry in reversed(entries)
        for number in entry
        if isinstance(number, Tensor)
    )
    values = _column([loss for loss, _ in entries], device)
    counts = _column([count for _, count in entries], device)
    empty = counts == 0
    bad = ~(torch.isfinite(values) & torch.isfinite(counts)) & ~empty
    counts = counts.masked_fill(bad, 0.0)
    values = values.masked_fill(bad | empty, 0.0)
    loss_sum = values.dot(counts) if are_means else values.sum()
    return torch.stack([loss_sum, counts.sum(), bad.sum().to(values.dtype)])


def _column(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Put numbers, some of them tensors of one element, into one wide tensor on a device, without
    waiting for it.
    """
    wide = widest_float(device)
    kinds = {*map(type, numbers)}
    if not any(issubclass(kind, Tensor) for kind in kinds):
        # A copy from pageable memory with non_blocking is staged at once and does not wait;
        # torch.tensor(..., device=) would wait for the device.
        return torch.tensor(numbers, dtype=wide).to(device, non_blocking=True)
    if (
        kinds == {Tensor}
        and len({(number.dtype, number.device, number.ndim) for number in cast("Any", numbers)})
        == 1
    ):
        return torch.stack(cast("Any", numbers)).detach().reshape(-1).to(device, wide)
    tensors = [
        number if isinstance(number, Tensor) else torch.full((), number, dtype=wide, device=device)
        for number in numbers
    ]
    return torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors])
