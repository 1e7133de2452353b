"""What decides the order of an epoch, as a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from ddpkit.compat import shuffle_digest
from ddpkit.data import (
    NamedSets,
    PlannedBatchSampler,
    RankBatchSampler,
    StreamShard,
    inner_loader,
    nested_samplers,
)
from ddpkit.dataloader import plan_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOMINAL = "nominal epoch"


def order_of(loader: Any) -> dict[str, str | int]:
    """Describe what the order of an epoch follows from, besides the seed.

    Args:
        loader: of this rank.

    Returns:
        Under ``order`` how the data is ordered, or the classes that order it; where they are known,
        the ``samples`` of the dataset, ``drop_last``, a digest of a stream's shuffle, and the
        batches of a ``nominal epoch``. Equal on all ranks, and on any number of them; nothing is
        drawn.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> order_of(shard(range(5), Sharding(rank=1, world_size=2), batch_size=2, shuffle=True))
        {'order': 'shuffled', 'drop_last': False, 'samples': 5}
    """
    inner = inner_loader(loader)
    if inner is not loader:
        return {**order_of(inner), NOMINAL: int(loader.epoch_length)}
    plan = plan_of(loader)
    dataset = getattr(loader, "dataset", None)
    if isinstance(plan, PlannedBatchSampler) and isinstance(plan.source, int):
        order = "shuffled" if plan.shuffle else "as it stands"
        sets = {"sets": dataset.describe()} if isinstance(dataset, NamedSets) else {}
        return {
            "order": order,
            "drop_last": bool(plan.drop_last),
            "samples": plan.source,
            **sets,
        }
    if isinstance(plan, RankBatchSampler):
        samples = {"samples": len(dataset)} if isinstance(dataset, Sized) else {}
        return {
            "order": _names(nested_samplers(plan.source)),
            "drop_last": bool(plan.drop_last),
            **samples,
        }
    if isinstance(dataset, StreamShard):
        own = (
            {"shards (its own, processes x workers)": dataset.parts}
            if dataset.divides_itself
            else {}
        )
        return {"order": f"of {type(dataset.whole).__name__}", **own, **_shuffle(dataset.whole)}
    return {
        "order": f"of {type(loader if dataset is None else dataset).__name__}",
        **_shuffle(loader),
    }


def counts_batches(order: Mapping[str, str | int] | None) -> bool:
    """Say whether an epoch of an order ends after a number of batches, and not with the data.

    Args:
        order: as :func:`order_of` describes it; None: unknown.

    Example:
        >>> counts_batches({"order": "shuffled", "nominal epoch": 100})
        True
    """
    return NOMINAL in (order or {})


def _shuffle(data: Any) -> dict[str, str]:
    digest = shuffle_digest(data)
    return {"shuffle (give it a seed)": digest} if digest else {}


def _names(samplers: Iterable[Any]) -> str:
    return f"by {' of '.join(type(sampler).__name__ for sampler in samplers)}"
