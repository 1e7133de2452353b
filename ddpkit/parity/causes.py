"""Compares several processes with one, and finds out by experiment why their gradients differ.

All experiments are made in the one process, with the recipe's own ``fit_batch``:

- noise: passes over the same samples with other random numbers, while what can be switched off is
  off;
- ``fit_batch``: one micro-batch, repeated to fill a window, has the gradients that it has alone;
- the loss: are the gradients of a joined batch those of one rank's part of it and of the rest,
  weighed by their numbers of samples? If they are with other weights, the loss is a sum, or a mean
  over something else, such as tokens. If they are with none, it matters which samples are together.
  (Two weights always fit a model of two parameters.)

A BatchNorm that the ranks do not share is named alone, whatever else there may be. While the loss
is examined, BatchNorm is in evaluation mode, and the model computes without autocast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpkit.parity.side import Side, Step
from ddpkit.precision import TorchAutocast

#: How far gradients may be apart, relative to the largest, by the coarsest dtype that the model
#: computes in.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
#: Of float32 on a GPU, which may multiply it in a shorter format (TF32).
ROUGH = 1e-2
#: Numbers of one parameter's gradient that are looked at when weights are fitted.
SAMPLED = 4096
SHOWN_ROWS = 10
#: A gradient that is zero but for rounding (of a bias before BatchNorm) is measured by this part of
#: the largest of all.
FLOOR = 1e-2
TINY = torch.finfo(torch.float64).tiny


def tolerance_of(brain: Any, gradients: Mapping[str, Tensor]) -> float:
    """Return the relative difference of gradients that is rounding at the model's precision."""
    used = {gradient.dtype for gradient in gradients.values()}
    if brain.training_ctx.enabled:
        used.add(brain.training_ctx.dtype)
    known = {**TOLERANCES, torch.float32: ROUGH} if brain.device.startswith("cuda") else TOLERANCES
    return max(known.get(dtype, known[torch.float32]) for dtype in used)


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check. ``str()`` gives the verdict, the cause and the parameters that
    differ most.

    Attributes:
        world_size: processes that were compared with one.
        differences: of each parameter the largest one, relative to its largest gradient.
        tolerance: relative differences up to this are rounding.
        kind: of the cause, one word or two; empty where parity holds.
        cause: why gradients differ, or would, and what to do; empty where parity holds.
        compared: which optimizer steps.
    """

    world_size: int
    differences: Mapping[str, float]
    tolerance: float
    kind: str
    cause: str
    compared: str

    @property
    def holds(self) -> bool:
        """Whether all gradients are equal up to rounding, and nothing spoils that."""
        return not self.kind

    def __str__(self) -> str:
        """Say the verdict, the cause, and the parameters that differ most."""
        sides = f"{self.world_size} processes and one with the joined batch"
        rows = sorted(self.differences.items(), key=lambda row: -row[1])
        if self.holds:
            lines = [f"Parity holds: {sides} have the same gradients."]
        elif self.kind == "randomness":
            lines = [f"Parity is not proven for {sides}.", f"- {self.cause}"]
        else:
            differ = rows[0][1] > self.tolerance
            found = (
                "different gradients"
                if differ
                else ("the same gradients now, but the training is not right")
            )
            lines = [f"Parity does not hold: {sides} have {found}.", f"- {self.cause}"]
        lines.append(f"The largest differences of {len(rows)} parameters:")
        for name, relative in rows[:SHOWN_ROWS]:
            lines.append(
                f"  {name} {relative:.1e} {'differs' if relative > self.tolerance else 'equal'}"
            )
        equal = (
            f"Equal is {self.tolerance:g} of the parameter's largest gradient (of {FLOOR:g} of "
            "the largest of all where that is more)."
        )
        return "\n".join([*lines, f"Compared: {self.compared}. {equal}"])


def compare(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return how far two sets of gradients are apart, by parameter; infinite where only one side
    has a gradient.

    Args:
        found: gradients by parameter.
        expected: those to measure by: the largest difference is divided by the parameter's largest
            gradient here.

    Example:
        >>> compare(
        ...     {"a": torch.tensor([1.0, 3.0]), "b": torch.ones(1)}, {"a": torch.tensor([1.0, 2.0])}
        ... )
        {'a': 0.5, 'b': inf}
    """
    floor = FLOOR * max(map(_largest, expected.values()), default=0.0)
    return {
        name: _distance(
            found.get(name),
            expected.get(name),
            floor,
        )
        for name in {**expected, **found}
    }


def _distance(gradient: Tensor | None, other: Tensor | None, floor: float) -> float:
    if gradient is None or other is None:
        return math.inf
    size = max(_largest(other), floor, TINY)
    relative = _largest(gradient.double() - other.double()) / size
    return math.inf if math.isnan(relative) else relative


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


