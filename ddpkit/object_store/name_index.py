"""Which objects to look for in a store, besides those that it lists: it may list a new one late,
but it answers for a name at once.

An index is a small object that names all that was about to be written. It is written before what it
names is. What is named and not there was not written, or is deleted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpkit.object_store.objects import Objects

INDEX_FORMAT = 1

logger = get_logger(__name__)


@dataclass(frozen=True)
class NameIndex:
    r"""The index of a folder of a store.

    Args:
        name: of the object.
        content: what it names, in the plural, such as ``"files"``.
        forbidden: signs that no name has; an index with such a name cannot be understood.

    Ranks: main only, but for :meth:`read`.

    Example:
        >>> NameIndex(".files.json", "files", forbidden="\0").name
        '.files.json'
    """

    name: str
    content: str
    forbidden: str = ""

    def read(self, objects: Objects) -> set[str]:
        """Return what the index names; nothing where there is none, or one that cannot be
        understood.

        Args:
            objects: of the folder.
        """
        try:
            data = objects.read(self.name)
        except FileNotFoundError:
            return set()
        try:
            named = json.loads(data)[self.content]
            if not all(map(self._is_name, named)):
                raise ValueError("names that are no text")
        except (ValueError, LookupError, TypeError) as error:
            logger.warning(
                "%s/%s cannot be understood (%s): %s are found by the store's listing.",
                objects.url,
                self.name,
                error,
                self.content,
            )
            return set()
        return set(named)

    def write(
        self,
        objects: Objects,
        names: Iterable[str],
    ) -> None:
        """Write the index anew.

        Args:
            objects: of the folder.
            names: of all that is there, or about to be.
        """
        content = {"format": INDEX_FORMAT, self.content: sorted(names)}
        objects.write(self.name, json.dumps(content).encode())

    def _is_name(self, name: object) -> bool:
        return isinstance(name, str) and bool(name) and set(name).isdisjoint(self.forbidden)
