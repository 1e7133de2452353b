"""The collectives that recipes use: barrier, broadcast and all-reduce."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ddpkit.base import is_distributed_initialized
from ddpkit.comm import await_late, control_group, get_runtime
from ddpkit.distributed.main_only_code import ALONE, ddp_prevent_block
from ddpkit.distributed.marked_sums import start_sum_over_ranks
from ddpkit.errors import LaunchError

T = TypeVar("T")


def ddp_barrier() -> None:
    """Wait until every rank is here. Does nothing in one process and in main-only code.

    There is no time limit outside of ``fit`` and ``evaluate`` while the other ranks live. After
    half a minute it is said where they are. Work of the main process alone is better given to
    :func:`run_on_main`.

    Raises:
        RankFailedError: a rank has come to its end without making this call.
        RankMismatchError: another rank has come to another call.

    Ranks: collective.

    Example:
        >>> ddp_barrier()
    """
    if not ddp_prevent_block():
        with get_runtime().mailbox.forgetting():
            start_sum_over_ranks([], "ddp_barrier", is_patient=True)()


def ddp_broadcast(communication_object: T, src: int = 0) -> T:
    """Give every rank the object of rank ``src``. Returns it unchanged in one process and in
    main-only code.

    Args:
        communication_object: anything that pickles; only ``src``'s object counts.
        src: the sending rank.

    Returns:
        The object of rank ``src``.

    Ranks: collective.

    Example:
        >>> ddp_broadcast([1, 2])
        [1, 2]
    """
    if ddp_prevent_block():
        return communication_object
    box: list[Any] = [communication_object]
    # a rank in another call is named here, and waited for without a limit; torch would do neither
    start_sum_over_ranks([], "ddp_broadcast", is_patient=True)()
    dist.broadcast_object_list(box, src=src, group=control_group())
    result: T = box[0]
    return result


def ddp_all_reduce(
    communication_object: torch.Tensor,
    reduce_op: Any = ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place.

    Args:
        communication_object: tensor of any shape, the same on every rank.
        reduce_op: a ``torch.distributed.ReduceOp``.

    Returns:
        The same tensor, reduced; unchanged in one process.

    Raises:
        LaunchError: called inside main-only code, where the result could not be what was asked for.

    Ranks: collective.

    Example:
        >>> ddp_all_reduce(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_distributed_initialized():
        return communication_object
    if ALONE.get():
        raise LaunchError(
            "ddp_all_reduce was called inside main-only code (run_on_main, main_process_only): "
            "the other ranks are not there, so the tensor cannot be reduced. Reduce before the "
            "main-only call and pass the result in."
        )
    # the default group of a run on GPUs, NCCL, takes no tensors of the CPU
    if communication_object.device.type != "cpu":
        dist.all_reduce(communication_object, op=reduce_op)
        return communication_object
    work = dist.all_reduce(
        communication_object,
        op=reduce_op,
        group=control_group(),
        async_op=True,
    )
    await_late(work, "ddp_all_reduce")
    return communication_object
