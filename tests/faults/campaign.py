"""Kill training at random and start it again: it must end as if nothing had happened, to the last
bit.

Run it with ``make faults``, or ``python -m tests.faults.campaign --kills 200 --seed 0 --variant
dropout``. A trial is one run of one recipe: it is killed once to three times, each time started
again with the same command, and compared with the run that was not killed. What was found is
printed with the command that does it again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ddpkit.metrics import LossMeter
from ddpkit.run import rank_state

from .campaign_moments import ALL, BETWEEN, STEPPED, TRAIN, VALID, Kill
from .campaign_ranks import Attempt, run_attempt, zygote
from .campaign_sizes import SIZES, print_sizes
from .campaign_verdict import Difference, Reference, compare
from .campaign_virtual import print_virtual
from .recipes_for_faults import VARIANTS, Setting, kill_of, setting_of, text_of

PLACES = {"train": 6, "save": 5, "valid": 2, "between": 2, "first": 2, "start": 1, "time": 4}
SURVIVORS = {"kill": 6, "term": 2, "alone": 1}
WORLD_SIZES = {1: 4, 2: 7, 3: 1}
MOST_ATTEMPTS = 8


@dataclass(frozen=True)
class Trial:
    """A run that is killed, and when: the n-th kill is for the n-th attempt."""

    setting: Setting
    kills: tuple[Kill, ...]

    @property
    def command(self) -> str:
        words = " ".join(f"'{text_of(one)}'" for one in (self.setting, *self.kills))
        return f"OMP_NUM_THREADS=1 python -m tests.faults.campaign --replay {words}"


@dataclass
class Verdict:
    """What became of a trial."""

    trial: Trial
    attempts: list[Attempt]
    differences: list[Difference]
    seconds: float


# -------------------------------------------------------------------------------------------- plans


def plan_trial(usual: Setting, dice: random.Random, reference: Reference, seconds: float) -> Trial:
    """Choose a setting and one to three kills at random."""
    # a rank has a part of what is saved
    savers = ["all"] if "strategy" in dict(usual.options) else ["all", "main"]
    setting = replace(
        usual, saver=dice.choice(savers), interval=dice.choice([1, 2, 3, 5]),
        options=(*usual.options, ("ckpt_async", dice.random() < 0.5)),
    )  # fmt: skip
    steps = [key[1:] for key, _ in reference.events[0] if key[0] == "TRAIN"]
    count = dice.choice([1, 1, 2, 2, 3])
    moments = sorted(dice.choice(steps) for _ in range(count))
    if count > 1 and dice.random() < 0.4:  # twice in one epoch
        epoch = dice.choice(steps)[0]
        moments = sorted(dice.sample([step for step in steps if step[0] == epoch], count))
    kills = [
        plan_kill(dice, moment, number, seconds, usual.world_size)
        for number, moment in enumerate(moments)
    ]
    return Trial(setting, tuple(kills))


def plan_kill(
    dice: random.Random,
    moment: tuple[int, int],
    number: int,
    seconds: float,
    world_size: int,
) -> Kill:
    place = _choose(dice, PLACES)
    if place == "first" and not number:
        place = "train"
    epoch, step = moment
    at = {
        "train": (epoch, TRAIN, step, dice.randint(0, STEPPED)),
        "save": (epoch, TRAIN, step, 0),
        "valid": (epoch, VALID, dice.randint(1, 3), 0),
        "between": (epoch, dice.choice(BETWEEN), 0, 0),
        "first": (0, 0, 0, dice.randint(0, STEPPED)),
    }.get(place, (0, 0, 0, 0))
    return Kill(
        place,
        who=ALL if world_size == 1 else dice.choice([ALL, *range(world_size)]),
        at=at,
        operation=dice.randint(1, 25) if place == "save" else 0,
        after=dice.random() < 0.5,
        delay=round(dice.uniform(0.05, 1.0) * seconds, 4) if place == "time" else 0.0,
        survivors=_choose(dice, SURVIVORS),
    )


def _choose(dice: random.Random, weights: dict) -> object:
    return dice.choices(list(weights), list(weights.values()))[0]


# --------------------------------------------------------------------------------------------- runs


@dataclass
class Campaign:
    """Runs trials, and keeps the uninterrupted runs that they are compared with."""

    folder: Path
    options: tuple[tuple[str, Any], ...] = ()
    references: dict[Setting, tuple[Reference, float]] = field(default_factory=dict)
    problems: list[Difference] = field(default_factory=list)
    _number: int = 0

    def usual(self, variant: str, world_size: int) -> Setting:
        """Return the setting of an uninterrupted run."""
        return Setting(variant, world_size, options=self.options)

    def reference(self, usual: Setting) -> tuple[Reference, float]:
        """Return the uninterrupted run, and the seconds that it took; made once, and checked."""
        if usual not in self.references:
            name = f"{usual.variant} on {usual.world_size} rank(s)"
            folder = self._new_folder()
            attempt = run_attempt(usual, folder, 0)
            if attempt.error:
                raise RuntimeError(f"{name} fails without a kill:\n{attempt.error}")
            reference = Reference.of(attempt, folder)
            self.problems += [
                Difference(one.what, f"{name}: {one.words}") for one in reference.problems(usual)
            ]
            self.references[usual] = reference, attempt.seconds
            shutil.rmtree(folder)
        return self.references[usual]

    def run(self, trial: Trial) -> Verdict:
        """Start, kill, start again until the run has come to its end, and compare."""
        setting = trial.setting
        folder = self._new_folder()
        attempts = []
        reference, _ = self.reference(self.usual(setting.variant, setting.world_size))
        started = time.monotonic()
        for number in range(MOST_ATTEMPTS):
            kill = trial.kills[number] if number < len(trial.kills) else None
            attempts.append(run_attempt(setting, folder, number, kill))
            if not attempts[-1].killed:
                break
        factor = setting.recipe.factor
        most_lost = (setting.interval + factor) * (
            1 + dict(setting.options).get("ckpt_async", True)
        )
        differences = compare(reference, attempts, folder, most_lost=most_lost)
        if not differences:
            shutil.rmtree(folder)
        return Verdict(trial, attempts, differences, time.monotonic() - started)

    def _new_folder(self) -> Path:
        self._number += 1
        return self.folder / str(self._number)


def trials(campaign: Campaign, variant: str, dice: random.Random, kills: int) -> Iterator[Verdict]:
    """Run trials of one variant until so many kills have really happened."""
    done = 0
    while done < kills:
        sizes = {
            size: weight
            for size, weight in WORLD_SIZES.items()
            if size < 3 or not VARIANTS[variant].batchnorm
        }
        world_size = _choose(
            dice,
            {size: weight for size, weight in sizes.items() if size > 1 or not campaign.options},
        )
        usual = campaign.usual(variant, world_size)
        trial = plan_trial(usual, dice, *campaign.reference(usual))
        trial = Trial(trial.setting, trial.kills[: kills - done])
        verdict = campaign.run(trial)
        done += sum(one.killed for one in verdict.attempts)
        yield verdict


# ------------------------------------------------------------------------------------------- report


def row_of(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Add up what became of the trials of one variant."""
    attempts = [attempt for verdict in verdicts for attempt in verdict.attempts]
    places = Counter(attempt.where.split(":")[0] for attempt in attempts if attempt.killed)
    return {
        "trials": len(verdicts),
        "kills": sum(places.values()),
        "places": dict(sorted(places.items())),
        "where": dict(
            sorted(Counter(attempt.where for attempt in attempts if attempt.killed).items())
        ),
        "missed": sum(len(verdict.trial.kills) for verdict in verdicts) - sum(places.values()),
        "resumes": sum(len(verdict.attempts) - 1 for verdict in verdicts),
        "differences": dict(
            Counter(one.what for verdict in verdicts for one in verdict.differences)
        ),
        "different runs": sum(bool(verdict.differences) for verdict in verdicts),
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
    }


