"""Which part of the data a process takes."""

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

    @property
    def shards(self) -> int:
        """How many parts of every batch each rank takes."""
        return (self.virtual_ranks or self.world_size) // self.world_size

    @property
    def is_virtual(self) -> bool:
        """Whether a stream is divided over virtual ranks: in training, not where it is only
        evaluated.
        """
        return self.virtual_ranks is not None and self.keep_step

    @property
    def shards_of_stream(self) -> range:
        """The parts of a stream's blocks that this rank takes: its own one, but of virtual
        ranks.
        """
        each = self.shards if self.is_virtual else 1
        return range(self.rank * each, (self.rank + 1) * each)

    @classmethod
    def of_this_rank(cls, **given: Any) -> Sharding:
        """Return the part of this rank among all ranks of its process group, shuffled by the
        experiment's seed.

        Args:
            given: the other attributes by name; or other values for these three.

        Example:
            >>> Sharding.of_this_rank(global_batch_size=32).world_size
            1
        """
        return cls(
            **{
                "rank": get_rank() or 0,
                "world_size": get_world_size(),
                "seed": default_seed(),
                **given,
            }
        )
