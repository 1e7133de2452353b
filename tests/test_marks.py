"""The marks that leave combinations of a test's parameters to the slower runs."""

from __future__ import annotations

import pytest

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
