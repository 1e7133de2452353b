"""The findings as a person reads them: one line for what is well, a block for what is not, the
worst last.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpkit.base import spans
from ddpkit.see.amounts import counted
from ddpkit.see.doctor.examination import Examination, Placed
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, VERDICTS, Finding

WIDTH = 80
VERDICT_COLUMNS = 9
NAME_COLUMNS = 20
LABEL_COLUMNS = 10
MOST_VALUES = 4  # shown of a finding that differs between hosts
_WORDS = {OK: "ok", LOOK: "look", PROBLEM: "PROBLEM"}


def table(examination: Examination, *, verbose: bool = False) -> str:
    """Write the findings in 80 columns, the worst last, where the eye is.

    Args:
        examination: the findings of all ranks.
        verbose: whether to say of everything what was expected, and why.
    """
    placed = examination.placed
    everywhere = _Everywhere(set(range(examination.world_size)), set(examination.hosts))
    rows = []
    for verdict in VERDICTS:
        for group in grouped(finding for finding in placed if finding.finding.verdict == verdict):
            rows += _row(group, everywhere, is_block=verbose or verdict != OK)
    return "\n".join([*rows, "", *_wrapped("", summary(placed))]).lstrip("\n")


def summary(placed: Sequence[Placed]) -> str:
    """Say in a line how many findings there are of each kind.

    Args:
        placed: the findings of all ranks.

    Example:
        >>> summary([])
        '0 problems, 0 to look at, 0 ok'
    """
    count = dict.fromkeys(VERDICTS, 0)
    names = []
    for group in grouped(placed):
        count[group[0].finding.verdict] += 1
        if group[0].finding.is_problem:
            names.append(group[0].finding.name)
    which = f": {', '.join(dict.fromkeys(names))}" if names else ""
    return f"{counted(count[PROBLEM], 'problem')}, {count[LOOK]} to look at, {count[OK]} ok{which}"


def grouped(placed: Iterable[Placed]) -> list[list[Placed]]:
    """Bring together what says the same of several ranks: name, verdict and shown advice are equal.

    Args:
        placed: findings.
    """
    groups: dict[tuple[str, str, str], list[Placed]] = {}
    for finding in placed:
        is_shown = finding.finding.verdict != OK
        key = (
            finding.finding.name,
            finding.finding.verdict,
            finding.finding.advice if is_shown else "",
        )
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _row(
    group: Sequence[Placed],
    everywhere: _Everywhere,
    *,
    is_block: bool,
) -> list[str]:
    finding = group[0].finding
    start = f"{_WORDS[finding.verdict]:{VERDICT_COLUMNS}}{finding.name:{NAME_COLUMNS}} "
    measured = _measured(group, everywhere)
    if not is_block:
        return [*_wrapped(start, measured, len(start)), *_lines(finding)]
    rows = ["", start.rstrip()]
    for label, text in (
        ("found", measured),
        ("expected", finding.expected),
        ("because", finding.source),
        ("cost", "" if finding.verdict == OK else finding.cost),
        ("do", "" if finding.verdict == OK else finding.advice),
    ):
        if text:
            rows += _wrapped(" " * VERDICT_COLUMNS + f"{label:{LABEL_COLUMNS}}", text)
    return [*rows, *_lines(finding)]


def _lines(finding: Finding) -> list[str]:
    return [" " * VERDICT_COLUMNS + line for line in finding.lines]


def _wrapped(start: str, text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        start + text,
        WIDTH,
        subsequent_indent=" " * (indent or len(start)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _measured(group: Sequence[Placed], everywhere: _Everywhere) -> str:
    """Say what was measured, and where, if it is not the same everywhere."""
    by_value: dict[str, list[Placed]] = {}
    for placed in group:
        by_value.setdefault(placed.finding.measured, []).append(placed)
    shown = []
    for value, ones in list(by_value.items())[:MOST_VALUES]:
        where = everywhere.less(ones)
        shown.append(f"{value} ({where})" if where else value)
    more = len(by_value) - len(shown)
    return "; ".join(shown) + (f"; and {more} other values" if more else "")


@dataclass(frozen=True)
class _Everywhere:
    """All ranks and hosts."""

    ranks: set[int]
    hosts: set[str]

    def less(self, ones: Sequence[Placed]) -> str:
        """Say where some findings were made; nothing where that is everywhere."""
        hosts = list(dict.fromkeys(placed.host for placed in ones))
        named = ", ".join(hosts[:MOST_VALUES]) + (", ..." if len(hosts) > MOST_VALUES else "")
        ranks = {placed.rank for placed in ones}
        if ones[0].is_of_host:
            return "" if set(hosts) == self.hosts else named
        if ranks == self.ranks:
            return ""
        words = f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
        return words if len(self.hosts) == 1 else f"{words} on {named}"