def print_difference(verdict: Verdict, most: int = 6) -> None:
    """Say how a run differs, and how to see it again."""
    shown = list({one.what: one for one in reversed(verdict.differences)}.values())[::-1]
    fell = ", ".join(attempt.where for attempt in verdict.attempts if attempt.killed)
    print(f"  DIFFERENT after {fell or 'no kill'}:\n    {verdict.trial.command}")
    for one in shown[:most]:
        print(f"    {one.what}: {one.words}")
    sys.stdout.flush()


def print_row(name: str, row: dict) -> None:
    places = "  ".join(f"{place} {number}" for place, number in row["places"].items())
    different = (
        ", ".join(f"{what} {number}" for what, number in row["differences"].items()) or "none"
    )
    print(
        f"{name:18} {row['kills']:5} {row['resumes']:8} {row['seconds']:8}  {different:30}  "
        f"{places}",
        flush=True,
    )


def run_campaign(
    names: Sequence[str],
    kills: int,
    seed: int,
    folder: Path,
    strategy: str = "",
) -> dict[str, dict]:
    """Spread kills over variants; print a row each."""
    rows = {}
    print(
        f"{'variant':18} {'kills':>5} {'resumes':>8} {'seconds':>8}  {'differences':30}  kills by "
        "place",
        flush=True,
    )
    campaign = Campaign(folder, (("strategy", strategy),) if strategy else ())
    for number, name in enumerate(names):
        share = kills * (number + 1) // len(names) - kills * number // len(names)
        verdicts = []
        for verdict in trials(campaign, name, random.Random(f"{seed}/{name}"), share):
            verdicts.append(verdict)
            if verdict.differences:
                print_difference(verdict)
        rows[name] = row_of(verdicts)
        print_row(name, rows[name])
    for problem in campaign.problems:
        print(f"PROBLEM {problem.what}: {problem.words}")
    rows["problems"] = [f"{one.what}: {one.words}" for one in campaign.problems]
    return rows


