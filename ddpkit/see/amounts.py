"""Amounts in words."""

from __future__ import annotations

KILO = 1000.0
GB = 1e9
MB = 1e6
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def in_bytes(number: float) -> str:
    """Write a number of bytes.

    Args:
        number: bytes.

    Example:
        >>> in_bytes(67_108_864), in_bytes(2.5e9), in_bytes(0)
        ('67.1 MB', '2.5 GB', '0 B')
    """
    unit = 0
    while abs(number) >= KILO and unit < len(_UNITS) - 1:
        number /= KILO
        unit += 1
    return f"{number:.0f} B" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"


def counted(number: float, noun: str) -> str:
    """Write a number of things.

    Args:
        number: how many.
        noun: of one of them.

    Example:
        >>> counted(1, "core"), counted(1.5, "core"), counted(2, "process"), counted(3, "batch")
        ('1 core', '1.5 cores', '2 processes', '3 batches')
    """
    plural = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:g} {noun}{'' if number == 1 else plural}"
