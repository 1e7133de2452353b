"""Name the kind of a value in a sentence: "an int", "a list"."""

from __future__ import annotations

from typing import Any

_VOWELS = tuple("aeioAEIO")  # a class whose name begins with U mostly has the sound of "you"


def with_article(name: str) -> str:
    """Put "a" or "an" before a name.

    Args:
        name: such as that of a class.

    Example:
        >>> with_article("OrderedDict"), with_article("UserDict"), with_article("list")
        ('an OrderedDict', 'a UserDict', 'a list')
    """
    return f"{'an' if name.startswith(_VOWELS) else 'a'} {name}"


def kind_of(value: Any) -> str:
    """Name the class of a value, for messages.

    Args:
        value: any; nothing is asked of it.

    Example:
        >>> kind_of(3), kind_of([3])
        ('an int', 'a list')
    """
    return with_article(type(value).__name__)
