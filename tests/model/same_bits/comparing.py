"""Runs a drawn recipe on its ways, and compares each, bit by bit, with one process that has
everything.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.model.same_bits.described import Moments, Recipe, Way, moment_of
from tests.model.same_bits.drawing import draw, ways_of
from tests.model.same_bits.recipe import train

ATTEMPTS = 20  # recipes that a strategy may refuse, one after the other
SECONDS = 240.0  # of a run, on a machine that does much else
KILLED = "exit code -9"

# What fsdp refuses, and a word of what it says; the others take all that is drawn.
REFUSED_BY_FSDP = {
    "fused=True": lambda one: one.optimizer == "fused",
    "Adafactor": lambda one: one.optimizer == "adafactor",
    "skip_nonfinite_grads": lambda one: one.skips_nonfinite,
    "share the parameter": lambda one: one.tied == "entries",
}


@dataclasses.dataclass
class Found:
    """What came of some recipes.

    Attributes:
        recipes: their number.
        runs: by strategy and number of processes.
        killed: runs that were killed and have gone on.
        refused: recipes that a strategy has refused by name, by the word.
        differences: in words.
    """

    recipes: int = 0
    runs: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    killed: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    differences: list[str] = dataclasses.field(default_factory=list)


def look_at(
    seed: int,
    number: int,
    ranks: Any,
    found: Found,
    *,
    every: bool = False,
    only: int | None = None,
) -> None:
    """Run the recipe of a number on its ways; add to what was found.

    Args:
        seed: of the draws.
        number: of the recipe.
        ranks: a pool of ranks.
        found: so far.
        every: whether on all combinations.
        only: the number of the only way; or None.
    """
    found.recipes += 1
    expected: dict[Recipe, dict[str, Any] | str] = {}
    for place, way in enumerate(ways_of(seed, number, every=every)):
        if only not in {None, place}:
            continue
        recipe = accepted(seed, number, way, ranks, found)
        if recipe is None:
            said = [f"{ATTEMPTS} recipes were refused"]
        else:
            if recipe not in expected:
                expected[recipe] = of_one_process(recipe, ranks)
            known = expected[recipe]
            said = [known] if isinstance(known, str) else differences(recipe, way, known, ranks)
            found.runs[way.strategy, way.world] += 1
            found.killed += way.killed is not None
        if said:
            found.differences.append(report(seed, number, place, recipe, way, said, every=every))


def accepted(seed: int, number: int, way: Way, ranks: Any, found: Found) -> Recipe | None:
    """Return the first recipe of a number that the strategies of a way take.

    The docs say which are refused. That they are, in these words, is tried.
    """
    for attempt in range(ATTEMPTS):
        recipe = draw(seed, number, attempt)
        words = [word for word, refuses in REFUSED_BY_FSDP.items() if refuses(recipe)]
        world = {way.strategy: way.world, way.strategy_after: way.world_after}.get("fsdp")
        if world is None or not words:
            return recipe
        with tempfile.TemporaryDirectory() as folder:
            said = outcomes(ranks, recipe, folder, "fsdp", world, Moments())
        if all(isinstance(one, str) and any(word in one for word in words) for one in said):
            found.refused[words[0]] += 1
        else:
            text = f"fsdp on {world} had to refuse {words}, and came to {said}"
            found.differences.append(f"seed {seed}, recipe {number}, {recipe}: {text}")
    return None


def of_one_process(recipe: Recipe, ranks: Any) -> dict[str, Any] | str:
    """Return what comes of a recipe in one process that nobody has launched; in words, if it has
    failed or has made no step.
    """
    with tempfile.TemporaryDirectory() as folder:
        (found,) = outcomes(ranks, recipe, folder, "single", 1, Moments())
    if isinstance(found, str) or not found["steps"]:
        return f"in one process: {found}"
    return found


def outcomes(
    ranks: Any, recipe: Recipe, folder: str, strategy: str, world: int, moments: Moments
) -> list[Any]:
    """Train on ranks; return what each has returned, or what has become of it, in words."""
    found = ranks.outcomes(
        train,
        recipe,
        folder,
        strategy,
        moments,
        world_size=world,
        init=strategy != "single",
        timeout=SECONDS,
    )
    return [one.value if one.ok else f"{one.error_type}: {one.trace or one.error}" for one in found]


def differences(recipe: Recipe, way: Way, expected: dict[str, Any], ranks: Any) -> list[str]:
    """Run a recipe on a way; say in words what is not as in one process.

    Args:
        recipe: described.
        way: how it is run.
        expected: what came of it in one process.
        ranks: a pool of ranks.
    """
    moments = moment_of(way, expected["counts"])
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "save")
        found = outcomes(ranks, recipe, folder, way.strategy, way.world, moments)
        if way.killed is not None and not any(isinstance(one, str) for one in found):
            # several processes have fewer batches each, and so perhaps fewer saves: known now
            said = compare(found, expected, is_whole=True)
            if said:
                return said
            moments = moment_of(way, found[0]["counts"])
            folder = str(Path(name) / "again")
            found = outcomes(ranks, recipe, folder, way.strategy, way.world, moments)
        if way.killed is not None:
            alive = [one for one in found if not str(one).endswith(KILLED)]
            if alive:
                return [f"not killed at {moments}: {alive}"]
            found = outcomes(ranks, recipe, folder, way.strategy_after, way.world_after, Moments())
    return compare(found, expected, is_whole=way.killed is None)


def compare(found: list[Any], expected: dict[str, Any], *, is_whole: bool) -> list[str]:
    """Say in words where the first rank that has come to something else than one process has.

    Args:
        found: of each rank.
        expected: of one process.
        is_whole: whether the ranks have trained from the beginning on.
    """
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(found) if isinstance(one, str)]
    if failed:
        return failed
    for rank, one in enumerate(found):
        said = [
            f"{what} of rank {rank}: {value}, and not {expected['digests'][what]}"
            for what, value in one["digests"].items()
            if value != expected["digests"][what]
        ]
        reported, wanted = one["reported"], expected["reported"]
        if not is_whole:
            wanted = wanted[len(wanted) - len(reported) :]
        if repr(reported) != repr(wanted):  # to the last bit, and NaN is NaN
            said.append(f"reported on rank {rank}: {reported}, and not {wanted}")
        if one["steps"] != expected["steps"]:
            said.append(f"steps of rank {rank}: {one['steps']}, and not {expected['steps']}")
        if said:
            return said
    return []


def report(
    seed: int,
    number: int,
    place: int,
    recipe: Recipe | None,
    way: Way,
    said: list[str],
    *,
    every: bool,
) -> str:
    """Return what is told of a difference, with the command that repeats it alone."""
    command = f"python -m tests.model --same_bits --seed {seed} --only {number} --way {place}"
    lines = [f"{way}: {recipe}", *(f"  {one}" for one in said), command + " --all" * every]
    return "\n".join(lines)
