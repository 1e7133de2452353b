"""Marks of functions in which a process waits for other ranks. The report of a hang tells by them
who waits.

A mark stands at the function itself, so that a file may be moved or renamed. It is set once, when
the function is defined, and notes which lines of which file it has: a call costs nothing more. What
is defined inside of the function has the mark, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

FunctionT = TypeVar("FunctionT", bound="Callable[..., Any]")


class _Marks:
    """Functions that are marked, by the lines that they have.

    Lines and not code objects: torch.compile makes others, of the same lines.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, int]]] = {}  # by file: first and last lines

    def add(self, function: Callable[..., Any]) -> None:
        """Mark a function."""
        code = function.__code__
        self._lines.setdefault(code.co_filename, []).append((code.co_firstlineno, _last_line(code)))

    def has(self, file: str, line: int) -> bool:
        """Say whether a line of a file is in a marked function."""
        return any(first <= line <= last for first, last in self._lines.get(file, ()))


_WAITING = _Marks()
_READING = _Marks()


def waits_for_ranks(function: FunctionT) -> FunctionT:
    """Mark a function that stands still until other ranks have come, or until they have done
    something.

    Args:
        function: written in Python; below other decorators.

    Returns:
        The function itself.

    Ranks: local.

    State: the marks of this process.

    Example:
        >>> def receive(): ...
        >>> waits_for_ranks(receive) is receive
        True
    """
    _WAITING.add(function)
    return function


def reads_device(function: FunctionT) -> FunctionT:
    """Mark a function that reads a number from a device, such as by ``.item()``.

    NCCL's collectives return at once; where a number is read, a rank waits for what other ranks
    have to send.

    Args:
        function: written in Python; below other decorators.

    Returns:
        The function itself.

    State: the marks of this process.

    Example:
        >>> def norm_of(total): return total.item()
        >>> reads_device(norm_of) is norm_of
        True
    """
    _READING.add(function)
    return function


def is_marked_waiting(file: str, line: int) -> bool:
    """Say whether a line of a file is in a function that waits for other ranks.

    Ranks: local.
    """
    return _WAITING.has(file, line)


def is_marked_reading(file: str, line: int) -> bool:
    """Say whether a line of a file is in a function that reads a number from a device."""
    return _READING.has(file, line)


def _last_line(code: CodeType) -> int:
    """Return the last line of a function, or of what is defined inside of it."""
    own = [line for _, _, line in code.co_lines() if line is not None]
    inner = [
        _last_line(constant) for constant in code.co_consts if isinstance(constant, type(code))
    ]
    return max(own + inner)
