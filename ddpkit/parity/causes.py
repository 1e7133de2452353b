"""Compares several processes with one, and finds out by experiment why their gradients differ.

All experiments are made in the one process, with the recipe's own ``fit_batch``:

- noise: passes over the same samples with other random numbers, while what can be switched off is off;
- data: the samples that a rank had, loaded once more;
- accumulation: a window of micro-batches as a weighted sum of windows of each of them;
- the loss: the joined batch as a weighted sum of each rank's part of it. Weights of 1: a sum. Weights that add up to
  1, but are not the samples': a mean over something else, such as tokens. No weights: it matters which samples are
  together.

A BatchNorm that the ranks do not share is named alone, whatever else there may be. While the loss is examined,
BatchNorm is in evaluation mode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddpkit.data import sketch
from ddpkit.parity.report import TOLERANCES, Gradients, ParityReport, ParityRow, all_equal, compare, worst
from ddpkit.parity.side import Side, Step
from ddpkit.precision import TorchAutocast

#: Numbers of one parameter's gradient that are looked at when weights are fitted.
SAMPLED = 4096
#: Below this ratio of singular values the parts' gradients are too much alike to tell their weights apart.
APART = 1e-3
#: How exactly a fitted weight must be a known number to count as that.
NEAR = 0.02
#: The tolerance of float32 on a GPU that multiplies it in a shorter format (TF32).
ROUGH = 1e-2
SHOWN_NAMES = 5


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
        self.is_even = all(rank["counts"] == first["counts"] for rank in self.ranks)
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
        expected = [self._run(window) for window in self.windows]
        rows = [self._compare(window, grads) for window, grads in zip(self.windows, expected, strict=True)]
        failing = [window for window, own in zip(self.windows, rows, strict=True) if not all_equal(own)]
        if not all(map(self._repeats, self.windows)):
            self.causes["randomness"] = NOISE
        if self.side.outside:
            self.causes["outside modules"] = OUTSIDE.format(self.side.outside[0], len(self.side.outside))
        self._look_at_accumulation()
        if failing and not self.causes:
            self._explain(failing)
        numbers = ", ".join(str(window.number) for window in self.windows)
        compared = (
            f"optimizer step{'' if len(self.windows) == 1 else 's'} {numbers} of {self.records[0]['length']} in an "
            f"epoch, {sum(sum(rank['counts']) for rank in self.windows[0].ranks)} samples in the first"
        )
        return ParityReport(len(self.records), worst([row for own in rows for row in own]), self.causes, compared)

    def _run(self, window: _Window, **options: Any) -> list[Gradients]:
        return self.side.run(window.step, self.factor, window.step, **options)

    def _alone(self, step: Step, batch: list[Any], place: int) -> Gradients:
        """Return the gradients of a batch that is an optimizer step of its own; of its last call of an optimizer."""
        own = Step(step.number, step.first + place, [batch], [len(batch)])
        return self.side.run(own, 1, own, still=True)[-1]

    def _compare(self, window: _Window, expected: Sequence[Gradients]) -> list[ParityRow]:
        return compare(window.ranks[0]["gradients"], expected, self.tolerances, window.number)

    # ------------------------------------------------------------------ what may be wrong though gradients agree

    def _repeats(self, window: _Window) -> bool:
        """Say whether a step has the same gradients whatever random numbers are drawn."""
        first, *others = (self._run(window, seed=seed) for seed in (1, 2, 3))
        return not _is_finite(first) or all(
            all_equal(compare(other, first, self.tolerances, window.number)) for other in others
        )

    def _look_at_accumulation(self) -> None:
        """See whether a recipe's own ``fit_batch`` weighs the micro-batches of a window as it should."""
        if not (self.own_fit_batch and self.side.joins and self.factor > 1):
            return
        for window in self.windows:
            size = min(2, *(len(batch) for batch in window.step.batches))
            batches = [batch[:size] for batch in window.step.batches]
            step = dataclasses.replace(window.step, batches=batches, counts=[size] * len(batches))
            found = self.side.run(step, self.factor, step, still=True)
            weights = fitted_weights([self._alone(step, batch, k) for k, batch in enumerate(batches)], found[-1])
            times = sum(weights)
            is_multiple = bool(weights) and _near(weights, [times / len(weights)] * len(weights))
            if len(found) == 1 and is_multiple and not _near([times], [1.0]):
                self.causes["accumulation"] = ACCUMULATION.format(window.number, times, len(batches))
                return

    # ------------------------------------------------------------------ why gradients differ

    def _explain(self, failing: list[_Window]) -> None:
        found = next((cause for window in failing if (cause := self._fault_of_a_rank(window))), None)
        if found is not None:
            self.causes.update([found])
            return
        norms = self.records[0]["norms"]
        apart = [name for name, shared in norms.items() if not (shared and self.side.joins)]
        if apart:
            unshared = OFF if self.brain.run_opts.sync_batchnorm is False else NOT_SHARED
            words = MADE_ALREADY if all(norms.values()) else unshared
            self.causes["batch norm"] = words.format(_listed([one for one in apart if not norms[one]] or apart))
            return
        if self.brain.training_ctx.enabled:
            self.brain.training_ctx = TorchAutocast(device_type=torch.device(self.brain.device).type)
        kind, words = self._fault_of_the_loss(failing)
        moved = _listed(self.records[0]["moved"])
        self.causes[kind] = words.format(f" Each rank changes state by its own samples: {moved}." if moved else "")

    def _fault_of_a_rank(self, window: _Window) -> tuple[str, str] | None:
        """See whether gradients are finite, the samples those of one process, and the gradients those of all ranks."""
        if not _is_finite(self._run(window)):
            return "not finite", NO_NUMBER.format(window.number)
        if not _is_finite(window.ranks[0]["gradients"]):
            return "not finite", RANK_HAS_NONE.format(window.number)
        for number, rank in enumerate(window.ranks):
            here, again = ([sketch(one) for one in self.side.load(rank["batches"])] for _ in range(2))
            if here == again and here != rank["sketches"]:
                return "data", OTHER_DATA.format(number, rank["batches"][0][:3])
        for number, rank in enumerate(window.ranks):
            rows = compare(rank["gradients"], window.ranks[0]["gradients"], self.tolerances, window.number)
            if not all_equal(rows):
                return "not averaged", NOT_AVERAGED.format(number, worst(rows)[0].parameter)
        return None

    def _fault_of_the_loss(self, failing: Sequence[_Window]) -> tuple[str, str]:
        """Write the gradients of a joined batch as a weighted sum of those of its parts."""
        window = failing[0]
        place = next((place for place, parts in enumerate(window.parts) if len(parts) > 1), None)
        if not self.side.joins or place is None:
            return "unknown", UNKNOWN
        parts, joined = window.parts[place], window.step.batches[place]
        columns = [self._alone(window.step, part, place) for part in parts]
        weights = fitted_weights(columns, self._alone(window.step, joined, place))
        total, number = sum(weights), len(weights)
        if not weights:
            return "batch-dependent", BATCH_DEPENDENT
        if math.isnan(total):
            return "unknown", UNKNOWN
        if _near(weights, [len(part) / len(joined) for part in parts]):
            counts_alike = self.own_fit_batch and not any(window.is_even for window in failing)
            return ("fit_batch", COUNTS_BATCHES) if counts_alike else ("unknown", UNKNOWN)
        is_mean, has_counts = _near([total], [1.0]), self.side.has_counts
        if has_counts and not is_mean:
            return "counted loss", COUNTED
        if is_mean and not has_counts:
            return "own weights", OWN_WEIGHTS
        if _near(weights, [total / number] * number):
            grows = "is a sum over the batch" if _near([total], [number]) else "grows with the batch"
            return "sum loss", SUM.format(grows, number, 1 / total)
        return "unknown", UNKNOWN


