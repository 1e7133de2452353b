"""Into how many shards the data is divided, and which of them a process takes.

There is one shard for each rank, or a fixed number of them: *virtual ranks*, of which each rank
stands for as many as every other. Who divides data or counts batches asks a :class:`Division`, and
needs not know which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpkit.base import get_rank, get_world_size
from ddpkit.seed import global_seed

DEFAULT_SEED = 563375142


def default_seed() -> int:
    """Return the experiment's seed, or a fixed one where ``seed_everything`` was not called.

    Ranks: local.

    Example:
        >>> isinstance(default_seed(), int)
        True
    """
    seed = global_seed()
    return DEFAULT_SEED if seed is None else seed


@dataclass(frozen=True)
class Division:
    """Into how many shards every batch is divided, and which of them this process works on.

    Attributes:
        rank: this rank.
        world_size: number of ranks that divide the data.
        virtual_ranks: the number of shards, where it is the same on any number of ranks; a multiple
            of theirs. None: each rank is a shard.
        in_turns: whether the shards that the ranks work on at the same time follow each other:
            those of a rank are then ``rank``, ``rank + world_size`` and so on. If not, those of a
            rank follow each other.

    Ranks: local.

    Example:
        >>> division = Division(rank=1, world_size=3, virtual_ranks=6)
        >>> division.number, division.each, division.mine
        (6, 2, range(2, 4))
        >>> Division(rank=1, world_size=3, virtual_ranks=6, in_turns=True).mine
        range(1, 6, 3)
        >>> division.in_words, Division(world_size=1).in_words
        ('6 virtual ranks on 3 processes', '1 process')
    """

    rank: int = 0
    world_size: int = 1
    virtual_ranks: int | None = None
    in_turns: bool = False

    @classmethod
    def of_ranks(
        cls,
        virtual_ranks: int | None = None,
        *,
        in_turns: bool = False,
    ) -> Division:
        """Return the division over the ranks of the process group.

        Args:
            virtual_ranks: likewise.
            in_turns: likewise.

        Example:
            >>> Division.of_ranks(4).mine
            range(0, 4)
        """
        return cls(get_rank() or 0, get_world_size(), virtual_ranks, in_turns)

    @property
    def is_fixed(self) -> bool:
        """Whether the shards are the same on any number of processes, so that no bit may depend on
        which process works on them.
        """
        return self.virtual_ranks is not None

    @property
    def number(self) -> int:
        """How many shards there are over all ranks."""
        return self.virtual_ranks or self.world_size

    @property
    def each(self) -> int:
        """How many shards each rank works on, one after another."""
        return self.number // self.world_size

    @property
    def mine(self) -> range:
        """The numbers of this rank's shards."""
        if self.in_turns:
            return range(self.rank, self.number, self.world_size)
        return range(self.rank * self.each, (self.rank + 1) * self.each)

    @property
    def owners(self) -> str:
        """What has a shard, in messages."""
        return "virtual ranks" if self.is_fixed else "processes"

    @property
    def given(self) -> str:
        """The option that has fixed the number of shards, in messages; empty if none has."""
        return f"virtual_ranks={self.virtual_ranks}" if self.is_fixed else ""

    @property
    def in_words(self) -> str:
        """How many there are, in messages."""
        processes = f"{self.world_size} process{'' if self.world_size == 1 else 'es'}"
        if not self.is_fixed:
            return processes
        return f"{self.number} virtual rank{'' if self.number == 1 else 's'} on {processes}"


@dataclass(frozen=True)
class Sharding:
    """Which part of the data a loader gives to this process.

    Attributes:
        rank: this rank.
        world_size: number of ranks that divide the data; 1 gives everything to everybody.
        keep_step: whether every rank must yield the same number of batches, as training must.
        seed: of the shuffling.
        global_batch_size: samples of an optimizer step over all ranks; takes the place of
            ``batch_size``.
        micro_batches: batches that those are worked on in, one after the other.
        virtual_ranks: a multiple of the ranks, over which the data is divided then; each rank takes
            as many of their parts as it stands for, one after another. None: the ranks themselves.
        in_turns: which of the parts a rank takes, as in :class:`Division`.
        may_drop: whether ``drop_last`` counts. In an evaluation it does not: what it leaves out
            follows from the number of ranks.

    Ranks: local.

    Example:
        >>> Sharding(rank=0, world_size=2).keep_step
        True
    """

    rank: int = 0
    world_size: int = 1
    keep_step: bool = True
    seed: int = DEFAULT_SEED
    global_batch_size: int | None = None
    micro_batches: int = 1
    virtual_ranks: int | None = None
    may_drop: bool = True
    in_turns: bool = False

    @property
    def division(self) -> Division:
        """Into how many shards every batch is divided."""
        return Division(self.rank, self.world_size, self.virtual_ranks, self.in_turns)

    @property
    def division_of_stream(self) -> Division:
        """Likewise for a stream: in an evaluation, where it is read to its end on each rank, each
        rank is a shard.
        """
        return self.division if self.keep_step else Division(self.rank, self.world_size)

    @classmethod
    def of_this_rank(cls, division: Division | None = None, **given: Any) -> Sharding:
        """Return the part of this rank, shuffled by the experiment's seed.

        Args:
            division: the data is divided so; None: over the ranks of the process group.
            given: the other attributes by name; or other values for these.

        Example:
            >>> Sharding.of_this_rank(global_batch_size=32).world_size
            1
        """
        found = Division.of_ranks() if division is None else division
        return cls(
            **{
                "rank": found.rank,
                "world_size": found.world_size,
                "virtual_ranks": found.virtual_ranks,
                "in_turns": found.in_turns,
                "seed": default_seed(),
                **given,
            }
        )
