"""Runs a drawn training on real ranks, and compares it with the plain loop and with itself."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

from tests.model import recipe
from tests.model.oracle import train_plainly
from tests.model.training import Training, rows_of

CLOSE = 1e-9  # in float64: a sample that counts a little more or less is seen at 1e-4


def complaints_of(training: Training, ranks) -> list[str]:
    """Train it, kill it and let it go on; say in words what is not as it has to be.

    Args:
        training: described.
        ranks: a pool of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run_and_compare(training, ranks, Path(folder))


def run_and_compare(training: Training, ranks, folder: Path) -> list[str]:
    whole = str(folder / "whole")
    copy = folder / "killed"
    world, strategy = training.world, training.strategy
    found = outcomes(ranks, world, strategy, recipe.through, training, whole, str(copy))
    expected = what_the_plain_loop_says(training)
    if isinstance(expected, str):
        refused = isinstance(found, list) and all(str(one).startswith(expected) for one in found)
        return [] if refused else [f"there is nothing to train on, and the ranks say {found}"]
    said = compare(found, expected)
    if said or not copy.exists():
        return said
    world, strategy = training.world_after, training.strategy_after
    has_saved = any(copy.glob("CKPT*"))
    if not has_saved:  # it begins anew, with as many samples in a step as these ranks have
        expected = what_the_plain_loop_says(dataclasses.replace(training, world=world))
    after = outcomes(ranks, world, strategy, recipe.again, training, str(copy))
    said = compare(after, expected, has_saved=has_saved)
    if not said and has_saved and has_the_same_bits(training):
        said = compare_bits(after, found)
    return [f"after the kill: {one}" for one in said]


def outcomes(ranks, world: int, strategy: str, function, *args):
    """Run a function on ranks; return what each has returned, or what has become of them."""
    init = not (world == 1 and strategy == "auto")
    found = ranks.outcomes(function, *args, world_size=world, init=init, timeout=120)
    failed = [
        f"rank {rank}: {one.error_type}\n{one.trace or one.error}"
        for rank, one in enumerate(found)
        if not one.ok
    ]
    return "\n".join(failed) if failed else [one.value for one in found]


def what_the_plain_loop_says(training: Training) -> dict | str:
    """Return what has to come of a training; or the beginning of the error, without a step."""
    epochs = training.steps()
    if not epochs[0]:
        return "DataError"
    net = recipe.make_net(training)
    parts = [net] if training.optimizers == 1 else [net.lower, net.upper]
    optimizers = [recipe.make_optimizer(training, one.parameters()) for one in parts]
    others = rows_of(recipe.FIRST_OF_VALIDATION, training.validation)
    reported, steps, weights, average = train_plainly(
        training, net, optimizers, epochs, rows_of(0, training.samples), others
    )
    return {
        "steps": steps,
        "reported": [
            (stage, epoch, loss)
            for epoch, losses in enumerate(reported, 1)
            for stage, loss in zip(("TRAIN", "VALID"), losses, strict=True)
        ],
        "seen": samples_of_steps(training, epochs),
        "weights": weights,
        "average": average,
        "rates": [group["lr"] for one in optimizers for group in one.param_groups],
    }


def samples_of_steps(training: Training, epochs: list) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step by its epoch and the steps before it.

    Samples of a step that is left out, as none of its tokens counts, come with the next one.
    """
    tokens = rows_of(0, training.samples)[2]
    seen: dict[tuple[int, int], list[int]] = {}
    steps = 0
    for epoch, windows in enumerate(epochs, 1):
        for window in windows:
            if steps == training.step_limit:
                return seen
            samples = [one for batch in window for one in batch]
            seen.setdefault((epoch, steps), []).extend(samples)
            steps += float(training.weights(tokens[samples]).sum()) > 0
    return seen


def compare(found, expected: dict, *, has_saved: bool = False) -> list[str]:
    """Compare what the ranks have come to with what has to come; the end of it, after a kill."""
    if not isinstance(found, list) or any(isinstance(one, str) for one in found):
        return [f"the ranks have failed: {found}"]
    said = compare_samples(found, expected["seen"], has_saved=has_saved)
    said += compare_reports(found, expected["reported"], has_saved=has_saved)
    for what in ("steps", "rates"):
        values = [one[what] for one in found]
        if any(value != as_close(expected[what]) for value in values):
            said.append(f"{what} on the ranks: {values}, and not {expected[what]}")
    for rank, one in enumerate(found):
        for what in ("weights", "average"):
            said += differences(one[what], expected[what], f"{what} of rank {rank}")
    return said


def compare_samples(found: list[dict], expected: dict, *, has_saved: bool) -> list[str]:
    seen: dict = {}
    for one in found:
        for place, samples in one["seen"].items():
            seen.setdefault(place, []).extend(samples)
    seen = {place: sorted(samples) for place, samples in sorted(seen.items())}
    wanted = {place: sorted(samples) for place, samples in expected.items()}
    if has_saved and len(seen) == len(wanted) > 1:
        return ["it has begun anew, and there was a checkpoint"]
    if has_saved:
        wanted = dict(end_of(list(wanted.items()), len(seen)))
    return [] if seen == wanted else [f"the samples of steps are {seen}, and not {wanted}"]


def compare_reports(found: list[dict], expected: list, *, has_saved: bool) -> list[str]:
    reports = [one["reported"] for one in found]
    wanted = end_of(expected, len(reports[0])) if has_saved else expected
    if any(repr(one) != repr(reports[0]) for one in reports):
        return [f"the ranks report different numbers: {reports}"]
    are_close = len(reports[0]) == len(wanted) and all(
        own == (*other[:2], as_close(other[2]))
        for own, other in zip(reports[0], wanted, strict=True)
    )
    return [] if are_close else [f"reported is {reports[0]}, and not {wanted}"]


def end_of(things: list, number: int) -> list:
    """Return the last so many."""
    return things[len(things) - number :]


def as_close(number):
    """Return what is equal to numbers that are close to it."""
    if isinstance(number, list):
        return [as_close(one) for one in number]
    return pytest.approx(number, rel=0, abs=CLOSE)


def differences(found: dict | None, expected: dict | None, what: str) -> list[str]:
    """Say which tensor is not close to what is expected."""
    if (found is None) != (expected is None):
        return [f"{what}: {found}, and not {expected}"]
    return [
        f"{what}: {name} differs by {(found[name] - value).abs().max().item():.2g}"
        for name, value in (expected or {}).items()
        if value.is_floating_point() and not torch.allclose(found[name], value, rtol=0, atol=CLOSE)
    ]


# --------------------------------------------------------------------------------------- bits


def has_the_same_bits(training: Training) -> bool:
    """Say whether the docs promise the last bit for what goes on after the kill."""
    if training.virtual_ranks:
        return True
    same = {"auto", "zero1"}  # of which one has the bits of the other
    strategies = {training.strategy, training.strategy_after}
    return training.world == training.world_after and (strategies <= same or len(strategies) == 1)


def compare_bits(after: list[dict], whole: list[dict]) -> list[str]:
    said = [
        f"{what}: {name} has not the same bits"
        for what in ("weights", "average")
        for name, value in (whole[0][what] or {}).items()
        if not torch.equal(after[0][what][name], value)
    ]
    reported = after[0]["reported"]
    if reported != (wanted := end_of(whole[0]["reported"], len(reported))):
        said.append(f"reported is {reported}, and to the last bit not {wanted}")
    return said
