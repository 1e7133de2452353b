"""What datasets that are made of several sets have in common: names, sizes, epoch and seed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from ddpkit.base import kind_of
from ddpkit.data.plan import set_epoch_inside
from ddpkit.data.set_order import SetPasses
from ddpkit.data.sharding import default_seed
from ddpkit.errors import ConfigError, DataError
from ddpkit.seed import mix_key

if TYPE_CHECKING:
    from collections.abc import Callable

_PASSES = 0x5E7  # tells the orders of the sets from other orders of the same seed


class NamedSets(Dataset[Any]):
    """Several datasets by name, each of which is gone through pass after pass; a base class.

    Its indices are positions of the present epoch. So a loader reads it in its own order, and a
    sample has another index in each epoch.

    Args:
        sets: by name, each with a length and indices.
        shuffle: whether each pass over a set has an order of its own.
        seed: of the orders; None: the experiment's seed.

    Attributes:
        names: of the sets.
        datasets: the sets, in that order.
        epoch: whose samples the positions stand for.
        seed: of the orders.

    Ranks: local; alike on every rank.
    """

    def __init__(
        self,
        sets: Any,
        *,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        _require_sets(type(self).__name__, sets)
        self.names = tuple(sets)
        self.datasets = list(sets.values())
        self.shuffle = shuffle
        self.epoch = 1
        self._given_seed = seed
        self._begin()

    def __len__(self) -> int:
        raise NotImplementedError

    def describe(self) -> str:
        """Return what an epoch is made of, in words."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        """The samples of each set, by name."""
        return {name: len(data) for name, data in zip(self.names, self.datasets, strict=True)}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose samples the positions stand for, and tell the sets."""
        self.epoch = epoch
        for data in self.datasets:
            set_epoch_inside(data, epoch)
        self._begin()

    def _begin(self) -> None:
        """Make the orders of the epoch."""
        # A worker that was started anew does not know the experiment's seed: it keeps what it got.
        if get_worker_info() is None or not hasattr(self, "seed"):
            self.seed = default_seed() if self._given_seed is None else int(self._given_seed)
        self._passes = [
            SetPasses(len(data), mix_key(self.seed, number, _PASSES), shuffle=self.shuffle)
            for number, data in enumerate(self.datasets)
        ]

    def _position(self, index: Any) -> int:
        """Return an index as a position of the epoch.

        Raises:
            IndexError: the epoch has no such position.
        """
        position = operator.index(index)
        size = len(self)
        if not -size <= position < size:
            raise IndexError(f"{type(self).__name__} has {size} positions, and no {position}.")
        return position % size

    def collate(self, items: list[Any]) -> Any:
        """Make a batch of items; in a loader that is given nothing else.

        Args:
            items: as the dataset gives them.
        """
        raise NotImplementedError

    def collate_of(self, number: int) -> Callable[[list[Any]], Any]:
        """Return what makes a batch of the samples of one set, where nothing else is given.

        Args:
            number: of the set.
        """
        data = self.datasets[number]
        if hasattr(data, "set_output_keys") and hasattr(data, "pipeline"):  # of SpeechBrain
            from ddpkit.batch import PaddedBatch

            return PaddedBatch
        return default_collate


def _require_sets(kind: str, sets: Any) -> None:
    """Refuse what are no sets by name.

    Raises:
        ConfigError: no mapping, no set in it, a name that is no text, or what is no dataset with a
            length.
        DataError: a set is empty.
    """
    if not isinstance(sets, Mapping) or not sets:
        raise ConfigError(
            f"{kind}: sets={sets!r:.80} must be a mapping with at least one dataset, such as "
            f"{kind}({{'clean': clean_set, 'noisy': noisy_set}})."
        )
    for name, data in sets.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{kind}: {name!r} cannot name a set. Give a text that is not empty.")
        _require_set(f"{kind}: the set {name!r} is {kind_of(data)}", data)
        if not len(data):
            raise DataError(
                f"{kind}: the set {name!r} is empty. Check the paths and filters that made it, or "
                "leave it out."
            )


def _require_set(words: str, data: Any) -> None:
    if isinstance(data, DataLoader):
        raise ConfigError(f"{words}. Give its dataset; the batches are made by one loader of all.")
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ConfigError(
            f"{words}, a stream without a length, of which nobody knows where a pass ends. Mix "
            "streams with their own library (datasets.interleave_datasets, webdataset.RandomMix) "
            "and give the mixed stream to fit."
        )
    if not hasattr(data, "__getitem__") or isinstance(data, (str, bytes, Mapping)):
        raise ConfigError(f"{words}, which has no samples 0, 1, 2 and so on. Give a dataset.")
