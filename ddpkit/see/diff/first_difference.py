"""The first optimizer step at which two runs differ, and what of it differs first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.see.diff.circumstances import circumstances, unknown_circumstances
from ddpkit.see.diff.hashed_run import FIELDS, differing, not_compared

if TYPE_CHECKING:
    from ddpkit.see.diff.circumstances import Circumstance
    from ddpkit.see.diff.hashed_run import HashedRun

BY_MODULE = ("gradients", "optimizer", "weights", "average")
NO_COMMON_STEP = (
    "no optimizer step has a record in both runs: {!r} has steps {}, {!r} has steps {}. Run one of "
    "them again with the --hash_every of the other."
)
SHOWN_STEPS = 4


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        runs: as given.
        common: the optimizer steps that both have recorded.
        step: the first of them that differs; None: none does.
        equal_before: the last one before it; None: there is none.
        differ: which fields of the step differ, in the order in which a step comes to them.
        modules: of gradients, states and weights: the modules whose digests differ.
        besides: what else differs between the runs.

    Ranks: local.
    """

    runs: tuple[HashedRun, HashedRun]
    common: list[int]
    step: int | None = None
    equal_before: int | None = None
    differ: list[str] = field(default_factory=list)
    modules: dict[str, list[str]] = field(default_factory=dict)
    besides: list[Circumstance] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether the step before the one that differs is known to be equal."""
        return self.step == 1 or self.step == (self.equal_before or 0) + 1

    @property
    def not_compared(self) -> list[str]:
        """Fields of the first record that differs, or of the last, that one run is too old for."""
        one, other = self.runs
        step = self.step or self.common[-1]
        return not_compared(one.steps[step], other.steps[step])

    def values(self, name: str) -> tuple[Any, Any]:
        """Return a field of the first record that differs, of either run."""
        one, other = self.runs
        step = self.step or self.common[-1]
        return one.steps[step].get(name), other.steps[step].get(name)

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values, for programs."""
        rows = [
            {
                "name": row.name,
                "values": row.values,
                "meaning": row.meaning,
                "steps": row.steps,
            }
            for row in self.besides
        ]
        return {
            "runs": [run.label for run in self.runs],
            "equal": self.step is None,
            "common_steps": self.common,
            "step": self.step,
            "equal_before": self.equal_before,
            "exact": self.is_exact if self.step else None,
            "first": self.differ[0] if self.differ else None,
            "differ": self.differ,
            "not_compared": self.not_compared,
            "modules": self.modules,
            "besides": rows,
            "unknown": unknown_circumstances(*self.runs),
            "problems": [run.problems for run in self.runs],
            "notes": [run.notes for run in self.runs],
        }


def compare(one: HashedRun, other: HashedRun) -> Comparison:
    """Find the first recorded optimizer step at which two runs differ.

    Args:
        one: of the runs.
        other: likewise.

    Raises:
        ConfigError: no step has a record in both.

    Ranks: local.
    """
    common = sorted(one.steps.keys() & other.steps.keys())
    if not common:
        raise ConfigError(
            NO_COMMON_STEP.format(
                one.label,
                _some(one),
                other.label,
                _some(other),
            )
        )
    before = None
    for step in common:
        records = one.steps[step], other.steps[step]
        differ = differing(*records)
        if differ:
            compared = [number for number in common if number <= step]
            return Comparison(
                (one, other),
                common,
                step,
                before,
                differ,
                _modules(*records),
                circumstances(one, other, compared),
            )
        before = step
    return Comparison((one, other), common, besides=circumstances(one, other, common))


def _modules(
    one: dict[str, Any],
    other: dict[str, Any],
) -> dict[str, list[str]]:
    """Return the modules whose digests differ, of each field that knows modules."""
    found = {}
    for name in BY_MODULE:
        digests = [record.get("modules", {}).get(name, {}) for record in (one, other)]
        modules = dict.fromkeys([*digests[0], *digests[1]])
        differ = [module for module in modules if digests[0].get(module) != digests[1].get(module)]
        if differ:
            found[name] = differ
    return found


def _some(run: HashedRun) -> str:
    steps = sorted(run.steps)
    shown = ", ".join(map(str, steps[:SHOWN_STEPS]))
    return f"{shown}, ..." if len(steps) > SHOWN_STEPS else shown


def equal_fields(comparison: Comparison) -> list[str]:
    """Return the fields of the step that are equal in both runs.

    Ranks: local.
    """
    left_out = {*comparison.differ, *comparison.not_compared}
    return [name for name in FIELDS if name not in left_out]
