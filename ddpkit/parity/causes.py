"""Compares several processes with one, and finds out by experiment why their gradients differ.

All experiments are made in the one process, with the recipe's own ``fit_batch``:

- noise: two passes over the same samples with other random numbers;
- data: the samples that a rank had, loaded once more;
- accumulation: a window of micro-batches, and each of them as a window of its own;
- the loss: the joined batch, and each rank's part of it, alone. The joined gradient is written as a sum of the parts'.
  Weights of 1: a sum. Weights that add up to 1, but are not the samples': a mean over something else, such as tokens.
  No weights: the loss or the model depends on which samples are together;
- the model: what it gives for the joined batch, and for the parts.

BatchNorm is judged by a second pass of both sides in which it stands still.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddpkit.brain import run_of
from ddpkit.data.likeness import sketch
from ddpkit.parity.noise import noisy_layers
from ddpkit.parity.report import (
    ROUGH,
    TOLERANCES,
    Gradients,
    ParityCause,
    ParityReport,
    ParityRow,
    compare,
    size_of,
    worst,
)
from ddpkit.parity.side import Share, Side, batches_of
from ddpkit.precision import TorchAutocast

#: Numbers of one parameter's gradient that are looked at when weights are fitted.
SAMPLED = 4096
#: How exactly a fitted weight must be a known number to count as that.
NEAR = 0.02
#: Below this ratio of singular values the ranks' gradients are too much alike to tell their weights apart.
APART = 1e-3

WHATEVER = "The training would not be the same on another number of processes, whatever the library."


def diagnose(side: Side, records: Sequence[dict[str, Any]]) -> ParityReport:
    """Compare what the ranks have recorded with one process.

    Args:
        side: of this process.
        records: what :func:`ddpkit.parity.check.record` returned on each rank.

    Ranks: local; one process.
    """
    return _Diagnosis(side, records).report()


class _Step:
    """One optimizer step: what each rank did, and the samples of one process."""

    def __init__(self, records: Sequence[dict[str, Any]], place: int, *, is_joined: bool) -> None:
        self.ranks = [one["steps"][place] for one in records]
        first = self.ranks[0]
        self.number: int = first["number"] + 1
        self.is_even = all(rank["counts"] == first["counts"] for rank in self.ranks)
        self.parts = [  # per micro-batch, those of the ranks that have samples of it
            [rank["batches"][place] for rank in self.ranks if rank["counts"][place]]
            for place in range(len(first["batches"]))
        ]
        joined = [[index for part in parts for index in part] for parts in self.parts]
        batches = joined if is_joined else [part for parts in self.parts for part in parts]
        ranks_at_once = 1 if is_joined else len(records)
        counts = [len(batch) for batch in batches]
        self.share = Share(batches, counts, first["first"] * ranks_at_once, first["number"])
        self.counts = self.share if first["weighs"] else None


class _Diagnosis:
    def __init__(self, side: Side, records: Sequence[dict[str, Any]]) -> None:
        self.side, self.brain, self.records = side, side.brain, records
        self.is_joined: bool = records[0]["joins"]
        self.factor: int = records[0]["factor"] * (1 if self.is_joined else len(records))
        self.steps = [_Step(records, place, is_joined=self.is_joined) for place in range(len(records[0]["steps"]))]
        self.own_fit_batch = run_of(self.brain).recipe.has_own_fit_batch
        self.causes: list[ParityCause] = []

    def report(self) -> ParityReport:
        """Compare, and look for the causes."""
        expected = [self._run(step) for step in self.steps]
        rows = [self._compare(step, grads, "gradients") for step, grads in zip(self.steps, expected, strict=True)]
        self._look_for_noise()
        failing = [step for step, own in zip(self.steps, rows, strict=True) if not _equal(own)]
        if self.side.outside:
            self._add("outside modules", OUTSIDE.format(self.side.outside[0], len(self.side.outside)))
        self._look_at_accumulation()
        if failing and not any(cause.spoils for cause in self.causes):
            self._explain(failing)
        first = self.steps[0]
        return ParityReport(
            world_size=len(self.records),
            rows=worst([row for own in rows for row in own]),
            causes=tuple(self.causes),
            steps=tuple(step.number for step in self.steps),
            num_steps=self.records[0]["length"],
            samples=sum(sum(rank["counts"]) for rank in first.ranks),
            notes=self._notes(expected[0]),
        )

    # ------------------------------------------------------------------ experiments

    def _run(self, step: _Step, **options: Any) -> list[Gradients]:
        return self.side.run(step.share, factor=self.factor, counts=step.counts, **options)

    def _alone(self, step: _Step, batch: list[Any], place: int) -> Gradients:
        """Return the gradients of a batch that is an optimizer step of its own; of its last call of an optimizer."""
        share = Share([batch], [len(batch)], step.share.first + place, step.share.done)
        return self.side.run(share, factor=1, counts=share, still=True)[-1]

    def _compare(self, step: _Step, expected: Sequence[Gradients], which: str) -> list[ParityRow]:
        return compare(step.ranks[0][which], expected, self._least(), step.number)

    def _least(self) -> float:
        """Return the smallest tolerance for what the model computes in."""
        context, matmul = self.brain.training_ctx, torch.backends.cuda.matmul
        is_rough = self.brain.device.startswith("cuda") and (torch.backends.cudnn.allow_tf32 or matmul.allow_tf32)
        tolerance = TOLERANCES.get(context.dtype, 0.0) if context.enabled else 0.0
        return max(tolerance, ROUGH if is_rough and self._is_single() else 0.0)

    def _is_single(self) -> bool:
        return any(one.dtype is torch.float32 for one in self.brain.modules.parameters())

    def _look_for_noise(self) -> None:
        if all(self._repeats(step, calm=False) for step in self.steps):
            return
        layers = noisy_layers(self.brain.modules)
        where = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")  # noqa: PLR2004 -- a line
        drawn = f"The training draws random numbers ({where or 'in compute_forward or compute_objectives'})"
        is_off = all(self._repeats(step, calm=True) for step in self.steps)
        self._add("randomness", f"{drawn}{NOISE_IS_OFF if is_off else NOISE_IS_LEFT}", spoils=not is_off)

    def _repeats(self, step: _Step, *, calm: bool) -> bool:
        """Say whether a step has the same gradients whatever random numbers are drawn."""
        first = self._run(step, seed=1, calm=calm)
        if not _is_finite(first):
            return True
        others = [self._run(step, seed=seed, calm=calm) for seed in (2, 3)]
        return all(_equal(compare(other, first, self._least(), step.number)) for other in others)

    def _look_at_accumulation(self) -> None:
        """See whether a recipe's own ``fit_batch`` weighs the micro-batches of a window as it should."""
        if not (self.own_fit_batch and self.is_joined and self.factor > 1):
            return
        found = [(times, len(step.parts)) for step in self.steps if (times := self._times_too_much(step)) is not None]
        if not found:
            return
        times, batches = found[0]
        if all(number < self.factor for _, number in found):
            words = (
                "fit_batch of the recipe corrects the short last window of an epoch twice, or not at all: its "
                f"gradients are {times:.3g} times what they should be ({batches} instead of {self.factor} "
                "micro-batches). Where fit_batch does not make the step of this window, the library makes it, with a "
                "correction of its own."
            )
        else:
            words = (
                "fit_batch of the recipe weighs the micro-batches of a window twice, or not at all: the gradients of "
                f"{batches} are {times:.3g} times the mean of their own."
            )
        self._add("accumulation", f"{words} {WEIGH_ONCE}")

    def _times_too_much(self, step: _Step) -> float | None:
        """Compare a window of equal micro-batches with the mean over them; None where it is no other multiple."""
        size = min(2, *(len(batch) for batch in step.share.batches))
        batches = [batch[:size] for batch in step.share.batches]
        share = dataclasses.replace(step.share, batches=batches, counts=[size] * len(batches))
        found = self.side.run(share, factor=self.factor, counts=share, still=True)
        alone = [self._alone(step, batch, place) for place, batch in enumerate(batches)]
        if len(found) != 1:
            return None
        names = [name for name, one in alone[0].items() if one is not None and found[0].get(name) is not None]
        if not names:
            return None
        ours, mean = _flat(found[0], names), torch.stack([_flat(one, names) for one in alone]).mean(0)
        times = float(ours @ mean / (mean @ mean)) if bool(mean.any()) else math.nan
        is_multiple = bool((ours - times * mean).norm() <= NEAR * ours.norm())  # never of what is not finite
        return times if is_multiple and abs(times - 1) > NEAR else None

    def _explain(self, failing: list[_Step]) -> None:
        if self._is_not_finite(failing) or self._has_other_data(failing) or self._is_not_averaged(failing):
            return
        norms = {name: shared for name, shared in self.records[0]["norms"].items() if not (shared and self.is_joined)}
        if norms:
            words = NOT_SHARED if not all(norms.values()) else MADE_ALREADY
            alone = [name for name, shared in norms.items() if not shared] or list(norms)
            self._add("batch norm", words.format(", ".join(alone)))
        if self.records[0]["norms"]:
            still = [step for step in failing if not _equal(self._compare(step, self._run(step, still=True), "still"))]
            if not still and norms:
                return
            failing = still or failing
        if self.brain.training_ctx.enabled:
            self.brain.training_ctx = TorchAutocast(device_type=torch.device(self.brain.device).type)
        self._explain_loss(failing)

    def _is_not_finite(self, failing: Sequence[_Step]) -> bool:
        for step in failing:
            if not _is_finite(self._run(step)):
                self._add("not finite", NO_NUMBER.format(step.number))
                return True
            if not _is_finite(step.ranks[0]["gradients"]):
                self._add("not finite", RANK_HAS_NONE.format(step.number))
                return True
        return False

    def _has_other_data(self, failing: Sequence[_Step]) -> bool:
        """See whether the ranks had other samples at the same places of the dataset than this process has."""
        for step in failing:
            for number, rank in enumerate(step.ranks):
                here, again = ([sketch(one) for one in batches_of(self.side.loader, rank["batches"])] for _ in range(2))
                if here == again and here != rank["sketches"]:
                    self._add("data", OTHER_DATA.format(number, rank["batches"][0][:3]))
                    return True
        return False

    def _is_not_averaged(self, failing: Sequence[_Step]) -> bool:
        """See whether the ranks step with gradients of their own."""
        for step in failing:
            for number, rank in enumerate(step.ranks):
                rows = compare(rank["gradients"], step.ranks[0]["gradients"], self._least(), step.number)
                if not _equal(rows):
                    self._add("not averaged", NOT_AVERAGED.format(number, worst(rows)[0].parameter))
                    return True
        return False

    def _explain_loss(self, failing: Sequence[_Step]) -> None:
        step = next((step for step in failing if step.is_even), failing[0])
        place = next((place for place, parts in enumerate(step.parts) if len(parts) > 1), None)
        if not self.is_joined or place is None:
            self._unknown()
            return
        parts, joined = step.parts[place], step.share.batches[place]
        columns = [self._alone(step, part, place) for part in parts]
        weights = fitted_weights(columns, self._alone(step, joined, place))
        expected = [len(part) / len(joined) for part in parts]
        if weights is None:
            self._unknown()
        elif not weights:
            self._depends_on_the_batch(parts, joined)
        elif not _near(weights, expected):
            self._explain_weights(weights)
        elif self.own_fit_batch and not any(step.is_even for step in failing):
            self._add("fit_batch", COUNTS_BATCHES)
        else:
            self._unknown()

    def _explain_weights(self, weights: Sequence[float]) -> None:
        total, number = sum(weights), len(weights)
        is_mean = _near([total], [1.0])
        if self.side.has_counts:
            self._unknown() if is_mean else self._add("counted loss", COUNTED.format(self._moved()))
        elif is_mean:
            self._add("own weights", OWN_WEIGHTS.format(", ".join(f"{weight:.3f}" for weight in weights)))
        elif _near(weights, [total / number] * number):
            self._add("sum loss", _sum_loss(number, total))
        else:
            self._unknown()

    def _depends_on_the_batch(self, parts: Sequence[list[Any]], joined: list[Any]) -> None:
        if self.own_fit_batch:
            self._unknown()
            return
        whole, pieces = self.side.rows_of(joined), [self.side.rows_of(part) for part in parts]
        apart = [torch.cat(rows) for rows in zip(*pieces, strict=False) if len({row.shape[1:] for row in rows}) == 1]
        if not whole or [one.shape for one in whole] != [one.shape for one in apart]:
            self._unknown()
        elif any(
            bool(((one - other).abs() > 1e-3 * size_of(one)).any()) for one, other in zip(whole, apart, strict=True)
        ):
            self._add("batch-dependent model", MODEL_DEPENDS.format(self._moved()))
        elif self.side.has_counts:
            self._add("counted loss", COUNTED.format(self._moved()))
        elif self._moved():
            self._unknown()
        else:
            self._add("batch-dependent loss", LOSS_DEPENDS)

    # ------------------------------------------------------------------ in words

    def _add(self, kind: str, words: str, *, spoils: bool = True) -> None:
        self.causes.append(ParityCause(kind, words, spoils))

    def _unknown(self) -> None:
        self._add("unknown", UNKNOWN.format(self._moved()))

    def _moved(self) -> str:
        moved = self.records[0]["moved"]
        more = f" and {len(moved) - 5} more" if len(moved) > 5 else ""  # noqa: PLR2004 -- a line
        return f" Buffers that each rank moves by its own rows: {', '.join(moved[:5])}{more}." if moved else ""

    def _notes(self, gradients: Sequence[Gradients]) -> tuple[str, ...]:
        """Say what real ranks will stumble over although the gradients agree."""
        used = {name for step in gradients for name, one in step.items() if one is not None}
        entries = {name.partition(".")[0] for name in used}
        without = [
            name
            for name in dict.fromkeys(name for step in gradients for name in step)
            if name not in used and name.partition(".")[0] in entries
        ]
        if not without or self.brain.find_unused_parameters:
            return ()
        return (LEFT_OUT.format(without[0], len(without)),)


