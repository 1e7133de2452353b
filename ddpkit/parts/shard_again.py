"""One batch of a shard, computed once more, here or on another rank: what it comes to, as digests,
and nothing of it left behind.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.checkpointing import plain_key
from ddpkit.parts.batch_copies import copied, restored
from ddpkit.parts.kept_attributes import kept_attributes
from ddpkit.parts.state_digests import digest_of
from ddpkit.training import backward, metrics_among, sum_and_count
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpkit.training import RunContext

OF_WINDOW = ("closes", "count", "weight", "loss_scale")  # what a window has of each batch
COUNT = "the count of the loss"


@dataclass
class ShardWork:
    """A batch of a shard, and what it came to where it was worked on first.

    Attributes:
        rank: that has worked on it.
        number: of the process's batches in the epoch, from 0.
        shard: its number over all processes.
        step: the number of the batch in the stage, from 1.
        of_window: what the window had of it.
        batch: its copy.
        answer: the digest of each gradient, and of each buffer that has moved, by name; the
            count of the loss.

    Ranks: local.
    """

    rank: int
    number: int
    shard: int
    step: int
    of_window: dict[str, Any]
    batch: bytes
    answer: dict[str, str] = field(default_factory=dict)


class ShardAgain:
    """Computes a batch of the open step again, as ``fit_batch`` does.

    Args:
        context: of the run.
        brain: of the recipe.

    Ranks: local; each has the weights, and the buffers of the step's beginning.
    """

    def __init__(self, context: RunContext, brain: Any) -> None:
        self._context = context
        self._brain = brain
        self._plain_names: dict[str, str] = {}

    def begin(self, batch: Any, number: int, rank: int) -> ShardWork:
        """Note what a batch is computed from, before the recipe has it.

        Args:
            batch: as the loader yields it.
            number: of the process's batches in the epoch, from 0.
            rank: this rank.

        Raises:
            ConfigError: the batch cannot be copied.
        """
        progress = self._context.progress
        strategy: Any = self._context.strategy
        return ShardWork(
            rank,
            number,
            strategy.shard_of(number, rank),
            progress.step + 1,  # the loop counts it when it has it
            {name: getattr(progress.window, name) for name in OF_WINDOW},
            copied(batch),
        )

    def answer(
        self,
        gradients: Sequence[torch.Tensor | None],
        count: torch.Tensor | float | None,
    ) -> dict[str, str]:
        """Return what a batch has come to: digests by what they are of.

        Args:
            gradients: of all parameters, in their order.
            count: of the loss sum; None where the loss is a mean.
        """
        modules = self._context.modules
        strategy: Any = self._context.strategy
        found = {}
        for (name, _), gradient in zip(modules.named_parameters(), gradients, strict=True):
            found[f"the gradient of {self._plain_name(name)}"] = digest_of(gradient)
        for name, buffer in strategy.followed_buffers().items():
            found[f"the buffer {self._plain_name(name)}"] = digest_of(buffer)
        found[COUNT] = digest_of(None if count is None else float(count))
        return found

    def _plain_name(self, name: str) -> str:
        """Return a tensor's name without those of wrappers."""
        if name not in self._plain_names:
            self._plain_names[name] = plain_key(self._context.modules, name)
        return self._plain_names[name]

    def inputs(self) -> dict[str, str]:
        """Return digests of what a step is computed with here: the weights, and the buffers at its
        beginning.
        """
        modules = self._context.modules
        strategy: Any = self._context.strategy
        found = {}
        for name, parameter in modules.named_parameters():
            found[self._plain_name(name)] = digest_of(parameter)
        for name, buffer in strategy.buffers_before().items():
            found[self._plain_name(name)] = digest_of(buffer)
        return found

    @torch.no_grad()
    def compute(self, work: ShardWork) -> dict[str, str]:
        """Compute a batch again; return what it comes to here.

        Args:
            work: of any rank, in the open step.
        """
        brain = self._brain
        strategy: Any = self._context.strategy
        batch = restored(work.batch, self._context.device)
        with self._leaving_nothing(work):
            # after all that is put back was noted, and before the recipe draws anything
            strategy.begin_again(work.number, work.rank)
            with torch.enable_grad():
                with brain.training_ctx:  # autocast, as around the first time
                    outputs = brain.compute_forward(batch, Stage.TRAIN)
                    loss = brain.compute_objectives(outputs, batch, Stage.TRAIN)
                count = self._back_propagate(loss)
            return self.answer(strategy.take_gradients(), count)

    def _back_propagate(self, loss: Any) -> torch.Tensor | float | None:
        """Make the backward pass of a loss, if it has one; return its count."""
        name = self._context.recipe.name
        window = self._context.progress.window
        if loss is None:  # the batch is skipped
            return 0.0
        scale = window.loss_scale
        count = None
        if isinstance(loss, tuple):
            loss, count = sum_and_count(loss, name)
            scale = 1.0 if window.count else 0.0
            count = count if window.count else 0.0
        # without a scaler: fp16 has its own range for each run, and is refused with shards
        if not self._depends_on_nothing(loss):
            backward(loss, scale, None, name)
        return count

    def _depends_on_nothing(self, loss: Any) -> bool:
        """Say whether a loss has no graph, as that of a batch without ground truth."""
        if not getattr(loss, "is_leaf", False):
            return False
        return all(loss is not parameter for parameter in self._context.modules.parameters())

    @contextlib.contextmanager
    def _leaving_nothing(self, work: ShardWork) -> Iterator[None]:
        """Return a context after which buffers, metrics, logs, counters and what else the recipe
        has changed are what they were. The strategy seeds the random streams anew.
        """
        context = self._context
        brain = self._brain
        # metrics have sums and lists inside, which attributes alone do not show
        metrics = metrics_among(brain, context.hparams, *context.parts.parts)
        owners = [brain, context.hparams, *context.modules.modules()]
        try:
            with kept_attributes(owners), context.progress.once_more(work.step, work.of_window):
                yield
        finally:
            metrics.put_back()
