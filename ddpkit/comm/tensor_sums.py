"""Sums of tensors over ranks, and exchanges between two: started, and waited for where they are
needed.

Between two ranks on CPUs a small tensor is exchanged, which takes less than half the time of gloo's
sum.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpkit.base import WAITS, waits_for_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


# of 4 MiB on both ways take the same time, and an exchange needs the memory
EXCHANGED_BYTES = 2**19

# See keep_alive.
_lately_used: deque[torch.Tensor] = deque(maxlen=64)


def is_exchanged(tensors: Iterable[torch.Tensor], group: Any = None) -> bool:
    """Say whether tensors are exchanged: few bytes, on the CPU, of two ranks over gloo.

    gloo adds up and gathers in several rounds, with a change of threads in each: about 0.5 ms for a
    few kilobytes between two processes of one machine, where one exchange takes 0.2 ms. Between two
    ranks both ways send the same number of bytes, and a sum of two numbers has the same bits in
    either order. With more ranks the order of a sum would change. Of megabytes gloo's own way takes
    no longer, and needs no memory beside the tensor.

    Args:
        tensors: which are sent together.
        group: None: the default group.

    Ranks: local.

    Example:
        >>> is_exchanged([torch.ones(2**18)])  # 1 MiB
        False
    """
    sizes = [tensor.nbytes if tensor.is_cpu else EXCHANGED_BYTES + 1 for tensor in tensors]
    is_small = sum(sizes) <= EXCHANGED_BYTES
    return is_small and dist.get_world_size(group) == 2 and "gloo" in dist.get_backend(group)  # noqa: PLR2004 -- a pair


def keep_alive(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a small tensor for a while that goes into a collective, and return it.

    A collective's thread lets go of its tensor a moment after the caller has been answered. If that
    is the last to hold it, the thread enters Python to delete it; and a process that is forked in
    this moment, such as a loader's worker, inherits a lock of the interpreter that nobody will ever
    release.

    Args:
        tensor: on the CPU, of any shape and dtype.

    Ranks: local.

    State: the last 64 such tensors of this process.

    Example:
        >>> keep_alive(torch.ones(2))
        tensor([1., 1.])
    """
    _lately_used.append(tensor)
    return tensor


@waits_for_ranks
def exchange_tensor(own: torch.Tensor, group: Any = None) -> Callable[[], torch.Tensor]:
    """Start to exchange a tensor with the other rank of a pair.

    Args:
        own: contiguous, shape ``(N,)``; on both ranks of the same dtype and size. Not to be written
            into before the other's is there.
        group: of two ranks.

    Returns:
        What waits for the other rank's tensor, and returns it.

    Ranks: collective.

    Example:
        >>> exchange_tensor(
        ...     torch.ones(2)
        ... )()  # on rank 0; rank 1 gives torch.zeros(2)  # doctest: +SKIP
        tensor([0., 0.])
    """
    received = keep_alive(torch.empty_like(own))
    sizes = [0, 0]
    sizes[1 - dist.get_rank(group)] = len(own)
    work: Any = dist.all_to_all_single(
        received,
        keep_alive(own),
        sizes,
        sizes,
        group=group,
        async_op=True,
    )

    def wait() -> torch.Tensor:
        _await(work)
        return received

    return wait


@waits_for_ranks
def start_sum(total: torch.Tensor, group: Any = None) -> Callable[[], object]:
    """Start to add up a tensor over the ranks of a group, in place.

    Args:
        total: contiguous; of the same dtype and size on all ranks.
        group: None: the default group.

    Returns:
        What waits for the sum; to be called once.

    Ranks: collective.

    Example:
        >>> total = torch.ones(2)
        >>> start_sum(total)()  # doctest: +SKIP
        >>> total  # on two ranks  # doctest: +SKIP
        tensor([2., 2.])
    """
    if not is_exchanged([total], group):
        work: Any = dist.all_reduce(total, group=group, async_op=True)
        return functools.partial(_await, work)
    flat = total.view(-1)
    other = exchange_tensor(flat, group)
    return lambda: flat.add_(other())


@waits_for_ranks
def _await(work: Any) -> None:
    """Wait for a collective, as a stopwatch is told; the frame says that this rank waits."""
    watch = WAITS.watch
    before = None if watch is None else watch.begin_wait()
    work.wait()
    if watch is not None:
        watch.end_wait(before)
