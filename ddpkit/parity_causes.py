"""Why the gradients of several ranks and of one process differ: found by experiment, said in plain words."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpkit.parity_report import TOLERANCES, ParityCause
from ddpkit.parity_sides import Sides, standing_still
from ddpkit.parity_windows import ParityWindow
from ddpkit.rehearsal import Gradients
from ddpkit.types import Stage

#: Numbers of one parameter's gradient that are looked at when weights are fitted.
SAMPLED = 4096
#: How exactly a fitted weight must be a known number to count as that.
NEAR = 0.02
#: Below this ratio of singular values the ranks' gradients are too much alike to tell their weights apart.
APART = 1e-3

WHATEVER = "The training would not be the same on another number of processes, whatever the library."


def find_causes(
    sides: Sides, failing: Sequence[ParityWindow], passing: Sequence[ParityWindow], *, own_fit_batch: bool
) -> list[ParityCause]:
    """Find out why gradients differ.

    Args:
        sides: both, with their noise switched off.
        failing: windows whose gradients differ; at least one.
        passing: the others.
        own_fit_batch: whether the recipe overrides ``fit_batch``.

    Returns:
        At least one cause.

    Ranks: local.

    Example:
        >>> find_causes.__name__
        'find_causes'
    """
    broken = _not_finite(sides, failing)
    if broken is not None:
        return [broken]
    causes = []
    suspects = dict(sides.alone if sides.windows.can_join else {**sides.alone, **sides.synchronised})
    used = layers_used(sides, failing[0], suspects)
    if used:
        causes.append(_batch_norm(sides, used))
    with standing_still(used):
        if used:
            failing = [window for window in failing if not sides.compare(window)]
        if failing:
            causes.append(_of_the_loss_or_the_model(sides, failing, passing, own_fit_batch=own_fit_batch))
    return causes


def accumulation_cause(sides: Sides, windows: Sequence[ParityWindow]) -> ParityCause | None:
    """See whether a recipe's own ``fit_batch`` weighs the micro-batches of a window as it should.

    One process works on the samples of a window twice: in micro-batches, and as one batch. Gradients that are a
    multiple of what they should be were weighed twice, or not at all; on all ranks alike, so that parity holds.

    Args:
        sides: both, with their noise switched off.
        windows: to try.

    Returns:
        None where nothing was found; also where this cannot be tried, or a batch is more than its samples.

    Ranks: local.
    """
    if not sides.windows.can_join or sides.windows.joined_factor == 1:
        return None
    wrong = [found for found in (_times_too_much(sides, window) for window in windows) if found is not None]
    if not wrong:
        return None
    factor = sides.windows.joined_factor
    times, batches, uses_backward = wrong[0]
    cause = (
        "self.backward weighs the loss already. Pass it the mean loss as it is, neither multiplied by "
        "self.progress.window.scale nor divided by grad_accumulation_factor."
        if uses_backward
        else "Call self.backward(loss) with the mean loss, and optimizers_step() where self.should_step is true, which "
        "weigh every window right."
    )
    if all(found[1] < factor for found in wrong):
        words = (
            "fit_batch of the recipe corrects the short last window of an epoch twice, or not at all: its gradients "
            f"are {times:.3g} times what they should be ({batches} instead of {factor} micro-batches). Where fit_batch "
            f"does not make the step of this window, the library makes it, with a correction of its own. {cause}"
        )
    else:
        words = (
            f"fit_batch of the recipe weighs the micro-batches of a window twice, or not at all: the gradients of "
            f"{batches} are {times:.3g} times those of one batch of the same samples. {cause}"
        )
    return ParityCause("accumulation", words)


def _times_too_much(sides: Sides, window: ParityWindow) -> tuple[float, int, bool] | None:
    """Compare the gradients of micro-batches with those of one batch of the same samples.

    Returns:
        What they are multiplied by, how many micro-batches there were, and whether they came from ``self.backward``.
        None where they are equal, or no multiple.
    """
    host = sides.joined.hosts[0]
    apart, together = sides.windows.small(window)
    outcome = sides.joined.run([apart], window.number * sides.windows.joined_factor)
    factor, host.grad_accumulation_factor = host.grad_accumulation_factor, 1
    try:
        expected = sides.joined.run([together], 0).steps
    finally:
        host.grad_accumulation_factor = factor
    if len(outcome.steps) != 1 or len(expected) != 1:
        return None  # a step in every micro-batch, or several: what they come to is another question
    (one,), (other,) = outcome.steps, expected
    names = [name for name in other if one.get(name) is not None and other[name] is not None]
    if not names:
        return None
    ours, theirs = _flat(one, other, names), _flat(other, other, names)
    times = float(ours @ theirs / (theirs @ theirs)) if theirs.any() else math.nan
    is_multiple = (ours - times * theirs).norm() <= NEAR * ours.norm()  # never of what is not finite
    return (times, len(apart.batches), outcome.uses_backward) if is_multiple and abs(times - 1) > NEAR else None


def layers_used(sides: Sides, window: ParityWindow, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those layers that a window calls while they are in training mode.

    Ranks: local.

    Example:
        >>> layers_used(None, None, {})
        {}
    """
    called: dict[str, nn.Module] = {}
    hooks = []
    for name, layer in layers.items():

        def note(layer: nn.Module, _: Any, name: str = name) -> None:
            if layer.training:
                called[name] = layer

        hooks.append(layer.register_forward_pre_hook(note))
    try:
        if hooks:
            sides.as_one(window)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def fitted_weights(columns: Sequence[Gradients], target: Gradients) -> list[float] | None:
    """Write one gradient as a weighted sum of others.

    Args:
        columns: of every rank's own loss.
        target: of the joined loss.

    Returns:
        The weight of each; None where no weights fit, or more than one choice does.

    Ranks: local.

    Example:
        >>> ours = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}]
        >>> fitted_weights(ours, {"w": torch.tensor([1.0, 2.0])})
        [1.0, 2.0]
    """
    names = [name for name, gradient in target.items() if gradient is not None]
    if not names or len(columns) < 2:  # noqa: PLR2004 -- one rank has nothing to be compared with
        return None
    matrix = torch.stack([_flat(column, target, names) for column in columns], dim=1)
    wanted = _flat(target, target, names)
    if len(matrix) < len(columns) or not (matrix.isfinite().all() and wanted.isfinite().all()):
        return None
    values = torch.linalg.svdvals(matrix)
    if not values[-1] > APART * values[0]:
        return None
    weights = torch.linalg.lstsq(matrix, wanted.unsqueeze(1)).solution
    dtypes = {gradient.dtype for gradient in target.values() if gradient is not None}
    tolerance = 10 * max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]) for dtype in dtypes)
    if (matrix @ weights - wanted.unsqueeze(1)).norm() > tolerance * wanted.norm():
        return None
    return [float(weight) for weight in weights]


