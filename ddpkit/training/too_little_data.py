"""Training data that is too little for one step, or for all ranks."""

from __future__ import annotations

from typing import Any

from ddpkit.errors import DataError
from ddpkit.logger import get_logger

logger = get_logger(__name__)


def check_train_data(loader: Any, batches: int | None) -> None:
    """Refuse training data that makes no step.

    Args:
        loader: the training loader.
        batches: its number of batches, where it is known.

    Raises:
        DataError: no rank has a batch.

    Ranks: local; alike on every rank.
    """
    plan = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    if plan is not None and 0 < plan.num_samples < plan.world_size:
        words = (
            "The training set has %d sample(s) for %d ranks: a rank without a sample repeats one "
            "with weight 0."
        )
        logger.warning(words, plan.num_samples, plan.world_size)
    if batches == 0:
        raise DataError(
            "the training loader yields no batch. Either the set is empty, or it does not fill "
            "one global batch and drop_last=True leaves the rest out: use a smaller batch_size, "
            "fewer (virtual) ranks, or drop_last=False."
        )
