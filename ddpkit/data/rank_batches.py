"""What the batch samplers of one rank have in common: their place, and their epoch."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from torch.utils.data import Sampler

from ddpkit.data.plan import set_epoch_inside
from ddpkit.data.sampler_drawing import draw_alike
from ddpkit.data.sharding import Division


class RankBatchSampler(Sampler[list[Any]]):
    """What a batch sampler of one rank's batches knows of its place and its epoch; a base class.

    Attributes:
        source: what is divided: a number of samples, or what a user's sampler or batch sampler
            yields.
        division: how every round is divided.
        mine: the numbers of this rank's shards, in the order in which it yields their batches.
        epoch: whose batches the next iteration yields.
        skip: batches that the next iteration leaves out.
    """

    seed: int
    passes_epoch_on = True  # for set_epoch_inside

    def __init__(
        self,
        source: Any,
        rank: int,
        world_size: int,
        shards: int = 1,
        *,
        in_turns: bool = False,
    ) -> None:
        self.source = source
        self.rank = rank
        self.world_size = world_size
        self.shards = shards
        self.division = Division(rank, world_size, world_size * shards, in_turns)
        self.mine = self.division.mine
        self.epoch = 1
        self.skip = 0
        self._drawn: list[Any] | None = None
        self._repeats: list[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration yields."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._drawn = None
            self._repeats = None
        set_epoch_inside(self.source, epoch)

    def first_index(self) -> Any:
        """Return the first index that the source yields for this epoch, the same on every rank."""
        return 0 if isinstance(self.source, int) else self._draw()[0]

    def drawn_words(self) -> dict[str, str]:
        """Describe what the source has yielded for this epoch, for a comparison with the other
        ranks.
        """
        if isinstance(self.source, int):
            return {}
        name = (
            f"draw of {type(self.source).__name__} for epoch {self.epoch} (its randomness must "
            "follow from a seed that all ranks share; one that draws for its own rank alone says "
            "is_sharded = True)"
        )
        shown = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self._draw()))
        return {name: hashlib.blake2b(shown.encode(), digest_size=6).hexdigest()}

    def _draw(self) -> list[Any]:
        """Return what the source yields in this epoch, drawn once per epoch and alike on every
        rank.
        """
        if self._drawn is None:
            self._drawn = draw_alike(self.source, self.seed, self.epoch)
        return self._drawn
