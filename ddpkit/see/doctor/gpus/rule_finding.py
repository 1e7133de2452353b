"""A finding about several GPUs of a machine: the worst of them makes its verdict and is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpkit.see.doctor.finding import OK, VERDICTS, Finding
from ddpkit.see.doctor.gpus.driver import Gpu


@dataclass(frozen=True)
class Row:
    """What was seen of one GPU."""

    gpu: Gpu
    verdict: str
    measured: str


@dataclass(frozen=True)
class Rule:
    """What is expected of each GPU, and what a difference costs; as in a finding."""

    name: str
    expected: str
    source: str
    cost: str
    advice: str


def finding_of(rule: Rule, rows: Sequence[Row], **details: Any) -> Finding:
    """Make the finding.

    Args:
        rule: that the GPUs were looked at by.
        rows: of each GPU, at least one.
        details: for ``--json``.

    Example:
        >>> rule = Rule("PCIe link", "x16", "the slot", "slow copies", "Seat it again.")
        >>> finding_of(rule, [Row(Gpu(0), "ok", "x16"), Row(Gpu(1), "look", "x8")]).measured
        'GPU 1: x8'
        >>> finding_of(rule, [Row(Gpu(0), "ok", "x16"), Row(Gpu(1), "ok", "x16")]).measured
        '2 GPUs: x16'
    """
    verdict = max((row.verdict for row in rows), key=VERDICTS.index)
    shown = [row for row in rows if row.verdict == verdict]
    by_value: dict[str, list[int]] = {}
    for row in shown:
        by_value.setdefault(row.measured, []).append(row.gpu.index)
    if verdict == OK and len(by_value) == 1:
        measured = shown[0].measured
        measured = measured if len(shown) == 1 else f"{len(shown)} GPUs: {measured}"
    else:
        measured = "; ".join(f"{_names(each)}: {value}" for value, each in by_value.items())
    each: Mapping[str, str] = {str(row.gpu.index): row.measured for row in rows}
    return Finding(
        rule.name,
        verdict,
        measured,
        rule.expected,
        rule.source,
        cost=rule.cost,
        advice=rule.advice,
        details={"gpus": each, **details},
    )


def _names(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
