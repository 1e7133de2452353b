"""An audit of the ranks, with the option ``audit_every``: each rank computes again what the rank
after it has computed, and compares the bits before the optimizers step.

It goes with strategies in which any process can compute a shard of any other with the same bits.
What is sent is the batch, as the loader has given it, and digests; the weights are the auditor's
own.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

from ddpkit.control import usage_errors
from ddpkit.distributed import from_next_rank, get_rank, get_world_size, sum_over_ranks
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.parts.audit_inquiry import AuditInquiry
from ddpkit.parts.own import OwnPart
from ddpkit.parts.shard_again import ShardAgain
from ddpkit.training import has_cuda_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from typing_extensions import Self

    from ddpkit.parts.shard_again import ShardWork
    from ddpkit.training import RunContext
    from ddpkit.types import FitResult

logger = get_logger(__name__)

OPTION = "audit_every"
NOT_WITH_STRATEGY = "audit_every={} does not work with {}, {}."
NOT_WITH = "audit_every={} does not work with {}. Leave --audit_every out."
OWN_FIT_BATCH = (
    "a fit_batch of its own, as {} has it: what it computes of a batch cannot be computed again "
    "without making a step"
)
OWN_BATCH_START = (
    "on_fit_batch_start, as {} has it: it may change a batch, or count, before the forward pass. "
    "Do this in the loader or in on_fit_batch_end"
)
CUDA_GRAPHS = "CUDA graphs, which would overwrite the outputs of the last batch of {}"
ROW = "every {} steps each process computes a shard of the next one again (--audit_every)"
ROW_ALONE = (
    "every {} steps this process computes one of its own shards again (--audit_every): that finds "
    "what it does not repeat, not what it computes wrong each time"
)
TOO_RARE = (
    "audit_every=%d is more than the %d optimizer steps up to the end of this fit, so that none of "
    "them is audited. A smaller N audits some."
)
DONE = "audit_every: %d shards were computed again, with the same bits."


class RankAudit(OwnPart):
    """Has each rank compute a shard of the rank after it again, after every so many steps.

    The shards of a rank come in turn. A rank alone computes its own again.

    Args:
        context: of the run.
        every: optimizer steps from one audit to the next.

    Attributes:
        audits: how many this rank has made.

    Ranks: all; an audit sends a batch of each rank to the one before it.

    Example:
        >>> RankAudit(None, 100).audits
        0
    """

    def __init__(self, context: Any, every: int) -> None:
        self.context = context
        self.every = every
        self.audits = 0
        self._clean = 0  # the last optimizer step up to which no audit has found anything
        self._brain: Any = None
        self._again: Any = None
        self._work: ShardWork | None = None
        self._is_open = False  # whether the batch of it is being worked on
        # what this rank has worked on, and what the work of the next rank comes to here
        self._audited: tuple[ShardWork, dict[str, str]] | None = None

    @classmethod
    def of_run(cls, context: RunContext) -> Self:
        """Make it of ``audit_every``."""
        return cls(context, context.options[OPTION])

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Follow the work on the shards.

        Raises:
            ConfigError: the strategy or the recipe does not let a batch be computed again.
        """
        with usage_errors():
            self._require_repeatable(brain)
        strategy: Any = self.context.strategy
        self._brain = brain
        self._again = ShardAgain(self.context, brain)
        strategy.witness = self
        try:
            yield
        finally:
            strategy.witness = None

    def _require_repeatable(self, brain: Any) -> None:
        context = self.context
        strategy = context.strategy
        if strategy.unauditable:
            raise ConfigError(
                NOT_WITH_STRATEGY.format(self.every, strategy.name, strategy.unauditable)
            )
        recipe = context.recipe
        refused = {
            OWN_FIT_BATCH: recipe.has_own_fit_batch,
            OWN_BATCH_START: recipe.begins_batches,
            CUDA_GRAPHS: has_cuda_graphs(context.options),
        }
        for words, is_so in refused.items():
            if is_so:
                raise ConfigError(NOT_WITH.format(self.every, words.format(recipe.name)))

    def start_rows(self, brain: Any) -> Mapping[str, str]:
        """Return a row on what is audited."""
        words = ROW if get_world_size() > 1 else ROW_ALONE
        return {"audits": words.format(self.every)}

    def on_fit_start(self, brain: Any) -> None:
        """Note from which step on this run audits; warn where it is too short for an audit."""
        self._clean = brain.optimizer_step
        total = brain.total_steps
        if total is not None and brain.optimizer_step + total < self.every:
            logger.warning(TOO_RARE, self.every, brain.optimizer_step + total)

    def on_fit_end(self, brain: Any, result: FitResult) -> None:
        """Say how much was audited."""
        if self.audits:
            logger.info(DONE, int(sum_over_ranks([self.audits])[0]))

    # ------------------------------------------------------------------ in a step

    def before_batch(self, batch: Any, number: int) -> None:
        """Note what the batch is computed from, if it is the one that is audited."""
        factor = self.context.accumulation.factor
        # The number of the step is known without asking whether the step before was skipped, which
        # a GPU may not have said yet: where steps are skipped, they count here.
        step = self.context.progress.began_at + number // factor + 1
        if step % self.every == 0 and number % factor == (step // self.every - 1) % factor:
            self._work = self._again.begin(batch, number, get_rank() or 0)
            self._is_open = True

    def after_batch(
        self,
        gradients: list[torch.Tensor | None],
        count: torch.Tensor | None,
    ) -> None:
        """Note what it came to."""
        if self._is_open and self._work is not None:
            self._work.answer = self._again.answer(gradients, count)
            self._is_open = False

    def before_sums(self) -> bool:
        """Compute the batch of the next rank; return whether it came to other bits there."""
        work = self._work
        self._work = None
        self._audited = None
        if work is None:  # this step is not audited, or was too short for the batch in turn
            return False
        # of a rank of this very job
        theirs: ShardWork = pickle.loads(from_next_rank(pickle.dumps(work)))  # noqa: S301
        found = self._again.compute(theirs)
        self.audits += 1
        self._audited = work, found
        return bool(found != theirs.answer)

    def after_sums(self, *, is_wrong: bool) -> None:
        """Go on, or find out which rank is wrong.

        Raises:
            AuditError: two ranks have different bits. On all ranks.
        """
        if self._audited is None:
            return
        if is_wrong:
            AuditInquiry(self.context, self._brain, self._again).end(*self._audited, self._clean)
        self._clean = self._brain.optimizer_step + 1
