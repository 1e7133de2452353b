"""Drawn recipes have the same bits under each strategy, on any number of processes, and after a
kill that another strategy goes on from.

Some of them run with the slower tests, more before a release, and a hundred with ``python -m
tests.model --same_bits --recipes 100 --seed 1``.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cells import some_of
from tests.model.__main__ import parse
from tests.model.same_bits import comparing
from tests.model.same_bits.comparing import Found, compare, look_at
from tests.model.same_bits.described import COMBINATIONS, FIELDS, Recipe, Way, moment_of
from tests.model.same_bits.drawing import CHOICES, draw, is_allowed, ways_of
from tests.model.same_bits.recipe import digest
from tests.model.training import MOMENTS

SEED = 1
RECIPES = 12
SHOWN = [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("number", some_of(range(RECIPES), SHOWN))
def test_a_drawn_recipe_has_the_bits_of_one_process(ranks, number):
    found = Found()
    look_at(SEED, number, ranks, found)
    assert not found.differences, "\n".join(found.differences)


# ------------------------------------------------------------------------------------ its own parts


def test_every_value_is_drawn_and_every_draw_is_allowed():
    drawn = [draw(SEED, number) for number in range(300)]
    assert drawn[7] == draw(SEED, 7) != draw(SEED, 7, 1)
    for field in FIELDS:
        values = {getattr(one, field.name) for one in drawn}
        assert values == set(CHOICES[field.name]), field.name
    assert all(is_allowed(one) for one in drawn)


def test_each_combination_comes_equally_often_and_a_third_is_killed():
    ways = [way for number in range(99) for way in ways_of(SEED, number)]
    assert set(Counter((one.strategy, one.world) for one in ways).values()) == {33}
    assert {(one.strategy, one.world) for one in ways} == set(COMBINATIONS)
    killed = [one for one in ways if one.killed is not None]
    assert 3 * len(killed) == len(ways)
    assert {one.killed for one in killed} == set(MOMENTS)
    assert not any(
        one.strategy == one.strategy_after or one.world == one.world_after for one in killed
    )
    assert {one.strategy_after for one in killed} == {"single", "ddp", "zero1", "fsdp"}
    assert len(ways_of(SEED, 0, every=True)) == len(COMBINATIONS)


def test_the_moment_of_a_kill_always_comes():
    counts = {"batch": 32, "step": 3}
    assert moment_of(Way("zero1", 4, "batch", 0.0), counts).killed_at == 1
    assert moment_of(Way("zero1", 4, "batch", 1.0), counts).killed_at == 8
    assert moment_of(Way("zero1", 4, "step", 0.5), counts).killed_at == 2
    assert moment_of(Way("zero1", 4), counts).killed is None


def test_a_flipped_bit_is_another_digest():
    values = {"weight": torch.tensor([1.0, -0.0]), "step": 3}
    known = digest(values)
    assert digest({"weight": torch.tensor([1.0, -0.0]), "step": 3}) == known
    assert digest({**values, "weight": torch.tensor([1.0, 0.0])}) != known
    assert digest({**values, "weight": torch.tensor([[1.0, -0.0]])}) != known
    assert digest({**values, "step": 4}) != known


EXPECTED = {
    "digests": {"weights": "a", "optimizers": "b"},
    "reported": [("TRAIN", 1, 0.5), ("VALID", 1, float("nan"))],
    "steps": 2,
}
WRONG = {
    "weights of rank 1: c, and not a": {"digests": {"weights": "c", "optimizers": "b"}},
    "optimizers of rank 1: c, and not b": {"digests": {"weights": "a", "optimizers": "c"}},
    "reported on rank 1": {"reported": [("TRAIN", 1, 0.25), ("VALID", 1, float("nan"))]},
    "steps of rank 1: 3, and not 2": {"steps": 3},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_differs_on_one_rank_is_told(words):
    same = {**EXPECTED, "reported": [("TRAIN", 1, 0.5), ("VALID", 1, float("nan"))]}
    assert not compare([same, same], EXPECTED, is_whole=True)
    (said,) = compare([same, same | WRONG[words]], EXPECTED, is_whole=True)
    assert words in said


def test_after_a_kill_the_end_of_what_was_reported_is_compared():
    end = EXPECTED | {"reported": [("VALID", 1, float("nan"))]}
    assert not compare([end], EXPECTED, is_whole=False)
    assert compare([end], EXPECTED, is_whole=True)


def test_a_difference_is_reported_with_a_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr(comparing, "outcomes", lambda *_: [EXPECTED | {"counts": {}}])
    monkeypatch.setattr(comparing, "differences", lambda *_: ["weights of rank 0"])
    monkeypatch.setattr(comparing, "ways_of", lambda *_, **__: [Way("ddp", 2), Way("zero1", 4)])
    found = Found()
    look_at(SEED, 17, None, found)
    first, second = found.differences
    assert str(draw(SEED, 17)) in first
    command = second.splitlines()[-1]
    arguments = parse(command.split()[3:])
    assert (arguments.same_bits, arguments.seed) == (True, SEED)
    assert (arguments.only, arguments.way) == (17, 1)


def test_a_refusal_has_to_be_the_one_of_the_docs(monkeypatch):
    """Another error, or none, is a difference; the recipe is drawn again."""
    refused = Recipe(optimizer="fused")
    monkeypatch.setattr(comparing, "draw", lambda *given: [refused, Recipe()][given[2]])
    for said, counted in (("has fused=True", 1), ("out of memory", 0)):
        monkeypatch.setattr(comparing, "outcomes", lambda *_, said=said: [said])
        found = Found()
        assert comparing.accepted(SEED, 0, Way("fsdp", 1), None, found) == Recipe()
        assert found.refused.total() == counted
        assert len(found.differences) == 1 - counted
        assert comparing.accepted(SEED, 0, Way("zero1", 1), None, found) == refused
