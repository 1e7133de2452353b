"""Rows of the tensors of all ranks, with gradients that go back to the rank of each row."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from ddpkit.base import POSITION, StageData, get_rank, is_distributed_initialized, waits_for_ranks
from ddpkit.comm import control_group
from ddpkit.distributed.main_only_code import ALONE
from ddpkit.errors import ConfigError, DataError, LaunchError

REPEATED = (
    "gather_with_gradient was called in a training with auto_micro_batch. Smaller parts of a batch "
    "would be compared with fewer rows, and a rank that has run out of memory would leave the "
    "others waiting. Give --micro_batch_size, and leave --auto_micro_batch out."
)
HALF = (torch.float16, torch.bfloat16)  # added up in float32 on a CPU


def gather_with_gradient(rows: Any) -> torch.Tensor:
    """Return the rows of all ranks, in the order of the ranks, as one tensor; gradients go back to
    each rank.

    It is for a loss over more samples than a rank has, such as a contrastive loss. In training a
    loss that each rank computes for all rows has the weights of one process. So has one that a rank
    computes for its own rows against all, where no rank repeats a batch to keep step: such a batch
    gives no rows. Ranks may have different numbers of rows, also none. Where each rank sees all of
    the data, as in an evaluation without ``shard_evaluation``, the rows are returned as they are.
    With accumulation the rows are those of a micro-batch of each rank.

    Args:
        rows: shape ``(n, ...)``, with the same type and the same other dimensions on every rank; on
            the device of the run.

    Returns:
        Shape ``(N, ...)``, with ``N`` the sum of all ranks' ``n``. In one process ``rows`` itself.

    Raises:
        DataError: the rows of two ranks have different types or shapes, on every rank; or ``rows``
            is no tensor of rows.
        ConfigError: called in an evaluation whose data is divided: there one rank may have more
            batches than another. Or in a training with ``auto_micro_batch``.
        LaunchError: called in main-only code, where the other ranks' rows would be missing.

    Ranks: collective, forward and backward: each rank uses the result in its loss.

    Source: the gradient of ``torch.distributed.nn.functional.all_gather``, for uneven rows.

    Example:
        >>> gather_with_gradient(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    if not (isinstance(rows, torch.Tensor) and rows.dim()):
        raise DataError(
            f"gather_with_gradient was given {_kind(rows)}: give a tensor whose first dimension "
            "counts samples."
        )
    is_in_stage = POSITION.progress is not None  # else a loop of the script's own
    if not is_distributed_initialized() or (is_in_stage and not StageData.divided):
        return rows
    if is_in_stage and not StageData.steps_together:
        raise ConfigError(
            "gather_with_gradient was called in an evaluation whose data is divided "
            "(shard_evaluation, predict): one rank may have more batches than another, and would "
            "wait for it. Collect the rows, and call self.gather in on_stage_end; or leave "
            "shard_evaluation out."
        )
    if StageData.may_repeat:
        raise ConfigError(REPEATED)
    if ALONE.get():
        raise LaunchError(
            "gather_with_gradient was called inside main-only code (run_on_main, "
            "main_process_only): the other ranks are not there. Call it on every rank."
        )
    own = rows if StageData.window.count else rows[:0]
    gathered: torch.Tensor = _Gathered.apply(own, _sizes(own))  # type: ignore[no-untyped-call]
    return gathered


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor without dimensions"
    return f"an object of type {type(value).__name__}"


@waits_for_ranks
def _sizes(rows: torch.Tensor) -> list[int]:
    """Return how many rows each rank has; check that they fit together."""
    world_size = dist.get_world_size()
    kind = f"{tuple(rows.shape[1:])} of {rows.dtype}"
    facts = torch.zeros(2, world_size, dtype=torch.int64)
    rank = get_rank() or 0
    facts[0, rank] = len(rows)
    # Tensors of other shapes would fail in the gathering below, on some backends without an end. A
    # digest travels with the number of rows, over the CPU: nobody waits for a GPU.
    facts[1, rank] = zlib.crc32(kind.encode())
    dist.all_reduce(facts, group=control_group())
    if len(set(facts[1].tolist())) > 1:
        raise DataError(
            f"gather_with_gradient: rank {rank} has rows of shape {kind}, and another rank has "
            "rows of another shape or type. Only the first dimension may differ."
        )
    sizes: list[int] = facts[0].tolist()
    return sizes


class _Gathered(torch.autograd.Function):
    """The rows of all ranks; backward, the sum of all ranks' gradients of this rank's rows."""

    @staticmethod
    @waits_for_ranks
    def forward(ctx: Any, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        # Backends gather tensors of one size: short ones are filled up, and cut off again below.
        most = max(sizes)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=_group_of(rows))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @waits_for_ranks
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        is_widened = gradient.dtype in HALF and gradient.device.type == "cpu"
        total = gradient.to(torch.float32) if is_widened else gradient
        total = total.contiguous().clone()  # the gradient itself may be another's, too
        dist.all_reduce(total, group=_group_of(total))
        rank = get_rank() or 0
        before = sum(ctx.sizes[:rank])
        own = total[before : before + ctx.sizes[rank]]
        return own.to(gradient.dtype), None


def _group_of(tensor: torch.Tensor) -> Any:
    """Return the group for tensors of a device: that of the run on GPUs takes none of the CPU."""
    return control_group() if tensor.device.type == "cpu" else None
