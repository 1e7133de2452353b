"""A callback that does nothing, where nobody has given another one."""

from __future__ import annotations


def do_nothing(*_: object) -> None:
    """Take any arguments, and do nothing.

    Ranks: local.

    Example:
        >>> do_nothing("a", 1) is None
        True
    """