class _Window:
    """One optimizer step: what each rank did, and the samples of one process and its gradients."""

    def __init__(self, side: Side, ranks: Sequence[dict[str, Any]]) -> None:
        first = ranks[0]
        self.number: int = first["number"] + 1
        self.found: list[dict[str, Tensor]] = [rank["gradients"] for rank in ranks]
        self.parts = [  # per micro-batch, those of the ranks that have samples of it
            [rank["batches"][index] for rank in ranks if rank["counts"][index]]
            for index in range(len(first["batches"]))
        ]
        joined = [list(itertools.chain(*parts)) for parts in self.parts]
        batches = joined if side.joins else list(itertools.chain(*self.parts))
        counts = [1 if side.counts is None else len(batch) for batch in batches]
        self.step = Step(
            first["number"],
            first["first"] * (1 if side.joins else len(ranks)),
            batches,
            counts,
        )
        self.expected: dict[str, Tensor] = {}


class Diagnosis:
    """Compares what the ranks have recorded with one process, and looks for the cause of a
    difference.

    Args:
        side: of this process.
        records: what :func:`ddpkit.parity.check.record` returned on each rank.

    Ranks: local; one process.
    """

    def __init__(self, side: Side, records: Sequence[dict[str, Any]]) -> None:
        self.side = side
        self.first = records[0]
        self.world_size = len(records)
        self.factor: int = records[0]["factor"] * (1 if side.joins else len(records))
        self.windows = [
            _Window(side, ranks)
            for ranks in zip(*[record["steps"] for record in records], strict=True)
        ]
        self.tolerance = tolerance_of(side.brain, self.windows[0].found[0])
        self.own_fit_batch = side.parts.context.recipe.has_own_fit_batch

    def report(self) -> ParityReport:
        """Work on the steps of the ranks as one process, and return what differs and why."""
        worst: dict[str, float] = {}
        for window in self.windows:
            window.expected = self.side.run(window.step, self.factor)
            for name, relative in compare(window.found[0], window.expected).items():
                worst[name] = max(relative, worst.get(name, 0.0))
        kind, cause = self._cause()
        numbers = ", ".join(str(window.number) for window in self.windows)
        samples = sum(map(len, self.windows[0].step.batches))
        compared = (
            f"optimizer steps {numbers} of {self.windows[-1].number} in an epoch, {samples} "
            "samples in the first"
        )
        return ParityReport(self.world_size, worst, self.tolerance, kind, cause, compared)

    def _alone(
        self,
        window: _Window,
        batch: list[Any],
        index_in_window: int = 0,
    ) -> dict[str, Tensor]:
        """Return the gradients of a batch that is an optimizer step of its own."""
        return self.side.run(
            Step(
                window.step.number,
                window.step.first + index_in_window,
                [batch],
                [len(batch)],
            ),
            1,
        )

    def _equal(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
        return max(compare(found, expected).values()) <= self.tolerance

    def _cause(self) -> tuple[str, str]:
        """Return the kind of the cause and the cause in words; nothing where parity holds."""
        for window in self.windows:
            if not all(
                bool(gradient.isfinite().all())
                for gradient in (*window.found[0].values(), *window.expected.values())
            ):
                return "not finite", NOT_FINITE.format(window.number)
        if not all(map(self._repeats, self.windows)):
            return "randomness", NOISE
        if self.own_fit_batch and not all(map(self._accumulates, self.windows)):
            return "fit_batch", FIT_BATCH
        failing = [
            window for window in self.windows if not self._equal(window.found[0], window.expected)
        ]
        return self._difference(failing[0]) if failing else ("", "")

    # ----------------------------------------------------- what may be wrong though gradients agree

    def _repeats(self, window: _Window) -> bool:
        """Say whether a step has the same gradients whatever random numbers are drawn."""
        drawn = [self.side.run(window.step, self.factor, seed=seed) for seed in (1, 2)]
        return all(self._equal(found, window.expected) for found in drawn)

    def _accumulates(self, window: _Window) -> bool:
        """Say whether a batch that fills a window, again and again, has the gradients that it has
        alone.
        """
        batch = window.step.batches[0]
        number = len(window.step.batches)
        alone, later = [self._alone(window, batch, index) for index in (0, number - 1)]
        filled = Step(
            window.step.number,
            window.step.first,
            [batch] * number,
            [len(batch)] * number,
        )
        found = self.side.run(filled, self.factor)
        if found.keys() != alone.keys() or self.side.moved or not self._equal(later, alone):
            # it steps in between, keeps state, or the loss depends on the step: this says nothing
            return True
        return self._equal(found, alone)

    # ------------------------------------------------------------------ why gradients differ

    def _difference(self, window: _Window) -> tuple[str, str]:
        """Find out why a window has other gradients on several processes than on one."""
        for number, found in enumerate(window.found):
            apart = compare(found, window.found[0])
            worst = max(apart, key=apart.__getitem__)
            if apart[worst] > self.tolerance:
                return "not averaged", NOT_AVERAGED.format(number, worst)
        if self.first["norms"]:
            return "batch norm", NOT_SHARED.format(", ".join(self.first["norms"]))
        self.side.brain.training_ctx = TorchAutocast(
            device_type=torch.device(self.side.brain.device).type
        )
        trained = [layer.eval() for layer in self.side.norm_layers.values() if layer.training]
        kind, words = (
            self._loss(window)
            if self.side.joins and len(window.parts[0]) > 1
            else ("unknown", UNKNOWN)
        )
        # The loss is right where they normalise each sample by itself.
        if kind in {"unknown", "fit_batch"} and trained and len(window.parts[0]) > 1:
            kind = "batch-dependent"
            words = BATCH_DEPENDENT
        moved = ", ".join(self.first["moved"])
        return kind, words + (
            f" Each rank changes state by its own samples: {moved}." if moved else ""
        )

    def _loss(self, window: _Window) -> tuple[str, str]:
        """Write the gradients of a joined batch as a weighted sum of those of one rank's part of it
        and of the rest.
        """
        parts = window.parts[0]
        joined = window.step.batches[0]
        whole = self._alone(window, joined)
        for part in parts:
            rest = [index for other in parts if other is not part for index in other]
            both = self._alone(window, part), self._alone(window, rest)
            *columns, target = [_flat(gradients, whole) for gradients in (*both, whole)]
            matrix = torch.stack(columns, dim=1)
            by_samples = target.new_tensor([len(part), len(rest)]) / len(joined)
            rounding = self.tolerance * target.norm()
            if not matrix.isfinite().all() or (matrix @ by_samples - target).norm() <= rounding:
                continue
            step = columns[0] - columns[1]
            way = target - columns[1]
            if (
                self.side.is_counted
                and (way - step * (step @ way) / (step @ step)).norm() <= rounding
            ):
                continue  # their mean, weighted by some counts
            # torch's default driver gives up where the first column is zero: a part to which the
            # loss is nothing.
            fit = torch.linalg.lstsq(
                matrix,
                target[:, None],
                rcond=self.tolerance,
                driver="gelsd",
            )
            weights = fit.solution.flatten()
            if (matrix @ weights - target).norm() > rounding:
                return "batch-dependent", BATCH_DEPENDENT
            found, wanted = (
                "{:.3g} + {:.3g}".format(*numbers.tolist()) for numbers in (weights, by_samples)
            )
            return "loss", LOSS.format(
                len(joined),
                found,
                len(part),
                len(rest),
                wanted,
            )
        return ("fit_batch", FIT_BATCH) if self.own_fit_batch else ("unknown", UNKNOWN)


def _flat(gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Put gradients, thinned out where they are long, into one vector; a parameter without one has
    zeros.
    """
    found = [gradients.get(name, torch.zeros_like(gradient)) for name, gradient in like.items()]
    steps = [max(1, gradient.numel() // SAMPLED) for gradient in found]
    pairs = zip(found, steps, strict=True)
    return torch.cat([gradient.flatten()[::step].double() for gradient, step in pairs])


NOISE = (
    "The training draws random numbers that a check cannot switch off (numpy, Python's random, "
    "torch.multinomial, a generator in the dataset), so nothing can be said about the rest. Draw "
    "with torch.rand or torch.randn, or leave the noise out while you check."
)
FIT_BATCH = (
    "fit_batch of the recipe weighs its batches twice, not at all, or small ones as much as large "
    "ones. Call self.backward(loss) with the mean loss (or the loss_sum and count) as it is, and "
    "optimizers_step() where self.should_step is true."
)
NOT_FINITE = (
    "The gradients are not finite in optimizer step {}. Where it is so on several processes only, "
    "the loss is probably a mean over something of which a rank has none (an empty mask, no "
    "sample of a class). Return (loss_sum, count)."
)
NOT_AVERAGED = (
    "Rank {} steps with other gradients of {} than rank 0: they are not averaged. DDP averages "
    "gradients only of forward passes through the modules of self.modules: put all that is "
    "trained there. Call these, and self.backward(loss)."
)
NOT_SHARED = (
    "BatchNorm that is not over all rows of a step: {}. It is synchronised unless "
    "sync_batchnorm=off is given, or it has a forward or a parametrization of its own; and one "
    "process does not join the batches of a batch_sampler. Build the layer on "
    "ddpkit.syncbn.SyncBatchNorm, normalise per sample (GroupNorm, LayerNorm), or call eval() on "
    "it in training."
)
LOSS = (
    "The loss is not a mean over the samples of a batch: the gradients of {} samples are {} times "
    "those of {} and of {} of them, and not {}. It is a sum, a mean over something else (tokens, "
    "frames, weighted classes), or weighed twice. Return (loss_sum, count) from "
    "compute_objectives: the sum, not a mean, and the number to divide it by."
)
BATCH_DEPENDENT = (
    "The model or the loss depends on which samples are in a batch together (padding without a "
    "mask, also that which a BatchNorm sees, attention or statistics across samples, in-batch "
    "negatives, a maximum over the batch). Such a training depends on the number of processes, "
    "whatever the library. Compute each sample by itself."
)
UNKNOWN = (
    "The cause is not known. Does the result for a sample depend on the other samples of its "
    "batch? Do the model or fit_batch keep state? Does the script do something else under a "
    "launcher?"
)
