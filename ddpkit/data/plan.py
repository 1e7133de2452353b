"""The sampling plan: which sample stands at which position of an epoch, and which rank takes it.

An epoch's order is a function of ``(seed, epoch, position)`` and of nothing else. Global batch
``b`` is the positions ``[b * G, (b + 1) * G)``, where ``G`` is the sum of the ranks' batch sizes;
every rank takes a contiguous share of it, as even as it can be. So the order, the batches and their
number do not depend on the number of processes, no sample is repeated, and none is left out.

The order is a keyed bijection from positions to sample indices, computed where it is asked for:
position ``k`` costs the same for every ``k`` and every size, so that a billion samples start as
fast as ten.

Source: large sets are shuffled by a Feistel network with cycle walking (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002). One half is a number of bits, the other a number below
``ceil(N / 2**bits)``, so that the network's domain is larger than N by less than one part in a
hundred, and hardly ever walks. The mixing function is SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import operator
import re
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from ddpkit.errors import ConfigError, DataError
from ddpkit.seed import mix_key, own_randomness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from numpy.typing import NDArray

CHUNK = 8192
MOST_DRAWN = 20_000_000  # a sampler that yields more, and has no len(), seems endless
SMALL = 1 << 14
ROUNDS = 8
_HALF = np.uint64(32)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)  # odd, about half of its bits set


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _round_function(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash one half with a round's key: multiply, fold, multiply, and take the upper bits, which
    depend on all.
    """
    hashed: NDArray[np.uint64] = half + key
    hashed *= _MULTIPLIER
    hashed ^= hashed >> np.uint64(32)
    hashed *= _MULTIPLIER
    hashed >>= np.uint64(32)
    return hashed


class Order:
    """The order of one epoch: position in, sample index out; a keyed bijection on
    ``[0, num_samples)``.

    Args:
        num_samples: how many samples there are.
        seed: of the experiment.
        epoch: of the pass.
        shuffle: False gives the identity.

    Ranks: local; equal on all ranks that give equal arguments.

    Example:
        >>> order = Order(5, seed=1, epoch=1)
        >>> sorted(order.indices(0, 5))
        [0, 1, 2, 3, 4]
        >>> Order(5, seed=1, epoch=1, shuffle=False).indices(2, 4)
        [2, 3]
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        epoch: int,
        *,
        shuffle: bool = True,
    ) -> None:
        self.num_samples = num_samples
        self.shuffle = shuffle and num_samples > 1
        key = mix_key(seed, epoch)
        self._table: NDArray[np.int64] | None = None
        if self.shuffle and num_samples <= SMALL:
            keys = _mix_array(np.arange(num_samples, dtype=np.uint64) ^ np.uint64(key))
            self._table = np.argsort(keys, kind="stable")
        low_bits = max(1, (max(num_samples, 2) - 1).bit_length() // 2)
        self._low_bits = np.uint64(low_bits)
        self._low_mask = np.uint64((1 << low_bits) - 1)
        self._high_size = np.uint64(-(-num_samples >> low_bits))
        self._keys = [np.uint64(mix_key(key, number)) for number in range(ROUNDS)]

    def indices(self, start: int, stop: int) -> list[int]:
        """Return the sample indices at positions ``start`` to ``stop - 1``."""
        found: list[int] = self.at(np.arange(start, stop)).tolist()
        return found

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at some positions, which may have any shape."""
        if not self.shuffle:
            return positions
        if self._table is not None:
            return self._table[positions]
        values = self._encrypt(positions.ravel().astype(np.uint64))
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64).reshape(positions.shape)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low = values & self._low_mask
        high: NDArray[np.uint64] = values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _round_function(high, key) & self._low_mask
            else:
                # add modulo the size: the hash is scaled down to it, and what is too large wraps
                # around
                hashed = _round_function(low, key)
                hashed *= self._high_size
                hashed >>= _HALF
                high += hashed
                np.minimum(high, high - self._high_size, out=high)
        high <<= self._low_bits
        high |= low
        return high


