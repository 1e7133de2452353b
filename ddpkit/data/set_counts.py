"""How many samples of each of several sets an epoch has: by their weights, and by what ends it."""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LONGEST = "longest"
SHORTEST = "shortest"


def weights_of(given: Any, sizes: Mapping[str, int]) -> list[Fraction]:
    """Return the weight of each set, as an exact number.

    Args:
        given: a mapping by the names of the sets; None: each set weighs as many as it has samples.
        sizes: samples of each set, by name.

    Raises:
        ConfigError: a weight is missing, or is no positive number.
    """
    if given is None:
        return [Fraction(size) for size in sizes.values()]
    require_names("weights", given, sizes)
    for name, value in given.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(
                f"weights: {name!r} has the weight {value!r}. A weight is a positive number: the "
                "samples of an epoch that come from that set, in proportion to the others. Leave "
                "a set out that shall give none."
            )
    return [_exact(given[name]) for name in sizes]


def _exact(weight: Any) -> Fraction:
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(float(weight))


def require_names(argument: str, given: Any, names: Mapping[str, Any]) -> None:
    """Refuse a mapping that has not just the names of the sets.

    Raises:
        ConfigError: it is no mapping, or a name is missing or unknown.
    """
    if hasattr(given, "keys") and set(given) == set(names):
        return
    raise ConfigError(
        f"{argument}={given!r} must be a mapping with the names of the sets: "
        f"{', '.join(map(repr, names))}."
    )


def until_of(given: Any) -> str | int:
    """Return what ends an epoch.

    Raises:
        ConfigError: it is neither ``"longest"``, ``"shortest"`` nor a positive whole number.
    """
    if given in (LONGEST, SHORTEST):
        return str(given)
    if not isinstance(given, bool) and isinstance(given, Integral) and int(given) > 0:
        return int(given)
    raise ConfigError(
        f"until={given!r} must be 'longest' (an epoch ends when the last set has been used up), "
        "'shortest' (when the first has), or the positive number of its samples."
    )


def epoch_counts(
    sizes: Mapping[str, int],
    weights: Sequence[Fraction],
    until: str | int,
) -> list[int]:
    """Return how many samples of each set an epoch has.

    Args:
        sizes: samples of each set, by name.
        weights: positive, one for each set.
        until: ``"longest"``, ``"shortest"``, or the samples of an epoch.

    Raises:
        ConfigError: an epoch would have no sample of some set.

    Example:
        >>> epoch_counts({"a": 10, "b": 4}, [Fraction(1), Fraction(1)], "longest")
        [10, 10]
        >>> epoch_counts({"a": 10, "b": 4}, [Fraction(3), Fraction(1)], "shortest")
        [10, 3]
    """
    whole = sum(weights)
    ends = [size * whole / weight for size, weight in zip(sizes.values(), weights, strict=True)]
    if until == LONGEST:
        total = math.ceil(max(ends))
    elif until == SHORTEST:
        total = math.floor(min(ends))
    else:
        total = int(until)
    counts = apportion(total, [weight / whole for weight in weights])
    for name, count in zip(sizes, counts, strict=True):
        if not count:
            raise ConfigError(
                f"until={until!r}: an epoch of {total} sample(s) has none of the set {name!r}, by "
                "its weight. Give it a larger weight, or make the epoch longer."
            )
    return counts


def apportion(total: int, parts: Sequence[Fraction]) -> list[int]:
    """Divide a whole number by parts that add up to one; the largest remainders are rounded up."""
    counts = [math.floor(total * part) for part in parts]
    by_remainder = sorted(
        range(len(parts)), key=lambda number: counts[number] - total * parts[number]
    )
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts
