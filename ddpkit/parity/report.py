"""What a parity check found: gradients compared by parameter, causes in plain words, and a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Gradients by parameter; None where a parameter has none.
Gradients = dict[str, Tensor | None]

#: How far two gradients of one parameter may be apart, relative to the larger of its own largest gradient and
#: :data:`FLOOR` times the largest of all parameters.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: A gradient that is zero but for rounding (of a bias before BatchNorm) is measured by this.
FLOOR = 1e-2
#: The least tolerance on a GPU that multiplies float32 numbers in a shorter format (TF32).
ROUGH = 1e-2


@dataclass(frozen=True)
class ParityRow:
    """One parameter: how far its gradients are apart at most, and in which optimizer step.

    Ranks: local.
    """

    parameter: str
    difference: float
    relative: float
    tolerance: float
    step: int

    @property
    def is_equal(self) -> bool:
        """Whether the gradients are equal up to rounding."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class ParityCause:
    """Why gradients differ, or may differ; ``spoils``: parity cannot be said to hold while it is there.

    Ranks: local.
    """

    kind: str
    words: str
    spoils: bool = True


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check. ``str()`` gives the verdict, the causes and the parameters that differ most.

    Ranks: local.
    """

    world_size: int
    rows: tuple[ParityRow, ...]
    causes: tuple[ParityCause, ...]
    steps: tuple[int, ...]
    num_steps: int
    samples: int
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether all gradients are equal up to rounding, and no cause spoils that."""
        return all(row.is_equal for row in self.rows) and not self._spoiling

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the causes."""
        return tuple(cause.kind for cause in self.causes)

    @property
    def _spoiling(self) -> set[str]:
        return {cause.kind for cause in self.causes if cause.spoils}

    def __str__(self) -> str:
        """Say the verdict, the causes, and the parameters that differ most."""
        tolerances = " or ".join(f"{one:g}" for one in sorted({row.tolerance for row in self.rows}))
        steps = f"optimizer step{'' if len(self.steps) == 1 else 's'} {', '.join(map(str, self.steps))}"
        return "\n".join(
            [
                self._verdict(),
                *(f"- {cause.words}" for cause in self.causes),
                *(f"- {note}" for note in self.notes),
                *self._table(10),
                (
                    f"Compared: {steps} of {self.num_steps} in an epoch, {self.samples} samples in the first. Equal is "
                    f"{tolerances} of the parameter's largest gradient (of {FLOOR:g} of the largest of all where that "
                    "is more)."
                ),
            ]
        )

    def _verdict(self) -> str:
        sides = f"{self.world_size} processes and one with the joined batch"
        if self.holds:
            return f"Parity holds: {sides} have the same gradients."
        if self._spoiling == {"randomness"}:
            return f"Parity is not proven for {sides}."
        if not all(row.is_equal for row in self.rows):
            return f"Parity does not hold: {sides} have different gradients."
        if self._spoiling == {"accumulation"}:
            return f"Parity holds for {sides}, but an optimizer step is not that of its samples."
        return f"Parity does not hold: {sides} have the same gradients now, but would not keep them."

    def _table(self, limit: int) -> list[str]:
        cells = [("parameter", "largest difference", "relative", "in step", "verdict")] + [
            (row.parameter, f"{row.difference:.1e}", f"{row.relative:.1e}", str(row.step), _VERDICTS[row.is_equal])
            for row in self.rows[:limit]
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            f"  {line[0]:<{widths[0]}}  " + "  ".join(f"{line[k]:>{widths[k]}}" for k in (1, 2, 3)) + f"  {line[4]}"
            for line in cells
        ]
        more = self.rows[limit:]
        if more:
            differ = sum(not row.is_equal for row in more)
            lines.append(f"  and {differ} more differ, {len(more) - differ} more are equal")
        return lines


_VERDICTS = {True: "equal", False: "differs"}


def compare(found: Sequence[Gradients], expected: Sequence[Gradients], least: float, number: int) -> list[ParityRow]:
    """Compare the gradients of several processes with those of one, in the optimizer steps of one window.

    Args:
        found: of several processes; one entry for each call of an optimizer.
        expected: of one process.
        least: the smallest tolerance that makes sense for what the model computes in.
        number: of the optimizer step, for the rows.

    Ranks: local.
    """
    rows = []
    nothing: Gradients = {}  # a step that only one side makes differs in everything
    for ours, theirs in itertools.zip_longest(found, expected, fillvalue=nothing):
        largest = max((size_of(one) for one in theirs.values() if one is not None), default=0.0)
        rows += [
            _row(name, ours.get(name), theirs.get(name), largest, least, number)
            for name in {**theirs, **ours}
            if not (ours.get(name) is None and theirs.get(name) is None)
        ]
    return rows


def worst(rows: Sequence[ParityRow]) -> tuple[ParityRow, ...]:
    """Return the row that differs most of each parameter, the largest differences first.

    Ranks: local.
    """
    found: dict[str, ParityRow] = {}
    for row in sorted(rows, key=lambda row: (row.is_equal, -row.relative)):
        found.setdefault(row.parameter, row)
    return tuple(found.values())


def _row(name: str, found: Any, expected: Any, largest: float, least: float, number: int) -> ParityRow:
    present = [one for one in (found, expected) if one is not None]
    tolerance = max(least, *(TOLERANCES.get(one.dtype, TOLERANCES[torch.float32]) for one in present))
    if len(present) == 1:
        return ParityRow(name, size_of(present[0]), math.inf, tolerance, number)
    difference = size_of(found.double() - expected.double())
    size = max(size_of(expected), FLOOR * largest)
    relative = difference / size if size else (math.inf if difference else 0.0)
    return ParityRow(name, difference, relative if math.isfinite(relative) else math.inf, tolerance, number)


def size_of(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 of nothing.

    Ranks: local.
    """
    return float(tensor.abs().max()) if tensor.numel() else 0.0
