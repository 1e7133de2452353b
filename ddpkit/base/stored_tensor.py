"""A tensor that is still in files, of which any rows can be read."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StoredTensor(abc.ABC):
    """A tensor in the files of a checkpoint: nothing of it is in memory.

    Attributes:
        shape: of the whole.
        dtype: of its elements.

    Ranks: local.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abc.abstractmethod
    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read some rows into new memory.

        Args:
            first: number of the first row.
            count: how many.
        """

    def whole(self) -> torch.Tensor:
        """Read all of it into new memory."""
        return self.rows(0, self.shape[0])
