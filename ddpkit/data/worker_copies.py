"""What the persistent workers of a loader know of its dataset: the values from when they were
started.
"""

from __future__ import annotations

import contextlib
import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WorkerCopies"]

logger = get_logger(__name__)

PLAIN = (
    bool,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    np.number,
)
MOST_DATASETS = 64  # inside of each other, or joined
LONGEST_TEXT = 200
STALE = (
    "persistent_workers=True: the workers have copies of the dataset from when they were started. "
    "Since then %s, and the workers keep the old value. Give the loader's dataset a method "
    "set_epoch(epoch), which is called in the workers, too; or leave persistent_workers out."
)


class WorkerCopies:
    """Remembers the plain attributes of a dataset as persistent workers have them, and warns once
    of others.

    Private attributes are left out: they change for reasons of the dataset's own, as a stored
    length does.

    Ranks: local; warns on the main process.

    Example:
        >>> from types import SimpleNamespace
        >>> dataset, copies = SimpleNamespace(level=1, files=[]), WorkerCopies()
        >>> copies.compare(dataset)
        []
        >>> dataset.level = 2
        >>> copies.changes(dataset)
        ['SimpleNamespace.level has changed from 1 to 2']
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Any] | None = (
            None  # by the number of a dataset, and the attribute
        )
        self._has_told = False

    def compare(self, dataset: Any) -> list[str]:
        """Note what the workers get that are now started; of workers that run already, warn of what
        they lack.

        Args:
            dataset: of the loader, in this process.

        Returns:
            What has changed, in words.
        """
        if self._known is None:
            self._known = _attributes(dataset)
            return []
        changes = [] if self._has_told else self.changes(dataset)
        if changes:
            self._has_told = True
            logger.warning(STALE, "; ".join(changes))
        return changes

    def changes(self, dataset: Any) -> list[str]:
        """Return in words what has changed in this process since the workers were started."""
        known = self._known or {}
        now = _attributes(dataset)
        names = [type(inner).__name__ for inner in _datasets(dataset)]
        return [
            f"{names[number]}.{name} has changed from {known[number, name]!r} to {value!r}"
            for (number, name), value in now.items()
            if (number, name) in known and _differ(known[number, name], value)
        ]

    @contextlib.contextmanager
    def telling(self, dataset: Any) -> Iterator[None]:
        """Return a context for a change that the workers will make, too: what it changes is known
        to them.
        """
        if self._known is None:
            yield
            return
        before = _attributes(dataset)
        yield
        for key, value in _attributes(dataset).items():
            if key not in before or _differ(before[key], value):
                self._known[key] = value


def _attributes(dataset: Any) -> dict[tuple[int, str], Any]:
    """Return the public attributes with plain values of a dataset and of those inside it."""
    return {
        (number, name): value
        for number, inner in enumerate(_datasets(dataset))
        for name, value in getattr(inner, "__dict__", {}).items()
        if name[:1] != "_" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return len(value) <= LONGEST_TEXT
    if type(value) is tuple:
        return len(value) <= LONGEST_TEXT and all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN)


def _differ(value: Any, other: Any) -> bool:
    """Return whether two plain values differ; what is not a number is itself."""
    return repr(value) != repr(other)


def _datasets(dataset: Any) -> list[Any]:
    """Return a dataset and the datasets inside it, such as those of ``Subset`` and
    ``ConcatDataset``.
    """
    found = [dataset]
    for current in found:
        attributes = getattr(current, "__dict__", {})
        inner = attributes.get("datasets")
        inner = list(inner) if isinstance(inner, (list, tuple)) else []
        if attributes.get("dataset") is not None:
            inner.append(attributes["dataset"])
        found += [other for other in inner if all(other is not known for known in found)]
        if len(found) > MOST_DATASETS:
            break
    return found