def fitted_weights(columns: Sequence[Gradients], target: Gradients) -> list[float] | None:
    """Write one gradient as a weighted sum of others.

    Args:
        columns: of the parts of a batch.
        target: of the whole batch.

    Returns:
        The weight of each; an empty list where no weights fit; None where it cannot be told.

    Ranks: local.
    """
    names = [name for name, gradient in target.items() if gradient is not None]
    if not names:
        return None
    matrix = torch.stack([_flat(column, names, target) for column in columns], dim=1)
    wanted = _flat(target, names)
    if len(matrix) < len(columns) or not (matrix.isfinite().all() and wanted.isfinite().all()):
        return None
    values = torch.linalg.svdvals(matrix)
    weights = torch.linalg.lstsq(matrix, wanted.unsqueeze(1)).solution
    tolerance = 10 * max(TOLERANCES.get(one.dtype, 1e-3) for one in target.values() if one is not None)
    if (matrix @ weights - wanted.unsqueeze(1)).norm() > tolerance * wanted.norm():
        return []
    return [float(weight) for weight in weights] if values[-1] > APART * values[0] else None


def _flat(gradients: Gradients, names: Sequence[str], like: Gradients | None = None) -> Tensor:
    """Put gradients, thinned out where they are long, into one vector."""
    parts = []
    for name in names:
        gradient = gradients.get(name)
        if gradient is None and like is not None:
            gradient = torch.zeros_like(like[name])  # type: ignore[arg-type]  # names are those that it has
        flat = gradient.flatten()  # type: ignore[union-attr]  # likewise
        parts.append(flat[:: max(1, flat.numel() // SAMPLED)].double())
    return torch.cat(parts)


def _near(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(abs(one - other) <= NEAR * max(abs(other), 1e-9) for one, other in zip(found, wanted, strict=True))


def _equal(rows: Sequence[ParityRow]) -> bool:
    return all(row.is_equal for row in rows)


def _is_finite(steps: Sequence[Gradients]) -> bool:
    return all(bool(one.isfinite().all()) for step in steps for one in step.values() if one is not None)


def _sum_loss(number: int, total: float) -> str:
    is_sum = _near([total], [number])
    grows = "is a sum over the batch" if is_sum else f"grows with the batch ({number} ranks' joined: {total:.3g} times)"
    return (
        f"The loss {grows}: the gradients of {number} ranks, which are averaged, are {1 / total:.3g} times those of "
        "one process. Return the mean over the batch's samples, or (loss_sum, count), from compute_objectives."
    )


NOISE_IS_OFF = (
    ": every rank has noise of its own, so no two runs on different numbers of processes are equal. That is no error. "
    "All below was compared with the noise switched off."
)
NOISE_IS_LEFT = (
    ", and some of them could not be switched off: they do not come from torch's dropout and random functions, but "
    "from numpy, Python's random, torch.multinomial, a generator in the dataset or the like. So nothing can be said "
    "about the rest. Draw them with torch.rand or torch.randn, or check parity without them."
)
OUTSIDE = (
    "An optimizer updates parameters that are in no entry of modules ({}; {} in all). DDP does not know them: their "
    "gradients are not averaged, and the ranks drift apart. Put what holds them into modules."
)
WEIGH_ONCE = (
    "Pass the mean loss, neither multiplied by self.progress.window.scale nor divided by grad_accumulation_factor, to "
    "self.backward(loss), and call optimizers_step() where self.should_step is true: they weigh every window right."
)
NO_NUMBER = (
    "The gradients of one process are not finite in optimizer step {}, so there is nothing to compare with. Look at "
    "the loss and at the samples."
)
RANK_HAS_NONE = (
    "Some rank's gradients are not finite in optimizer step {}, where those of one process are: probably a mean over "
    "something of which a rank has none (an empty mask, no sample of a class), which divides by 0. Return "
    "(loss_sum, count) from compute_objectives."
)
OTHER_DATA = (
    "Rank {} has other data than one process at the same places of the dataset (such as {}): the order or the contents "
    "of the dataset differ from process to process (os.listdir or a set that is not sorted, a random split without a "
    "seed). Sort it, or seed it."
)
NOT_AVERAGED = (
    "Rank {} steps with other gradients of {} than rank 0: they are not averaged. DDP sees gradients of what was "
    "computed through the modules of self.modules, not of their inner parts, and not those of torch.autograd.grad. "
    "Call self.backward(loss)."
)
NOT_SHARED = (
    "BatchNorm without synchronisation: {}. Each rank normalises over its own rows. Only a BatchNorm without a forward "
    "or a parametrization of its own, in an entry of modules that is trained, is synchronised. Build the layer on "
    "ddpkit.syncbn.SyncBatchNorm, normalise per sample (GroupNorm, LayerNorm), or call eval() on it in training."
)
MADE_ALREADY = (
    "BatchNorm over batches that are made already: {}. Several ranks normalise over their batches together, one "
    "process over one batch after the other. Normalise per sample (GroupNorm, LayerNorm), or let batch_size "
    "make the batches."
)
COUNTS_BATCHES = (
    "fit_batch of the recipe counts every rank's batch the same, also the smaller ones at the end of an epoch. Call "
    "self.backward(loss) with the mean loss, not divided by grad_accumulation_factor (or multiply the loss by "
    "self.progress.window.scale before its own backward()), or set drop_last."
)
OWN_WEIGHTS = (
    "The loss is a mean over something else than samples, such as tokens, frames or weighted classes: in the joined "
    "batch the ranks' losses weigh {}. Return (loss_sum, count) from compute_objectives, the sum and what it is "
    "divided by."
)
COUNTED = (
    "(loss_sum, count) of a joined batch are not the sums of its parts' sums and counts. Return the sum, not a mean, "
    "and count exactly what it is over.{}"
)
MODEL_DEPENDS = (
    "The model depends on the batch: what compute_forward gives for a sample changes with the other samples of its "
    "batch (attention or statistics across samples, padding that is not masked, an augmentation that mixes samples).{} "
    f"{WHATEVER} Compute each sample by itself, or gather what must be seen together."
)
LOSS_DEPENDS = (
    "The loss depends on the batch: the model computes each sample by itself, and no weights make the joined loss out "
    "of the ranks' (in-batch negatives, a normalisation over the batch, a maximum, a square root of a mean). "
    f"{WHATEVER} Make it a mean over samples, or (loss_sum, count)."
)
UNKNOWN = (
    "The cause is not known.{} Look at what may depend on which samples are in a batch together (in-batch negatives, "
    "statistics or padding across samples), at state that the model or fit_batch keeps, and at what the script does "
    "differently under a launcher."
)
LEFT_OUT = (
    "{} gets no gradient ({} such in all): DDP waits for it. Several processes need --find_unused_parameters, or "
    "requires_grad_(False) on what is not trained."
)
