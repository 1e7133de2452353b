"""The sets of a validation or a test: a single one without a name, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

NO_NAME = ""  # of a single set
NO_SET = (
    "{}: the dict of sets is empty. Give the sets by name, such as {{'clean': a, 'noisy': b}}, or "
    "leave it out."
)
BAD_NAME = (
    "{}: {!r} is no name of a set: it goes before the names of values, as in noisy/accuracy. Give "
    "one without a slash that is not empty."
)


@dataclass(frozen=True, eq=False)
class EvaluationSets:
    """The loaders of a validation or a test, by the names of their sets.

    Attributes:
        loaders: of this rank, in the order in which the sets were given.

    Ranks: local; alike on every rank.

    Example:
        >>> sets = EvaluationSets({"clean": "abc", "noisy": "de"})
        >>> sets.deciding, [*sets.deciding_last()]
        ('clean', [('noisy', 'de'), ('clean', 'abc')])
    """

    loaders: Mapping[str, Any]

    @property
    def are_named(self) -> bool:
        """Whether the sets have names."""
        return NO_NAME not in self.loaders

    @property
    def deciding(self) -> str:
        """The name of the set that decides: the first."""
        return next(iter(self.loaders))

    def deciding_last(self) -> list[tuple[str, Any]]:
        """Return names and loaders, the set that decides at the end."""
        first, *others = self.loaders.items()
        return [*others, first]

    def by_stage(self, stage: str) -> dict[str, Any]:
        """Return the loaders by the stage, and the name of their set.

        Args:
            stage: such as ``"valid"``.
        """
        return {f"{stage} {name}".rstrip(): loader for name, loader in self.loaders.items()}

    def row(self, stage: str, describe: Callable[[Any], str]) -> dict[str, str]:
        """Return a row of the start-up block.

        Args:
            stage: such as ``"valid"``.
            describe: says how large the set of a loader is.
        """
        if not self.are_named:
            return {f"{stage} set": describe(self.loaders[NO_NAME])}
        sets = [f"{name}: {describe(loader)}" for name, loader in self.loaders.items()]
        return {f"{stage} sets": "; ".join(sets)}


def sets_of(
    argument: str,
    data: Any,
    loader_kwargs: Mapping[str, Any],
    make: Callable[[Any, str], Any],
) -> EvaluationSets:
    """Return the loaders of what was given to ``fit`` or ``evaluate``.

    Args:
        argument: its name.
        data: a dataset or a loader; or a mapping of names to such.
        loader_kwargs: with a sampler, a mapping is a dataset whose samples have keys.
        make: makes the loader of one of them, of a name.

    Raises:
        ConfigError: there is no set in the mapping, or a name cannot be used.
    """
    has_own_indices = any(
        loader_kwargs.get(name) is not None for name in ("sampler", "batch_sampler")
    )
    if has_own_indices or not _are_sets(data):
        return EvaluationSets({NO_NAME: make(data, NO_NAME)})
    if not data:
        raise ConfigError(NO_SET.format(argument))
    for name in data:
        if not name or "/" in name:
            raise ConfigError(BAD_NAME.format(argument, name))
    return EvaluationSets({name: make(each, name) for name, each in data.items()})


def _are_sets(data: Any) -> bool:
    """Say whether a value is a mapping of names to sets, and no dataset by itself."""
    if not isinstance(data, Mapping):
        return False
    return all(
        isinstance(name, str)
        and not isinstance(value, (Tensor, np.ndarray, str, bytes, int, float))
        for name, value in data.items()
    )
