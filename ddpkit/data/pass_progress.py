"""How far a pass over a loader is, in a unit that does not depend on the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.data.dealt_batches import DealtBatchSampler
from ddpkit.data.loader_plan import plan_of
from ddpkit.data.planned_batches import PlannedBatchSampler
from ddpkit.data.stream_shard import StreamShard
from ddpkit.data.streams import StreamLoader

if TYPE_CHECKING:
    from ddpkit.data.stream_position import StreamPosition


def stream_marks(loader: Any) -> StreamPosition | None:
    """Return the marks of a stream's passes, or None."""
    return loader.position if isinstance(loader, StreamLoader) else None


def batch_unit(loader: Any) -> list[Any] | None:
    """Return in what the batches of a loader are counted over all ranks, and how many one has; None
    if unknown.
    """
    plan = plan_of(loader)
    dataset = getattr(loader, "dataset", None)
    own = getattr(loader, "batch_size", None)
    if isinstance(plan, DealtBatchSampler):
        return ["batches", plan.world_size]
    if isinstance(plan, PlannedBatchSampler):
        return None  # not all are alike
    if isinstance(dataset, StreamShard):
        return ["batches" if own is None else "samples", dataset.block_size]
    return ["samples of a rank", own] if isinstance(own, int) else None


def done_in(loader: Any, batches: int) -> list[Any] | None:
    """Return how far a pass is after so many batches, in a unit that does not depend on the batch
    size.
    """
    plan = plan_of(loader)
    size = batch_unit(loader)
    if isinstance(plan, PlannedBatchSampler):
        return ["samples", plan.plan.done_before(batches)]
    return None if size is None else [size[0], size[1] * batches]


def batches_after(loader: Any, done: list[Any] | None, batches: int) -> int:
    """Return how many batches of the present size are done; ``batches`` if no size is known."""
    plan = plan_of(loader)
    size = batch_unit(loader)
    unit, number = done or ("", 0)
    if isinstance(plan, PlannedBatchSampler) and unit == "samples":
        return plan.plan.batch_after(number)
    return batches if size is None or unit != size[0] else int(number // size[1])


def batches_from(
    loader: Any,
    done: list[Any] | None,
    batches: int,
    mark: int,
) -> tuple[int, int]:
    """Convert a saved mark to the current batch size: the batch after it, and the batches to the
    resume position.

    Args:
        loader: a stream, or a source of batches.
        done: what :func:`done_in` returned for ``batches``.
        batches: done then.
        mark: the batch then that it was before; at most ``batches``.
    """
    size = batch_unit(loader)
    if size is None or done is None or done[0] != size[0] or not mark:
        return mark, batches_after(loader, done, batches) - mark
    before = done[1] * mark // batches
    return max(before // size[1], 1), int((done[1] - before) // size[1])
