"""The rows of tensors whose sums over the ranks are under way in one step.

Every rank sends the same rows in the same order, but not at the same time: a large tensor, which is
a row by itself, can begin as soon as it is there and all rows before it have begun. What a rank
lacks is known at the end only, when the ranks have told each other which tensors there are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ddpkit.comm.tensor_rows import TensorRow

    class Transfers(Protocol):
        """Writes the sums of rows into them."""

        def has_room(self, row_bytes: int) -> bool:
            """Say whether a row can be pushed without a wait for another rank."""

        def push(self, parts: Sequence[torch.Tensor], *, may_wait: bool) -> None:
            """Send a row."""

        def finish(self) -> None:
            """Wait until all sums are there."""


class RowsUnderWay:
    """The sums of one step's rows.

    Args:
        rows: of one tensor each, which every rank expects, in the order in which they begin.
        transfers: what adds them up.

    Attributes:
        columns: by place, a tensor of each of this rank's subtrees, which was given early.
        sums: by place; their numbers are there when all have finished.

    Ranks: local; :meth:`finish` is collective.
    """

    def __init__(self, rows: Sequence[TensorRow], transfers: Transfers) -> None:
        self._rows = deque(rows)
        self._expected = {row.places[0] for row in rows}
        self._transfers = transfers
        self.columns: dict[int, list[torch.Tensor | None]] = {}
        self.sums: dict[int, torch.Tensor] = {}

    def add_column(self, place: int, column: list[torch.Tensor | None]) -> None:
        """Take a tensor whose sum may begin; begin what can.

        Args:
            place: of the tensor in the list of all.
            column: of each of this rank's subtrees.
        """
        self.columns[place] = column
        while self._rows and self._rows[0].places[0] in self.columns:
            if not self._transfers.has_room(self._rows[0].row_bytes):
                break  # a wait for another rank could be one for ever: it may wait for this one
            row = self._rows.popleft()
            first = row.places[0]
            totals = [{first: tensor} for tensor in self.columns[first]]
            self._begin(row, totals, may_wait=False)

    def finish(
        self,
        own: Sequence[Any],
        rows: Sequence[TensorRow],
        present: Callable[[int], bool],
    ) -> None:
        """Begin all other rows, and wait until all sums are there.

        Args:
            own: this rank's subtrees, all tensors.
            rows: what is there besides the expected ones.
            present: says of a place whether any rank has its tensor.
        """
        left = [row for row in self._rows if any(map(present, row.places))]
        for row in (*left, *rows):
            self._begin(row, own, may_wait=True)
        self._transfers.finish()

    def is_expected(self, place: int) -> bool:
        """Say whether a tensor is in one of the expected rows."""
        return place in self._expected

    def _begin(
        self,
        row: TensorRow,
        own: Sequence[Any],
        *,
        may_wait: bool,
    ) -> None:
        parts = [row.join(total) for total in own]
        self.sums.update(row.tensors(parts[0]))
        self._transfers.push(parts, may_wait=may_wait)
