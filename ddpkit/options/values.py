"""What the text of an option means: switches, numbers, names, lengths of time."""

from __future__ import annotations

import math
import re
from typing import Any

from ddpkit.errors import ConfigError

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})

_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhd]?)")


def to_bool(value: Any) -> bool:
    """Read a switch: True or False, 1 or 0, or a word for one of them in any case.

    Args:
        value: the switch or its text.

    Raises:
        ValueError: it is neither.

    Example:
        >>> to_bool("False"), to_bool("yes"), to_bool(1)
        (False, True, True)
    """
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(value)
    return word in _TRUE


def parse_duration(text: str) -> float:
    """Read a length of time.

    Args:
        text: ``"11:50:00"``, ``"1-06:00:00"`` (days first), ``"90m"``, ``"20h"``, or a number of
            seconds, which is also what YAML makes of ``11:50:00``.

    Returns:
        Seconds.

    Raises:
        ConfigError: the text is not a length of time, or not above 0.

    Ranks: local.

    Example:
        >>> (
        ...     parse_duration("11:50:00"),
        ...     parse_duration("1-00:00:10"),
        ...     parse_duration("90m"),
        ...     parse_duration("42600"),
        ... )
        (42600.0, 86410.0, 5400.0, 42600.0)
    """
    word = str(text).strip().lower()
    clock = _CLOCK.fullmatch(word)
    number = _NUMBER.fullmatch(word)
    seconds = 0.0
    if clock is not None:
        seconds = sum(int(clock[unit] or 0) * _UNITS[unit] for unit in "dhms")
    elif number is not None:
        seconds = float(number["number"]) * _UNITS[number["unit"] or "s"]
    if seconds <= 0:
        raise ConfigError(
            f"time_limit expects a length of time > 0, got {text!r}. Give H:MM:SS such as "
            "11:50:00, with days 1-06:00:00, or 90m, 20h, or seconds."
        )
    return seconds


def to_float(value: Any) -> float:
    """Read a number.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or math.isnan(float(value)):
        raise ValueError(value)
    return float(value)


def to_int(value: Any) -> int:
    """Read a whole number; a float that is whole is one.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:  # "1e5"
            pass
    number = to_float(value)  # a float that is whole: what `!ref <a> / <b>` gives in YAML
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


def to_text(value: Any) -> str:
    """Read a text; a switch, a list or a mapping is none.

    Raises:
        TypeError: it is something else.
    """
    if value is None or isinstance(value, (bool, dict, list, tuple)):
        raise TypeError(value)
    return str(value)


def to_words(value: Any) -> list[str]:
    """Read a list of names, or names between commas.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple, set)):
        raise TypeError(value)
    return [to_text(word) for word in value]
