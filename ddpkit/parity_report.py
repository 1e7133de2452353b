"""What a rehearsal found: gradients compared by parameter, causes in plain words, and a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: How far two gradients of one parameter may be apart, relative to the larger of its own largest gradient and
#: :data:`FLOOR` times the largest of all parameters.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
#: See :data:`TOLERANCES`: a gradient that is zero but for rounding (of a bias before BatchNorm) is measured by this.
FLOOR = 1e-2


@dataclass(frozen=True)
class ParityRow:
    """One parameter.

    Attributes:
        parameter: its name, ``<entry of modules>.<name>``.
        difference: the largest between the gradients of the pretended ranks and of one process, over all windows.
        relative: that, relative to the size of the gradient; infinite where only one side has a gradient, or one is
            not finite.
        tolerance: what ``relative`` may be.

    Ranks: local.

    Example:
        >>> ParityRow("net.weight", 1e-9, 2e-9, 1e-3).is_equal
        True
    """

    parameter: str
    difference: float
    relative: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether the gradients are equal up to rounding."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class ParityCause:
    """Why gradients differ, or may differ.

    Attributes:
        kind: ``"batch norm"``, ``"sum loss"``, ``"own weights"``, ``"batch-dependent model"``,
            ``"batch-dependent loss"``, ``"counted loss"``, ``"fit_batch"``, ``"accumulation"``, ``"outside modules"``,
            ``"not finite"``, ``"randomness"`` or ``"unknown"``.
        words: what it is, what it means and what to do.
        spoils: whether parity cannot be said to hold while it is there.

    Ranks: local.

    Example:
        >>> ParityCause("sum loss", "the loss is a sum").spoils
        True
    """

    kind: str
    words: str
    spoils: bool = True


@dataclass(frozen=True)
class ParityReport:
    """What a rehearsal found.

    Attributes:
        world_size: number of pretended ranks.
        rows: one per parameter, those that differ most first.
        causes: why gradients differ, or may differ.
        windows: the optimizer steps that were rehearsed, counted from 0.
        num_windows: optimizer steps of the epoch.
        samples: samples of the first of them, over all ranks.
        notes: what else was found that a run on real ranks should know.

    Ranks: local.

    Example:
        >>> report = ParityReport(2, (ParityRow("net.weight", 0.0, 0.0, 1e-3),), (), (0,), 1, 8)
        >>> report.holds
        True
        >>> print(str(report).splitlines()[0])
        Parity holds: 2 pretended ranks and one process with the joined batch have the same gradients.
    """

    world_size: int
    rows: tuple[ParityRow, ...]
    causes: tuple[ParityCause, ...]
    windows: tuple[int, ...]
    num_windows: int
    samples: int
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether all gradients are equal up to rounding, and nothing was found that would part real ranks."""
        return all(row.is_equal for row in self.rows) and not any(cause.spoils for cause in self.causes)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the causes."""
        return tuple(cause.kind for cause in self.causes)

    def __str__(self) -> str:
        """Say the verdict, the causes, and the parameters that differ most."""
        return self.text()

    def text(self, limit: int = 10) -> str:
        """Say the verdict, the causes, and the parameters that differ most.

        Args:
            limit: parameters that are listed.
        """
        lines = [self._verdict()]
        lines += [f"- {cause.words}" for cause in self.causes]
        lines += [f"- {note}" for note in self.notes]
        lines += self._table(limit)
        steps = ", ".join(str(window + 1) for window in self.windows)
        lines.append(
            f"Compared: optimizer step{'' if len(self.windows) == 1 else 's'} {steps} of {self.num_windows} in an "
            f"epoch, {self.samples} samples in the first. Equal is {self._tolerances()} of the parameter's largest "
            f"gradient (of {FLOOR:g} of the largest of all where that is more)."
        )
        return "\n".join(lines)

    def _verdict(self) -> str:
        sides = f"{self.world_size} pretended ranks and one process with the joined batch"
        if self.holds:
            return f"Parity holds: {sides} have the same gradients."
        if {cause.kind for cause in self.causes if cause.spoils} == {"randomness"}:
            return f"Parity is not proven for {sides}."
        if {cause.kind for cause in self.causes if cause.spoils} == {"accumulation"}:
            return f"Parity holds for {sides}, but an optimizer step is not that of its samples."
        if all(row.is_equal for row in self.rows):
            return f"Parity does not hold: {sides} have the same gradients, but real ranks would not."
        return f"Parity does not hold: {sides} have different gradients."

    def _table(self, limit: int) -> list[str]:
        shown = self.rows[:limit]
        cells = [("parameter", "largest difference", "relative", "verdict")] + [
            (row.parameter, f"{row.difference:.1e}", f"{row.relative:.1e}", "equal" if row.is_equal else "differs")
            for row in shown
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [
            f"  {name:<{widths[0]}}  {difference:>{widths[1]}}  {relative:>{widths[2]}}  {verdict}"
            for name, difference, relative, verdict in cells
        ]
        more = self.rows[limit:]
        differ = sum(not row.is_equal for row in more)
        if differ:
            lines.append(f"  and {differ} more differ, {len(more) - differ} more are equal")
        elif more:
            lines.append(f"  and {len(more)} more are equal")
        return lines

    def _tolerances(self) -> str:
        return " or ".join(f"{one:g}" for one in sorted({row.tolerance for row in self.rows}))


class Comparison:
    """Compares gradients of several windows, and keeps the largest difference of each parameter.

    Args:
        dtype: in which the model computes; None: in that of its parameters.
        rough: the device multiplies float32 numbers in a shorter format (TF32).

    Ranks: local.

    Example:
        >>> comparison = Comparison()
        >>> comparison.add({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.5])})
        False
        >>> [(row.parameter, row.difference, row.is_equal) for row in comparison.rows()]
        [('w', 0.5, False)]
    """

    def __init__(self, dtype: torch.dtype | None = None, *, rough: bool = False) -> None:
        self.dtype, self.rough = dtype, rough
        self._found: dict[str, ParityRow] = {}

    def add(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
        """Compare the gradients of one optimizer step.

        Args:
            found: those of the pretended ranks, by parameter; None where a parameter has none.
            expected: those of one process.

        Returns:
            Whether all are equal up to rounding.
        """
        largest = max((_largest(one) for one in expected.values() if one is not None), default=0.0)
        is_equal = True
        for name in {**expected, **found}:
            row = self._row(name, found.get(name), expected.get(name), largest)
            if row is None:
                continue
            is_equal = is_equal and row.is_equal
            before = self._found.get(name)
            if before is None or not row.relative <= before.relative:
                self._found[name] = row
        return is_equal

    def add_all(self, found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> bool:
        """Compare the gradients of all optimizer steps of a window; see :meth:`add`."""
        nothing: dict[str, Any] = {}  # a step of one side only differs in everything
        pairs = itertools.zip_longest(found, expected, fillvalue=nothing)
        equal = [self.add(one, other) for one, other in pairs]  # all are added, also after the first that differs
        return all(equal)

    def rows(self) -> tuple[ParityRow, ...]:
        """Return one row per parameter, those that differ most first."""
        return tuple(sorted(self._found.values(), key=lambda row: (row.is_equal, -row.relative)))

    def tolerance(self, dtypes: Iterable[torch.dtype]) -> float:
        """Return what a relative difference may be, for a gradient of some dtype.

        Args:
            dtypes: of the gradients on both sides.
        """
        kinds = [*dtypes, *([] if self.dtype is None else [self.dtype])]
        tolerance = max(TOLERANCES.get(dtype, TOLERANCES[torch.float32]) for dtype in kinds)
        return max(tolerance, 1e-2) if self.rough and tolerance == TOLERANCES[torch.float32] else tolerance

    def _row(self, name: str, found: Any, expected: Any, largest: float) -> ParityRow | None:
        present = [one for one in (found, expected) if one is not None]
        if not present:
            return None
        tolerance = self.tolerance(one.dtype for one in present)
        if len(present) == 1:
            return ParityRow(name, _largest(present[0]), float("inf"), tolerance)
        difference = _largest(found.double() - expected.double())
        size = max(_largest(expected), FLOOR * largest)
        relative = difference / size if size else (float("inf") if difference else 0.0)
        return ParityRow(name, difference, relative if math.isfinite(relative) else float("inf"), tolerance)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 of nothing."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
