"""Which call of ``fit`` in a script this is, and which calls a resumed run has done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class FitCalls:
    """Which call of ``fit`` in the script this is, and which calls are over.

    A script that was stopped in its second call is started again: the first call must return at
    once, and the second goes on.

    Attributes:
        number: calls so far, this one included.
        finished: optimizer steps after each finished call, by its number.
        later: a checkpoint of a later call, and its run state; else None.
        later_ends_epoch: whether that checkpoint was made at the end of an epoch.

    Ranks: local; equal on all ranks.

    Example:
        >>> calls = FitCalls()
        >>> calls.number = 1
        >>> calls.accept(Path("CKPT+a"), {"fit": 2, "finished": [12]}), calls.later[1]["fit"]
        (False, 2)
    """

    def __init__(self) -> None:
        self.number = 0
        self.finished: dict[int, int] = {}
        self.later: tuple[Path, Mapping[str, Any]] | None = None
        self.later_ends_epoch = True

    def accept(self, path: Path, state: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint was made in this call; keep a checkpoint of a later call in
        :attr:`later`.

        Args:
            path: its directory.
            state: its run state.
        """
        number = state.get("fit", self.number)
        self.later = (path, state) if 0 < self.number < number else None
        return self.number in {0, number}
