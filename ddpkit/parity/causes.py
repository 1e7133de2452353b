"""Compares several processes with one, and finds out by experiment why their gradients differ.

All experiments are made in the one process, with the recipe's own ``fit_batch``:

- noise: passes over the same samples with other random numbers, while what can be switched off is off;
- ``fit_batch``: one micro-batch, repeated to fill a window, has the gradients that it has alone;
- the loss: the joined batch as a weighted sum of each rank's part of it. Weights that are not the samples': a sum, or
  a mean over something else, such as tokens. No weights: it matters which samples are together.

A BatchNorm that the ranks do not share is named alone, whatever else there may be. While the loss is examined,
BatchNorm is in evaluation mode.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpkit.parity.report import TOLERANCES, Gradients, ParityReport, ParityRow, all_equal, compare, worst
from ddpkit.parity.side import Side, Step
from ddpkit.precision import TorchAutocast

#: Numbers of one parameter's gradient that are looked at when weights are fitted.
SAMPLED = 4096
#: Below this condition of the parts' gradients they are too much alike to tell their weights apart.
APART = 1e-3
#: How exactly a fitted weight must be a known number to count as that.
NEAR = 0.02
#: The tolerance of float32 on a GPU, which may multiply it in a shorter format (TF32).
ROUGH = 1e-2
SHOWN_LETTERS = 200  # of a list of names


def diagnose(side: Side, records: Sequence[dict[str, Any]]) -> ParityReport:
    """Compare what the ranks have recorded with one process.

    Args:
        side: of this process.
        records: what :func:`ddpkit.parity.check.record` returned on each rank.

    Ranks: local; one process.
    """
    return _Diagnosis(side, records).report()


class _Window:
    """One optimizer step: what each rank did, and the samples of one process."""

    def __init__(self, records: Sequence[dict[str, Any]], place: int, *, joins: bool) -> None:
        self.ranks = [one["steps"][place] for one in records]
        first = self.ranks[0]
        self.number: int = first["number"] + 1
        self.parts = [  # per micro-batch, those of the ranks that have samples of it
            [rank["batches"][place] for rank in self.ranks if rank["counts"][place]]
            for place in range(len(first["batches"]))
        ]
        joined = [[index for part in parts for index in part] for parts in self.parts]
        batches = joined if joins else [part for parts in self.parts for part in parts]
        counts = [len(batch) if first["weighs"] else 1 for batch in batches]
        self.step = Step(first["number"], first["first"] * (1 if joins else len(records)), batches, counts)


class _Diagnosis:
    def __init__(self, side: Side, records: Sequence[dict[str, Any]]) -> None:
        self.side, self.brain, self.records = side, side.brain, records
        self.factor: int = records[0]["factor"] * (1 if side.joins else len(records))
        self.windows = [_Window(records, place, joins=side.joins) for place in range(len(records[0]["steps"]))]
        self.tolerances = _tolerances(self.brain)
        self.own_fit_batch = side.parts.recipe.has_own_fit_batch
        self.causes: dict[str, str] = {}

    def report(self) -> ParityReport:
        """Compare, and look for the causes."""
        rows, failing = [], []
        for window in self.windows:
            expected = self._run(window)
            found = self._compare(window, window.ranks[0]["gradients"], expected)
            rows += found
            failing += [] if all_equal(found) else [window]
            if _is_finite(expected) and not self._repeats(window, expected):
                self.causes["randomness"] = NOISE
        if self.own_fit_batch and not (self.causes or all(map(self._accumulates, self.windows))):
            self.causes["fit_batch"] = FIT_BATCH
        if failing and not self.causes:
            kind, words = self._explain(failing)
            self.causes[kind] = words
        numbers = ", ".join(str(window.number) for window in self.windows)
        compared = (
            f"optimizer step{'' if len(self.windows) == 1 else 's'} {numbers} of {self.records[0]['length']} in an "
            f"epoch, {sum(sum(rank['counts']) for rank in self.windows[0].ranks)} samples in the first"
        )
        return ParityReport(len(self.records), worst(rows), self.causes, compared)

    def _run(self, window: _Window, **options: Any) -> list[Gradients]:
        return self.side.run(window.step, self.factor, window.step, **options)

    def _alone(self, window: _Window, batch: list[Any], place: int) -> list[Gradients]:
        """Return the gradients of a batch that is an optimizer step of its own; of its last call of an optimizer."""
        own = Step(window.step.number, window.step.first + place, [batch], [len(batch)])
        return self.side.run(own, 1, own)[-1:]

    def _compare(self, window: _Window, found: Sequence[Gradients], expected: Sequence[Gradients]) -> list[ParityRow]:
        return compare(found, expected, self.tolerances, window.number)

    # ------------------------------------------------------------------ what may be wrong though gradients agree

    def _repeats(self, window: _Window, expected: list[Gradients]) -> bool:
        """Say whether a step has the same gradients whatever random numbers are drawn."""
        return all(all_equal(self._compare(window, self._run(window, seed=seed), expected)) for seed in (1, 2))

    def _accumulates(self, window: _Window) -> bool:
        """Say whether a batch that fills a window, again and again, has the gradients that it has alone."""
        batch, number = window.step.batches[0], len(window.step.batches)
        alone = [self._alone(window, batch, place) for place in {0, number - 1}]
        filled = Step(window.step.number, window.step.first, [batch] * number, [len(batch)] * number)
        found = self.side.run(filled, self.factor, filled)
        if len(found) > 1 or not all_equal(self._compare(window, alone[0], alone[-1])):
            return True  # it steps in between, or the loss depends on the step: this says nothing
        weights = fitted_weights(*alone[0], *found)
        return not (weights and abs(weights[0] - 1) > NEAR)  # NaN says nothing, either

    # ------------------------------------------------------------------ why gradients differ

    def _explain(self, failing: list[_Window]) -> tuple[str, str]:
        found = next((cause for window in failing if (cause := self._fault_of_a_rank(window))), None)
        if found is not None:
            return found
        norms = self.records[0]["norms"]
        apart = [name for name, shared in norms.items() if not shared] or ([] if self.side.joins else list(norms))
        if apart:
            return "batch norm", NOT_SHARED.format(_listed(apart))
        if self.brain.training_ctx.enabled:
            self.brain.training_ctx = TorchAutocast(device_type=torch.device(self.brain.device).type)
        self.side.keep_norms_still()
        kind, words = self._fault_of_the_loss(failing[0])
        moved = _listed(self.records[0]["moved"])
        return kind, words + (f" Each rank changes state by its own samples: {moved}." if moved else "")

    def _fault_of_a_rank(self, window: _Window) -> tuple[str, str] | None:
        """See whether gradients are finite, and those of all ranks the same."""
        if not (_is_finite(window.ranks[0]["gradients"]) and _is_finite(self._run(window))):
            return "not finite", NOT_FINITE.format(window.number)
        for number, rank in enumerate(window.ranks):
            rows = self._compare(window, rank["gradients"], window.ranks[0]["gradients"])
            if not all_equal(rows):
                return "not averaged", NOT_AVERAGED.format(number, worst(rows)[0].parameter)
        return None

    def _fault_of_the_loss(self, window: _Window) -> tuple[str, str]:
        """Write the gradients of a joined batch as a weighted sum of those of its parts."""
        place = next((place for place, parts in enumerate(window.parts) if len(parts) > 1), None)
        if not self.side.joins or place is None:
            return "unknown", UNKNOWN
        parts, joined = window.parts[place], window.step.batches[place]
        weights = fitted_weights(*[self._alone(window, batch, place)[0] for batch in (*parts, joined)])
        if not weights:
            return "batch-dependent", BATCH_DEPENDENT
        if math.isnan(weights[0]):
            return "unknown", UNKNOWN
        of_samples = [len(part) / len(joined) for part in parts]
        if torch.allclose(torch.tensor(weights), torch.tensor(of_samples), rtol=NEAR):
            return ("fit_batch", FIT_BATCH) if self.own_fit_batch else ("unknown", UNKNOWN)
        found, wanted = (" + ".join(f"{one:.3g}" for one in numbers) for numbers in (weights, of_samples))
        return "loss", LOSS.format(len(joined), found, wanted)


def _tolerances(brain: Any) -> dict[torch.dtype, float]:
    """Return the tolerances for what the model computes in."""
    rough, context = ROUGH if brain.device.startswith("cuda") else 0.0, brain.training_ctx
    least = TOLERANCES[context.dtype] if context.enabled else 0.0
    found = {**TOLERANCES, torch.float32: max(TOLERANCES[torch.float32], rough)}
    return {dtype: max(tolerance, least) for dtype, tolerance in found.items()}


def fitted_weights(*gradients: Gradients) -> list[float]:
    """Write the last gradient as a weighted sum of the others.

    Returns:
        The weight of each; an empty list where no weights fit, and NaN where many do.

    Ranks: local.
    """
    target = {name: one for name, one in gradients[-1].items() if one is not None}
    if not target:
        return [math.nan]
    matrix = torch.stack([_flat(step, target) for step in gradients], dim=1)
    if not matrix.isfinite().all():
        return []
    parts, whole = matrix[:, :-1], matrix[:, -1:]
    weights, _, rank, _ = torch.linalg.lstsq(parts, whole, rcond=APART)
    if rank < parts.shape[1]:
        return [math.nan] * parts.shape[1]
    tolerance = 10 * max(TOLERANCES.get(one.dtype, 1e-3) for one in target.values())
    return weights.flatten().tolist() if (parts @ weights - whole).norm() <= tolerance * whole.norm() else []


def _flat(gradients: Gradients, like: dict[str, Tensor]) -> Tensor:
    """Put gradients, thinned out where they are long, into one vector; a parameter without one has zeros."""
    own = {name: one for name, one in gradients.items() if one is not None}
    found = [own.get(name, torch.zeros_like(one)) for name, one in like.items()]
    return torch.cat([one.flatten()[:: max(1, one.numel() // SAMPLED)].double() for one in found])


def _is_finite(steps: Sequence[Gradients]) -> bool:
    return all(bool(one.isfinite().all()) for step in steps for one in step.values() if one is not None)


def _listed(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), SHOWN_LETTERS, placeholder=" and more")


NOISE = (
    "The training draws random numbers that a check cannot switch off (numpy, Python's random, torch.multinomial, a "
    "generator in the dataset), so nothing can be said about the rest. Draw with torch.rand or torch.randn, or leave "
    "the noise out while you check."
)
FIT_BATCH = (
    "fit_batch of the recipe weighs its batches twice, not at all, or small ones as much as large ones. Call "
    "self.backward(loss) with the mean loss (or the loss_sum and count) as it is, and optimizers_step() where "
    "self.should_step is true."
)
NOT_FINITE = (
    "The gradients are not finite in optimizer step {}. Where it is so on several processes only, the loss is probably "
    "a mean over something of which a rank has none (an empty mask, no sample of a class). Return (loss_sum, count)."
)
NOT_AVERAGED = (
    "Rank {} steps with other gradients of {} than rank 0: they are not averaged. DDP averages gradients only of "
    "forward passes through the modules of self.modules: put all that is trained there. Call these, and "
    "self.backward(loss)."
)
NOT_SHARED = (
    "BatchNorm that is not over all rows of a step: {}. It is synchronised unless sync_batchnorm=off is given, or it "
    "has a forward or a parametrization of its own; and one process does not join the batches of a batch_sampler. "
    "Build the layer on ddpkit.syncbn.SyncBatchNorm, normalise per sample (GroupNorm, LayerNorm), or call eval() on "
    "it in training."
)
LOSS = (
    "The loss is not a mean over the samples of a batch: the gradients of {} samples are {} times those of the ranks' "
    "parts, and not {}. It is a sum, a mean over something else (tokens, frames, weighted classes), or weighed "
    "twice. Return (loss_sum, count) from compute_objectives: the sum, not a mean, and the number to divide it by."
)
BATCH_DEPENDENT = (
    "The model or the loss depends on which samples are in a batch together (padding without a mask, attention or "
    "statistics across samples, in-batch negatives, a maximum or a root over the batch). Such a training depends on "
    "the number of processes, whatever the library. Compute each sample by itself."
)
UNKNOWN = (
    "The cause is not known. Does the result for a sample depend on the others of its batch? Do the model or "
    "fit_batch keep state? Does the script do something else under a launcher?"
)
