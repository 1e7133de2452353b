"""Draws trainings from a seed: of everything that the docs allow together."""

from __future__ import annotations

import dataclasses
import random

from tests.model.training import MOMENTS, Training, rows_of

CHOICES = {
    "world": (1, 2, 2, 3),
    "samples": (*range(24), 13, 17, 19, 23),
    "epochs": (1, 2, 2, 3),
    "batch": (1, 2, 3, 4),
    "factor": (1, 1, 2, 3),
    "whole": (None, None, 4, 5, 6, 7, 9),
    "micro": (None, 1, 2, 3),
    "data": ("list", "list", "list", "sampler", "batches", "stream", "divided stream"),
    "shuffle": (True, True, False),
    "drop_last": (False, False, False, True),
    "counts_tokens": (False, False, True),
    "weighting": ("samples", "samples", "samples", "batches"),
    "norm": (False, False, True),
    "frozen": (False, False, True),
    "thaws": (False, True),
    "optimizers": (1, 1, 2),
    "adam": (False, True),
    "own_fit_batch": (False, False, True),
    "strategy": ("auto", "auto", "auto", "zero1", "fsdp"),
    "virtual_ranks": (None, None, None, None, 6),
    "max_norm": (0.0, 0.1, 0.5),
    "ema_decay": (None, None, 0.7),
    "evaluates_average": (False, True),
    "schedule": (None, None, "step", "epoch", "plateau"),
    "step_limit": (None, None, None, None, 1, 2, 3, 5, 8),
    "scales_rate": (False, False, True),
    "validation": (1, 3, 4, 7),
    "shard_evaluation": (False, True),
    "save_every": (0, 1, 2, 2, 3, 5),
    "saves_in_background": (False, True),
    "sends_checkpoints": (False, True),
    "killed": (None, *MOMENTS, "step"),
    "killed_at": (1, 1, 2, 3, 5, 8),
    "world_after": (1, 2, 2, 3),
    "strategy_after": ("auto", "auto", "auto", "zero1", "fsdp"),
}


def draw(seed: int, number: int) -> Training:
    """Return the training of a seed and a number; the same each time."""
    chance = random.Random(seed * 1_000_003 + number)
    while True:
        values = {name: chance.choice(choices) for name, choices in CHOICES.items()}
        training = Training(**settled(values, chance))
        if is_allowed(training):
            return training


# What a value excludes, as (name, values with which the others are taken back, the others).
EXCLUDED = (
    ("whole", (None,), {"micro": None}),
    ("micro", (1, 2, 3), {"factor": 1}),
    ("data", ("sampler",), {"shuffle": False}),
    ("data", ("batches", "stream", "divided stream"), {"shuffle": False, "drop_last": False}),
    ("data", ("divided stream",), {"virtual_ranks": None}),
    ("optimizers", (2,), {"schedule": None}),
    ("frozen", (False,), {"thaws": False}),
    ("schedule", ("plateau",), {"step_limit": None}),
    ("ema_decay", (None,), {"evaluates_average": False}),
    ("virtual_ranks", (6,), {"strategy": "auto", "strategy_after": "auto", "norm": False}),
    ("counts_tokens", (True,), {"weighting": "samples"}),
)


def settled(values: dict, chance: random.Random) -> dict:
    """Take back what excludes other values, so that few draws are in vain."""
    if chance.random() < 0.5:
        values |= {"world_after": values["world"], "strategy_after": values["strategy"]}
    for name, excluding, others in EXCLUDED:
        if values[name] in excluding:
            values |= others
    return values


def is_allowed(training: Training) -> bool:
    """Say whether the docs promise what the plain loop says, of this training and its resume."""
    return all(rule(training) for rule in RULES)


