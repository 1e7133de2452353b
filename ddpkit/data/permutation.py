"""The order of an epoch: a keyed bijection from positions to sample indices, computed where it is asked for.

Position ``k`` costs the same for every ``k`` and every size: nothing is stored, so a billion samples start as fast as
ten.

Source: large sets are shuffled by a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002). One half is a number of bits, the other a number below ``ceil(N / 2**bits)``, so that the
network's domain is larger than N by less than one part in a hundred, and hardly ever walks. The mixing function is
SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL = 1 << 14
ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_HALF = np.uint64(32)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)  # odd, about half of its bits set


def mix(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64, a bijection).

    Ranks: local.

    Example:
        >>> mix(1) == mix(1), mix(1) == mix(2)
        (True, False)
    """
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix_key(*parts: int) -> int:
    """Hash a few integers, in order, to one 64-bit key: (10, 2) and (11, 1) have nothing in common.

    Ranks: local.

    Example:
        >>> mix_key(10, 2) == mix_key(11, 1)
        False
    """
    key = 0
    for part in parts:
        key = mix(key ^ (part & _MASK64))
    return key


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _round_function(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash one half with a round's key: multiply, fold, multiply, and take the upper bits, which depend on all."""
    hashed: NDArray[np.uint64] = half + key
    hashed *= _MULTIPLIER
    hashed ^= hashed >> np.uint64(32)
    hashed *= _MULTIPLIER
    hashed >>= np.uint64(32)
    return hashed


class Order:
    """The order of one epoch: position in, sample index out; a keyed bijection on ``[0, num_samples)``.

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

    def __init__(self, num_samples: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
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
            else:  # add modulo the size: the hash is scaled down to it, and what is too large wraps around
                hashed = _round_function(low, key)
                hashed *= self._high_size
                hashed >>= _HALF
                high += hashed
                np.minimum(high, high - self._high_size, out=high)
        high <<= self._low_bits
        high |= low
        return high
