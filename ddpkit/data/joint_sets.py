"""A training set of several sets: each batch has samples of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpkit.data.named_sets import NamedSets
from ddpkit.data.plan import require_positive
from ddpkit.data.set_counts import LONGEST, SHORTEST, require_names, until_of
from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


class JointSets(NamedSets):
    """Joins several datasets: each step has a batch of every one of them.

    A batch is a dict with a batch of each set, by name. An item of the joined set has
    ``per_item`` samples of each; so the loader's ``batch_size=16`` with
    ``per_item={"labelled": 1, "unlabelled": 7}`` gives 16 labelled and 112 unlabelled samples. A
    step counts its items, here 16: over uneven ranks, micro-batches and the last batch of an
    epoch, the mean over each set's samples is weighed rightly, since each item has as many.

    A set is gone through pass after pass, each in a new order, also from one epoch to the next: no
    sample comes again before all others of its set have come. The order follows from the seed, the
    epoch and the position, and so does not depend on the number of processes. ``shuffle`` of the
    loader changes nothing, and a ``sampler`` is refused.

    Args:
        sets: datasets by name, each with a length and indices.
        per_item: samples of each set in an item, by name; None: one of each.
        until: what ends an epoch. ``"longest"``: all sets were used up; shorter ones come several
            times. ``"shortest"``: the first set was used up. Or the number of its items.
        shuffle: whether each pass over a set has an order of its own. False: the order of the set.
        collate_fn: makes a set's batch of a list of its samples; or one for each set, by name.
            None: as a loader of that set alone has it. A ``collate_fn`` of the loader takes the
            place of all: it gets the items, dicts with a list of samples for each name.
        seed: of the orders; None: the experiment's seed.

    Attributes:
        per_item: samples of each set in an item, by name.

    Raises:
        ConfigError: an argument cannot work, a set is a stream, or ``"shortest"`` with a set that
            has not enough samples for one item.
        DataError: a set is empty.

    Ranks: local. All ranks must give the same sets.

    State: none that is saved; the place follows from the batches that are done.

    Example:
        >>> joint = JointSets(
        ...     {"a": [1, 2], "b": [10, 20, 30, 40]}, per_item={"a": 1, "b": 2}, shuffle=False
        ... )
        >>> joint[1]
        {'a': [2], 'b': [30, 40]}
        >>> joint.collate([joint[0], joint[1]])
        {'a': tensor([1, 2]), 'b': tensor([10, 20, 30, 40])}
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        per_item: Mapping[str, int] | None = None,
        until: str | int = LONGEST,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        self.until = until_of(until)
        self._given_per_item = per_item
        super().__init__(sets, shuffle=shuffle, seed=seed)
        if isinstance(collate_fn, Mapping):
            require_names("collate_fn", collate_fn, self.per_item)
            self._collates = [collate_fn[name] for name in self.names]
        else:
            self._collates = [
                collate_fn or self.collate_of(number) for number in range(len(self.names))
            ]

    def _begin(self) -> None:
        super()._begin()
        sizes = self.sizes
        given = self._given_per_item
        if given is not None:
            require_names("per_item", given, sizes)
            for name, number in given.items():
                require_positive(f"per_item[{name!r}]", number, "each item has samples of all sets")
        self.per_item = {name: 1 if given is None else int(given[name]) for name in sizes}
        self._length = self._items(sizes)

    def _items(self, sizes: Mapping[str, int]) -> int:
        """Return how many items an epoch has."""
        if self.until == LONGEST:
            return max(-(-sizes[name] // number) for name, number in self.per_item.items())
        if self.until != SHORTEST:
            return int(self.until)
        name = min(sizes, key=lambda name: sizes[name] // self.per_item[name])
        items = sizes[name] // self.per_item[name]
        if not items:
            raise ConfigError(
                f"until='shortest': the set {name!r} has {sizes[name]} sample(s), fewer than the "
                f"{self.per_item[name]} of one item. Use until='longest', where such a set comes "
                "several times."
            )
        return items

    def __len__(self) -> int:
        """Return the number of items of an epoch."""
        return self._length

    def __getitem__(self, index: Any) -> dict[str, list[Any]]:
        position = (self.epoch - 1) * self._length + self._position(index)
        item = {}
        for number, name in enumerate(self.names):
            each = self.per_item[name]
            first = position * each
            drawn = [self._passes[number].sample(place) for place in range(first, first + each)]
            item[name] = [self.datasets[number][sample] for sample in drawn]
        return item

    def collate(self, items: list[dict[str, list[Any]]]) -> dict[str, Any]:
        """Make a batch of items: a dict with a batch of each set.

        Args:
            items: as the dataset gives them.
        """
        return {
            name: make([sample for item in items for sample in item[name]])
            for name, make in zip(self.names, self._collates, strict=True)
        }

    def describe(self) -> str:
        """Return what an epoch is made of, in words."""
        sizes = self.sizes
        each = ", ".join(f"{self.per_item[name]} of {name} ({sizes[name]})" for name in self.names)
        return f"{self._length} times {each}"
