"""What a parity check found: gradients compared by parameter, causes in plain words, and a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Gradients by parameter; None where a parameter has none.
Gradients = dict[str, Tensor | None]

#: How far two gradients of one parameter may be apart, relative to the larger of its own largest gradient and
#: :data:`FLOOR` times the largest of all parameters.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: A gradient that is zero but for rounding (of a bias before BatchNorm) is measured by this.
FLOOR = 1e-2
TINY = torch.finfo(torch.float64).tiny
SHOWN_ROWS = 10


@dataclass(frozen=True)
class ParityRow:
    """One parameter: how far its gradients are apart at most, relative to the largest, and in which optimizer step.

    Ranks: local.
    """

    parameter: str
    relative: float
    tolerance: float
    step: int

    @property
    def is_equal(self) -> bool:
        """Whether the gradients are equal up to rounding."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check. ``str()`` gives the verdict, the causes and the parameters that differ most.

    Attributes:
        world_size: processes that were compared with one.
        rows: the worst of each parameter, the largest differences first.
        causes: why gradients differ, or would: words by kind.
        compared: which optimizer steps.

    Ranks: local.
    """

    world_size: int
    rows: Sequence[ParityRow]
    causes: Mapping[str, str]
    compared: str

    @property
    def holds(self) -> bool:
        """Whether all gradients are equal up to rounding, and nothing spoils that."""
        return not self.causes and all_equal(self.rows)

    def __str__(self) -> str:
        """Say the verdict, the causes, and the parameters that differ most."""
        tolerances = " or ".join(f"{one:g}" for one in sorted({row.tolerance for row in self.rows}))
        compared = (
            f"Compared: {self.compared}. Equal is {tolerances} of the parameter's largest gradient "
            f"(of {FLOOR:g} of the largest of all where that is more)."
        )
        words = [f"- {one}" for one in self.causes.values()]
        return "\n".join([self._verdict(), *words, *self._table(), compared])

    def _verdict(self) -> str:
        sides = f"{self.world_size} processes and one with the joined batch"
        if self.holds:
            return f"Parity holds: {sides} have the same gradients."
        if set(self.causes) == {"randomness"}:
            return f"Parity is not proven for {sides}."
        found = (
            "the same gradients now, but the training is not right" if all_equal(self.rows) else "different gradients"
        )
        return f"Parity does not hold: {sides} have {found}."

    def _table(self) -> list[str]:
        shown = self.rows[:SHOWN_ROWS]
        width = max(len(name) for name in ("parameter", *(row.parameter for row in shown)))
        lines = [f"  {'parameter':<{width}}  difference  in step  verdict"]
        for row in shown:
            verdict = "equal" if row.is_equal else "differs"
            lines.append(f"  {row.parameter:<{width}}  {row.relative:>10.1e}  {row.step:>7}  {verdict}")
        more = self.rows[SHOWN_ROWS:]
        differ = sum(not row.is_equal for row in more)
        return [*lines, f"  and {differ} more differ, {len(more) - differ} more are equal"] if more else lines


def compare(
    found: Sequence[Gradients], expected: Sequence[Gradients], tolerances: Mapping[torch.dtype, float], number: int
) -> list[ParityRow]:
    """Compare the gradients of several processes with those of one, in one window.

    Args:
        found: of several processes; one entry for each call of an optimizer.
        expected: of one process.
        tolerances: by dtype.
        number: of the optimizer step, for the rows.

    Ranks: local.
    """
    rows = []
    nothing: Gradients = {}  # a step that only one side makes differs in everything
    for ours, theirs in itertools.zip_longest(found, expected, fillvalue=nothing):
        floor = FLOOR * max((_largest(one) for one in theirs.values() if one is not None), default=0.0)
        for name in {**theirs, **ours}:
            one, other = ours.get(name), theirs.get(name)
            present = [gradient for gradient in (one, other) if gradient is not None]
            if not present:
                continue
            tolerance = max(tolerances.get(gradient.dtype, TOLERANCES[torch.float32]) for gradient in present)
            relative = math.inf if one is None or other is None else _distance(one, other, floor)
            rows.append(ParityRow(name, relative, tolerance, number))
    return rows


def worst(rows: Sequence[ParityRow]) -> list[ParityRow]:
    """Return the row that differs most of each parameter, the largest differences first.

    Ranks: local.
    """
    found: dict[str, ParityRow] = {}
    for row in sorted(rows, key=lambda row: (row.is_equal, -row.relative)):
        found.setdefault(row.parameter, row)
    return list(found.values())


def all_equal(rows: Sequence[ParityRow]) -> bool:
    """Say whether all gradients are equal up to rounding.

    Ranks: local.
    """
    return all(row.is_equal for row in rows)


def _distance(one: Tensor, other: Tensor, floor: float) -> float:
    """Return the largest difference, relative to the largest number of ``other``, or to ``floor`` if that is more."""
    difference, size = _largest(one.double() - other.double()), max(_largest(other), floor)
    relative = difference / (size or TINY)
    return math.inf if math.isnan(relative) else relative


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
