"""The records of a run's log, one by one, also while the run writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit.errors import ConfigError

Record = dict[str, Any]

LONGEST_LINE = 16_000_000  # bytes; a longer one is no record of ddpkit's
FIRST_LINES = 100  # of which one at least is a record, or the file is no log of a run


@dataclass
class Unread:
    """What of a log could not be read.

    Attributes:
        lines: that are no JSON object with an event.
        is_cut: the last line has no end: the run was writing it, or was killed there.
    """

    lines: int = 0
    is_cut: bool = False


def read_records(path: Path, unread: Unread) -> Iterator[Record]:
    """Yield the records of a log in their order. A last line without an end is left out.

    Args:
        path: the log.
        unread: takes note of what is left out.

    Raises:
        ConfigError: the file cannot be read, or is no log of a run.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> _ = path.write_text('{"event": "start", "time": 1.5}' + chr(10) + '{"event": "st')
        >>> unread = Unread()
        >>> list(read_records(path, unread)), unread
        ([{'event': 'start', 'time': 1.5}], Unread(lines=0, is_cut=True))
    """
    found = 0
    for number, line in enumerate(_lines(path)):
        if not line.endswith(b"\n"):
            unread.is_cut = True
            break
        record = _record_in(line)
        if record is not None:
            found += 1
            yield record
        elif line.strip():
            unread.lines += 1
        if not found and number >= FIRST_LINES:
            raise _no_log(path)
    if unread.lines and not found:
        raise _no_log(path)


def _no_log(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no log of a run: no line of it is a JSON object with an event. "
        "Give the folder of an experiment, or its metrics.jsonl."
    )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                yield line
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from error


def _record_in(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if is_record else None


def number_of(value: Any) -> float | None:
    """Return a number of a record; also of ``"NaN"`` and ``"Infinity"``, as JSON has no such
    numbers.

    Returns:
        None for what is no number.

    Example:
        >>> number_of(3), number_of("-Infinity"), number_of("a"), number_of(True)
        (3.0, -inf, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value.lstrip("-") not in {"NaN", "Infinity"}:
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if isinstance(value, int) and value > 0 else -math.inf


def numbers_in(value: Any) -> dict[str, float]:
    """Return the numbers of a mapping, by name; lists and texts are left out.

    Example:
        >>> numbers_in({"loss": 0.5, "words": "a", "norm": "NaN"})
        {'loss': 0.5, 'norm': nan}
    """
    if not isinstance(value, dict):
        return {}
    found = {str(name): number_of(item) for name, item in value.items()}
    return {name: item for name, item in found.items() if item is not None}
