"""What a stage reads: a loader's batches, how many they are, and whether all ranks read from the same data.

With ``prefetch_to_device`` they move to the device one ahead, while the batch before them is worked on. On a GPU the
copies run on a stream of their own, from pinned memory, and the stream of the step waits for those of its batch only.
The loader counts a batch when it is handed out, not when it is read: what a checkpoint says of the position does not
change. Reading ahead must not move the random streams of this process, so the loader needs workers.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.comm import require_agreement
from ddpkit.data import (
    MOST_ITEMS,
    StreamLoader,
    guess_batch_size,
    require_alike,
)
from ddpkit.dataloader import LoopedLoader, SaveableDataLoader, first_samples, plan_of
from ddpkit.distributed import get_world_size
from ddpkit.logger import get_logger
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpkit.training.feed import Counts

logger = get_logger(__name__)


def counts_of(loader: Any) -> Counts | None:
    """Return what knows the number of samples of a loader's batches, or None.

    Ranks: local.

    Example:
        >>> counts_of([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader if loader.has_counts else None
    return plan_of(loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None for a stream, whose length is not reliable.

    Ranks: local.

    Example:
        >>> length_of([1, 2]), length_of(iter([]))
        (2, None)
    """
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:
        return None


def size_of(loader: Any) -> Callable[[Any], int | None]:
    """Return what tells the number of samples of a batch that was just read; None of one that another rank has.

    Ranks: local.
    """
    return loader.size_of if isinstance(loader, StreamLoader) else guess_batch_size


def counting(loader: Any) -> Callable[[int, Any], int]:
    """Return what tells a batch's number of samples: the plan, or where there is none the loader or the batch.

    Ranks: local.
    """
    counts = counts_of(loader)
    if counts is None:
        size = size_of(loader)
        return lambda _, batch: size(batch) or 0
    return lambda number, _: counts.count(number)


def require_same_draw(loader: Any) -> None:
    """Make sure that a user's sampler or a stream's shuffle is the same on all ranks, where each takes its part.

    Raises:
        RankMismatchError: it is not. On every rank.

    Ranks: collective.
    """
    plan, inner = plan_of(loader), loader.loader if isinstance(loader, LoopedLoader) else loader
    facts = plan.drawn_words() if plan is not None and plan.world_size > 1 else {}
    if isinstance(inner, StreamLoader):
        facts = inner.drawn_words()
    if facts:
        require_agreement(facts)


def compare_first_samples(name: str, loader: Any) -> None:
    """Make sure that all ranks hold the same dataset, where each is given its part of it: by a sample or two.

    Args:
        name: such as ``"train"``.
        loader: of this rank, or None.

    Raises:
        RankMismatchError: they do not. On every rank.

    Ranks: collective.

    Example:
        >>> compare_first_samples("train", [1, 2])
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    plan = plan_of(inner)
    if plan is None or plan.world_size == 1:
        return
    found = first_samples(inner)
    require_alike(
        None if found is None else ((), found),
        lambda: first_samples(inner, MOST_ITEMS),
        f"{name}: the ranks do not hold the same data, and each would be given one part in {plan.world_size} of it: "
        f"the samples of {type(inner.dataset).__name__} differ, and most would be lost in silence. Let every rank load "
        "all files, in the same order (sort a list of files), and seed what is random. If each rank shall keep files "
        "of its own, give a DataLoader of them with `loader.is_sharded = True`",
        f"the first samples of {name}",
    )


def compared(loader: Any, stage: Stage) -> Iterable[Any]:
    """Return an iterable over a loader's batches that compares the ranks' data after the first batch.

    Args:
        loader: of this rank.
        stage: for the message.

    Returns:
        The loader itself, unless it is a stream or a loader of batches that every rank reads whole.

    Ranks: local; to take the first batch is then collective.

    Example:
        >>> compared([1, 2], Stage.TEST)
        [1, 2]
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    if isinstance(inner, StreamLoader) and inner.is_dealt:
        return PassedThrough(loader, functools.partial(_checked, inner, stage))
    batches: Iterable[Any] = loader
    return batches


class PassedThrough:
    """A loader whose batches pass through a generator, each time it is iterated.

    Args:
        loader: started when the iteration begins, not with the first batch.
        through: takes the iterator, yields batches.

    Ranks: local.

    Example:
        >>> list(PassedThrough("ab", lambda batches: map(str.upper, batches)))
        ['A', 'B']
    """

    def __init__(self, loader: Iterable[Any], through: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self.loader, self.through = loader, through

    def __iter__(self) -> Iterator[Any]:
        return self.through(iter(self.loader))


def first_of(loader: Iterable[Any], number: int | None) -> PassedThrough:
    """Return the first batches of a loader; all where no number is given.

    Ranks: local.
    """
    return PassedThrough(loader, lambda batches: itertools.islice(batches, number))


def _checked(inner: StreamLoader, stage: Stage, batches: Iterator[Any]) -> Iterator[Any]:
    first = list(itertools.islice(batches, 1))
    kind, items = ("loader", "batches") if inner.of_batches else ("dataset", "items")
    require_alike(
        inner.first,
        lambda: None,
        f"{stage.name}: the ranks do not read the same {items}, and each would keep one in {get_world_size()} of "
        f"{type(inner.whole).__name__}: samples would be lost in silence. If it divides itself over the ranks, set "
        f"`is_sharded = True` on the {kind}. If it is random, seed it: draw from Python's, numpy's or torch's global "
        "generator, which are seeded alike on all ranks while it is read. If it lists files, sort them",
        f"the first {items} of {stage.name}",
    )
    yield from first
    yield from batches


def profiled(profiler: Any, left_out: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Tell the profiler after each batch that a step is over, except batches that a resume only skips.

    Ranks: local.
    """
    for number, batch in enumerate(batches):
        yield batch
        if number >= left_out:
            profiler.step()


def cuda_graph_steps(batches: Iterator[Any]) -> Iterator[Any]:
    """Tell torch before each batch that a step begins, in which CUDA graphs may overwrite the outputs of the last one.

    Untold, each call of a compiled module is a step of its own, and one module could not use the output of another.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
    """
    for batch in batches:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        yield batch


# ----------------------------------------------------------------------------------- moved to the device


def move_ahead(loader: Any, device: str) -> None:
    """Have a loader's batches moved to a device one batch ahead of the batch that is worked on.

    Args:
        loader: of this rank. A stream, a loader of another kind, or one without workers is left as it is, with a
            warning: there, to read a batch earlier would change which random numbers it is made with.
        device: such as ``"cuda:1"``.

    Ranks: local.

    Example:
        >>> loader = SaveableDataLoader(range(4), batch_size=2, num_workers=1)
        >>> move_ahead(loader, "cpu")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    is_stream = isinstance(getattr(inner, "dataset", None), torch.utils.data.IterableDataset)
    if not isinstance(inner, SaveableDataLoader) or is_stream or not inner.num_workers:
        logger.warning_once(
            "prefetch_to_device needs a dataset with a length and num_workers >= 1: the batches of a %s%s are moved "
            "when they are used.", type(inner).__name__, "" if is_stream else " without workers",
        )  # fmt: skip
        return
    inner.passed_through = functools.partial(moved_ahead, device=torch.device(device))


def moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches on a device, each of which has begun to move before the one before it is yielded.

    No memory of a batch is overwritten that a step still reads: before it allocates, the copying stream waits for what
    the step's stream was given so far. ``Tensor.record_stream`` would do for tensors only, and not for objects of which
    nobody knows the tensors.

    Args:
        batches: read one ahead.
        device: where they go; on a GPU without waiting for it.

    Ranks: local.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams

    Example:
        >>> next(moved_ahead(iter([{"x": torch.ones(1)}]), torch.device("cpu")))
        {'x': tensor([1.])}
    """
    side = _copying_stream(device) if device.type == "cuda" else None
    ahead: tuple[Any, Any] | None = None
    for batch in batches:
        coming = _begin(batch, device, side)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = coming
    if ahead is not None:
        yield _arrived(*ahead, device)


@functools.cache  # a stream has memory of its own: a new one each epoch would hold more and more of it
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _begin(batch: Any, device: torch.device, side: torch.cuda.Stream | None) -> tuple[Any, Any]:
    """Begin to move a batch; return it, and the event of its arrival."""
    if side is None:
        return _moved(batch, device), None
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return _moved(batch, device), side.record_event()


def _arrived(batch: Any, event: torch.cuda.Event | None, device: torch.device) -> Any:
    """Return a batch; what the current stream is given from now on waits for it."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return batch


def _moved(value: Any, device: torch.device) -> Any:
    """Move whatever has a method ``to``, inside of mappings and sequences too; what has none stays as it is."""
    if hasattr(value, "to"):
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # an object that takes nothing but the device
            return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: _moved(one, device) for key, one in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return moved
        alike = copy.copy(value)  # of the recipe's class, as the loader gives it
        alike.update(moved)
        return alike
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(one, device) for one in value))
    return type(value)(_moved(one, device) for one in value) if type(value) in (list, tuple) else value
