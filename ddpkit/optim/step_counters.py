"""Counts of optimizer steps, of which the last may not have been looked at yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.errors import DdpkitError

_COUNTERS = ("optimizer_step", "nonfinite", "clipped")
_looking = threading.RLock()  # a thread of the recipe, or of autograd, may look at a step, too


@dataclass
class StepCounters:
    """Counts optimizer steps, of which the last may not have been looked at yet.

    Nobody finds a counter that is behind: while a step is open its counters are not there, and
    whoever reads one looks at the step first. So nothing is waited for in a step that nobody asks
    about.

    Attributes:
        optimizer_step: updates since the run began.
        nonfinite: steps skipped in the current epoch because a gradient was not finite.
        clipped: updates of the current epoch whose gradients were scaled down to ``max_grad_norm``;
            equal on all ranks.
        follow: does what follows the last step, once it is looked at; None: that is done.
        error: what that has raised.

    Ranks: local.

    Example:
        >>> counters = StepCounters()
        >>> def follow(): counters.optimizer_step += 1
        >>> counters.leave_open(follow); "optimizer_step" in vars(counters), counters.optimizer_step
        (False, 1)
    """

    # Without a default in the class, so that a counter can be taken away.
    optimizer_step: int = field(default_factory=int)
    nonfinite: int = field(default_factory=int)
    clipped: int = field(default_factory=int)
    follow: Callable[[], None] | None = field(default=None, init=False, repr=False)
    error: DdpkitError | None = field(default=None, init=False, repr=False)
    _aside: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def leave_open(self, follow: Callable[[], None]) -> None:
        """Leave a step open.

        Args:
            follow: called once, before a counter is read: counts the step, or counts it as skipped.
        """
        with _looking:
            self.follow = follow
            for name in _COUNTERS:
                self._aside[name] = self.__dict__.pop(name)

    def look(self) -> None:
        """Look at the step that is open, if one is. An error waits for :meth:`settle`: this rank
        may look alone.
        """
        with _looking:
            if self.follow is None:
                return
            self.__dict__.update(self._aside)
            self._aside.clear()
            try:
                self.follow()
            except DdpkitError as error:
                self.error = error
            finally:
                self.follow = None

    def settle(self) -> None:
        """Look at the step that is open, where all ranks do.

        Raises:
            DdpkitError: what followed that step has raised.

        Ranks: all, at the same step.
        """
        self.look()
        error = self.error
        self.error = None
        if error is not None:
            raise error

    def settled_step(self) -> int:
        """Settle, and return the updates since the run began."""
        self.settle()
        return self.optimizer_step

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: counters that no open step is missing from."""
        self.look()
        return {**vars(self), "_aside": {}}

    if not TYPE_CHECKING:  # else mypy would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Look first at the step that is open, whose counters are not there."""
            if name in _COUNTERS:
                self.look()
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]