def values_go_together(one: Training) -> bool:
    return (
        (one.whole is not None or one.micro is None)
        and (one.micro is None or one.factor == 1)
        and (one.data == "list" or not one.shuffle)
        and (one.data in {"list", "sampler"} or not one.drop_last)
        and (one.optimizers == 1 or one.schedule is None)
        and (one.frozen or not one.thaws)
        and (one.schedule != "plateau" or one.step_limit is None)
        and (one.ema_decay is not None or not one.evaluates_average)
        and not (one.counts_tokens and one.weighting == "batches")
    )


def micro_batches_have_a_sample(one: Training) -> bool:
    return one.whole is None or one.batches_of_a_step <= one.whole


def recipes_own_batches_are_whole(one: Training) -> bool:
    """They are not divided, and each of them counts the same where batches do."""
    return one.data != "batches" or (
        one.whole is None
        and one.weighting == "samples"
        and not one.scales_rate
        and one.keeps_its_parts
    )


def streams_are_long_enough(one: Training) -> bool:
    """They have an item for every rank; and all batches of a global batch are alike, likewise."""
    if not one.is_stream:
        return True
    worlds = (
        [one.parts] if one.killed is None else [one.parts, one.virtual_ranks or one.world_after]
    )
    if one.whole is not None and (
        one.data == "divided stream"
        or one.whole % one.batches_of_a_step
        or one.whole // one.batches_of_a_step < max(worlds)
    ):
        return False
    weighs_batches = one.virtual_ranks is not None and one.weighting == "batches"
    return not weighs_batches and (one.samples >= max(worlds) or not one.samples)


def a_stream_goes_on_in_equal_batches(one: Training) -> bool:
    """On other ranks a step has as many samples as before, in batches that are alike."""
    if not one.is_stream or one.keeps_its_parts:
        return True
    samples = one.samples_of_a_step
    batches = one.batches_of_a_step
    if one.world_after < one.world:
        largest = -(-samples // (one.world * batches))
        batches = -(-samples // (largest * one.world_after))
    return samples % batches == 0 and samples // batches >= one.world_after


def a_divided_stream_keeps_its_ranks(one: Training) -> bool:
    return one.data != "divided stream" or (
        one.keeps_its_parts and one.weighting == "samples" and not one.norm
    )


def batch_norm_sees_the_same_rows(one: Training) -> bool:
    """Two rows at least; and as many on another number of ranks, as of batches that count alike."""
    if not (one.norm or one.weighting == "batches"):
        return True
    batches = [batch for epoch in one.steps() for step in epoch for batch in step]
    if one.norm and min(map(len, batches), default=2) < 2:
        return False
    return one.keeps_its_parts


def something_counts(one: Training) -> bool:
    """A step that counts nothing is left out; not all of them, in any epoch."""
    if not one.counts_tokens or not one.samples:
        return True
    tokens = rows_of(0, one.samples)[2]
    return all(
        any(float(tokens[batch].sum()) for step in epoch for batch in step) for epoch in one.steps()
    )


def virtual_ranks_go_alone(one: Training) -> bool:
    if one.virtual_ranks is None:
        return True
    return (
        {one.strategy, one.strategy_after} == {"auto"}
        and not one.norm
        and one.data != "divided stream"
        and (one.whole is None or one.whole // one.batches_of_a_step >= one.virtual_ranks)
    )


RULES = (
    values_go_together,
    micro_batches_have_a_sample,
    recipes_own_batches_are_whole,
    streams_are_long_enough,
    a_stream_goes_on_in_equal_batches,
    a_divided_stream_keeps_its_ranks,
    virtual_ranks_go_alone,
    something_counts,
    batch_norm_sees_the_same_rows,
)


def smaller_ones(training: Training):
    """Yield trainings that are a little simpler: one value is the simplest, or a smaller number."""
    for field in dataclasses.fields(training):
        value = getattr(training, field.name)
        if value == field.default:
            continue
        tries = [field.default]
        if type(value) is int:
            least = field.default or 0
            tries += [one for one in (value // 2, value - 1) if one > least]
        for tried in tries:
            yield dataclasses.replace(training, **{field.name: tried})
