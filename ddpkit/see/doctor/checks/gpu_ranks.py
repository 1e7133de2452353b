"""Which GPU each rank gets, and whether the GPUs of a run are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

SLOWER = 0.85  # of the median of all ranks
MEMORY_SHARE = 0.02


@dataclass(frozen=True)
class Seat:
    """A rank and its GPU.

    Attributes:
        rank: its number.
        host: its name.
        device: such as ``"cuda:1"``; ``"cpu"`` without a GPU.
        problem: why it gets none, in ddpkit's words.
        uuid: of the GPU, or of the MIG part; empty where torch does not tell.
        name: of the GPU.
        memory: of the GPU, in bytes.
    """

    rank: int
    host: str
    device: str
    problem: str = ""
    uuid: str = ""
    name: str = ""
    memory: int = 0

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Seat:
        """Make one from the fields of another."""
        return cls(**plain)


def seats(taken: Sequence[Seat]) -> Finding:
    """Look whether each rank has a GPU of its own.

    Args:
        taken: of all ranks that answer.
    """
    holders: dict[tuple[str, str], list[int]] = {}
    for seat in taken:
        if seat.uuid:
            holders.setdefault((seat.host, seat.uuid), []).append(seat.rank)
    twice = [
        f"ranks {', '.join(map(str, ranks))} on {host} share one GPU"
        for (host, _), ranks in holders.items()
        if len(ranks) > 1
    ]
    without = [f"rank {seat.rank}: {seat.problem}" for seat in taken if seat.problem]
    words = "; ".join([*twice, *without])
    return Finding(
        "GPU of each rank",
        PROBLEM if words else OK,
        words or _named(taken),
        "a GPU of its own for each rank",
        "NCCL refuses two ranks on one GPU; ddpkit goes by the local rank",
        cost="the run does not start",
        advice=(
            "Start as many processes on each host as it has GPUs (--nproc_per_node). A launcher "
            "that shows each process one GPU must show each another one (srun --gpus-per-task=1)."
        ),
        details={"ranks": {str(seat.rank): seat.device for seat in taken}},
    )


def _named(taken: Sequence[Seat]) -> str:
    if len(taken) == 1:
        return f"{taken[0].device}: {taken[0].name}"
    return f"{len(taken)} ranks, each with one of its own"


def alike(taken: Sequence[Seat], *, is_run: bool) -> Finding | None:
    """Look whether GPUs are of one kind.

    Args:
        taken: of all ranks; or, for one process, a seat for each GPU that it sees.
        is_run: whether all of them would train together.
    """
    known = [seat for seat in taken if seat.name]
    if len(known) < 2:  # noqa: PLR2004 -- two can differ
        return None
    kinds: dict[tuple[str, int], list[Seat]] = {}
    for seat in known:
        kind = next((kind for kind in kinds if _same(kind, seat)), (seat.name, seat.memory))
        kinds.setdefault(kind, []).append(seat)
    words = "; ".join(
        f"{len(ones)} x {name}, {memory / 2**30:.0f} GiB"
        + (f" ({_where(ones, is_run=is_run)})" if len(kinds) > 1 else "")
        for (name, memory), ones in kinds.items()
    )
    differ = PROBLEM if is_run else LOOK
    return Finding(
        "GPUs alike",
        differ if len(kinds) > 1 else OK,
        words,
        "one kind, with the same memory",
        "all ranks do the same work, and wait for each other in each step",
        cost="each step is as slow as on the slowest, and a batch must fit into the smallest",
        advice="Choose GPUs of one kind (CUDA_VISIBLE_DEVICES, or the scheduler's constraint).",
    )


def _same(kind: tuple[str, int], seat: Seat) -> bool:
    name, memory = kind
    return name == seat.name and abs(memory - seat.memory) <= MEMORY_SHARE * max(memory, 1)


def _where(ones: Sequence[Seat], *, is_run: bool) -> str:
    if not is_run:
        return ", ".join(seat.device for seat in ones)
    return ", ".join(f"rank {seat.rank} on {seat.host}" for seat in ones)


def even_speed(flops: Mapping[str, float]) -> Finding | None:
    """Compare what the GPUs compute in a second with each other.

    Args:
        flops: operations per second, by the name of a GPU or rank.

    Example:
        >>> even_speed({"rank 0": 7e14, "rank 1": 4e14, "rank 2": 7e14}).measured
        'rank 1: 400 TFLOP/s, 57 % of the median (700 TFLOP/s)'
    """
    if not flops:
        return None
    ordered = sorted(flops.values())
    median = ordered[len(ordered) // 2]
    slow = {name: value for name, value in flops.items() if value < SLOWER * median}
    words = "; ".join(
        f"{name}: {value / 1e12:.0f} TFLOP/s, {100 * value / median:.0f} % of the median"
        for name, value in slow.items()
    )
    if slow:
        words += f" ({median / 1e12:.0f} TFLOP/s)"
    return Finding(
        "speed of the GPUs",
        PROBLEM if slow else OK,
        words or f"{min(ordered) / 1e12:.0f} to {max(ordered) / 1e12:.0f} TFLOP/s",
        f"at least {SLOWER * 100:.0f} % of the median of all",
        "products of float16 matrices of 4096 x 4096 for 0.15 s, measured by torch",
        cost="each step is as slow as on the slowest GPU",
        advice="Look at its clocks, heat, power limit and other processes, above.",
        details={"flops_per_second": dict(flops)},
    )
