"""The record of verdicts: a line for each fault, in the order of the list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .fault import Fault
from .trial import CAUGHT, Verdict

PATH = Path(__file__).with_name("record.tsv")
HEAD = ("room", "fault", "verdict", "caught by")


def read_record(path: Path = PATH) -> dict[str, Verdict]:
    """Return the recorded verdicts by the names of the faults."""
    if not path.exists():
        return {}
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return {name: Verdict(kind, tests) for _, name, kind, *tests in rows}


def write_record(faults: Sequence[Fault], verdicts: dict[str, Verdict], path: Path = PATH) -> None:
    """Write the verdicts of all faults that have one."""
    tried = [(fault, verdicts[fault.name]) for fault in faults if fault.name in verdicts]
    rows = [(fault.room, fault.name, one.kind, *one.tests) for fault, one in tried]
    path.write_text("".join("\t".join(row) + "\n" for row in (HEAD, *rows)), encoding="utf-8")


def complaint(fault: Fault, now: Verdict, recorded: Verdict | None) -> str:
    """Say what is worse than in the record; empty if nothing is."""
    if recorded is None:
        return f"{fault.name!r} is not in the record: run with --record, and commit the record."
    if recorded.kind == CAUGHT and now.kind != CAUGHT:
        by = " ".join(recorded.tests)
        return f"{fault.name!r} was caught by {by}, and now: {now.kind}. Its tests: {fault.tests}"
    return ""
