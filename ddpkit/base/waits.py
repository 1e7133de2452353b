"""Tells a stopwatch when this process waits for other ranks, wherever in a step that is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Watch(Protocol):
    """What is told of waits while a step is measured."""

    def begin_wait(self) -> Any:
        """Note that a wait begins; return what :meth:`end_wait` needs."""

    def end_wait(self, before: Any) -> None:
        """Note that it is over."""


class Waits:
    """Who is told of this process's waits for other ranks.

    Attributes:
        watch: of the step that is measured; None: nobody.

    Ranks: local.
    """

    watch: Watch | None = None


WAITS = Waits()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Return a context in which this process waits for other ranks.

    Ranks: local.
    """
    watch = WAITS.watch
    if watch is None:
        yield
        return
    before = watch.begin_wait()
    try:
        yield
    finally:
        watch.end_wait(before)
