"""Batches for which ``compute_objectives`` returns None: they count as batches without samples.

Such a batch says nothing of what the others return. Where those are sums and counts, the ranks add
up the counts of a window, and a rank without a loss takes part with 0. Where they are means nothing
is added up: what a mean weighs is planned before anybody knows of the batch that is skipped. So the
ranks tell each other, in the first window of a pass, which kind of loss they have. Nothing is asked
in later windows.

They do so in the batch that closes the window, once the modules were called: in a call DDP may wait
for the other ranks, and in an earlier batch of the window a rank may call none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddpkit.distributed import exchange, get_world_size
from ddpkit.errors import BatchError

if TYPE_CHECKING:
    from ddpkit.training.context import RunContext

MEAN = "a mean loss"
SUM = "(loss_sum, count)"
SKIPPED = "None"

SKIPPED_AND_MEANS = (
    "{}.compute_objectives returned None for a batch, and a mean loss for others. None skips a "
    "batch, and what a mean weighs is planned before it is known which batches are skipped. "
    "Return (loss_sum, count) where a batch has a loss: for a mean over n samples that is loss * "
    "n and n. If no batch is to be skipped, look for a missing return."
)
TWO_KINDS = (
    "{}.compute_objectives returned a mean loss for some micro-batches of an optimizer step and "
    "(loss_sum, count) for others. Return the same kind for every training batch."
)
ALL_SKIPPED = (
    "{}.compute_objectives returned None for each of the {} batches of the first epoch, on every "
    "process, so that nothing is trained. Look for a missing return; None skips a batch."
)


class SkippedBatches:
    """Gives a batch without a loss a sum of 0 and a count of 0, once the ranks know that they sum.

    Args:
        context: of the run.

    Attributes:
        is_open: whether no rank has had a loss since the pass began, as far as this one knows.
        is_noting: whether the ranks have still to tell each other what they have had.

    Ranks: local, but for :meth:`agree`.

    State: the number of skipped batches, in the meter of the stage.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._is_of_means = False
        self._seen = set[str]()  # by this rank, or by all once they have told each other
        self.is_open = True
        self.is_noting = False

    def begin_pass(self) -> None:
        """Find out anew which kind of loss there is."""
        self._is_of_means = False
        self._seen.clear()
        self.is_open = True
        self.is_noting = False

    def settle(self, loss: Any) -> Any:
        """Return the loss of a training batch, or what stands for it where the batch is skipped.

        Args:
            loss: as ``compute_objectives`` returned it.

        Raises:
            BatchError: a batch is skipped, and others of this rank have a mean loss.
        """
        if self._is_of_means and loss is None:
            self._refuse(SKIPPED_AND_MEANS)
        if self.is_open:
            self._seen.add(_kind_of(loss))
            self.is_noting = True
            self._require_one_kind()
        if loss is not None:
            return loss
        return self.skip()

    def skip(self) -> tuple[torch.Tensor, float]:
        """Count a skipped batch of any stage; return the sum and the count that stand for its
        loss.
        """
        self._context.progress.count_skipped_batch()
        return torch.zeros((), device=self._context.device), 0.0

    def agree(self) -> None:
        """Tell the other ranks which kinds of loss this one has seen, and learn theirs.

        Raises:
            BatchError: they do not go together. On all ranks.
        """
        if get_world_size() > 1:
            self._seen.update(*exchange(sorted(self._seen), "kinds of losses"))
        self._require_one_kind()
        self._is_of_means = MEAN in self._seen
        self.is_open = self._seen <= {SKIPPED}
        self.is_noting = False

    def require_some(self, batches: int) -> None:
        """Refuse an epoch in which every batch of every rank was skipped.

        Args:
            batches: of this rank, in the epoch.

        Raises:
            BatchError: it was so. On all ranks.
        """
        if self.is_open and SKIPPED in self._seen:
            self._refuse(ALL_SKIPPED, batches)

    def _require_one_kind(self) -> None:
        if {MEAN, SKIPPED} <= self._seen:
            self._refuse(SKIPPED_AND_MEANS)
        if {MEAN, SUM} <= self._seen:
            self._refuse(TWO_KINDS)

    def _refuse(self, words: str, *values: Any) -> None:
        name = self._context.recipe.name
        raise BatchError(words.format(name, *values), hook="compute_objectives")


def _kind_of(loss: Any) -> str:
    if loss is None:
        return SKIPPED
    return SUM if isinstance(loss, tuple) else MEAN
