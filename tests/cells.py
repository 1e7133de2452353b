"""Which values of a test's parameters run in every check, and which before a release."""

from __future__ import annotations

import pytest


def some_of(values, kept, mark=pytest.mark.exhaustive):
    """Mark the values that show what another one shows, on another recipe or size.

    Args:
        values: of one parameter.
        kept: those that keep to the marks of their test.
        mark: of the others.
    """
    values = list(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"no such values: {missing}"
    return [pytest.param(value, marks=() if value in kept else mark) for value in values]