def _tolerances(brain: Any) -> dict[torch.dtype, float]:
    """Return the tolerances for what the model computes in."""
    found, context = dict(TOLERANCES), brain.training_ctx
    if brain.device.startswith("cuda") and _may_multiply_in_tf32():
        found[torch.float32] = ROUGH
    least = found[context.dtype] if context.enabled else 0.0
    return {dtype: max(tolerance, least) for dtype, tolerance in found.items()}


def _may_multiply_in_tf32() -> bool:
    """Say whether float32 may be multiplied in a shorter format; also where it is not known."""
    try:
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch cannot say it by these names once `fp32_precision` was set
        return True


def fitted_weights(columns: Sequence[Gradients], target: Gradients) -> list[float]:
    """Write one gradient as a weighted sum of others.

    Args:
        columns: of the parts of a batch.
        target: of the whole batch.

    Returns:
        The weight of each; an empty list where no weights fit, and NaN where many do.

    Ranks: local.
    """
    steps = (*columns, target)
    names = [name for name in target if all(step.get(name) is not None for step in steps)]
    matrix = torch.stack([_flat(step, names) for step in steps], dim=1) if names else torch.tensor(math.nan)
    if not matrix.isfinite().all():
        return []
    weights = torch.linalg.lstsq(matrix[:, :-1], matrix[:, -1:]).solution
    tolerance = 10 * max(TOLERANCES.get(one.dtype, 1e-3) for one in target.values() if one is not None)
    rest = matrix[:, :-1] @ weights - matrix[:, -1:]
    if rest.norm() > tolerance * matrix[:, -1].norm():
        return []
    is_unique = torch.linalg.matrix_rank(matrix[:, :-1], rtol=APART) == len(columns)
    return weights.flatten().tolist() if is_unique else [math.nan] * len(columns)


