"""Loaders: a rank's part of a dataset, which remembers how far it has come, or cut into epochs of a
fixed length.

Every loader that the Brain makes follows the plan of :mod:`ddpkit.data.plan`. A loader draws its
workers' seeds from a generator of its own, so that making an iterator does not move the global
random stream.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ddpkit.augmentation import LOADER_OPTIONS, as_it_is, load_keyed
from ddpkit.base import get_rank, get_world_size, kind_of
from ddpkit.data import (
    DealtBatchSampler,
    JointSets,
    LoopedLoader,
    MixedSets,
    NamedSets,
    PlannedBatchSampler,
    SaveableDataLoader,
    Sharding,
    SingleIndices,
    StreamLoader,
    StreamShard,
    default_seed,
    is_sharded,
    keep_states,
    nested_samplers,
    plan_in,
    plan_of,
    require_loader_arguments,
    resume_after_call,
    resume_after_end,
    resume_at,
    set_epoch,
    state_at,
    state_at_begin,
    state_at_end,
    stream_loader,
    stream_state,
    summarize,
    worker_key,
)
from ddpkit.errors import ConfigError, DataError
from ddpkit.logger import get_logger
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.data import FirstItems

__all__ = [
    "JointSets",
    "LoopedLoader",
    "MixedSets",
    "SaveableDataLoader",
    "Sharding",
    "deal_batches",
    "default_seed",
    "distributed_loader_specifics",
    "is_batches",
    "keep_states",
    "make_dataloader",
    "plan_of",
    "reshard",
    "resume_after_call",
    "resume_after_end",
    "resume_at",
    "set_epoch",
    "shard",
    "spread_samples",
    "state_at",
    "state_at_begin",
    "state_at_end",
    "stream_state",
]

logger = get_logger(__name__)

NOTHING_DROPPED = (
    "drop_last=True has no effect in an evaluation: every sample counts once, on any number of "
    "processes. To leave samples out, give a smaller dataset, such as a torch.utils.data.Subset."
)
DECIDED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def shard(dataset: Any, sharding: Sharding, **loader_kwargs: Any) -> Any:
    """Make the loader that gives one process its part of a dataset.

    Args:
        dataset: map-style or iterable; or, without ``loader_kwargs``, anything else that yields
            batches.
        sharding: which part.
        loader_kwargs: as for ``torch.utils.data.DataLoader``; not changed. Without a ``collate_fn``
            a dataset with a method ``set_output_keys`` and an attribute ``pipeline``, by which
            SpeechBrain's ``DynamicItemDataset`` is known, gets :class:`ddpkit.batch.PaddedBatch`.

    Returns:
        The loader; its ``batch_sampler`` is a
        :class:`~ddpkit.data.planned_batches.PlannedBatchSampler` or
        :class:`~ddpkit.data.dealt_batches.DealtBatchSampler`, but for iterable datasets, and where
        a ``DistributedSampler`` was given, which has divided the data already.

    Raises:
        ConfigError: an argument that no loader takes, ``shuffle`` with a sampler, a bad batch size,
            or other arguments that exclude each other.
        DataError: the dataset is empty, or what was given is no dataset.

    Ranks: local; all ranks must give the same arguments but ``sharding.rank``.

    Example:
        >>> loader = shard(range(5), Sharding(rank=1, world_size=2), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4]]
    """
    require_loader_arguments(loader_kwargs)
    options = _with_all_samples(loader_kwargs, sharding)
    if options.get("batch_sampler") is not None or options.get("batch_size", 1) is None:
        _refuse_size(
            sharding,
            "batches that are made already, by a batch_sampler or by the dataset",
        )
    if isinstance(dataset, IterableDataset):
        return stream_loader(dataset, sharding, options)
    if is_batches(dataset) and not options:
        return deal_batches(dataset, sharding)
    _check_exclusive(options)
    if isinstance(dataset, NamedSets):
        _leave_order_to(dataset, options)
    _choose_collate(dataset, options)
    batch_sampler = options.pop("batch_sampler", None)
    sampler = options.pop("sampler", None)
    share = plan_in(batch_sampler, sampler)  # made by `distributed_loader_specifics`
    if _is_divided(batch_sampler, sampler) or (share is not None and share.world_size > 1):
        _refuse_divided(sharding, "what a DistributedSampler has divided already")
        return SaveableDataLoader(dataset, batch_sampler=batch_sampler, sampler=sampler, **options)
    shuffle = bool(options.pop("shuffle", False))
    drop_last = bool(options.pop("drop_last", False))
    common: dict[str, Any] = {
        "seed": sharding.seed,
        "drop_last": drop_last,
        "keep_step": sharding.keep_step,
        "shards": sharding.division.each,
        "in_turns": sharding.in_turns,
    }
    if batch_sampler is not None:
        options.pop("batch_size", None)
        planned: Any = DealtBatchSampler(
            batch_sampler,
            sharding.rank,
            sharding.world_size,
            **common,
        )
        return SaveableDataLoader(dataset, batch_sampler=planned, **options)
    size = _length(dataset) if sampler is None or hasattr(dataset, "__len__") else 0
    batch_size = options.pop("batch_size", 1)
    planned = PlannedBatchSampler(
        size if sampler is None else sampler,
        1 if batch_size is None else batch_size,
        sharding.rank,
        sharding.world_size,
        shuffle=shuffle,
        global_batch_size=sharding.global_batch_size,
        micro_batches=sharding.micro_batches,
        **common,
    )
    if batch_size is None:  # the dataset gives whole batches: one index, one batch
        return SaveableDataLoader(
            dataset,
            sampler=SingleIndices(planned),
            batch_size=None,
            **options,
        )
    return SaveableDataLoader(dataset, batch_sampler=planned, **options)


def reshard(loader: DataLoader[Any], sharding: Sharding) -> Any:
    """Make a loader that gives one process its share of a ready-made loader's batches.

    Args:
        loader: its dataset, batch size, order, collate function and workers are kept.
        sharding: which part.

    Returns:
        A new loader; the same one if a ``DistributedSampler`` is in it, for then its maker has
        divided the data. Of one that says ``is_sharded = True`` each rank reads all, and may have
        another number of batches than the others.

    Ranks: local.

    Example:
        >>> ready = DataLoader(range(5), batch_size=2)
        >>> [batch.tolist() for batch in reshard(ready, Sharding(rank=0, world_size=2))]
        [[0, 1], [4]]
    """
    options: dict[str, Any] = {
        name: getattr(loader, name) for name in LOADER_OPTIONS if hasattr(loader, name)
    }
    if (
        is_sharded(loader)
        or _has_its_own_way(loader)
        or (isinstance(loader, StreamLoader) and loader.of_batches)
    ):
        return deal_batches(loader, sharding)
    if isinstance(loader.dataset, IterableDataset):
        sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return shard(loader.dataset, sharding, **sizes, **options)
    if _is_divided(loader.batch_sampler, loader.sampler):
        _refuse_divided(sharding, "a loader that a DistributedSampler has divided already")
        return loader
    return shard(loader.dataset, sharding, **_order_of(loader), **options)


def deal_batches(loader: Any, sharding: Sharding) -> StreamLoader:
    """Shard an opaque iterable of batches: rank r keeps every world_size-th batch.

    Args:
        loader: yields batches, anew whenever it is iterated. One that says ``is_sharded = True``
            has been divided by its maker, and gives all it has.
        sharding: which part.

    Ranks: local.

    Example:
        >>> list(deal_batches({"ab": 1, "cd": 2, "e": 3}.keys(), Sharding(rank=0, world_size=2)))
        ['ab', 'e']
    """
    _refuse_size(sharding, "the batches of a loader of one's own")
    if isinstance(loader, StreamLoader):
        loader = loader.whole
    name = type(loader).__name__
    if is_sharded(loader):
        _refuse_divided(sharding, f"{name}, which divides itself over the processes")
        sharding = Sharding(seed=mix_key(sharding.seed, sharding.rank))
    elif sharding.world_size > 1 and not sharding.division_of_stream.is_fixed:
        logger.info(
            "%s is dealt out by batches: every rank reads all of them, and trains on one in %d.",
            name,
            sharding.world_size,
        )
    own = StreamShard(loader, sharding, of_batches=True)
    return StreamLoader(own, worker_key(sharding), batch_size=None, collate_fn=as_it_is)


def _with_all_samples(loader_kwargs: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """Return a copy of loader arguments, without ``drop_last`` where nothing may be left out."""
    options = dict(loader_kwargs)
    if options.get("drop_last") and not sharding.may_drop:
        logger.warning_once(NOTHING_DROPPED)
        options["drop_last"] = False
    return options


def _leave_order_to(dataset: NamedSets, options: dict[str, Any]) -> None:
    """Take the order out of the arguments of a loader of several sets, which have their own."""
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}={kind_of(options[name])} cannot order {type(dataset).__name__}, whose "
                "indices are positions of the epoch in an order of its own. Leave it out; weights, "
                "and what ends an epoch, are arguments of the sets."
            )
    options.pop("shuffle", None)


def _choose_collate(dataset: Any, options: dict[str, Any]) -> None:
    """Add what makes a batch of samples, where a dataset has its own and nothing else is given."""
    if (options.get("batch_size", 1), options.get("batch_sampler")) == (None, None):
        return  # the dataset gives whole batches
    if isinstance(dataset, NamedSets):
        # a ready-made loader has torch's where nothing was given
        if options.get("collate_fn") in {None, default_collate}:
            options["collate_fn"] = dataset.collate
    elif hasattr(dataset, "set_output_keys") and hasattr(dataset, "pipeline"):
        from ddpkit.batch import PaddedBatch

        options.setdefault("collate_fn", PaddedBatch)


def _has_its_own_way(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class has its own iteration, which a rebuilt loader would lose."""
    kind = next(base for base in type(loader).__mro__ if "__iter__" in vars(base))
    return kind.__module__.split(".")[0] not in {"torch", "torchdata", "ddpkit"}


