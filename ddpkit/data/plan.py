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

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpkit.errors import ConfigError
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


CHUNK = 8192
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
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(
            f"{name}={value!r} is not a positive whole number: {reason}. Set {name} to 1 or more."
        )


def part(size: int, parts: int, number: int) -> tuple[int, int]:
    """Divide ``size`` things into parts that differ by one at most, the larger first; return one
    part's bounds.

    Example:
        >>> [part(5, 3, number) for number in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    each, more = divmod(size, parts)
    start = number * each + min(number, more)
    return start, start + each + (1 if number < more else 0)


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler or a loader, the sampler inside it, and so on.

    Args:
        sampler: any; it may hold another as its ``batch_sampler`` or ``sampler``, or a list of them
            as ``samplers``.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> outer = BatchSampler(range(3), 2, drop_last=False)
        >>> [type(sampler).__name__ for sampler in nested_samplers(outer)]
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
    """
    for inner in nested_samplers(sampler):
        setter = getattr(inner, "set_epoch", None)
        if setter is not None:
            setter(epoch)
        if getattr(inner, "passes_epoch_on", False):
            return  # to what it divides, which would hear of it twice
