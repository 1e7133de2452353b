"""Threads that run one at a time, in a fixed order, from one meeting to the next; and stand-ins for methods."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddpkit.errors import ParityError


class AbandonedError(Exception):
    """Another pretended rank has failed; that one's error is the one to show."""


class Lockstep:
    """Lets threads run one at a time, in rank order, from one meeting to the next.

    Args:
        size: number of threads.
        on_turn: called with a rank whenever it begins to run.

    Attributes:
        is_joining: whether a meeting's work is being done right now.

    Ranks: local.

    Example:
        >>> Lockstep(1).meet(0, "here", 2, lambda values: [10 * value for value in values])
        20
    """

    def __init__(self, size: int, on_turn: Callable[[int], object] = bool) -> None:
        self.size = size
        self.on_turn = on_turn
        self.is_joining = False
        self._turn = 0
        self._arrived: list[tuple[str, Any]] = []
        self._results: Sequence[Any] = []
        self._is_broken = False
        self._changed = threading.Condition()

    def wait(self, rank: int) -> None:
        """Wait until it is a rank's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_broken or self._turn == rank)
            if self._is_broken:
                raise AbandonedError("another pretended rank has failed")
            self.on_turn(rank)

    def meet(self, rank: int, place: str, value: Any, join: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Give the turn to the next rank; go on once all have come here.

        Args:
            rank: whose turn it is.
            place: where the ranks meet; all must be at the same.
            value: what this rank brings.
            join: called once with what all ranks brought, in rank order; returns what each takes away.

        Returns:
            What this rank takes away.

        Raises:
            ParityError: the ranks are at different places.
        """
        self._arrived.append((place, value))
        if len(self._arrived) == self.size:
            self._join(join)
        self.pass_on(rank)
        self.wait(rank)
        return self._results[rank]

    def pass_on(self, rank: int) -> None:
        """Give the turn to the next rank."""
        with self._changed:
            self._turn = (rank + 1) % self.size
            self._changed.notify_all()

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def _join(self, join: Callable[[list[Any]], Sequence[Any]]) -> None:
        arrived, self._arrived = self._arrived, []
        if len({place for place, _ in arrived}) > 1:
            places = ", ".join(f"rank {rank} at {place}" for rank, (place, _) in enumerate(arrived))
            raise ParityError(
                f"parity does not hold: the ranks do not run the same code, {places}. Real ranks would wait for each "
                "other there for ever. Look for a branch or a layer that depends on random numbers or on the data of "
                "one rank, and let all ranks take it alike."
            )
        self.is_joining = True
        try:
            self._results = join([value for _, value in arrived])
        finally:
            self.is_joining = False


@contextlib.contextmanager
def standing_in(owner: object, name: str, stand_in: Any) -> Iterator[None]:
    """Let something stand in for a method of one object for a while.

    Args:
        owner: whose method; its class is left alone.
        name: of the method.
        stand_in: what is found instead.

    Ranks: local.

    Example:
        >>> class Layer:
        ...     def forward(self, rows):
        ...         return rows
        >>> layer = Layer()
        >>> with standing_in(layer, "forward", lambda rows: 2 * rows):
        ...     layer.forward(3)
        6
        >>> layer.forward(3)
        3
    """
    attributes = vars(owner)
    before = attributes.get(name)
    attributes[name] = stand_in
    try:
        yield
    finally:
        del attributes[name]
        if before is not None:
            attributes[name] = before
