"""Sums of a few numbers that carry a mark of their call: ranks in different calls are found."""

from __future__ import annotations

import traceback
import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpkit.base import do_nothing, is_distributed_initialized, line_of, waits_for_ranks
from ddpkit.comm import control_group, is_exchanged, keep_alive, start_patient_sum, start_sum
from ddpkit.distributed.main_only_code import require_all_ranks
from ddpkit.errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable


MARKED_NUMBERS = 30  # that travel with the mark of a call


@waits_for_ranks
def start_sum_over_ranks(
    values: list[float],
    call: str = "start_sum_over_ranks",
    *,
    is_patient: bool = False,
    look: Callable[[], object] = do_nothing,
) -> Callable[[], list[float]]:
    """Start to add up a few numbers over all ranks, as :func:`sum_over_ranks` does, and do not wait
    for the sums.

    A mark of the call travels with them. It has one size for all calls: of different sizes gloo
    would end the process.

    Args:
        values: the same number of them on every rank, at most :data:`MARKED_NUMBERS`.
        call: names the call, the same on every rank.
        is_patient: wait without a limit for ranks that come late, as after work of the main process
            alone.
        look: called every few seconds of a patient wait; may raise where a rank cannot come any
            more.

    Returns:
        What waits for the sums and returns them; it may be called once, later, or not at all. Other
        collectives may come in between.

    Raises:
        RankMismatchError: by that, on every rank: another rank has come to another call.

    Ranks: collective.

    Example:
        >>> start_sum_over_ranks([1.5, 2.0])()
        [1.5, 2.0]
    """
    if not is_distributed_initialized():
        return lambda: list(values)
    require_all_ranks(call)
    # Equal marks add up to the mark times the ranks, and so do their squares. Different marks can
    # do the first by chance, but not both. They are small: the sum of their squares is exact.
    mark = zlib.crc32(call.encode()) % 2**20
    world_size = dist.get_world_size()
    numbers = [
        float(mark),
        float(mark**2),
        *values,
        *[0.0] * (MARKED_NUMBERS - len(values)),
    ]
    tensor = keep_alive(torch.tensor(numbers, dtype=torch.float64))
    wait = (
        _start_patient_sum(tensor, call, look) if is_patient else start_sum(tensor, control_group())
    )

    def finish() -> list[float]:
        wait()
        sums: list[float] = tensor.tolist()
        if sums[:2] != [world_size * number for number in numbers[:2]]:
            raise RankMismatchError(
                f"rank {dist.get_rank()} has come to {call}, at "
                f"{line_of(traceback.extract_stack())}, and another rank to another collective: "
                "their numbers do not belong together. Make each of these calls on every rank, "
                "not under `if if_main_process():`, and use only its result there."
            )
        return sums[2 : 2 + len(values)]

    return finish


def _start_patient_sum(
    total: torch.Tensor,
    call: str,
    look: Callable[[], object],
) -> Callable[[], object]:
    group = control_group()
    return start_patient_sum(
        total,
        call,
        group,
        exchanges=is_exchanged([total], group),
        look=look,
    )
