"""The interface of an object that follows the work on the shards of a step, batch by batch, and may
have a batch computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class ShardWitness(Protocol):
    """Follows what a process computes of its shards.

    Ranks: local, but for :meth:`before_sums` and :meth:`after_sums`, where all ranks are together.
    """

    def before_batch(self, batch: Any, number: int) -> None:
        """Hear of a batch before the recipe has it.

        Args:
            batch: of one shard, as the loader yields it.
            number: of the process's batches in the epoch, from 0.
        """

    def after_batch(
        self,
        gradients: list[torch.Tensor | None],
        count: torch.Tensor | None,
    ) -> None:
        """Hear what a batch has come to, before anything is added to it.

        Args:
            gradients: of all parameters, in their order.
            count: of its loss sum; None where the loss is a mean.
        """

    def before_sums(self) -> bool:
        """Hear that all batches of a step are computed, and nothing is added up over the processes
        yet. No parameter has a gradient then, and the random streams are seeded anew after it.

        Returns:
            Whether something is wrong, which all processes are told with the sums.
        """

    def after_sums(self, *, is_wrong: bool) -> None:
        """Hear whether any process has found something wrong, before the sums are used.

        Raises:
            AuditError: it has; on all processes, which have the state of the step's beginning.
        """
