"""The batches of one rank from a recipe's own batch sampler, dealt out whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.data.rank_batches import RankBatchSampler
from ddpkit.data.repeats import count_repeats
from ddpkit.data.sampler_drawing import draw_alike
from ddpkit.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class DealtBatchSampler(RankBatchSampler):
    """Deals a user's batches out to the ranks: batch ``b * world_size + r`` is rank ``r``'s
    ``b``-th.

    Args:
        batch_sampler: yields lists of indices; drawn alike on every rank.
        rank: this rank.
        world_size: number of ranks.
        seed: of the experiment.
        drop_last: leave out a last round that has no batch for every rank.
        keep_step: as in :class:`PlannedBatchSampler`.
        shards: batches of a round that each rank takes one after another; a round has one for each
            shard of each rank.
        in_turns: which of them this rank takes, as in :class:`~ddpkit.data.sharding.Division`.

    Ranks: local. All ranks must give equal batch samplers.

    Example:
        >>> from torch.utils.data import BatchSampler, SequentialSampler
        >>> inner = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
        >>> [list(DealtBatchSampler(inner, rank, 2)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [4]]]
    """

    def __init__(  # noqa: PLR0913 -- the loader's arguments
        self,
        batch_sampler: Iterable[list[Any]],
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        drop_last: bool = False,
        keep_step: bool = True,
        shards: int = 1,
        in_turns: bool = False,
    ) -> None:
        super().__init__(batch_sampler, rank, world_size, shards, in_turns=in_turns)
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.drop_last = drop_last
        self.keep_step = keep_step

    def count(self, batch: int) -> int:
        """Return the number of samples in this rank's batch; 0 where it repeats one to keep
        step.
        """
        return len(self._own(self._draw(), batch))

    def total(self, batch: int) -> int:
        """Return the number of samples of a round over all ranks; of several shards, with the first
        of them.
        """
        return 0 if batch % self.shards else sum(len(indices) for indices in self._round(batch))

    def part(self, batch: int) -> float:
        """Return 1 if this rank has a batch in a round, else 0: every batch of the user counts the
        same.
        """
        return 1.0 if self.count(batch) else 0.0

    def parts(self, batch: int) -> int:
        """Return the number of batches of a round; of several shards, with the first of them."""
        return 0 if batch % self.shards else len(self._round(batch))

    def first_index(self) -> Any:
        """Return the first index of the first batch of this epoch, the same on every rank."""
        return next(iter(self._draw()[0]))

    def repeats(self, batch: int) -> list[int]:
        """Return how often each sample of this rank's batch came before in the epoch, on any
        rank.
        """
        if self._repeats is None:
            seen: dict[int, int] = {}
            self._repeats = [count_repeats(indices, seen) for indices in self._draw()]
        return self._own(self._repeats, batch)

    def samples_of_all(self, first: int, last: int) -> list[Any]:
        """Return the indices of the samples of batches ``first`` to ``last - 1`` of all ranks, in
        the order of the user's batches: they depend on no number of ranks.
        """
        size = self.world_size * self.shards
        start = first // self.shards * size
        stop = last // self.shards * size
        batches = self._draw()[start:stop]
        found: list[Any] = []
        for indices in batches:
            found += indices
        return found

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in an epoch."""
        rounds, rest = divmod(len(self._draw()), self.world_size * self.shards)
        whole = rounds * self.shards
        if not rest or self.drop_last:
            return whole
        return whole + (self.shards if self.keep_step else sum(shard < rest for shard in self.mine))

    def __iter__(self) -> Iterator[list[Any]]:
        skip = self.skip
        self.skip = 0
        batches = self._draw()
        for number in range(skip, len(self)):
            own = self._own(batches, number)
            # a rank without a batch repeats one sample, of no weight, for the collectives' sake
            yield own if len(own) else batches[-1][:1]

    def _own(self, batches: list[Any], batch: int) -> list[Any]:
        """Return this rank's batch of that number, of facts about all batches; empty if it has
        none.
        """
        number, shard = divmod(batch, self.shards)
        position = number * self.world_size * self.shards + self.mine[shard]
        own: list[Any] = batches[position] if position < len(batches) else []
        return own

    def _round(self, batch: int) -> list[list[Any]]:
        size = self.world_size * self.shards
        return self._draw()[batch // self.shards * size :][:size]

    def _draw(self) -> list[list[Any]]:
        if self._drawn is None:
            drawn = draw_alike(self.source, self.seed, self.epoch)
            batches = [batch if hasattr(batch, "__len__") else list(batch) for batch in drawn]
            if not all(map(len, batches)):
                name = type(self.source).__name__
                raise DataError(
                    f"{name} yields a batch without any index in epoch {self.epoch}: leave empty "
                    "ones out."
                )
            self._drawn = batches
        return self._drawn
