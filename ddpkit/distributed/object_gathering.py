"""Objects of all ranks, whatever their size."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ddpkit.base import is_distributed_initialized, waits_for_ranks
from ddpkit.comm import control_group, get_runtime, keep_alive
from ddpkit.distributed.main_only_code import require_all_ranks
from ddpkit.distributed.marked_sums import start_sum_over_ranks
from ddpkit.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


def gather_objects(make: Callable[[], T]) -> list[T]:
    """Make a value on every rank and give every rank the list of all of them, in rank order,
    whatever their size.

    The values travel in collectives on the CPU group, not through the store as in :func:`exchange`:
    use it for large results. Meanwhile a rank holds the values of all ranks, and one of them
    pickled as well.

    Args:
        make: makes this rank's value, which must pickle; tensors best on the CPU.

    Returns:
        One value per rank, copies each; ``[make()]`` itself without a process group.

    Raises:
        LaunchError: called inside main-only code, where the others are not there.
        RankFailedError: ``make`` failed on another rank, or its value does not pickle there.
        Exception: ``make`` failed on this rank; the original exception.

    Ranks: collective.

    Example:
        >>> gather_objects(lambda: "here")
        ['here']
    """
    if not is_distributed_initialized():
        return [make()]
    require_all_ranks("gather_objects")
    failure: Exception | None = None
    try:
        data = pickle.dumps(make())
    except Exception as error:  # noqa: BLE001 -- raised below, once the others know
        failure = error
        data = pickle.dumps(f"{type(error).__name__}: {error}")
    with get_runtime().mailbox.forgetting():
        start_sum_over_ranks([], "gather_objects", is_patient=True)()
        payloads, failed = _gather_bytes(data, failed=failure is not None)
    if failure is not None:
        raise failure
    if any(failed):
        words = [
            f"rank {rank}: {pickle.loads(payloads[rank])}"  # noqa: S301 -- a rank of this very job
            for rank, bad in enumerate(failed)
            if bad
        ]
        raise RankFailedError(
            f"nothing could be gathered, because it failed elsewhere: {'; '.join(words)}"
        )
    values: list[T] = []
    # what is unpickled goes at once: both forms of all values might not fit into memory
    while payloads:
        values.append(pickle.loads(payloads.pop(0)))  # noqa: S301 -- as above
    return values


@waits_for_ranks
def _gather_bytes(
    data: bytes,
    *,
    failed: bool,
) -> tuple[list[Any], list[bool]]:
    """Give every rank all ranks' bytes, and whether each failed: sizes first, then each rank
    broadcasts its own.
    """
    group = control_group()
    rank = dist.get_rank()
    facts = keep_alive(torch.tensor([len(data), int(failed)]))
    everybody = [keep_alive(torch.empty_like(facts)) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, facts, group=group)
    payloads = []
    for source, (size, _) in enumerate(facts_of_rank.tolist() for facts_of_rank in everybody):
        mine = source == rank
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if mine
            else torch.empty(size, dtype=torch.uint8)
        )
        dist.broadcast(buffer, src=source, group=group)
        payloads.append(buffer.numpy())
    return payloads, [bool(facts_of_rank[1]) for facts_of_rank in everybody]
