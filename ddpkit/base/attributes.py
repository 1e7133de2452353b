"""Attributes of an object that are set for a while."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside a ``with`` block; restore them afterwards.

    Args:
        owner: the object, or a class.
        **attributes: the values by name; the attributes exist.

    Example:
        >>> from ddpkit.base import RankStatus
        >>> status = RankStatus()
        >>> with temporarily(status, step=3):
        ...     status.step
        3
        >>> status.step
        0
    """
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