@dataclass(frozen=True)
class SamplingPlan:
    """How an epoch's positions are divided into global batches, these into micro-batches, and those
    over the ranks.

    Every division is as even as it can be. A *batch* is what the ranks work on at once: a
    micro-batch, which is the whole global batch unless ``micro_batches`` says otherwise. Batches
    are numbered through the epoch.

    Args:
        num_samples: samples of the epoch.
        batch_size: samples per rank and batch. With ``global_batch_size``, what the largest share
            comes to.
        world_size: number of ranks.
        drop_last: leave out an incomplete last global batch.
        global_batch_size: samples per global batch; by default all ranks' ``batch_size``, in every
            micro-batch.
        micro_batches: batches that a global batch is divided into; the last, smaller one into no
            more than it needs.

    Raises:
        ConfigError: a size is not a positive whole number, or there are more micro-batches than
            samples.

    Ranks: local; every rank computes every rank's share, so nothing has to be asked.

    Example:
        >>> plan = SamplingPlan(num_samples=7, batch_size=2, world_size=2)
        >>> len(plan), [plan.share(1, rank) for rank in range(2)]
        (2, [(4, 6), (6, 7)])
        >>> plan = SamplingPlan(num_samples=10, world_size=3, global_batch_size=10, micro_batches=2)
        >>> [[plan.share(batch, rank) for rank in range(3)] for batch in range(2)]
        [[(0, 2), (2, 4), (4, 5)], [(5, 7), (7, 9), (9, 10)]]
    """

    num_samples: int
    batch_size: int = 1
    world_size: int = 1
    drop_last: bool = False
    global_batch_size: int = None  # type: ignore[assignment]  # filled in below
    micro_batches: int = 1

    def __post_init__(self) -> None:
        reason = "every step needs at least one sample"
        parts = self.world_size * self.micro_batches
        given: Any = self.global_batch_size
        if given is None:
            require_positive("batch_size", self.batch_size, reason)
            object.__setattr__(self, "global_batch_size", self.batch_size * parts)
            return
        require_positive("global_batch_size", given, reason)
        if self.micro_batches > given:
            raise ConfigError(
                f"global_batch_size={given} cannot be divided into {self.micro_batches} batches: "
                "some would be empty. Use a smaller grad_accumulation_factor, or a larger "
                "global_batch_size."
            )
        object.__setattr__(self, "batch_size", -(-given // parts))

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the same on every rank."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full * self.micro_batches + (
            self._pieces(rest) if rest and not self.drop_last else 0
        )

    @property
    def used_samples(self) -> int:
        """Samples of an epoch: all, or with ``drop_last`` the samples in full global batches."""
        return (
            self.num_samples // self.global_batch_size * self.global_batch_size
            if self.drop_last
            else self.num_samples
        )

    @property
    def full_batches(self) -> int:
        """Number of batches that belong to full global batches."""
        return self.num_samples // self.global_batch_size * self.micro_batches

    def total(self, batch: int) -> int:
        """Return the number of samples of a batch, over all ranks."""
        start, stop = self._span(batch)
        return stop - start

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """Return the positions ``(start, stop)`` that a rank takes of a batch; they may be none."""
        start, stop = self._span(batch)
        own_start, own_stop = part(stop - start, self.world_size, rank)
        return start + own_start, start + own_stop

    def done_before(self, batch: int) -> int:
        """Return how many samples of the epoch come before a batch, over all ranks; all of them at
        the end.
        """
        return self._span(batch)[0] if batch < len(self) else self.used_samples

    def batch_after(self, samples: int) -> int:
        """Return the batch that comes next when so many samples are done; it may have some of them
        once more.
        """
        length = len(self)
        batch = min(samples // self.global_batch_size * self.micro_batches, length)
        while batch < length and self.done_before(batch + 1) <= samples:
            batch += 1
        return batch

    def _span(self, batch: int) -> tuple[int, int]:
        """Return the positions of a batch, of all ranks together."""
        number, piece = divmod(batch, self.micro_batches)
        start = number * self.global_batch_size
        size = min(self.global_batch_size, self.num_samples - start)
        piece_start, piece_stop = part(size, self._pieces(size), piece)
        return start + piece_start, start + piece_stop

    def _pieces(self, size: int) -> int:
        """Return into how many batches a global batch of a size is divided."""
        largest = -(-self.global_batch_size // self.micro_batches)
        return self.micro_batches if size == self.global_batch_size else -(-size // largest)


def require_positive(name: str, value: Any, reason: str) -> None:
    """Raise an error unless a value is a whole number >= 1.

    Args:
        name: of the argument, for the message.
        value: given for it.
        reason: why, for the message.

    Raises:
        ConfigError: the value is not a whole number, or is below 1.

    Ranks: local.

    Example:
        >>> require_positive("num_buckets", 3, "at least one bucket is needed")
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(
            f"{name}={value!r} is not a positive whole number: {reason}. Set {name} to 1 or more."
        )


def part(size: int, parts: int, number: int) -> tuple[int, int]:
    """Divide ``size`` things into parts that differ by one at most, the larger first; return one
    part's bounds.

    Ranks: local.

    Example:
        >>> [part(5, 3, number) for number in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    each, more = divmod(size, parts)
    start = number * each + min(number, more)
    return start, start + each + (1 if number < more else 0)


class RankBatchSampler(Sampler[list[Any]]):
    """What a batch sampler of one rank's batches knows of its place and its epoch; a base class.

    Attributes:
        source: what is divided: a number of samples, or what a user's sampler or batch sampler
            yields.
        epoch: whose batches the next iteration yields.
        skip: batches that the next iteration leaves out.

    Ranks: local.
    """

    seed: int

    def __init__(
        self,
        source: Any,
        rank: int,
        world_size: int,
    ) -> None:
        self.source = source
        self.rank = rank
        self.world_size = world_size
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
            self._drawn = _draw_alike(self.source, self.seed, self.epoch)
        return self._drawn


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
    ) -> None:
        super().__init__(source, rank, world_size)
        self.shards = shards
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
        full = dataclasses.replace(self._plan, num_samples=self._plan.global_batch_size)
        self._in_full = micro_batches * shards  # batches of a full global one
        shares = [self._share(full, batch) for batch in range(self._in_full)]
        # of every batch of a full global one
        self._own_counts = [stop - start for start, stop in shares]
        totals = [full.total(batch) for batch in range(micro_batches)]
        self._totals = [
            0 if batch % shards else totals[batch // shards] for batch in range(self._in_full)
        ]
        filler = (full.num_samples - 1, full.num_samples)
        own = [np.arange(*(share if share[0] < share[1] else filler)) for share in shares]
        ends = np.cumsum([positions.size for positions in own]).tolist()
        self._own = np.concatenate(own)
        self._cuts = [slice(start, stop) for start, stop in itertools.pairwise([0, *ends])]

    @property
    def plan(self) -> SamplingPlan:
        """The plan of the current epoch."""
        if not isinstance(self.source, int) and len(self._draw()) != self._plan.num_samples:
            self._plan = dataclasses.replace(self._plan, num_samples=len(self._draw()))
        self._full_batches = self._plan.full_batches * self.shards
        return self._plan

    def _share(self, plan: SamplingPlan, batch: int) -> tuple[int, int]:
        """Return the positions of this rank's batch of that number."""
        number, shard = divmod(batch, self.shards)
        return plan.share(number, self.rank * self.shards + shard)

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

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in an epoch."""
        plan = self.plan
        own = len(plan) * self.shards
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
        if begun:
            yield (own + number * plan.global_batch_size)[None], cuts[begun:]
            number += 1
        at_a_time = max(CHUNK // own.size, 1)
        for start in range(number, full, at_a_time):
            numbers = np.arange(start, min(start + at_a_time, full))
            yield (numbers * plan.global_batch_size)[:, None] + own, cuts
        # the last global batch, if it is not full
        for batch in range(max(first, in_full), len(plan) * self.shards):
            last = np.arange(*self._share(plan, batch))
            if last.size or self.keep_step:
                yield (last if last.size else np.array([plan.num_samples - 1]))[None], [slice(None)]


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

    Ranks: local. All ranks must give equal batch samplers.

    Example:
        >>> from torch.utils.data import BatchSampler, SequentialSampler
        >>> inner = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
        >>> [list(DealtBatchSampler(inner, rank, 2)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [4]]]
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[Any]],
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        drop_last: bool = False,
        keep_step: bool = True,
        shards: int = 1,
    ) -> None:
        super().__init__(batch_sampler, rank, world_size)
        self.batch_sampler = batch_sampler
        self.shards = shards
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
        return 0 if batch % self.shards else sum(len(one) for one in self._round(batch))

    def part(self, batch: int) -> float:
        """Return 1 if this rank has a batch in a round, else 0: every batch of the user counts the
        same.
        """
        return 1.0 if self.count(batch) else 0.0

    def parts(self, batch: int) -> int:
        """Return the number of batches of a round; of several shards, with the first of them."""
        return 0 if batch % self.shards else len(self._round(batch))

    def repeats(self, batch: int) -> list[int]:
        """Return how often each sample of this rank's batch came before in the epoch, on any
        rank.
        """
        if self._repeats is None:
            seen: dict[int, int] = {}
            self._repeats = [count_repeats(one, seen) for one in self._draw()]
        return self._own(self._repeats, batch)

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in an epoch."""
        rounds, rest = divmod(len(self._draw()), self.world_size * self.shards)
        whole = rounds * self.shards
        if not rest or self.drop_last:
            return whole
        return whole + (
            self.shards
            if self.keep_step
            else min(max(rest - self.rank * self.shards, 0), self.shards)
        )

    def __iter__(self) -> Iterator[list[Any]]:
        skip = self.skip
        self.skip = 0
        batches = self._draw()
        for number in range(skip, len(self)):
            own = self._own(batches, number)
            yield own if len(own) else batches[-1][:1]

    def _own(self, batches: list[Any], batch: int) -> list[Any]:
        """Return this rank's batch of that number, of facts about all batches; empty if it has
        none.
        """
        number, shard = divmod(batch, self.shards)
        position = (number * self.world_size + self.rank) * self.shards + shard
        own: list[Any] = batches[position] if position < len(batches) else []
        return own

    def _round(self, batch: int) -> list[list[Any]]:
        size = self.world_size * self.shards
        return self._draw()[batch // self.shards * size :][:size]

    def _draw(self) -> list[list[Any]]:
        if self._drawn is None:
            drawn = _draw_alike(self.source, self.seed, self.epoch)
            batches = [batch if hasattr(batch, "__len__") else list(batch) for batch in drawn]
            if not all(map(len, batches)):
                name = type(self.source).__name__
                raise DataError(
                    f"{name} yields a batch without any index in epoch {self.epoch}: leave empty "
                    "ones out."
                )
            self._drawn = batches
        return self._drawn


def layers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler or a loader, the sampler inside it, and so on.

    Args:
        sampler: any; it may hold another as its ``batch_sampler`` or ``sampler``, or a list of them
            as ``samplers``.

    Ranks: local.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> [type(one).__name__ for one in layers(BatchSampler(range(3), 2, drop_last=False))]
        ['BatchSampler', 'range']
    """
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        sampler = waiting.pop()
        if sampler is None or id(sampler) in seen:
            continue
        seen.add(id(sampler))
        yield sampler
        # first: a DataLoader has both, and this one decides
        inner = getattr(sampler, "batch_sampler", None)
        waiting.append(getattr(sampler, "sampler", None) if inner is None else inner)
        several = getattr(sampler, "samplers", None)
        waiting += reversed(several) if isinstance(several, (list, tuple)) else []


def set_epoch_inside(sampler: Any, epoch: int) -> None:
    """Tell a sampler or a loader, and the samplers inside it, which epoch comes.

    Args:
        sampler: any; samplers without ``set_epoch`` are left alone.
        epoch: which comes.

    Ranks: local.

    Example:
        >>> set_epoch_inside([0, 1, 2], 3)
    """
    for one in layers(sampler):
        setter = getattr(one, "set_epoch", None)
        if setter is not None:
            setter(epoch)
        if isinstance(one, RankBatchSampler):
            return  # they pass it on


def count_repeats(indices: Iterable[Any], seen: dict[int, int]) -> list[int]:
    """Return how often each index came before: in ``seen``, which is brought up to date, or in the
    same list.

    Args:
        indices: of samples.
        seen: how often each came so far, by its number.

    Ranks: local.

    Example:
        >>> count_repeats([3, 5, 3, 3], {5: 1})
        [0, 1, 1, 2]
    """
    counts = []
    for index in indices:
        number = index_number(index)
        counts.append(seen.get(number, 0))
        seen[number] = counts[-1] + 1
    return counts


def index_number(index: Any) -> int:
    """Return an index as a number; any other value, such as a tuple, by its ``repr``.

    Args:
        index: what a sampler yields for one sample.

    Ranks: local; equal on all ranks if the ``repr`` is.

    Example:
        >>> index_number(3), index_number((3, 224)) == index_number((3, 224))
        (3, True)
    """
    if type(index) is int:
        return index
    try:
        return operator.index(index)
    except TypeError:
        return int.from_bytes(
            hashlib.blake2b(repr(index).encode(), digest_size=8).digest(),
            "little",
        )


def _draw_alike(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """List what a sampler yields, its randomness fixed by (seed, epoch) and the caller's left as it
    was.
    """
    key = mix_key(seed, epoch, 0xDEA1)
    generators = [getattr(one, "generator", None) for one in layers(sampler)]
    with own_randomness(key, [one for one in generators if isinstance(one, torch.Generator)]):
        most = MOST_DRAWN
        with contextlib.suppress(TypeError, NotImplementedError):
            most = max(most, 2 * len(cast("Sized", sampler)))
        drawn = list(itertools.islice(sampler, most + 1))
    name = type(sampler).__name__
    if len(drawn) > most:
        raise DataError(
            f"{name} seems to have no end: it has yielded {len(drawn):,} times. A sampler is "
            "drawn whole at the start of an epoch, to be divided. Let it end, or give it a len() "
            "if it is so long."
        )
    if not drawn:
        raise DataError(
            f"{name} yields nothing in epoch {epoch}: there is no data to train on. A generator "
            "can be iterated only once; pass an object whose `__iter__` starts again."
        )
    return drawn