def _flat(gradients: Gradients, like: Gradients, names: Sequence[str]) -> Tensor:
    """Put gradients, thinned out where they are long, into one vector on the CPU."""
    parts = []
    for name in names:
        gradient = gradients.get(name)
        flat = torch.zeros_like(like[name]).flatten() if gradient is None else gradient.flatten()  # type: ignore[arg-type]
        parts.append(flat[:: max(1, flat.numel() // SAMPLED)].cpu().double())
    return torch.cat(parts)


def output_depends_on_neighbours(sides: Sides, window: ParityWindow) -> bool | None:
    """Say whether what ``compute_forward`` gives for a sample changes with the other samples of its batch.

    Args:
        sides: both; batch normalisation is kept still.
        window: whose first samples are used.

    Returns:
        None where it cannot be told: the recipe has no ``compute_forward``, or what it returns has no row per sample.

    Ranks: local.

    Example:
        >>> output_depends_on_neighbours.__name__
        'output_depends_on_neighbours'
    """
    host, indices = sides.joined.hosts[0], window.indices
    if len(indices) < 2 or not sides.windows.makes_batches:  # noqa: PLR2004 -- a sample and a neighbour
        return None
    first, second, *more = indices
    pairs = [[first, second], [first, more[0] if more else first]]
    rows = []
    with standing_still({**sides.alone, **sides.synchronised}), sides.in_thread():
        for pair in pairs:
            torch.manual_seed(0)
            with host.training_ctx:
                rows.append(list(_first_rows(host.compute_forward(sides.windows.batch_of(pair), Stage.TRAIN), 2)))
    if not rows[0] or [row.shape for row in rows[0]] != [row.shape for row in rows[1]]:
        return None
    return any(_differ(one, other) for one, other in zip(*rows, strict=True))


def _first_rows(value: Any, size: int) -> Iterator[Tensor]:
    """Yield the first row of every tensor, in nested containers, that has one row per sample."""
    if isinstance(value, Tensor):
        if value.dim() and len(value) == size and value.is_floating_point():
            yield value[0].detach().double()
    elif isinstance(value, dict):
        for one in value.values():
            yield from _first_rows(one, size)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _first_rows(one, size)


def _differ(one: Tensor, other: Tensor) -> bool:
    tolerance = TOLERANCES[torch.float32] * float(one.abs().max()) if one.numel() else 0.0
    return bool(((one - other).abs() > tolerance).any())


# ------------------------------------------------------------------------------------------- in plain words


def _batch_norm(sides: Sides, layers: Mapping[str, nn.Module]) -> ParityCause:
    names = ", ".join(f"{name} ({type(layer).__name__})" for name, layer in layers.items())
    if set(layers) <= set(sides.alone):
        words = (
            f"BatchNorm without synchronisation: {names}. Each rank normalises over its own rows. Only a BatchNorm "
            "without a forward or a parametrization of its own, in an entry of modules that is trained, is "
            "synchronised. Build the layer on ddpkit.syncbn.SyncBatchNorm, normalise per sample (GroupNorm, "
            "LayerNorm), or call eval() on it in training."
        )
    else:
        words = (
            f"BatchNorm over batches that are made already: {names}. Several ranks normalise over their batches "
            "together, one process over one batch after the other. Normalise per sample (GroupNorm, LayerNorm), or "
            "let batch_size make the batches."
        )
    return ParityCause("batch norm", words)


def _not_finite(sides: Sides, failing: Sequence[ParityWindow]) -> ParityCause | None:
    for window in failing:
        if not _is_finite(sides.as_one(window).steps):
            return ParityCause(
                "not finite",
                f"The gradients of one process are not finite in optimizer step {window.number + 1}, so there is "
                "nothing to compare with. Look at the loss and at the samples.",
            )
        if not _is_finite(sides.as_ranks(window).steps):
            return ParityCause(
                "not finite",
                f"Some rank's gradients are not finite in optimizer step {window.number + 1}, where those of one "
                "process are: probably a mean over something of which a rank has none (an empty mask, no sample of a "
                "class), which divides by 0. Return (loss_sum, count) from compute_objectives.",
            )
    return None


def _is_finite(steps: Sequence[Gradients]) -> bool:
    return all(bool(one.isfinite().all()) for step in steps for one in step.values() if one is not None)


def _of_the_loss_or_the_model(
    sides: Sides, failing: Sequence[ParityWindow], passing: Sequence[ParityWindow], *, own_fit_batch: bool
) -> ParityCause:
    even = [window for window in failing if window.is_even]
    if own_fit_batch and not even and any(window.is_even for window in passing):
        return ParityCause(
            "fit_batch",
            "fit_batch of the recipe counts every rank's batch the same, also the smaller ones at the end of an epoch. "
            "Call self.backward(loss) with the mean loss, not divided by grad_accumulation_factor (or multiply the "
            "loss by self.progress.window.scale before its own backward()), or set drop_last.",
        )
    window = (even or failing)[0]
    with contextlib.ExitStack() as stack:
        if sides.joined.hosts[0].training_ctx.enabled:
            stack.enter_context(sides.in_full_precision())
        found = _of_the_loss(sides, window, own_fit_batch=own_fit_batch)
        if found is None:
            found = _by_elimination(sides, window, own_fit_batch=own_fit_batch)
    return found


def _of_the_loss(sides: Sides, window: ParityWindow, *, own_fit_batch: bool) -> ParityCause | None:
    """See whether the joined gradient is a combination of the ranks' gradients, and what the weights tell."""
    if not sides.windows.can_join:
        return None
    ranks = [share.first() for share in window.ranks]
    apart = sides.ranks.run(ranks, window.first, apart=True)
    joined = sides.joined.run([window.joined.first()], window.first)
    if apart.has_counts or len(apart.apart) != 1 or len(joined.steps) != 1:
        return None
    present = [rank for rank, share in enumerate(ranks) if share.counts[0]]
    weights = fitted_weights([apart.apart[0][rank] for rank in present], joined.steps[0])
    if weights is None:
        return None
    counts = [ranks[rank].counts[0] for rank in present]
    if not own_fit_batch:  # the ranks' losses were weighed
        weights = [weight * count * len(ranks) / sum(counts) for weight, count in zip(weights, counts, strict=True)]
    return _of_the_weights(weights, [count / sum(counts) for count in counts])


def _of_the_weights(weights: Sequence[float], expected: Sequence[float]) -> ParityCause | None:
    def near(found: Sequence[float], wanted: Sequence[float]) -> bool:
        return all(abs(one - other) <= NEAR * max(abs(other), 1e-9) for one, other in zip(found, wanted, strict=True))

    number = len(weights)
    mean = sum(weights) / number
    if near(weights, expected):
        return None  # the first micro-batch is as it should be
    if near(weights, [1.0] * number) or (near(weights, [mean] * number) and not near([sum(weights)], [1.0])):
        grows = (
            "is a sum over the batch"
            if near(weights, [1.0] * number)
            else f"grows with the batch ({number} ranks' batches joined: {number * mean:.3g} times)"
        )
        return ParityCause(
            "sum loss",
            f"The loss {grows}: the gradients of {number} ranks, which are averaged, are {1 / (number * mean):.3g} "
            "times those of one process. Return the mean over the batch's samples, or (loss_sum, count), from "
            "compute_objectives.",
        )
    if near([sum(weights)], [1.0]):
        shares = ", ".join(f"{weight:.3f}" for weight in weights)
        return ParityCause(
            "own weights",
            f"The loss is a mean over something else than samples, such as tokens, frames or weighted classes: in the "
            f"joined batch the ranks' losses weigh {shares}. Return (loss_sum, count) from compute_objectives, the sum "
            "and what it is divided by.",
        )
    return None


def _by_elimination(sides: Sides, window: ParityWindow, *, own_fit_batch: bool) -> ParityCause:
    outcome = sides.as_ranks(window)
    moved = (
        f" Buffers that training moves, on each rank by its own rows: {_some(outcome.moved)}." if outcome.moved else ""
    )
    depends = None if own_fit_batch else output_depends_on_neighbours(sides, window)
    if depends:
        return ParityCause(
            "batch-dependent model",
            "The model depends on the batch: what compute_forward gives for a sample changes with the other samples of "
            "its batch (attention or statistics across samples, padding that is not masked, an augmentation that mixes "
            f"samples).{moved} {WHATEVER} Compute each sample by itself, or gather what must be seen together.",
        )
    if outcome.has_counts:
        return ParityCause(
            "counted loss",
            "(loss_sum, count) of a joined batch are not the sums of its parts' sums and counts. Return the sum, "
            f"not a mean, and count exactly what it is over.{moved}",
        )
    if depends is False and not moved:
        return ParityCause(
            "batch-dependent loss",
            "The loss depends on the batch, by elimination: the model computes each sample by itself, and no weights "
            "make the joined loss out of the ranks' (in-batch negatives, a normalisation over the batch, a maximum, a "
            f"square root of a mean). {WHATEVER} Make it a mean over samples, or (loss_sum, count).",
        )
    return ParityCause(
        "unknown",
        "By elimination: the model or the loss depends on which samples are in a batch together (in-batch negatives, "
        f"statistics or padding across samples), or keeps a state of its own.{moved} {WHATEVER}",
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
