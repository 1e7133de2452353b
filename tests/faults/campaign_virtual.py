"""Kill a run with ``--virtual_ranks``, go on with another number of processes: the same bits as
without any kill.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .campaign_moments import ALL, Kill
from .campaign_ranks import Attempt, run_attempt
from .campaign_verdict import Difference, result_of
from .recipes_for_faults import VIRTUAL, Setting

WORLD_SIZES = (1, 2, 3)
SHARDS = 6
MOST_ATTEMPTS = 12


@dataclass
class VirtualTrial:
    """One run: what it ran on, what killed it, and how it differs from the run that was not
    killed.
    """

    variant: str
    sizes: list[int] = field(default_factory=list)
    kills: int = 0
    differences: list[Difference] = field(default_factory=list)

    def __str__(self) -> str:
        sizes = " -> ".join(map(str, self.sizes))
        words = "; ".join(f"{one.what}: {one.words}" for one in self.differences[:2]) or (
            "the same bits"
        )
        return f"{self.variant}, {sizes} processes, {self.kills} kills: {words}"


def setting_on(variant: str, world_size: int) -> Setting:
    options = (("virtual_ranks", SHARDS), ("ckpt_async", False))
    return Setting(variant, world_size, batch_size=2, interval=1, options=options)


def virtual_trials(folder: Path, kills: int, seed: int) -> Iterator[VirtualTrial]:
    """Run trials until so many kills have really happened, on as many processes as the dice say
    after each.

    Args:
        folder: to work in.
        kills: how many.
        seed: of the dice.
    """
    dice = random.Random(f"{seed}/virtual ranks")
    done = 0
    references = {}
    for variant in itertools.cycle(VIRTUAL):
        if variant not in references:
            whole = folder / f"whole {variant}"
            references[variant] = run_attempt(setting_on(variant, 1), whole, 0), outcome(whole, 0)
        attempt, expected = references[variant]
        trial = one_trial(
            folder / "cut",
            variant,
            dice,
            attempt,
            min(kills - done, dice.randint(1, 3)),
        )
        trial.differences += compare_outcomes(
            expected,
            outcome(folder / "cut", len(trial.sizes) - 1),
        )
        if attempt.error:
            trial.differences.append(Difference("error", attempt.error))
        done += trial.kills
        yield trial
        if done >= kills or trial.differences:
            return


def one_trial(
    folder: Path,
    variant: str,
    dice: random.Random,
    reference: Attempt,
    kills: int,
) -> VirtualTrial:
    """Start a run, kill it at random moments, and start it again on another number of processes, to
    its end.
    """
    shutil.rmtree(folder, ignore_errors=True)
    trial = VirtualTrial(variant)
    for number in range(MOST_ATTEMPTS):
        others = [size for size in WORLD_SIZES if [size] != trial.sizes[-1:]]
        trial.sizes.append(dice.choice(others))
        delay = dice.uniform(0.3, 1.2) * reference.seconds
        kill = Kill("time", who=ALL, delay=delay) if trial.kills < kills else None
        attempt = run_attempt(setting_on(variant, trial.sizes[-1]), folder, number, kill)
        if attempt.error:
            trial.differences.append(Difference("error", attempt.error))
        if attempt.error or not attempt.killed:
            return trial
        trial.kills += 1
    trial.differences.append(Difference("place", f"no end after {MOST_ATTEMPTS} attempts"))
    return trial


def outcome(folder: Path, number: int) -> dict[str, object]:
    """Return how an attempt ended: weights, optimizers, averages, counters, random streams and
    losses.
    """
    return result_of(folder, number, 0)


def compare_outcomes(expected: dict[str, object], found: dict[str, object]) -> list[Difference]:
    """Name what differs, bit by bit."""
    names = [
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    ]
    return [
        Difference("bits", f"{name}: {found.get(name)} instead of {expected.get(name)}")
        for name in sorted(names)
    ]


def print_virtual(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Run trials; print a line each, and return how many kills there were, and how many runs that
    differ.
    """
    trials = []
    for trial in virtual_trials(folder, kills, seed):
        trials.append(trial)
        print(trial, flush=True)
    done = sum(trial.kills for trial in trials)
    different = sum(bool(trial.differences) for trial in trials)
    print(f"another number of processes: {done} kills, {different} runs that differ.")
    return {"trials": len(trials), "kills": done, "different runs": different}
