"""The figures as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from ddpkit.see.amounts import counted, in_bytes
from ddpkit.see.estimate.advice import advice
from ddpkit.see.estimate.figures import STEP, USABLE, MemoryEstimate, RankFigures

PARTS = ("weights", "buffers", "gradients", "optimizer", "averages", "exchange", "activations")
ALWAYS = ("weights", "gradients", "optimizer", "activations")
IN_STEP = "*"
REFUSED = "!"


def report(found: MemoryEstimate) -> str:
    """Return the table, what has to be known of it, and the advice.

    Args:
        found: the estimate.
    """
    sections = [
        _heading(found),
        "\n".join(_table(found)),
        "\n".join(_notes(found)),
        advice(found),
    ]
    return "\n\n".join(sections)


def _heading(found: MemoryEstimate) -> str:
    result = found.result
    samples = result["samples"]
    batch = "a batch" if samples is None else counted(samples, "sample")
    where = result["device_name"] if result["device_name"] != "cpu" else "the CPU"
    return f"{found.recipe}: memory of each process. Rehearsed on {where} with {batch}."


def _table(found: MemoryEstimate) -> list[str]:
    rows = found.rows
    shown = list(ALWAYS)
    for part in PARTS:
        if part not in shown and any(_part(row, part) for row in rows):
            shown.append(part)
    shown.sort(key=PARTS.index)
    heads = ["micro-batch", *shown, "peak"]
    if found.memory is not None:
        heads.append("fits")
        if found.is_line:
            heads.append("up to")
    lines = [["", *heads]]
    lines += [_cells(found, row, shown) for row in rows]
    return _aligned(lines)


def _cells(
    found: MemoryEstimate,
    row: RankFigures,
    shown: Sequence[str],
) -> list[str]:
    mark = IN_STEP if row.moment == STEP else " "
    cells = [
        row.name + (REFUSED if row.row["refused"] else ""),
        str(row.row["samples"] or "?"),
    ]
    cells += [in_bytes(_part(row, part)) for part in shown]
    cells.append(in_bytes(row.peak()) + mark)
    if found.memory is None:
        return cells
    cells.append("yes" if row.fits(found.memory) else "no")
    if found.is_line:
        largest = row.largest(found.memory)
        cells.append("any" if largest is None else str(largest))
    return cells


def _part(
    row: RankFigures,
    part: str,
) -> float:
    return row.activations if part == "activations" else float(row.row[part])


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*lines, strict=True)
    widths = [max(map(len, column)) for column in columns]
    aligned = []
    for line in lines:
        name, *cells = line
        words = [name.ljust(widths[0])]
        for cell, width in zip(
            cells,
            widths[1:],
            strict=True,
        ):
            words.append(cell.rjust(width))
        aligned.append("  ".join(words).rstrip())
    return aligned


def _notes(found: MemoryEstimate) -> list[str]:
    rows = found.rows
    notes = []
    if any(row.moment == STEP for row in rows):
        notes.append(f"{IN_STEP} The peak is in the optimizer step; else in the backward pass.")
    notes.append("A peak is less than the sum of a row where gradients come while activations go.")
    if found.memory is not None:
        notes.append(
            f"Of {in_bytes(found.memory)}, {100 * USABLE:.0f} % are counted on: the rest is for "
            "the driver, NCCL, and gaps between allocations."
        )
        if found.is_line:
            notes.append("up to: the most samples of a micro-batch that fit.")
    notes += [f"{REFUSED} {row.name}: {row.row['refused']}" for row in rows if row.row["refused"]]
    notes += _impossible(found)
    unknown = found.result["unknown"]
    if unknown:
        notes.append(f"Not known, as the strategy does not say: {', '.join(unknown)}.")
    room = [found.room] if found.room else []
    return [*notes, *found.result["remarks"], *room]


def _impossible(found: MemoryEstimate) -> list[str]:
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in found.result["rows"]:
        if "impossible" in row:
            key = (row["strategy"], row["impossible"])
            reasons.setdefault(key, []).append(row["processes"])
    return [
        f"Left out, {strategy} on {_processes(numbers)}: {why.rstrip('.')}."
        for (strategy, why), numbers in reasons.items()
    ]


def _processes(numbers: Sequence[int]) -> str:
    *others, last = map(str, sorted(numbers))
    return ", ".join([*others, counted(int(last), "process")])
