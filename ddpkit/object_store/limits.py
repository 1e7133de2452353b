"""How long a request may take. Packages of stores bound single reads and writes of a socket, and
wait without an end in between: for the word of the server that a body may come, for example.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

# Above the 60 s of botocore for one answer, so that its own error, which says more, comes first.
ANSWER_SECONDS = 90.0
# Far below what any network gives that can take checkpoints: a slow upload is not ended.
SLOWEST_BYTES_PER_SECOND = 100_000


class NoAnswerError(TimeoutError):
    """A store has not answered a request in time."""


def longest_seconds(size: int = 0) -> float:
    """Return how long a request may take that moves so many bytes."""
    return ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def limited(
    filesystem: AbstractFileSystem,
    request: Callable[..., T],
    *arguments: object,
    size: int = 0,
    **options: Any,
) -> T:
    """Make a request of a filesystem, and end it when its time is over.

    A filesystem that is not asynchronous has no way to end one: of a disk, of memory.

    Args:
        filesystem: that is asked.
        request: a method of it.
        arguments: for the request.
        size: the bytes that it moves.
        options: for the request.

    Raises:
        NoAnswerError: the time is over.
    """
    if not filesystem.async_impl:
        return request(*arguments, **options)
    from fsspec.exceptions import FSTimeoutError

    begin = time.monotonic()
    try:
        return request(*arguments, timeout=longest_seconds(size), **options)
    except FSTimeoutError as error:
        seconds = time.monotonic() - begin
        raise NoAnswerError(f"the store has not answered in {seconds:.0f} s") from error
