"""Why a size is as fast as it is, in a sentence or two: what, by how much, what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpkit.run import SliceResult
from ddpkit.see.amounts import counted, in_bytes
from ddpkit.see.scale.losses import (
    COMPUTING,
    Losses,
    earliest_rank,
    has_fewer_threads,
    late_rank,
    losses_of,
)
from ddpkit.see.scale.summary import GOOD, TOO_GOOD, Row
from ddpkit.step_times import DATA, EXCHANGE, MOVE, OPTIMIZER, OTHER

#: Gradients of fewer bytes travel as fast as any: what takes time is each message, not its size.
SMALL_BYTES = 1e6
#: So large a part of a step, of waiting for data, is told of the smallest size, too.
MUCH_WAITING = 0.1
#: Seconds of waiting for data in a step below which loader workers cost more than they bring.
LEAST_WAITING = 0.001


def reason_of(row: Row) -> str:
    """Say why a size is as fast as it is.

    Args:
        row: of the size.

    Returns:
        A few sentences in one line.
    """
    if row.is_base:
        return _of_base(row)
    losses = losses_of(row)
    opening = f"{row.name}: {row.speed_up:.2f}x, {_percent(row.efficiency)}"
    if row.efficiency > TOO_GOOD:
        return (
            f"{opening}: more than so many processes can give. Something has held "
            f"{_processes(row.base)} back, such as other programs. Measure again."
        )
    if row.efficiency >= GOOD or losses.total <= 0:
        if waits_for_data(row):
            return f"{opening}, {row.word}, but it waits for data, as {_processes(row.base)} did."
        return f"{opening}, {row.word}. Nothing is lost that is worth a change."
    base = _processes(row.base)
    slower = f" Slower than {base}." if row.speed_up < 1 else ""
    return f"{opening}.{slower} {_CAUSES[losses.largest](row)}{_also_late(row, losses)}"


def _also_late(row: Row, losses: Losses) -> str:
    """Name a late rank beside a larger cause."""
    is_much = losses.largest != "late" and losses.late >= MUCH_WAITING * row.slice.step
    return f" Also, {_late(row)}" if is_much and late_rank(row.slice) is not None else ""


def _of_base(row: Row) -> str:
    """Say what holds the smallest size back by itself; nothing, if that is its own computing."""
    if not waits_for_data(row):
        return ""
    waiting = row.slice.phase(DATA) / row.slice.step
    return f"{row.name}: {_percent(waiting)} of a step waits for data. {_try_loader(row)}"


def waits_for_data(row: Row) -> bool:
    """Say whether a size waits for data so long that its loader is worth a look."""
    waiting = row.slice.phase(DATA)
    return waiting >= max(LEAST_WAITING, MUCH_WAITING * row.slice.step)


# ----------------------------------------------------------------------------------- one cause each


def _data(row: Row) -> str:
    share = _percent(row.slice.phase(DATA) / row.slice.step)
    slowest = max(
        range(len(row.slice.phases)),
        key=lambda rank: row.slice.phases[rank].get(DATA, 0.0),
    )
    seconds = row.slice.phases[slowest].get(DATA, 0.0)
    who = f"rank {slowest} most, {_milliseconds(seconds)}" if row.slice.world_size > 1 else ""
    where = f" ({who})" if who else ""
    return f"{share} of a step waits for data{where}: the loader is the limit. {_try_loader(row)}"


def _try_loader(row: Row) -> str:
    workers = row.slice.loader_workers
    if not workers:
        return "Try num_workers=2 or more in train_loader_kwargs."
    if row.slice.world_size / row.slice.nodes * (workers + 1) > row.slice.cores:
        return (
            f"{_processes(row.slice)} with {workers} loader workers each share "
            f"{row.slice.cores} cores. Try cheaper loading, or data prepared beforehand."
        )
    return f"Try more than num_workers={workers}, or data prepared beforehand."


def _transfer(row: Row) -> str:
    result = row.slice
    share = _percent(result.transfer_seconds / result.step)
    if not result.exchanged_bytes:
        return f"{share} of a step waits for other processes. Try larger batches."
    rate = result.exchanged_bytes / max(result.transfer_seconds, 1e-9)
    size = in_bytes(result.exchanged_bytes)
    if result.exchanged_bytes < SMALL_BYTES:
        return (
            f"{share} of a step waits for gradients. They are small ({size}), so each exchange "
            "costs time, and not its size. Try larger batches, or accumulation."
        )
    return (
        f"{share} of a step waits for gradients: {size} at {rate / 1e9:.1f} GB/s. {_try_less(row)}"
    )


def _try_less(row: Row) -> str:
    ways = ["larger batches", "accumulation (--grad_accumulation_factor)"]
    if row.slice.way == "ddp" and "ddp_comm_hook" not in row.slice.options:
        ways.insert(0, "--ddp_comm_hook=bf16")
    if row.slice.way == "fsdp":
        ways.insert(0, "--strategy=ddp, if the model fits")
    return f"Try {_listed(ways)}."


def _late(row: Row) -> str:
    result = row.slice
    share = _percent(
        (result.phases[earliest_rank(result)][EXCHANGE] - result.transfer_seconds) / result.step
    )
    rank = late_rank(result)
    if rank is None:
        return (
            f"{share} of a step waits for the slowest process, now this one, now that one. "
            "Try batches of equal cost (buckets by length), and fewer programs beside it."
        )
    phase, extra = _late_phase(row, rank)
    meaning = ", which ends where the model is called," if phase == MOVE else ""
    return (
        f"{share} of a step waits for rank {rank}, the last one in "
        f"{_percent(result.last[rank])} of the steps: its {phase} phase{meaning} takes "
        f"{_milliseconds(extra)} more than that of the others. "
        "Look at what it does there, and at its machine with `python -m ddpkit doctor`."
    )


def _late_phase(row: Row, rank: int) -> tuple[str, float]:
    """Return the phase in which a rank takes longer than the others, and by how much."""
    own = row.slice.phases[rank]
    others = [times for number, times in enumerate(row.slice.phases) if number != rank]

    def extra(phase: str) -> float:
        return own[phase] - sum(times[phase] for times in others) / len(others)

    phases = [phase for phase in own if phase not in {EXCHANGE, "step"}]
    found = max(phases, key=extra)
    return found, extra(found)


def _cores(row: Row) -> str:
    result = row.slice
    if has_fewer_threads(row):
        return (
            f"Forward and backward pass take {_slower(row):.1f}x as long per sample: each process "
            f"has {_threads(result)}, and {_processes(row.base)} had {_threads(row.base)} "
            f"of the same {result.cores} cores. More processes give these cores nothing new to do. "
            "Try more machines, or a GPU."
        )
    workers = f" and {result.loader_workers} loader workers" if result.loader_workers else ""
    each = " each" if result.world_size > 1 else ""
    return (
        f"The processes wait {_percent(max(result.core_waits))} of the time for a core: "
        f"{_processes(result)} with {_threads(result)}{workers}{each} on {result.cores} "
        "cores. Try fewer processes, fewer loader workers, or more cores."
    )


def _processes(result: SliceResult) -> str:
    return counted(result.world_size, "process")


def _threads(result: SliceResult) -> str:
    return counted(result.threads, "thread")


def _batch(row: Row) -> str:
    size = row.slice.samples_of_step / row.slice.size
    return (
        f"The batch is too small: a process has {size:.4g} samples in a step, and forward and "
        f"backward pass take {_slower(row):.1f}x as long per sample as with "
        f"{row.base.samples_of_step / row.base.size:.4g}. Try a larger global batch; --weak shows "
        "what that gives."
    )


def _computing(row: Row) -> str:
    return (
        f"Forward and backward pass take {_slower(row):.1f}x as long per sample, with the same "
        "batch. Something is shared or throttled: memory, power, or another program. Try `python "
        "-m ddpkit doctor`."
    )


def _slower(row: Row) -> float:
    now = sum(row.slice.phase(phase) for phase in COMPUTING)
    before = row.work * sum(row.base.phase(phase) for phase in COMPUTING)
    return now / max(before, 1e-9)


def _optimizer(row: Row) -> str:
    share = _percent(row.slice.phase(OPTIMIZER) / row.slice.step)
    ways = ["larger batches", "accumulation", "fused=True of the optimizer"]
    if row.slice.way == "ddp":
        ways.insert(0, "--strategy=zero1, which divides it")
    return (
        f"{share} of a step is the optimizer's, which every process does for all parameters. Try "
        f"{_listed(ways)}."
    )


def _other(row: Row) -> str:
    share = _percent(row.slice.phase(OTHER) / row.slice.step)
    return (
        f"{share} of a step is outside of data, forward, backward and optimizer: on_fit_batch_end, "
        "logging, waiting for values of the GPU. Try less of it in each step, or larger batches."
    )


_CAUSES: Mapping[str, Callable[[Row], str]] = {
    "data": _data,
    "transfer": _transfer,
    "late": _late,
    "cores": _cores,
    "batch": _batch,
    "computing": _computing,
    "optimizer": _optimizer,
    "other": _other,
}


# ------------------------------------------------------------------------------------------ words


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
