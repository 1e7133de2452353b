"""How many samples and batches an optimizer step has.

``batch_size`` counts per process, as recipes expect, so more processes make a larger step.
``global_batch_size`` counts the samples of one optimizer step over all processes, so that the
number of processes changes nothing; ``micro_batch_size`` says how many of them fit on a process at
once, and the accumulation follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpkit.data import DealtBatchSampler, Division, PlannedBatchSampler, StreamShard, inner_loader
from ddpkit.dataloader import plan_of
from ddpkit.errors import ConfigError


def micro_batches(
    given: int,
    micro: int | None,
    whole: int | None,
    shards: int,
) -> int:
    """Return how many batches each process works on per optimizer step.

    Args:
        given: as ``grad_accumulation_factor``.
        micro: as ``micro_batch_size``; or None. With it the number follows.
        whole: as ``global_batch_size``; or None.
        shards: into how many every batch is divided.

    Raises:
        ConfigError: ``micro_batch_size`` without ``global_batch_size``, or contradicted by
            ``grad_accumulation_factor``.

    Ranks: local; equal on all ranks.

    Example:
        >>> micro_batches(1, micro=16, whole=100, shards=2)
        4
    """
    if micro is None:
        return given
    if whole is None:
        raise ConfigError(
            f"micro_batch_size={micro} divides a global batch, and global_batch_size is not "
            "given. Give global_batch_size (samples per optimizer step over all processes), or "
            "use batch_size and grad_accumulation_factor."
        )
    needed = -(-whole // (micro * shards))
    if given not in {1, needed}:
        raise ConfigError(
            f"grad_accumulation_factor={given} contradicts global_batch_size={whole} with "
            f"micro_batch_size={micro}, which needs {needed} batches per step on {shards} "
            "rank(s). Leave one of the three out."
        )
    return needed


@dataclass(frozen=True, eq=False)
class BatchSizes:
    """Batch sizes that follow from a training loader and the options.

    Attributes:
        division: of the data.
        per_process: samples of a full batch of one process: the smallest and the largest; None
            where a recipe's batch sampler or a stream decides.
        factor: batches of each process per optimizer step.
        per_step: samples of a full optimizer step over all ranks; None where it is not known.
        steps: optimizer steps per epoch; None where it is not known.
        samples: samples per epoch over all ranks; None where it is not known.
        alone: samples of a full optimizer step of one process with the same ``batch_size``; None
            where ``global_batch_size`` cannot be used, because others make the batches.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.data import Division
        >>> print(BatchSizes(Division(world_size=2), (32, 32), 2, 128, 15, 1797))
        2 processes x batch 32 x accumulation 2 = 128 samples per optimizer step; 15 steps, 1797
        samples per epoch
    """

    division: Division
    per_process: tuple[int, int] | None
    factor: int
    per_step: int | None
    steps: int | None
    samples: int | None
    alone: int | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        smallest, largest = self.per_process or (None, None)
        size = str(largest) if smallest == largest else f"{smallest} to {largest}"
        batch = "batches of changing size" if self.per_process is None else f"batch {size}"
        line = f"{self.division.in_words} x {batch} x accumulation {self.factor}"
        if self.per_step is not None:
            line += f" = {_number_of(self.per_step, 'sample')} per optimizer step"
        steps = (
            "an unknown number of steps" if self.steps is None else _number_of(self.steps, "step")
        )
        samples = "" if self.samples is None else f", {_number_of(self.samples, 'sample')}"
        return f"{line}; {steps}{samples} per epoch"

    def advice(self) -> str:
        """Say how several processes train as one does, where ``batch_size`` was given; nothing for
        one process.
        """
        if self.alone is None or self.division.is_fixed or self.division.number == 1:
            return ""
        return (
            f"{_number_of(self.per_step or 0, 'sample')}; one process has {self.alone}: "
            f"--global_batch_size={self.alone} trains as one process does"
        )


def _number_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def batch_sizes(
    loader: Any,
    length: int | None,
    factor: int,
    division: Division,
) -> BatchSizes:
    """Compute the batch sizes from a training loader and an accumulation factor.

    Args:
        loader: of this rank.
        length: its number of batches, if that is known.
        factor: batches of each shard per optimizer step.
        division: of the data.

    Ranks: local; equal on all ranks.

    Example:
        >>> from ddpkit.dataloader import Sharding, shard
        >>> sharding = Sharding(world_size=2)
        >>> loader = shard(range(10), sharding, batch_size=2)
        >>> str(batch_sizes(loader, len(loader), 1, sharding.division))
        '2 processes x batch 2 x accumulation 1 = 4 samples per optimizer step; 3 steps, 10 samples
        per epoch'
    """
    steps = None if length is None else -(-length // factor)
    inner = inner_loader(loader)
    per_process, per_step = _sizes(inner, factor, division.number)
    planned = plan_of(inner)
    samples = None
    is_divided = isinstance(planned, PlannedBatchSampler) or isinstance(
        getattr(inner, "dataset", None),
        StreamShard,
    )
    alone = per_step // division.number if is_divided and per_step is not None else None
    # else not a whole pass, or of batches
    if inner is loader and getattr(inner, "batch_sampler", None) is not None:
        if isinstance(planned, PlannedBatchSampler):
            samples = planned.plan.used_samples
        elif isinstance(planned, DealtBatchSampler):
            samples = sum(planned.total(batch) for batch in range(len(planned)))
    return BatchSizes(division, per_process, factor, per_step, steps, samples, alone)


def _sizes(
    loader: Any,
    factor: int,
    shards: int,
) -> tuple[tuple[int, int] | None, int | None]:
    """Return the smallest and largest full batch of one process, and a full optimizer step of all,
    in samples.
    """
    planned = plan_of(loader)
    batches = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None)
    if isinstance(planned, PlannedBatchSampler):
        plan = planned.plan
        if batches is None:  # the dataset yields whole batches of unknown size
            return None, None
        smallest = plan.global_batch_size // plan.micro_batches // shards
        return (smallest, plan.batch_size), plan.global_batch_size * factor // plan.micro_batches
    if isinstance(dataset, StreamShard) and size is not None:
        block = dataset.block_size
        return (block // shards, -(-block // shards)), block * factor
    givers = (loader, batches, getattr(planned, "batch_sampler", None))
    sizes: list[Any] = [getattr(giver, "batch_size", None) for giver in givers]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return (
        (
            (known[0], known[0]),
            known[0] * shards * factor,
        )
        if known
        else (None, None)
    )
