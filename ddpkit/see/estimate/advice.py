"""The sentence at the end: does it fit, and if not, what does."""

from __future__ import annotations

from ddpkit.options import OPTIONS
from ddpkit.see.amounts import counted, in_bytes
from ddpkit.see.estimate.figures import USABLE, MemoryEstimate, RankFigures

NO_MEMORY = (
    "There is no GPU here, so nothing is said about what fits. Give the memory of one: "
    "--memory=24GB, or with the option of the recipe --estimate=24GB."
)
NOTHING = "None of the strategies does on these numbers of processes."
MOST_OF_IT = 0.5  # of a peak: activations that large are worth computing again


def advice(found: MemoryEstimate) -> str:
    """Return a sentence or two on what runs, and fits.

    Args:
        found: the estimate.

    Ranks: local.
    """
    memory = found.memory
    if found.refusal is not None:
        return _cannot_run(found, *found.refusal)
    if memory is None:
        return NO_MEMORY
    own = found.chosen
    if own is None:
        return (
            "The strategy of the recipe does not say what it takes on "
            f"{counted(found.processes[0], 'process')}."
        )
    if own.fits(memory):
        amounts = f"{in_bytes(own.peak())} of {in_bytes(memory)}"
        return f"Fits under {_where(own)}: {amounts}{_room(found, own)}."
    ways = [*_smaller_batch(found, own), *_other_strategies(found)]
    does = f"What does: {'; or '.join(ways)}." if ways else NOTHING
    room = f"{in_bytes(own.peak())}, and {in_bytes(USABLE * memory)} of {in_bytes(memory)} are free"
    words = [f"Does not fit under {_where(own)}: {room}.", does, *_other_options(found, own)]
    return " ".join(words)


def _cannot_run(
    found: MemoryEstimate,
    strategy: str,
    why: str,
) -> str:
    """Say why the recipe's strategy does not run, and what would and fits."""
    others = [] if found.memory is None else _other_strategies(found)
    where = f"{strategy} on {counted(found.processes[0], 'process')}"
    words = [f"Cannot run under {where}: {why.rstrip('.')}."]
    words += [f"What runs, and fits: {other}." for other in others]
    return " ".join(words)


def _where(row: RankFigures) -> str:
    return f"{row.row['strategy']} on {counted(row.row['processes'], 'process')}"


def _room(
    found: MemoryEstimate,
    row: RankFigures,
) -> str:
    """Say how large the micro-batch may be."""
    largest = row.largest(found.memory or 0.0) if found.is_line else None
    return "" if largest is None else f"; batches of a process may have {largest} samples"


def _smaller_batch(
    found: MemoryEstimate,
    own: RankFigures,
) -> list[str]:
    largest = own.largest(found.memory or 0.0) if found.is_line else None
    if not largest:
        return []
    is_whole = "global_batch_size" in found.result["options"]
    return [f"--micro_batch_size={largest}" if is_whole else f"a batch_size of {largest}"]


def _other_strategies(found: MemoryEstimate) -> list[str]:
    """Name the first strategy that fits on the number of processes that is meant, or else on
    more.
    """
    memory = found.memory or 0.0
    others = [
        row
        for row in found.rows
        if row.fits(memory)
        and row.row["is_like_one_process"]
        and not row.row["refused"]
        and row.row["processes"] >= found.processes[0]
    ]
    if not others:
        return []
    # the fewest processes, and of these what holds most: it sends least
    best = min(
        others,
        key=lambda row: (row.row["processes"], -row.peak()),
    )
    return [f"{_where(best)}, {in_bytes(best.peak())}"]


def _other_options(
    found: MemoryEstimate,
    own: RankFigures,
) -> list[str]:
    """Name the options that would keep less of the activations, where these are most of it."""
    given = found.result["options"]
    names = [one.name for one in OPTIONS if one.saves_activations and not given.get(one.name)]
    if not names or own.activations < MOST_OF_IT * own.peak():
        return []
    return [f"--{names[0]} keeps less of its activations, {in_bytes(own.activations)}."]