def _flat(gradients: Gradients, names: Sequence[str]) -> Tensor:
    """Put gradients, thinned out where they are long, into one vector."""
    flat = [gradients[name].flatten() for name in names]  # type: ignore[union-attr]  # they are not None
    return torch.cat([one[:: max(1, one.numel() // SAMPLED)].double() for one in flat])


def _near(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=NEAR) for one, other in zip(found, wanted, strict=True))


def _is_finite(steps: Sequence[Gradients]) -> bool:
    return all(bool(one.isfinite().all()) for step in steps for one in step.values() if one is not None)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


NOISE = (
    "The training draws random numbers that a check cannot switch off (numpy, Python's random, torch.multinomial, a "
    "generator in the dataset), so nothing can be said about the rest. Draw with torch.rand or torch.randn, or leave "
    "the noise out while you check."
)
OUTSIDE = (
    "An optimizer updates parameters that are in no entry of modules ({}; {} in all). DDP does not average their "
    "gradients, and the ranks drift apart. Put the module that holds them into modules."
)
ACCUMULATION = (
    "fit_batch of the recipe weighs micro-batches twice, or not at all: in optimizer step {} the gradients are {:.3g} "
    "times the mean of those of its {} micro-batches. Call self.backward(loss) with the mean loss as it is, and "
    "optimizers_step() where self.should_step is true."
)
NO_NUMBER = "The gradients of one process are not finite in optimizer step {}. Look at the loss and at the samples."
RANK_HAS_NONE = (
    "The gradients of a rank are not finite in optimizer step {}, and those of one process are: probably the loss is a "
    "mean over something of which a rank has none (an empty mask, no sample of a class). Return (loss_sum, count)."
)
OTHER_DATA = (
    "Rank {} and one process have different data at the same places of the dataset (such as {}). Sort the result of "
    "os.listdir or of a set, and seed random splits."
)
NOT_AVERAGED = (
    "Rank {} steps with other gradients of {} than rank 0: they are not averaged. DDP averages gradients only of "
    "forward passes through the modules of self.modules. Call these, and self.backward(loss)."
)
NOT_SHARED = (
    "BatchNorm without synchronisation: {}. A BatchNorm is synchronised unless it has a forward or a parametrization "
    "of its own, or stands in an entry of modules that is not trained. Build the layer on ddpkit.syncbn.SyncBatchNorm, "
    "normalise per sample (GroupNorm, LayerNorm), or call eval() on it in training."
)
OFF = (
    "BatchNorm without synchronisation, as sync_batchnorm=off says: {}. Each rank normalises over its own rows. Leave "
    "--sync_batchnorm out to normalise over all rows of a step."
)
MADE_ALREADY = (
    "BatchNorm over batches that the loader does not make: {}. Ranks normalise over their batches together, one "
    "process over one batch after the other. Normalise per sample (GroupNorm, LayerNorm), or give batch_size."
)
SUM = (
    "The loss {}: the gradients of {} ranks, which are averaged, are {:.3g} times those of one process. Return the "
    "mean over the batch's samples, or (loss_sum, count), from compute_objectives."
)
OWN_WEIGHTS = (
    "The loss is a mean over something else than samples, such as tokens, frames or weighted classes. Return "
    "(loss_sum, count) from compute_objectives: the sum, and the number to divide it by."
)
COUNTED = (
    "(loss_sum, count) of a joined batch are not the sums of its parts' sums and counts.{} Return the sum, not a mean, "
    "and the number of terms in it."
)
COUNTS_BATCHES = (
    "fit_batch of the recipe counts all batches the same, also smaller ones at the end of an epoch. Call "
    "self.backward(loss) with the mean loss as it is, or set drop_last."
)
BATCH_DEPENDENT = (
    "The model or the loss depends on which samples are in a batch together (padding without a mask, attention or "
    "statistics across samples, in-batch negatives, a maximum or a root over the batch).{} Such a training depends on "
    "the number of processes, whatever the library. Compute each sample by itself."
)
UNKNOWN = (
    "The cause is not known.{} Does the result for a sample depend on the others of its batch? Do the model or "
    "fit_batch keep state? Does the script do something else under a launcher?"
)