def _forget_random() -> None:
    rank_state.restore_rng_state = lambda state: None


def _forget_optimizer() -> None:
    torch.optim.Optimizer.load_state_dict = lambda self, state: None


def _forget_loss() -> None:
    LossMeter.load_state_dict = lambda self, state: None


def keep_only(place: str | None) -> None:
    """Have all kills fall at one place, on 2 and 3 ranks alike; None: anywhere."""
    if place is None:
        return
    for weights, kept in ((PLACES, {place: 1}), (WORLD_SIZES, {2: 1, 3: 1})):
        weights.clear()
        weights.update(kept)


SABOTAGE = {"random": _forget_random, "optimizer": _forget_optimizer, "loss": _forget_loss}


def main() -> int:
    """Run a campaign, or one trial again."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--variant",
        action="append",
        choices=list(VARIANTS),
        help="only this one; may be repeated",
    )
    parser.add_argument("--strategy", default="", choices=["zero1", "fsdp"], help="instead of ddp")
    parser.add_argument(
        "--place",
        choices=list(PLACES),
        help="kill there alone, on 2 and 3 ranks alike: save for saves in shards, with fsdp",
    )
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--keep", type=Path, help="work in this folder, and keep what differs")
    parser.add_argument(
        "--sizes",
        nargs="*",
        metavar="2:1",
        help="instead: go on with another number of processes, 2 and then 1",
    )
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="instead: with --virtual_ranks, on another number after each kill",
    )
    parser.add_argument(
        "--sabotage",
        choices=list(SABOTAGE),
        help="do not restore this, to see that it is noticed",
    )
    parser.add_argument(
        "--replay",
        nargs="+",
        metavar="JSON",
        help="a setting and its kills, as printed",
    )
    options = parser.parse_args()
    if options.sabotage:
        SABOTAGE[options.sabotage]()
    keep_only(options.place)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="ddpkit-faults-"))
    try:
        with zygote():
            if options.replay:
                return replay(options.replay, folder)
            if options.virtual:
                row = print_virtual(folder, options.kills, options.seed)
                if options.json:
                    options.json.write_text(
                        json.dumps({"virtual ranks": row, "problems": []}) + "\n"
                    )
                return int(row["different runs"] > 0)
            if options.sizes is not None:
                pairs = [tuple(map(int, pair.split(":"))) for pair in options.sizes]
                return int(print_sizes(folder, pairs or SIZES) > 0)
            rows = run_campaign(
                options.variant or list(VARIANTS),
                options.kills,
                options.seed,
                folder,
                options.strategy,
            )
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    problems = rows.pop("problems")
    different = sum(row["different runs"] for row in rows.values())
    done = sum(row["kills"] for row in rows.values())
    again = sum(row["resumes"] for row in rows.values())
    print(
        f"{done} kills, {again} resumes, {different} runs that differ, {len(problems)} other "
        "problems."
    )
    return int(done < options.kills or different > 0 or bool(problems))


def replay(words: Sequence[str], folder: Path) -> int:
    """Run one trial again."""
    setting = setting_of(words[0])
    usual = tuple(one for one in setting.options if one[0] == "strategy")
    verdict = Campaign(folder, usual).run(Trial(setting, tuple(map(kill_of, words[1:]))))
    for number, attempt in enumerate(verdict.attempts):
        print(f"attempt {number}: {attempt.seconds:.2f} s, {attempt.where or 'to the end'}")
    for one in verdict.differences:
        print(f"  {one.what}: {one.words}")
    return int(bool(verdict.differences))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
