"""The steps of two runs in sections, in each of which neither run was started anew."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpkit.see.diff.hashed_run import Call, HashedRun


@dataclass(frozen=True)
class Side:
    """What one of two runs had in a section.

    Attributes:
        call: that has made the steps.
        labels: of the record.
        same_bits: whether the record promises the same bits on any number of processes.

    Ranks: local.
    """

    call: Call
    labels: dict[str, Any]
    same_bits: bool


@dataclass(frozen=True)
class Section:
    """Steps in which neither run had anything else than in the step before.

    Attributes:
        first: its first optimizer step.
        last: its last one.
        sides: what either run had.

    Ranks: local.
    """

    first: int
    last: int
    sides: tuple[Side, Side]


def sections(
    one: HashedRun,
    other: HashedRun,
    steps: Iterable[int],
) -> list[Section]:
    """Divide steps of two runs into sections.

    Args:
        one: of the runs.
        other: likewise.
        steps: optimizer steps that both have recorded, in their order. Those between two of them
            are in a section, too: a start may have made nothing else.

    Ranks: local.
    """
    found: list[Section] = []
    before = None
    for step in steps:
        for section in _up_to(one, other, before, step):
            if found and found[-1].sides == section.sides:
                found[-1] = replace(found[-1], last=section.last)
            else:
                found.append(section)
        before = step
    return found


def _up_to(
    one: HashedRun,
    other: HashedRun,
    before: int | None,
    step: int,
) -> Iterator[Section]:
    """Yield the sections from a record on up to the next one."""
    calls = one.calls[step], other.calls[step]
    if before is None:  # both runs have made the steps from here on
        before = max(of_run[0].before for of_run in calls)
    begins = set()
    for of_run in calls:
        for call in of_run:
            if before < call.before < step:
                begins.add(call.before)
    edges = [
        min(before, step - 1),
        *sorted(begins),
        step,
    ]
    for first, last in itertools.pairwise(edges):
        sides = (
            _side(one, step, last),
            _side(other, step, last),
        )
        yield Section(first + 1, last, sides)


def _side(
    run: HashedRun,
    step: int,
    at: int,
) -> Side:
    """Return what a run had at an optimizer step, as the record of a later one tells."""
    record = run.steps[step]
    calls = run.calls[step]
    made_by = calls[0]
    for call in calls:
        if call.before < at:
            made_by = call
    return Side(
        made_by,
        record.get("labels", {}),
        record.get("same_bits") is True,
    )
