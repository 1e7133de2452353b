"""Exchange between two ranks over gloo, which takes a fraction of the time of gloo's own all-reduce.

gloo adds up and gathers in several rounds, with a change of threads in each: about 0.5 ms for a few kilobytes between
two processes of one machine, where one exchange takes 0.2 ms. Between two ranks both ways send the same number of
bytes, and a sum of two numbers has the same bits in either order. With more ranks the order of a sum would change. Of
megabytes gloo's own way takes no longer, and needs no memory beside the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import Work


EXCHANGED_BYTES = 2**20  # of 4 MiB on both ways take the same time, and an exchange needs the memory


def is_exchanged(tensors: Iterable[torch.Tensor], group: Any = None) -> bool:
    """Say whether tensors are exchanged: few bytes, on the CPU, of two ranks over gloo.

    Args:
        tensors: which are sent together.
        group: None: the default group.

    Ranks: local.

    Example:
        >>> is_exchanged([torch.ones(2**19)])  # 2 MiB
        False
    """
    sizes = [one.nbytes if one.is_cpu else EXCHANGED_BYTES + 1 for one in tensors]
    is_small = sum(sizes) <= EXCHANGED_BYTES
    return is_small and dist.get_world_size(group) == 2 and "gloo" in dist.get_backend(group)  # noqa: PLR2004 -- a pair


def exchange(own: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, Work]:
    """Start to exchange a tensor with the other rank of a pair.

    Args:
        own: contiguous, shape ``(N,)``; on both ranks of the same dtype and size. Not to be written into until the work
            is done.
        group: of two ranks.

    Returns:
        The other rank's tensor, and the work after which it is there.

    Ranks: collective.

    Example:
        >>> exchange(torch.ones(2))  # doctest: +SKIP
        (tensor([2., 2.]), <torch.distributed.distributed_c10d.Work object at ...>)
    """
    received, sizes = torch.empty_like(own), [0, 0]
    sizes[1 - dist.get_rank(group)] = len(own)
    work: Any = dist.all_to_all_single(received, own, sizes, sizes, group=group, async_op=True)
    return received, work


def start_sum(total: torch.Tensor, group: Any = None) -> Callable[[], object]:
    """Start to add up a tensor over the ranks of a group, in place.

    Args:
        total: contiguous; of the same dtype and size on all ranks.
        group: None: the default group.

    Returns:
        What waits for the sum.

    Ranks: collective.

    Example:
        >>> total = torch.ones(2)
        >>> start_sum(total)()  # doctest: +SKIP
        >>> total  # on two ranks  # doctest: +SKIP
        tensor([2., 2.])
    """
    if not is_exchanged([total], group):
        work: Work = dist.all_reduce(total, group=group, async_op=True)
        return work.wait
    flat = total.view(-1)
    received, exchanged = exchange(flat, group)

    def add() -> None:
        exchanged.wait()
        flat.add_(received)

    return add
