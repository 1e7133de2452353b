"""The marks that leave combinations of a test's parameters to the slower runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.conftest import _beyond_each_check

FIRST = [1, 2, 3]
SECOND = [("a", None), ("b", None), ("a", True)]


def others(first, second):
    """Count the parametrizations that do not have their first values."""
    return (first != FIRST[0]) + (second != SECOND[0])


def is_slow(request):
    return request.node.get_closest_marker("slow") is not None


@pytest.mark.grid
@pytest.mark.parametrize("first", [1, pytest.param(2), 3])
@pytest.mark.parametrize(("name", "value"), SECOND)
def test_of_a_grid_the_axes_are_quick(request, first, name, value):
    assert is_slow(request) == (others(first, (name, value)) > 1)


@pytest.mark.corner
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name, value", SECOND)  # noqa: PT006 -- pytest takes this, too
def test_of_a_corner_the_first_values_are_quick(request, first, name, value):
    """Each other value is run with the first of the others."""
    assert others(first, (name, value)) <= 1
    assert is_slow(request) == (others(first, (name, value)) > 0)


@dataclass
class Combination:
    """What pytest has of a test with parameters, as far as it is asked for."""

    number: int
    marks: dict[str, pytest.Mark]
    originalname: str = "test_one"
    callspec: object = None
    parent: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(nodeid="tests/test_it.py")
    )

    def get_closest_marker(self, name):
        return self.marks.get(name)


def left_for_releases(count, **marks):
    given = {name: mark.mark for name, mark in marks.items()}
    every = [Combination(number, given) for number in range(count)]
    return [one.number for one in _beyond_each_check(every)]


@pytest.mark.parametrize(
    ("count", "left"),
    [(1, []), (2, [0]), (5, [0, 1, 2, 3])],
)
def test_of_a_slow_test_the_last_combination_is_in_each_check(count, left):
    assert left_for_releases(count, slow=pytest.mark.slow) == left
    assert left_for_releases(count, launch=pytest.mark.launch) == left
    assert not left_for_releases(count)


def test_another_number_of_them_may_be_named_of_any_test():
    mark = pytest.mark.in_each_check
    assert left_for_releases(3, in_each_check=mark(2)) == [1]
    assert left_for_releases(5, slow=pytest.mark.slow, in_each_check=mark(2)) == [1, 2, 3]
    assert left_for_releases(5, slow=pytest.mark.slow, in_each_check=mark(3)) == [1, 3]
    assert not left_for_releases(9, slow=pytest.mark.slow, in_each_check=mark(9))


def test_what_is_for_releases_already_is_not_counted():
    given = {"slow": pytest.mark.slow.mark}
    every = [Combination(number, given) for number in range(2)]
    every[0].marks = {**given, "exhaustive": pytest.mark.exhaustive.mark}
    assert not list(_beyond_each_check(every))
