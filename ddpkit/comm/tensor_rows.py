"""Tensors that are sent together, in one row of numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALIGNED_BYTES = 64  # vector kernels may add up a tensor in another order from another address on
ALONE = 4  # a tensor of this part of a row's bytes is a row by itself


class TensorRow:
    """Tensors of one dtype that are sent together in a row, each from where a tensor of its own
    could begin; or one large tensor, which is a row as it is.

    Args:
        like: shapes and dtype.
        places: of the tensors in the list of all.
        is_alone: whether there is one, which is not copied.

    Attributes:
        dtype: of all of them.
        places: of the tensors in the list of all.
        row_bytes: the size.

    Ranks: local.

    Example:
        >>> row = TensorRow([torch.zeros(2), torch.zeros(1)], [3, 5])
        >>> joined = row.join({3: torch.ones(2), 5: None})
        >>> {place: one.tolist() for place, one in row.tensors(joined)}
        {3: [1.0, 1.0], 5: [0.0]}
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        places: Sequence[int],
        *,
        is_alone: bool = False,
    ) -> None:
        self.dtype = like[0].dtype
        self._first = like[0]
        self.places = places
        self._sizes = [tensor.numel() for tensor in like]
        self._is_alone = is_alone
        self._padded = self._sizes if is_alone else [padded_size(tensor) for tensor in like]
        self.row_bytes = sum(self._padded) * like[0].element_size()

    def join(self, total: Any) -> torch.Tensor:
        """Join the tensors of a total; zeros for one that is not there.

        Args:
            total: a list or dict of tensors and None, by place.
        """
        if self._is_alone:
            alone: torch.Tensor | None = total[self.places[0]]
            return self._first.new_zeros(self._sizes[0]) if alone is None else alone.reshape(-1)
        zeros = self._first.new_zeros(max(self._padded))
        parts = []
        for place, size, padded in zip(self.places, self._sizes, self._padded, strict=True):
            own = total[place]
            parts += [zeros[:size] if own is None else own.reshape(-1), zeros[: padded - size]]
        return torch.cat(parts)

    def tensors(self, row: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the place and the numbers of each tensor in a row."""
        parts = zip(self.places, self._sizes, torch.split(row, self._padded), strict=True)
        for place, size, padded in parts:
            yield place, padded[:size]


def padded_size(tensor: torch.Tensor) -> int:
    """Return how many numbers of a row a tensor takes.

    Ranks: local.

    Example:
        >>> padded_size(torch.zeros(3)), padded_size(torch.zeros(17))
        (16, 32)
    """
    unit = ALIGNED_BYTES // tensor.element_size()
    return -(-tensor.numel() // unit) * unit


def rows_of(
    like: Sequence[torch.Tensor],
    places: Sequence[int],
    most: float,
) -> Iterator[TensorRow]:
    """Yield rows of tensors: each of one dtype and few bytes, but for a large tensor, which is
    alone.

    Args:
        like: shapes, dtypes and devices, by place.
        places: of the tensors that there are rows of.
        most: a row is full when it has as many bytes; a tensor of a quarter of that is alone.

    Ranks: local.

    Example:
        >>> like = [torch.zeros(size) for size in (10, 1000, 10, 10)]
        >>> [row.row_bytes for row in rows_of(like, range(4), 1000)]
        [4000, 192]
    """
    open_rows: dict[Any, tuple[int, list[int]]] = defaultdict(lambda: (0, []))
    for place in places:
        tensor = like[place]
        if tensor.nbytes >= most / ALONE:
            yield TensorRow([tensor], [place], is_alone=True)
            continue
        key = tensor.dtype, tensor.device
        size, those = open_rows[key]
        size += tensor.nbytes
        those.append(place)
        open_rows[key] = size, those
        if size >= most:
            del open_rows[key]
            yield TensorRow([like[one] for one in those], those)
    for _, those in open_rows.values():
        yield TensorRow([like[one] for one in those], those)
