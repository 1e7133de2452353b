"""The batches of one rank by a plan: shares of each global batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddpkit.data.plan import CHUNK, Order, SamplingPlan
from ddpkit.data.rank_batches import RankBatchSampler
from ddpkit.data.repeats import count_repeats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch.utils.data import Sampler


class PlannedBatchSampler(RankBatchSampler):
    """A batch sampler that yields one rank's share of every batch of a :class:`SamplingPlan`.

    Args:
        source: the number of samples; or a user's sampler, whose order is kept and dealt out.
        batch_size: samples per rank and batch.
        rank: this rank.
        world_size: number of ranks.
        shuffle: reorder every epoch (with a number of samples only).
        seed: of the experiment.
        drop_last: leave out an incomplete last global batch.
        keep_step: what a rank does that has no sample in a batch: True repeats one sample, which
            counts nothing, so that it can take part in the collectives; False yields nothing.
        global_batch_size: as in :class:`SamplingPlan`; takes the place of ``batch_size``.
        micro_batches: likewise.
        shards: parts of every batch that each rank takes, and yields one after another as batches
            of their own. The plan is then that of ``world_size * shards`` ranks, and ``batch_size``
            the samples of such a part.
        in_turns: which of the parts this rank takes, as in
            :class:`~ddpkit.data.sharding.Division`.

    Ranks: local. All ranks must give the same arguments but ``rank``.

    Example:
        >>> [list(PlannedBatchSampler(5, 2, rank, 2)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [4]]]
        >>> PlannedBatchSampler(5, 2, 1, 2).count(1)
        0
        >>> list(PlannedBatchSampler(5, 2, shards=2))
        [[0, 1], [2, 3], [4], [4]]
    """

    def __init__(  # noqa: PLR0913 -- the loader's arguments
        self,
        source: int | Sampler[int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        keep_step: bool = True,
        global_batch_size: int | None = None,
        micro_batches: int = 1,
        shards: int = 1,
        in_turns: bool = False,
    ) -> None:
        super().__init__(source, rank, world_size, shards, in_turns=in_turns)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.keep_step = keep_step
        size = source if isinstance(source, int) else 0
        whole = cast("int", global_batch_size)
        self._plan = SamplingPlan(
            size,
            batch_size,
            world_size * shards,
            drop_last,
            whole,
            micro_batches,
        )
        self.divide(micro_batches)

    def divide(self, micro_batches: int) -> None:
        """Divide every global batch into so many batches, from the next iteration on.

        Args:
            micro_batches: as in :class:`SamplingPlan`.
        """
        shards = self.shards
        self._plan = dataclasses.replace(self._plan, micro_batches=micro_batches)
        self.batch_size = self._plan.batch_size
        self._full_batches = 0  # until the plan is asked for
        # A full global batch is worked out once: `count` and `total` are asked in every step.
        full = dataclasses.replace(self._plan, num_samples=self._plan.global_batch_size)
        self._in_full = micro_batches * shards  # batches of a full global one
        shares = [self._share(full, batch) for batch in range(self._in_full)]
        # of every batch of a full global one
        self._own_counts = [stop - start for start, stop in shares]
        totals = [full.total(batch) for batch in range(micro_batches)]
        self._totals = [
            0 if batch % shards else totals[batch // shards] for batch in range(self._in_full)
        ]
        # a rank without a sample repeats the last one, of no weight, to keep step
        filler = (full.num_samples - 1, full.num_samples)
        own = [np.arange(*(share if share[0] < share[1] else filler)) for share in shares]
        ends = np.cumsum([positions.size for positions in own]).tolist()
        self._own = np.concatenate(own)
        self._cuts = [slice(start, stop) for start, stop in itertools.pairwise([0, *ends])]

    @property
    def plan(self) -> SamplingPlan:
        """The plan of the current epoch."""
        # a user's sampler may yield another number of samples in each epoch
        if not isinstance(self.source, int) and len(self._draw()) != self._plan.num_samples:
            self._plan = dataclasses.replace(self._plan, num_samples=len(self._draw()))
        self._full_batches = self._plan.full_batches * self.shards
        return self._plan

    def _share(self, plan: SamplingPlan, batch: int) -> tuple[int, int]:
        """Return the positions of this rank's batch of that number."""
        number, shard = divmod(batch, self.shards)
        return plan.share(number, self.mine[shard])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        super().set_epoch(epoch)
        self._full_batches = 0  # until the new epoch's length is known

    def count(self, batch: int) -> int:
        """Return the number of samples this rank has in a batch; 0 where it repeats one to keep
        step.
        """
        # asked at every step: all but the last global batch are alike
        if batch < self._full_batches:
            return self._own_counts[batch % self._in_full]
        start, stop = self._share(self.plan, batch)
        return stop - start

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch over all ranks; of several shards, with the first
        of them.
        """
        if batch < self._full_batches:
            return self._totals[batch % self._in_full]
        return 0 if batch % self.shards else self.plan.total(batch // self.shards)

    def part(self, batch: int) -> float:
        """Return this rank's part of a batch, where every batch of all ranks together counts
        one.
        """
        return self.count(batch) / self.plan.total(batch // self.shards)

    def parts(self, batch: int) -> int:
        """Return what all ranks' parts of a batch come to: one; of several shards, with the first
        of them.
        """
        return int(batch % self.shards == 0)

    def repeats(self, batch: int) -> list[int] | None:
        """Return how often each of this rank's samples of a batch came before in the epoch, on any
        rank.

        None where no sample comes twice.
        """
        if isinstance(self.source, int):
            return None
        if self._repeats is None:
            self._repeats = count_repeats(self._draw(), {})
        return self._repeats[slice(*self._share(self.plan, batch))]

    def samples_of_all(self, first: int, last: int) -> list[Any]:
        """Return the indices of the samples of batches ``first`` to ``last - 1`` of all ranks, in
        the epoch's order: they depend on no number of ranks.
        """
        plan = self.plan
        start = plan.done_before(first // self.shards)
        stop = plan.done_before(last // self.shards)
        order = Order(
            plan.num_samples,
            self.seed,
            self.epoch,
            shuffle=self.shuffle,
        )
        indices = order.indices(start, stop)
        if isinstance(self.source, int):
            return indices
        drawn = self._draw()
        return [drawn[index] for index in indices]

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in an epoch."""
        plan = self.plan
        own = len(plan) * self.shards
        # the last global batch may have fewer samples than there are ranks and shards
        while own and not self.keep_step and self.count(own - 1) == 0:
            own -= 1
        return own

    def __iter__(self) -> Iterator[list[int]]:
        skip = self.skip
        self.skip = 0
        return itertools.islice(self._batches(skip), max(len(self) - skip, 0))

    def _batches(self, skip: int) -> Iterator[list[int]]:
        plan = self.plan
        order = Order(
            plan.num_samples,
            self.seed,
            self.epoch,
            shuffle=self.shuffle,
        )
        drawn = None if isinstance(self.source, int) else self._draw()
        whole = len(self._cuts) == 1
        for positions, cuts in self._positions(plan, skip):
            for row in order.at(positions).tolist():
                for indices in [row] if whole else [row[cut] for cut in cuts]:
                    yield indices if drawn is None else [drawn[index] for index in indices]

    def _positions(
        self,
        plan: SamplingPlan,
        first: int,
    ) -> Iterator[tuple[NDArray[np.int64], list[slice]]]:
        """Yield this rank's positions from a batch on, and where to cut them into batches.

        A row is what the rank has of one global batch; there are a few thousand positions at a
        time.
        """
        own = self._own
        cuts = self._cuts
        in_full = plan.full_batches * self.shards
        number, begun = divmod(min(first, in_full), len(cuts))
        full = in_full // len(cuts)
        # a pass may begin in the middle of a row: with shards, between two batches of one
        if begun:
            yield (own + number * plan.global_batch_size)[None], cuts[begun:]
            number += 1
        # many rows in one call of NumPy: it costs as much for one position as for hundreds
        at_a_time = max(CHUNK // own.size, 1)
        for start in range(number, full, at_a_time):
            numbers = np.arange(start, min(start + at_a_time, full))
            yield (numbers * plan.global_batch_size)[:, None] + own, cuts
        # the last global batch, if it is not full
        for batch in range(max(first, in_full), len(plan) * self.shards):
            last = np.arange(*self._share(plan, batch))
            # without samples of its own a rank repeats one, of no weight, for the collectives' sake
            if not last.size and self.keep_step:
                last = np.array([plan.num_samples - 1])
            if last.size:
                yield last[None], [slice(None)]
