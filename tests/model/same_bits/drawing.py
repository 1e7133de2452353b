"""Draws recipes and the ways on which they are run, from a seed."""

from __future__ import annotations

import random

from tests.model.same_bits.described import COMBINATIONS, VIRTUAL_RANKS, Recipe, Way
from tests.model.training import MOMENTS

WAYS_OF_A_RECIPE = 4
RECIPES_OF_A_ROUND = len(COMBINATIONS) // WAYS_OF_A_RECIPE  # one of these is killed

CHOICES = {
    "samples": (32, 37, 41, 48, 53, 59, 64, 69, 71, 84),
    "epochs": (1, 2, 2),
    "batch": (1, 2, 2, 3),
    "factor": (1, 1, 2, 3),
    "whole": (None, None, None, 11, 19, 23, 24),
    "micro": (None, 1, 2),
    "data": ("list", "list", "list", "sampler", "batches", "stream", "divided stream"),
    "shuffle": (True, True, False),
    "drop_last": (False, False, True),
    "noisy_data": (False, False, True),
    "counts_tokens": (False, False, True),
    "weighting": ("samples", "samples", "samples", "batches"),
    "dropout": (0.0, 0.2, 0.5),
    "norm": (None, "layer", "batch"),
    "tied": (None, None, None, "inside", "inside", "entries"),
    "unused": (False, False, True),
    "frozen": (False, False, True),
    "thaws": (False, True),
    "recomputes": (False, False, True),
    "optimizer": ("sgd", "sgd", "adamw", "adamw", "adamw", "nadam", "fused", "adafactor"),
    "optimizers": (1, 1, 2),
    "own_fit_batch": (False, False, True),
    "precision": ("fp32", "fp32", "bf16"),
    "max_norm": (0.0, 0.1, 0.5),
    "skips_nonfinite": (False,) * 9 + (True,),
    "ema_decay": (None, None, 0.7),
    "evaluates_average": (False, True),
    "schedule": (None, "step", "epoch"),
    "step_limit": (None, None, None, 2, 3, 5),
    "validation": (1, 5, 9),
    "shard_evaluation": (False, True),
    "save_every": (0, 1, 2, 2, 3),
    "saves_in_background": (False, True),
    "sends_checkpoints": (False, True),
    "saves_shards": (False, True),
    "blocks": (False, True),
    "keeps_whole": (False, False, True),
}

# What a value excludes, as (name, values with which the others are taken back, the others).
EXCLUDED = (
    ("norm", ("batch",), {"whole": None, "drop_last": True}),
    ("whole", (None,), {"micro": None}),
    ("micro", (1, 2), {"factor": 1}),
    ("data", ("sampler",), {"shuffle": False}),
    ("data", ("batches",), {"shuffle": False, "drop_last": False, "noisy_data": False}),
    ("data", ("stream",), {"shuffle": False, "drop_last": False, "noisy_data": False}),
    ("data", ("divided stream",), {"shuffle": False, "drop_last": False, "noisy_data": False}),
    ("data", ("batches", "divided stream"), {"whole": None, "micro": None}),
    ("data", ("batches", "stream", "divided stream"), {"weighting": "samples"}),
    ("counts_tokens", (True,), {"weighting": "samples"}),
    ("frozen", (False,), {"thaws": False}),
    ("optimizers", (2,), {"schedule": None}),
    ("tied", ("entries",), {"optimizers": 1}),
    ("ema_decay", (None,), {"evaluates_average": False}),
)


def draw(seed: int, number: int, attempt: int = 0) -> Recipe:
    """Return the recipe of a seed and a number; the same each time.

    Args:
        seed: of the draws.
        number: of the recipe.
        attempt: how many recipes of this number a strategy has refused before.
    """
    chance = random.Random((seed * 1_000_003 + number) * 101 + attempt)
    while True:
        values = {name: chance.choice(choices) for name, choices in CHOICES.items()}
        for name, excluding, others in EXCLUDED:
            if values[name] in excluding:
                values |= others
        recipe = Recipe(**values)
        if is_allowed(recipe):
            return recipe


def is_allowed(recipe: Recipe) -> bool:
    """Say whether the docs promise the same bits, of what no strategy refuses."""
    return all(rule(recipe) for rule in RULES)


def every_value_counts(one: Recipe) -> bool:
    """No value is without effect beside the others."""
    return not any(
        getattr(one, name) in excluding
        and any(getattr(one, other) != value for other, value in others.items())
        for name, excluding, others in EXCLUDED
    )


def batch_norm_sees_two_rows(one: Recipe) -> bool:
    return one.norm != "batch" or (one.batch > 1 and one.data in {"list", "sampler"})


def each_virtual_rank_has_a_sample(one: Recipe) -> bool:
    """Of a whole step, in each of its batches; all of a stream's are alike."""
    if one.whole is None:
        return True
    each, rest = divmod(one.whole, one.batches_of_a_step)
    return each >= VIRTUAL_RANKS and not (one.is_stream and rest)


def a_step_is_made(one: Recipe) -> bool:
    """Where an incomplete last batch is left out, there is a complete one."""
    of_a_batch = one.whole or one.batch * VIRTUAL_RANKS
    return not one.drop_last or one.samples >= of_a_batch


RULES = (
    every_value_counts,
    batch_norm_sees_two_rows,
    each_virtual_rank_has_a_sample,
    a_step_is_made,
)


# ------------------------------------------------------------------------------------ the ways


def ways_of(seed: int, number: int, *, every: bool = False) -> list[Way]:
    """Return the ways on which a recipe is run.

    Of recipes that follow each other three have all combinations of a strategy and a number of
    processes between them, each once, and one of the three is killed on each of its ways.

    Args:
        seed: of the draws.
        number: of the recipe.
        every: whether each recipe has all combinations.
    """
    turn, place = divmod(number, RECIPES_OF_A_ROUND)
    chance = random.Random(f"{seed} {turn}")
    combinations = [*COMBINATIONS]
    chance.shuffle(combinations)
    is_killed = place == chance.randrange(RECIPES_OF_A_ROUND)
    if not every:
        combinations = combinations[place * WAYS_OF_A_RECIPE :][:WAYS_OF_A_RECIPE]
    chance = random.Random(f"{seed} {number} kills")
    return [
        killed(strategy, world, chance) if is_killed else Way(strategy, world)
        for strategy, world in combinations
    ]


def killed(strategy: str, world: int, chance: random.Random) -> Way:
    """Return a way that goes on with another strategy and another number of processes."""
    others = [
        (other, size)
        for other, size in [*COMBINATIONS, ("single", 1)]
        if other != strategy and size != world
    ]
    moment, share = chance.choice(MOMENTS), round(chance.random(), 2)
    return Way(strategy, world, moment, share, *chance.choice(others))
