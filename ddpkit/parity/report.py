"""What a parity check found: gradients compared by parameter, a cause in plain words, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: A gradient that is zero but for rounding (of a bias before BatchNorm) is measured by this part of the largest of all.
FLOOR = 1e-2
TINY = torch.finfo(torch.float64).tiny
SHOWN_ROWS = 10


class ParityRow(NamedTuple):
    """One parameter: how far its gradients are apart at most, relative to the largest, and in which optimizer step.

    Ranks: local.
    """

    parameter: str
    relative: float
    step: int


@dataclass(frozen=True)
class ParityReport:
    """The result of a parity check. ``str()`` gives the verdict, the cause and the parameters that differ most.

    Attributes:
        world_size: processes that were compared with one.
        rows: the worst of each parameter, the largest differences first.
        tolerance: relative differences up to this are rounding.
        kind: of the cause, one word or two; empty where parity holds.
        cause: why gradients differ, or would, and what to do; empty where parity holds.
        compared: which optimizer steps.

    Ranks: local.
    """

    world_size: int
    rows: Sequence[ParityRow]
    tolerance: float
    kind: str
    cause: str
    compared: str

    @property
    def holds(self) -> bool:
        """Whether all gradients are equal up to rounding, and nothing spoils that."""
        return not self.kind

    def __str__(self) -> str:
        """Say the verdict, the cause, and the parameters that differ most."""
        sides = f"{self.world_size} processes and one with the joined batch"
        if self.holds:
            lines = [f"Parity holds: {sides} have the same gradients."]
        elif self.kind == "randomness":
            lines = [f"Parity is not proven for {sides}.", f"- {self.cause}"]
        else:
            differ = self.rows[0].relative > self.tolerance
            found = "different gradients" if differ else "the same gradients now, but the training is not right"
            lines = [f"Parity does not hold: {sides} have {found}.", f"- {self.cause}"]
        equal = (
            f"Equal is {self.tolerance:g} of the parameter's largest gradient (of {FLOOR:g} of the largest of all "
            "where that is more)."
        )
        return "\n".join([*lines, *self._table(), f"Compared: {self.compared}. {equal}"])

    def _table(self) -> list[str]:
        shown, more = self.rows[:SHOWN_ROWS], self.rows[SHOWN_ROWS:]
        width = max(len(name) for name in ("parameter", *(row.parameter for row in shown)))
        lines = [f"  {'parameter':<{width}}  difference  in step  verdict"]
        for name, relative, step in shown:
            verdict = "differs" if relative > self.tolerance else "equal"
            lines.append(f"  {name:<{width}}  {relative:>10.1e}  {step:>7}  {verdict}")
        differ = sum(row.relative > self.tolerance for row in more)
        return [*lines, f"  and {differ} more differ, {len(more) - differ} more are equal"] if more else lines


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far two sets of gradients are apart, by parameter; infinite where only one side has a gradient.

    Args:
        found: gradients by parameter.
        expected: those to measure by: the largest difference is divided by the parameter's largest gradient here.

    Ranks: local.

    Example:
        >>> compare({"a": torch.tensor([1.0, 3.0]), "b": torch.ones(1)}, {"a": torch.tensor([1.0, 2.0])})
        {'a': 0.5, 'b': inf}
    """
    floor = FLOOR * max(map(_largest, expected.values()), default=0.0)
    return {name: _distance(found.get(name), expected.get(name), floor) for name in {**expected, **found}}


def _distance(one: Tensor | None, other: Tensor | None, floor: float) -> float:
    if one is None or other is None:
        return math.inf
    size = max(_largest(other), floor, TINY)
    relative = _largest(one.double() - other.double()) / size
    return math.inf if math.isnan(relative) else relative


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
