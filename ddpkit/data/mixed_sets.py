"""A training set of several sets: each sample is of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpkit.data.named_sets import NamedSets
from ddpkit.data.set_counts import LONGEST, epoch_counts, until_of, weights_of
from ddpkit.data.set_order import SetOrder
from ddpkit.errors import DataError
from ddpkit.seed import mix_key

_MIXING = 0x313  # tells the order of the sets from other orders of the same seed


class MixedSets(NamedSets):
    """Mixes several datasets by their weights; each sample of a batch is of one of them.

    An epoch has exactly as many samples of each set as its weight says, and every stretch of it
    has about that proportion. A set is gone through pass after pass, each in a new order, also from
    one epoch to the next: no sample comes again before all others of its set have come.

    Give it to ``fit`` as any dataset. The order is its own: ``shuffle`` of the loader changes
    nothing, and a ``sampler`` is refused. The order follows from the seed, the epoch and the
    position, and so does not depend on the number of processes.

    Args:
        sets: datasets by name, each with a length and indices; in any number.
        weights: of each set, by name: positive numbers, of which only the proportions count. None:
            the lengths of the sets, so that each sample comes once in an epoch.
        until: what ends an epoch. ``"longest"``: all sets were used up; shorter ones come several
            times. ``"shortest"``: the first set was used up. Or the number of its samples.
        shuffle: whether each pass over a set has an order of its own. False: the order of the set.
        set_key: under this key each sample says of which set it is, by name; a sample that is no
            dict gets the name as its last entry. None: samples as they are.
        seed: of the orders; None: the experiment's seed.

    Attributes:
        counts: samples of each set in an epoch, by name.

    Raises:
        ConfigError: an argument cannot work, a set is a stream, or an epoch would have no sample of
            some set.
        DataError: a set is empty; or, when a sample is read, it has the key ``set_key`` already.

    Ranks: local. All ranks must give the same sets.

    State: none that is saved; the place follows from the batches that are done.

    Example:
        >>> mixed = MixedSets({"few": [0, 1], "many": [10, 11, 12, 13]}, {"few": 1, "many": 1})
        >>> mixed.counts
        {'few': 4, 'many': 4}
        >>> sorted(mixed[position] for position in range(len(mixed)))
        [0, 0, 1, 1, 10, 11, 12, 13]
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        until: str | int = LONGEST,
        *,
        shuffle: bool = True,
        set_key: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.weights = weights
        self.until = until_of(until)
        self.set_key = set_key
        super().__init__(sets, shuffle=shuffle, seed=seed)

    def _begin(self) -> None:
        super()._begin()
        sizes = self.sizes
        counts = epoch_counts(sizes, weights_of(self.weights, sizes), self.until)
        self.counts = dict(zip(self.names, counts, strict=True))
        self._mixing = SetOrder(counts, mix_key(self.seed, self.epoch, _MIXING))

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return sum(self.counts.values())

    def __getitem__(self, index: Any) -> Any:
        number, sample = self.find(self._position(index))
        found = self.datasets[number][sample]
        return found if self.set_key is None else self._marked(found, self.names[number])

    def find(self, position: int) -> tuple[int, int]:
        """Return the set at a position of this epoch, by number, and the sample's index in it.

        Args:
            position: from 0 to the length.
        """
        number, drawn = self._mixing.at(position)
        before = (self.epoch - 1) * self.counts[self.names[number]]
        return number, self._passes[number].sample(before + drawn)

    def describe(self) -> str:
        """Return what an epoch is made of, in words."""
        sizes = self.sizes
        return ", ".join(f"{self.counts[name]} of {name} ({sizes[name]})" for name in self.names)

    def collate(self, items: list[Any]) -> Any:
        """Make a batch of samples as a loader of the first set has it.

        Args:
            items: samples, of any of the sets.
        """
        return self.collate_of(0)(items)

    def _marked(self, sample: Any, name: str) -> Any:
        if isinstance(sample, Mapping):
            if self.set_key in sample:
                raise DataError(
                    f"MixedSets: set_key={self.set_key!r} is a key of the samples of {name!r} "
                    "already. Give another one."
                )
            return {**sample, self.set_key: name}
        if type(sample) in {tuple, list}:
            return (*sample, name)
        return sample, name
