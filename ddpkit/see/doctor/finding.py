"""A finding: what was measured, what was expected and why, and what to do about a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
LOOK = "look"
PROBLEM = "problem"
VERDICTS = (OK, LOOK, PROBLEM)  # from good to bad


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: a noun, the same on all ranks, such as ``"shared memory"``.
        verdict: one of :data:`VERDICTS`. A problem makes the command exit with 1.
        measured: the value, with its unit.
        expected: the value that a good machine has, with its unit.
        source: where the expectation comes from: a rule, a page, another rank.
        cost: what a run loses by the difference; shown unless the verdict is ok.
        advice: what to do; shown unless the verdict is ok.
        lines: a small table, shown below whatever the verdict is; at most 70 columns.
        details: plain values for ``--json`` alone.

    Example:
        >>> Finding(
        ...     "open files", OK, "1048576", "at least 4096", "one per tensor of a batch"
        ... ).is_problem
        False
    """

    name: str
    verdict: str
    measured: str
    expected: str
    source: str
    cost: str = ""
    advice: str = ""
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_problem(self) -> bool:
        """Whether a run will fail, or be far slower than it has to."""
        return self.verdict == PROBLEM


def not_looked_at(name: str, error: BaseException, expected: str = "an answer") -> Finding:
    """Make the finding of a check that has failed itself.

    Args:
        name: of the finding.
        error: what came in between.
        expected: what was asked for.

    Example:
        >>> not_looked_at("swap", PermissionError("no")).measured
        'could not be looked at: PermissionError: no'
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Finding(
        name,
        LOOK,
        f"could not be looked at: {reason}",
        expected,
        "this check",
        cost="a fault of this kind would not be seen",
        advice="Look at it by hand, or run the command with the rights that it needs.",
    )
