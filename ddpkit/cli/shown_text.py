"""Values of any origin as text of a terminal: in one line, in part, in columns."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import torch

from ddpkit.logger import format_order_of_magnitude


def printable(text: Any) -> str:
    """Return a text as one line, without anything that a terminal would act upon."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def size_text(size: int) -> str:
    """Return a number of bytes with a unit."""
    return f"{format_order_of_magnitude(size)}B"


_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 400


def value_text(value: Any, limit: int = 120) -> str:
    """Return a value of any origin in at most ``limit`` characters of one line; a deep or endless
    one in part.
    """
    text = (
        f"{value:.4g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else _REPR.repr(value)
    )
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def tensor_text(value: torch.Tensor) -> str:
    """Return a tensor's dtype and shape."""
    shape = " x ".join(map(str, value.shape)) or "one number"
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    return lines