def _refuse_divided(sharding: Sharding, what: str) -> None:
    if sharding.division.is_fixed:
        raise _cannot_divide(sharding.division.given, what)
    _refuse_size(sharding, what)


def _refuse_size(sharding: Sharding, what: str) -> None:
    size = sharding.global_batch_size
    if size is not None:
        raise _cannot_divide(f"global_batch_size={size}", what)


def _cannot_divide(given: str, what: str) -> ConfigError:
    return ConfigError(
        f"{given} cannot divide {what}. Leave {given.partition('=')[0]} out, or give a dataset or "
        "a stream of samples that is not divided, with a sampler if you like."
    )


def is_batches(data: Any) -> bool:
    """Return whether an object is an opaque source of batches: neither a dataset nor a loader that
    can be rebuilt.

    Args:
        data: the training set as given.

    Returns:
        True for what can be iterated, and neither derives from torch's ``Dataset`` or
        ``DataLoader`` nor has ``__getitem__``, as map-style datasets do.

    Ranks: local.

    Example:
        >>> is_batches(iter([1, 2])), is_batches([1, 2])
        (True, False)
    """
    if isinstance(data, (Dataset, DataLoader)):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def spread_samples(loader: Any, number: int, readings: int = 1) -> FirstItems | None:
    """Summarize a few samples of a sharded dataset, for a comparison with the other ranks.

    Args:
        loader: any.
        number: of samples, beginning with sample 0 and going on over the whole set.
        readings: how many times they are read, all in one process: with workers, each process that
            starts has a copy of the dataset and its generators, and would draw the same noise.

    Returns:
        Their indices, and sketches of them, reading after reading. None where the loader has no
        such dataset, or they cannot be loaded.

    Ranks: local.

    State: nothing of this process changes but what loading them changes in the dataset, without
    workers.

    Example:
        >>> spread_samples(shard(range(9), Sharding(0, 2)), 2), spread_samples([1, 2], 2)
        (((0, 4), [{'0': '0'}, {'0': '4'}]), None)
    """
    plan = plan_of(loader)
    dataset = getattr(loader, "dataset", None)
    if plan is None or plan.world_size == 1 or not isinstance(dataset, Sized):
        return None
    try:
        indices = sorted({place * len(dataset) // number for place in range(number)})
        return tuple(indices), load_keyed(loader, indices * readings, summarize, plan.seed)
    except Exception:  # what is wrong with it comes up where it is needed; perhaps it never is
        logger.debug(
            "%d samples of %s cannot be loaded.",
            number,
            type(dataset).__name__,
            exc_info=True,
        )
        return None


def _is_divided(batch_sampler: Any, sampler: Any) -> bool:
    """Say whether the user has divided the data already: with a ``DistributedSampler``, or one that
    says so.
    """
    deciding = sampler if batch_sampler is None else batch_sampler
    return any(
        isinstance(inner, DistributedSampler) or is_sharded(inner)
        for inner in nested_samplers(deciding)
    )


def _order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Say in loader arguments how a ready-made loader orders its data."""
    plan = plan_of(loader)
    if isinstance(plan, DealtBatchSampler):
        return {"batch_sampler": plan.batch_sampler, "drop_last": plan.drop_last}
    if isinstance(plan, PlannedBatchSampler):
        inner = {} if isinstance(plan.source, int) else {"sampler": plan.source}
        batch_size = None if loader.batch_sampler is None else plan.batch_size
        return {
            "batch_size": batch_size,
            "shuffle": plan.shuffle,
            "drop_last": plan.drop_last,
            **inner,
        }
    batches = loader.batch_sampler
    sampler = cast("Any", loader.sampler)
    sizes: dict[str, Any] = {"batch_size": None}
    if _is_torchs(batches, BatchSampler):  # made by the loader or by the user
        batches = cast("Any", batches)
        sampler = batches.sampler
        sizes = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    elif batches is not None:
        return {"batch_sampler": batches}
    is_random = _is_torchs(sampler, RandomSampler)
    whole = type(sampler) is SequentialSampler or (is_random and not sampler.replacement)
    if whole and hasattr(loader.dataset, "__len__") and len(sampler) == _length(loader.dataset):
        return {**sizes, "shuffle": is_random}
    return {**sizes, "sampler": sampler}


def _is_torchs(sampler: Any, kind: type) -> bool:
    """Say whether a sampler is torch's own, or the one that a ``StatefulDataLoader`` of torchdata
    has in its place.
    """
    return type(sampler) is kind or (
        type(sampler).__name__ == kind.__name__
        and type(sampler).__module__.startswith("torchdata.stateful_dataloader.")
    )


def _check_exclusive(options: dict[str, Any]) -> None:
    has_batches, has_sampler = (
        options.get(name) is not None for name in ("batch_sampler", "sampler")
    )
    has_size = has_batches and options.get("batch_size") not in {None, 1}
    if has_batches + has_sampler + has_size + bool(options.get("shuffle")) > 1:
        raise ConfigError(
            "a loader takes one of shuffle=True, sampler and batch_sampler, and batch_sampler "
            "without batch_size: give one of them."
        )


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{kind} has no length: give a map-style dataset, a stream, or batches without "
            "arguments."
        )
    size = len(dataset)
    if size < 1:
        raise DataError(
            f"the dataset is empty: len({kind}) is {size}. Check the paths and filters that made "
            "it."
        )
    return size


def make_dataloader(
    dataset: Any,
    looped_nominal_epoch: int | None = None,
    **loader_kwargs: Any,
) -> Any:
    """Make a loader over the whole dataset, for this process alone.

    ``Brain.make_dataloader`` is the one that divides the data; a loader made here and given to
    ``fit`` is divided then.

    Args:
        dataset: map-style or iterable.
        looped_nominal_epoch: batches per nominal epoch; makes a :class:`LoopedLoader`.
        loader_kwargs: as for ``torch.utils.data.DataLoader``. Without a ``collate_fn`` a
            ``DynamicItemDataset`` of SpeechBrain gets :class:`~ddpkit.batch.PaddedBatch`.

    Returns:
        A :class:`SaveableDataLoader`, a ``DataLoader`` for an ``IterableDataset``, or a
        :class:`LoopedLoader`.

    Raises:
        ConfigError: arguments that exclude each other.

    Ranks: local.

    Example:
        >>> [batch.tolist() for batch in make_dataloader(range(3), batch_size=2)]
        [[0, 1], [2]]
    """
    loader = shard(dataset, Sharding(seed=default_seed()), **loader_kwargs)
    return loader if looped_nominal_epoch is None else LoopedLoader(loader, looped_nominal_epoch)


def distributed_loader_specifics(
    distributed_launch: bool,
    rank: int | None,
    dataset: Any,
    loader_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return loader arguments that give one rank its share, for a loader that a recipe makes
    itself.

    Given to ``Brain.fit``, such a loader is divided like any other, as a whole and once.

    Args:
        distributed_launch: False returns the arguments as they are.
        rank: this rank; None: the rank of the process.
        dataset: the loader's dataset. A stream cannot be divided by arguments: its arguments come
            back with a warning.
        loader_kwargs: as for ``torch.utils.data.DataLoader``; not changed.

    Ranks: local; all ranks must give the same arguments but ``rank``.

    Example:
        >>> distributed_loader_specifics(False, 0, range(4), {"batch_size": 2})
        {'batch_size': 2}
    """
    if not distributed_launch:
        return loader_kwargs
    if isinstance(dataset, IterableDataset):
        logger.warning(
            "%s is a stream: give it to Brain.fit, which divides it.",
            type(dataset).__name__,
        )
        return loader_kwargs
    sharding = Sharding(
        (get_rank() or 0) if rank is None else rank,
        get_world_size(),
        seed=default_seed(),
    )
    loader = shard(dataset, sharding, **loader_kwargs)
    others = {name: value for name, value in loader_kwargs.items() if name not in DECIDED}
    if loader.batch_sampler is None:
        return {**others, "batch_size": None, "sampler": loader.sampler}
    return {**others, "batch_sampler": loader.batch_sampler}
