"""An attribute of several objects that has another value for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class SwitchedAttribute:
    """A context in which an attribute of some objects has another value. A class: a window enters
    it in each batch.
    """

    __slots__ = ("_before", "_during", "_name", "_owners")

    def __init__(
        self,
        owners: Sequence[Any],
        name: str,
        *,
        during: bool,
    ) -> None:
        self._owners = owners
        self._name = name
        self._during = during
        self._before: list[Any] = []

    def __enter__(self) -> None:
        name = self._name
        self._before = [getattr(owner, name) for owner in self._owners]
        for owner in self._owners:
            setattr(owner, name, self._during)

    def __exit__(self, *_: object) -> None:
        for owner, before in zip(self._owners, self._before, strict=True):
            setattr(owner, self._name, before)
