"""Numbers in words: durations, sizes, shares and times for people."""

from __future__ import annotations

import math
import time
import unicodedata
from typing import Any

MINUTE = 60
HOUR = 3600
DAY = 86400
UNKNOWN = "-"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PREFIXES = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
)
THOUSANDTH = 1e-3
MILLIONTH = 1e-6


def duration(seconds: float | None) -> str:
    """Return a duration in one or two units.

    Example:
        >>> duration(0.0123), duration(75.4), duration(7260), duration(200_000), duration(None)
        ('12.3 ms', '1 min 15 s', '2 h 1 min', '2 d 7 h', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < MINUTE:
        return short_duration(seconds)
    whole = round(seconds)
    for unit, word, smaller, smaller_word in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
        (MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {word}" + (f" {rest} {smaller_word}" if rest else "")
    return UNKNOWN


def short_duration(seconds: float) -> str:
    """Return a duration of at most a few minutes, in one unit.

    Example:
        >>> short_duration(2.5), short_duration(0.000_02), short_duration(0)
        ('2.5 s', '20 µs', '0 s')
    """
    if not seconds or abs(seconds) >= 1:
        return f"{number(seconds)} s"
    if abs(seconds) >= THOUSANDTH:
        return f"{number(seconds * 1e3)} ms"
    return f"{number(seconds * 1e6)} µs"


def number(value: float | None) -> str:
    """Return a number with three or four digits.

    Example:
        >>> (
        ...     number(0.123456),
        ...     number(12345.6),
        ...     number(3),
        ...     number(4.2e-7),
        ...     number(float("inf")),
        ...     number(None),
        ... )
        ('0.123', '12.3k', '3', '4.2e-07', 'Infinity', '-')
    """
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    for size, prefix in PREFIXES:
        if abs(value) >= size * (10 if prefix == "k" else 1):
            return f"{value / size:.3g}{prefix}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004 -- four digits in full


def size(value: float | None) -> str:
    """Return a number of bytes.

    Example:
        >>> size(50_400_000), size(999), size(None)
        ('50.4 MB', '999 B', '-')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, prefix in PREFIXES:
        if abs(value) >= unit:
            return f"{value / unit:.3g} {prefix}B"
    return f"{value:.3g} B"


def share(value: float | None) -> str:
    """Return a share in per cent.

    Example:
        >>> share(0.876), share(0.0004), share(0.0), share(None)
        ('87.6 %', '0.04 %', '0 %', '-')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{100 * value:.3g} %"


def count(value: float | None) -> str:
    """Return a whole number with its thousands apart.

    Example:
        >>> count(1234567.0), count(None)
        ('1 234 567', '-')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{round(value):,}".replace(",", " ")


def clock(seconds: float | None) -> str:
    """Return a time in seconds since 1970 as local time.

    Example:
        >>> len(clock(1.8e9)), clock(None), clock(1e300)
        (19, '-', '-')
    """
    if not seconds or not math.isfinite(seconds):
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def visible(value: Any) -> Any:
    """Return a text without control characters, and without halves of letters that no file can
    hold.

    Args:
        value: a text, or what a template has made of texts already: that stays as it is.

    Example:
        >>> visible("a" + chr(27) + "[2J" + chr(0xD800))
        'a�[2J�'
    """
    if type(value) is not str:
        return value
    is_fine = value.isascii() and value.isprintable()
    return value if is_fine else "".join(map(_visible_letter, value))


def _visible_letter(letter: str) -> str:
    is_hidden = unicodedata.category(letter) in {"Cc", "Cs"} and letter != "\n"
    return REPLACEMENT if is_hidden else letter
