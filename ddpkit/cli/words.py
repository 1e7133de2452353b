"""How commands write: sizes, ages, tables and values of any origin, in words that fit a terminal.

What comes from a file may be anything: text is shown without its control characters, and of a value that is
large or endless only the beginning.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "age_text",
    "complain",
    "indented",
    "plain",
    "printable",
    "say",
    "say_json",
    "size_text",
    "table",
    "value_text",
]

MAX_DEPTH = 8
MAX_ITEMS = 2000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_AGES = ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h"), (math.inf, 24 * 3600, "d"))


def say(text: str = "") -> None:
    """Write a line to the standard output, whatever its encoding.

    Args:
        text: the line, or several.

    Ranks: local.

    Example:
        >>> say("3 checkpoints")
        3 checkpoints
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def complain(text: str) -> None:
    """Write a line to the standard error, which Python encodes with backslashes where it must.

    Args:
        text: the line.

    Ranks: local.

    Example:
        >>> complain("something to know")
    """
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")


def say_json(value: Any) -> None:
    """Write a value as JSON to the standard output.

    Args:
        value: of any origin; see :func:`plain`.

    Ranks: local.

    Example:
        >>> say_json({"loss": float("nan")})
        {
          "loss": "nan"
        }
    """
    say(json.dumps(plain(value), indent=2, allow_nan=False))


def printable(text: Any) -> str:
    r"""Return a text as one line, without anything that a terminal would act upon.

    Args:
        text: anything; its ``str`` counts.

    Ranks: local.

    Example:
        >>> print(printable("a" + chr(27) + "[2Jb" + chr(10) + "c"))
        a\x1b[2Jb\nc
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def size_text(size: float) -> str:
    """Return a number of bytes in three digits and a unit.

    Args:
        size: bytes.

    Ranks: local.

    Example:
        >>> size_text(999), size_text(1234567), size_text(123_456_789)
        ('999 B', '1.23 MB', '123 MB')
    """
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:  # noqa: PLR2004 -- above it three digits round to 1000
        size, unit = size / 1000, unit + 1
    if unit == 0:
        return f"{size:.0f} B"
    decimals = (size < 9.995) + (size < 99.95)  # noqa: PLR2004 -- above these three digits round to the next power
    return f"{size:.{decimals}f} {_UNITS[unit]}"


def age_text(seconds: float) -> str:
    """Return how long something is ago, in one unit.

    Args:
        seconds: how long; nothing if it lies ahead.

    Ranks: local.

    Example:
        >>> age_text(59), age_text(7200), age_text(1e6)
        ('59 s', '2 h', '11 d')
    """
    seconds = max(seconds, 0)
    unit, name = next((unit, name) for limit, unit, name in _AGES if seconds < limit)
    return f"{int(seconds / unit)} {name}"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lay out rows in columns.

    Args:
        rows: the first is the head.
        right: the columns that are aligned to the right.

    Returns:
        One line per row, two blanks between columns, none at the end.

    Ranks: local.

    Example:
        >>> for line in table([("name", "size"), ("a", "12 B"), ("long one", "3 B")], right=[1]): print(line)
        name      size
        a         12 B
        long one   3 B
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_right = set(right)
    return [
        "  ".join(
            cell.rjust(width) if number in to_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def indented(text: str, width: int, indent: str = "    ") -> list[str]:
    """Break a text into lines of a width, all indented.

    Args:
        text: words with blanks between them.
        width: characters of a line.
        indent: what each line begins with.

    Ranks: local.

    Example:
        >>> indented("one two three four five", 20, "  ")
        ['  one two three four', '  five']
    """
    return textwrap.wrap(
        text,
        max(width, len(indent) + 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def value_text(value: Any, limit: int = 120) -> str:
    """Return a value of a file in at most ``limit`` characters of one line.

    Args:
        value: anything that YAML or a file of torch can hold.
        limit: characters.

    Ranks: local.

    Example:
        >>> value_text(0.123456789), value_text(torch.zeros(2, 3)), value_text([1, "a"])
        ('0.1235', 'tensor float32 2 x 3', '[1, a]')
    """
    text = _words(plain(value, numbers=False))
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_words(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_words, value)) + "]"
    return printable(f"{value:.4g}" if isinstance(value, float) else value)


def plain(value: Any, *, numbers: bool = True) -> Any:
    """Turn a value of any origin into what JSON can hold.

    Args:
        value: anything; may be endless.
        numbers: tensors of a few numbers become these; otherwise all but single ones are described.

    Returns:
        Containers, numbers, texts. Numbers that JSON does not know become text; of what is deep or long only the
        beginning is left, and ``"..."``.

    Ranks: local.

    Example:
        >>> endless = []; endless.append(endless)
        >>> plain({"loss": float("inf"), "point": (1, 2)}), plain(endless, numbers=False) == endless
        ({'loss': 'inf', 'point': [1, 2]}, False)
    """
    return _Plain(numbers).of(value, 0)


class _Plain:
    """Counts what it has turned into plain values, for a small file can describe an enormous value."""

    def __init__(self, numbers: bool) -> None:
        self.numbers = numbers
        self.left = MAX_ITEMS

    def of(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if isinstance(value, torch.Tensor):
            value = _tensor(value, numbers=self.numbers)
        if isinstance(value, float):
            return value if math.isfinite(value) or not self.numbers else str(value)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if depth >= MAX_DEPTH and isinstance(value, (Mapping, list, tuple, set)):
            return "..."
        if isinstance(value, Mapping):
            return {str(name): self.of(inner, depth + 1) for name, inner in self._first(value.items())}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.of(inner, depth + 1) for inner in self._first(value)]
        return str(value)

    def _first(self, items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            if self.left <= 0:
                return
            yield item


def _tensor(value: torch.Tensor, *, numbers: bool) -> Any:
    if value.device.type != "meta" and value.numel() <= (16 if numbers else 1) and not value.is_complex():
        return value.tolist()
    return f"tensor {dtype_text(value)} {shape_text(value)}"


def dtype_text(value: torch.Tensor) -> str:
    """Return the name of a tensor's dtype.

    Ranks: local.

    Example:
        >>> dtype_text(torch.zeros(1))
        'float32'
    """
    return str(value.dtype).removeprefix("torch.")


def shape_text(value: torch.Tensor) -> str:
    """Return a tensor's shape.

    Ranks: local.

    Example:
        >>> shape_text(torch.zeros(2, 3)), shape_text(torch.tensor(1))
        ('2 x 3', 'one number')
    """
    return " x ".join(map(str, value.shape)) or "one number"
