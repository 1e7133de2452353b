"""The outputs of ``predict_batch``, one for each sample."""

from __future__ import annotations

from typing import Any

from ddpkit.base import kind_of
from ddpkit.errors import BatchError
from ddpkit.training import row_count, rows_of


def predicted_rows(output: Any, count: int | None, name: str) -> list[Any]:
    """Return the outputs of the samples of a batch.

    Raises:
        BatchError: there is not one output for each sample.
    """
    rows = row_count(output)
    if rows is None or count not in {None, rows}:
        samples = "its samples" if count is None else f"its {count} sample(s)"
        shape = f" of shape {tuple(output.shape)}" if hasattr(output, "shape") else ""
        raise BatchError(
            f"{name}.predict_batch returned {kind_of(output)}{shape}, not one output for each of "
            f"{samples}. Return a tensor whose first dimension is the samples', a list with an "
            "entry per sample, or a tuple or a dict of these.",
            hook="predict_batch",
        )
    return rows_of(output)
