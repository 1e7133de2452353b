"""How fast the ranks average and send: measured in a process group of its own."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

SIZES = (
    4 * 2**10,
    64 * 2**10,
    2**20,
    8 * 2**20,
    64 * 2**20,
)  # bytes
MORE_SIZES = (*SIZES, 256 * 2**20)  # NVLink needs more to show what it can
PAIR_BYTES = 4 * 2**20
FIRST_PAIR_BYTES = 64 * 2**10
SECONDS_OF_A_SIZE = 0.25
MOST_SECONDS = 1.0  # of a single all-reduce; larger sizes are then left out
MOST_TIMES = 40
FEWEST_TIMES = 3
COPIED_FLOATS = 8 * 2**20


@dataclass(frozen=True)
class Place:
    """What a measurement needs to know.

    Attributes:
        rank: of this process.
        world_size: how many there are.
        backend: such as ``"gloo"``.
        device: of this process, such as ``"cuda:1"``.

    Ranks: local.
    """

    rank: int
    world_size: int
    backend: str
    device: str

    @property
    def is_gpu(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device.startswith("cuda")


@contextlib.contextmanager
def process_group(place: Place, store: Store, seconds: float) -> Iterator[None]:
    """Make a process group for a while.

    Args:
        place: of this process.
        store: of this measurement alone.
        seconds: that a collective may take.

    Ranks: collective.
    """
    if place.is_gpu:
        torch.cuda.set_device(torch.device(place.device))
    dist.init_process_group(
        place.backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device(place.device) if place.is_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduce_seconds(
    place: Place,
    sizes: Sequence[int] = SIZES,
) -> dict[int, list[float]]:
    """Return the seconds of some all-reduces, by bytes; what would take too long is left out.

    Args:
        place: of this process; its group is there.
        sizes: in bytes, ascending.

    Ranks: collective; the numbers are this rank's own.
    """
    found: dict[int, list[float]] = {}
    for size in sizes:
        values = torch.ones(size // 4, device=place.device)
        average = functools.partial(dist.all_reduce, values)
        first = min(_agreed(place, _timed(place, average)) for _ in range(2))
        times = _times(first)
        taken = []
        for _ in range(times):
            values.fill_(1.0)
            taken.append(_timed(place, average))
        found[size] = taken
        following = next((other for other in sizes if other > size), size)
        if _agreed(place, min(taken)) * following / size > MOST_SECONDS:
            break
    return found


def pair_seconds(
    place: Place,
    pairs: Sequence[tuple[int, int]],
    times: int,
) -> dict[tuple[int, int], tuple[int, float]]:
    """Have pairs of ranks send to each other, one pair after another.

    Args:
        place: of this process; its group is there.
        pairs: of ranks.
        times: that each pair sends; the best counts, for other work on the machines only slows it.

    Returns:
        Bytes, and the seconds in which both had sent them, of the pairs with this rank.

    Ranks: collective.
    """
    found: dict[tuple[int, int], tuple[int, float]] = {}
    for pair in pairs:
        if place.rank in pair:
            other = pair[1] if pair[0] == place.rank else pair[0]
            found[pair] = _between(place, other, times)
        dist.barrier()
    return found


def _between(place: Place, other: int, times: int) -> tuple[int, float]:
    size = FIRST_PAIR_BYTES
    first = _exchanged(place, other, size, FEWEST_TIMES)
    whole = first * PAIR_BYTES / size
    # The two must decide alike; each tells the other what it has seen.
    own = torch.tensor([whole], device=place.device)
    theirs = torch.zeros(1, device=place.device)
    _swap(place, other, own, theirs)
    if max(float(own), float(theirs)) > MOST_SECONDS:
        return size, first
    return PAIR_BYTES, _exchanged(place, other, PAIR_BYTES, times)


def _exchanged(
    place: Place,
    other: int,
    size: int,
    times: int,
) -> float:
    own = torch.ones(size // 4, device=place.device)
    theirs = torch.empty_like(own)
    _swap(place, other, own, theirs)  # the first time connects
    return min(_timed(place, lambda: _swap(place, other, own, theirs)) for _ in range(times))


def _swap(
    place: Place,
    other: int,
    own: Tensor,
    theirs: Tensor,
) -> None:
    """Send to another rank, and receive from it, at the same time."""
    operations = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, theirs, other)]
    if place.rank > other and not place.is_gpu:
        operations.reverse()
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def copied_per_second() -> float:
    """Return how many bytes this process copies in its memory in a second.

    Ranks: local.
    """
    source = torch.ones(COPIED_FLOATS)
    target = torch.empty_like(source)
    target.copy_(source)
    taken = []
    for _ in range(FEWEST_TIMES):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return 4 * COPIED_FLOATS / min(taken)


def _times(seconds: float) -> int:
    return max(FEWEST_TIMES, min(MOST_TIMES, round(SECONDS_OF_A_SIZE / max(seconds, 1e-9))))


def _agreed(place: Place, seconds: float) -> float:
    """Return the largest number of all ranks."""
    value = torch.tensor(
        [seconds],
        dtype=torch.float32,
        device=place.device,
    )
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _timed(place: Place, work: Callable[[], object]) -> float:
    if place.is_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if place.is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
