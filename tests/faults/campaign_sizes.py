"""A run that goes on with another number of processes: the same samples in every optimizer step,
the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from .campaign_moments import ALL, TRAIN, TRAIN_START, Diary, Kill
from .campaign_ranks import Attempt, run_attempt
from .campaign_verdict import Difference
from .recipes_for_faults import DOUBLE, Setting

SIZES = ((2, 1), (1, 2), (2, 3), (3, 2), (1, 3))
MOMENTS = {"in an epoch": (2, TRAIN, 5, 3), "between epochs": (2, TRAIN_START, 0, 0)}
TOLERANCE = 1e-10
Steps = dict[tuple[int, int], list[int]]


def change_of_size(
    folder: Path,
    variant: str,
    before: int,
    after: int,
    moment: str,
) -> list[Difference]:
    """Kill a run, start the same command with another number of processes, and compare with the run
    that was not.

    Args:
        folder: to work in; the uninterrupted runs stay there.
        variant: a key of DOUBLE.
        before: number of ranks until the kill.
        after: number of ranks from then on.
        moment: a key of MOMENTS.
    """
    options = (("ckpt_async", False),)
    settings = [
        Setting(variant, size, batch_size=4, interval=2, options=options)
        for size in (before, after)
    ]
    whole = folder / f"{variant} on {before}"
    halves = folder / "halves"
    shutil.rmtree(halves, ignore_errors=True)
    if whole.exists():
        reference = Attempt(diaries=[Diary.read(whole, rank, 0) for rank in range(before)])
    else:
        reference = run_attempt(settings[0], whole, 0)
    killed = run_attempt(settings[0], halves, 0, Kill("train", who=ALL, at=MOMENTS[moment]))
    resumed = run_attempt(settings[1], halves, 1)
    if reference.error or resumed.error or not killed.killed:
        return [Difference("error", reference.error or resumed.error or "the kill missed")]
    found = compare_steps(steps_of(reference), [steps_of(killed), steps_of(resumed)])
    first = min(steps_of(resumed))
    done = sum(epoch == 2 for epoch, _ in steps_of(killed))
    again = done - sum(place < first and place[0] == 2 for place in steps_of(reference))
    if first[0] != 2 or not 0 <= again <= 2:
        found.append(
            Difference(
                "work lost",
                f"went on with (epoch, step) {first}: {again} steps are done again",
            )
        )
    return found + compare_weights(whole, halves)


def steps_of(attempt: Attempt) -> Steps:
    """Return the samples of every optimizer step that all ranks made, over all ranks and
    micro-batches, sorted.
    """
    ranks: list[Steps] = []
    for diary in attempt.diaries:
        steps = {}
        pending = []
        for entry in diary:
            if entry[0] == "TRAIN":
                pending += entry[3]
            elif entry[0] == "step":
                steps[entry[2], entry[1]] = pending
                pending = []
        ranks.append(steps)
    common = set.intersection(*map(set, ranks))
    return {place: sorted(number for steps in ranks for number in steps[place]) for place in common}


def compare_steps(expected: Steps, attempts: list[Steps]) -> list[Difference]:
    """Compare what optimizer steps were made of, by their number since the run began."""
    found: list[Difference] = []
    for steps in attempts:
        for place, samples in steps.items():
            if expected.get(place) != samples:
                found.append(
                    Difference(
                        "samples",
                        f"(epoch, step) {place}: {samples} instead of {expected.get(place)}",
                    )
                )
    missing = sorted(set(expected) - set().union(*attempts))
    if missing:
        found.append(Difference("samples", f"never done: {missing}"))
    return found


def compare_weights(whole: Path, halves: Path) -> list[Difference]:
    """Compare the weights that two runs ended with."""
    expected, own = (
        torch.load(folder / "weights.pt", weights_only=True) for folder in (whole, halves)
    )
    worst = max(float((own[name] - value).abs().max()) for name, value in expected.items())
    return (
        []
        if worst <= TOLERANCE
        else [Difference("weights", f"differ by {worst:.2e}, {TOLERANCE:g} is allowed")]
    )


def print_sizes(folder: Path, sizes: Sequence[tuple[int, int]] = SIZES) -> int:
    """Run changes of size; print a line each, and return how many differ."""
    different = 0
    for variant in DOUBLE:
        for before, after in sizes:
            for moment in MOMENTS:
                found = change_of_size(folder, variant, before, after, moment)
                different += bool(found)
                words = "; ".join(f"{one.what}: {one.words}" for one in found[:2]) or (
                    "the same steps and weights"
                )
                print(f"{variant}, {before} -> {after} processes {moment}: {words}", flush=True)
    return different
