"""The norm of gradients of which each rank has a part, with the bits that one process with whole
gradients computes.

Every gradient is put together on one rank, which computes its norm by the same kernel as one
process would. The gradients are dealt out, so that each rank puts together as many numbers as it
has parts of: as many bytes travel as a rank has of the gradients.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ddpkit.base import local_part, waiting
from ddpkit.comm import BUCKET_BYTES
from ddpkit.compat import norm_of_norms, norms_of_each
from ddpkit.strategies.rank_memory import bytes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def norm_of_parts(gradients: Sequence[Any]) -> torch.Tensor:
    """Return the norm of gradients, as of one vector: the bits of
    :func:`~ddpkit.compat.torch_inside.norm_of_all` of the whole ones.

    Args:
        gradients: divided by their first dimension, of one dtype; the same on all ranks.

    Returns:
        Shape ``()``, the same on all ranks.

    Ranks: collective.
    """
    mesh = gradients[0].device_mesh
    group = mesh.get_group()
    ranks: int = mesh.size()
    owners = _owners(gradients, ranks)
    own = local_part(gradients[0])
    norms = own.new_zeros(len(gradients))
    for places in _buckets(gradients):
        mine = [place for place in places if owners[place] == mesh.get_local_rank()]
        wholes = _put_together(
            gradients,
            places,
            owners,
            mine,
            group,
        )
        pairs = zip(
            mine,
            norms_of_each(wholes),
            strict=True,
        )
        for place, norm in pairs:
            norms[place] = norm
    with waiting():
        dist.all_reduce(norms, group=group)  # one rank has each of them, the others zeros
    return norm_of_norms(norms.unbind())


def _owners(gradients: Sequence[Any], ranks: int) -> list[int]:
    """Return which rank puts each gradient together: the largest first, each on the rank with the
    least.
    """
    owners = [0] * len(gradients)
    loads = [0] * ranks
    for place in sorted(range(len(gradients)), key=lambda one: -gradients[one].numel()):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += gradients[place].numel()
    return owners


def _buckets(gradients: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the places of gradients that travel together."""
    places: list[int] = []
    size = 0.0
    for place, gradient in enumerate(gradients):
        places.append(place)
        size += bytes_in(gradient)
        if size >= BUCKET_BYTES:
            yield places
            places = []
            size = 0.0
    if places:
        yield places


def _put_together(
    gradients: Sequence[Any],
    places: list[int],
    owners: list[int],
    mine: list[int],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Send this rank's parts of some gradients to their owners; return the whole ones of this
    rank.
    """
    ranks = range(group.size())
    own = local_part(gradients[0])
    to = [[place for place in places if owners[place] == rank] for rank in ranks]
    parts = {place: local_part(gradients[place]).reshape(-1) for place in places}
    in_order = [parts[place] for those in to for place in those]
    # torch joins no empty list
    sent = torch.cat([own.new_empty(0), *in_order])
    item = sent.element_size()
    counts = [sum(parts[place].numel() for place in those) * item for those in to]
    coming = [[_part_size(gradients[place], rank, len(ranks)) for place in mine] for rank in ranks]
    received = sent.new_empty(sum(map(sum, coming)))
    with waiting():
        # bytes travel: not every backend knows every dtype
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [sum(sizes) * item for sizes in coming],
            counts,
            group=group,
        )
    # rank by rank, and of each rank gradient by gradient
    pieces = torch.split(received, list(itertools.chain.from_iterable(coming)))
    return [
        torch.cat(pieces[number :: len(mine)]).view(gradients[place].shape)
        for number, place in enumerate(mine)
    ]


def _part_size(gradient: Any, rank: int, ranks: int) -> int:
    """Return how many numbers of a gradient a rank has: rows as of ``torch.chunk``."""
    rows: int = gradient.shape[0]
    size = -(-rows // ranks)
    own = min(rows, (rank + 1) * size) - min(rows, rank * size)
    return own * (gradient.numel() // rows) if rows else 0
