"""What differs between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MISSING = "-"
MOST_ROWS = 200


@dataclass(frozen=True)
class Difference:
    """A name that has not the same value in all runs.

    Attributes:
        name: of the option, key or package.
        values: of each run; :data:`MISSING` where it has none.
    """

    name: str
    values: tuple[str, ...]


def differences(runs: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Return what differs between mappings, in the order of their keys.

    Example:
        >>> differences([{"lr": "0.1", "seed": "1"}, {"lr": "0.2", "seed": "1"}])
        [Difference(name='lr', values=('0.1', '0.2'))]
    """
    names = dict.fromkeys(name for run in runs for name in run)
    rows = (Difference(name, tuple(run.get(name, MISSING) for run in runs)) for name in names)
    return [row for row in rows if len(set(row.values)) > 1][:MOST_ROWS]
