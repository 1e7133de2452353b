"""The processes, batches and samples of an optimizer step, which a checkpoint stores.

With another number of processes the options that keep the samples per step are computed before any
loader is made, and the position in the epoch is converted, because it counts batches of one
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpkit.data import DealtBatchSampler, inner_loader
from ddpkit.dataloader import plan_of
from ddpkit.errors import ConfigError
from ddpkit.run.data_order import counts_batches, order_of
from ddpkit.training import batch_sizes, length_of

if TYPE_CHECKING:
    from ddpkit.training import BatchSizes, RunContext


@dataclass(frozen=True)
class StepPlan:
    """The step plan: the processes, batches and samples of an optimizer step.

    Attributes:
        world_size: number of ranks, or of shards where it is fixed; None if the checkpoint does not
            say.
        grad_accumulation_factor: batches of each process per optimizer step; None if the checkpoint
            does not say.
        per_step: samples of a full optimizer step over all ranks; None if unknown, or if the data
            yields whole batches, which cannot be divided.
        per_process: samples of a full batch of one process; None likewise.
        data: what the order of an epoch follows from (:func:`order_of`); None in a checkpoint that
            does not tell. Two that differ in nothing else are equal.

    A checkpoint holds them under these names.

    Ranks: local; equal on all ranks.

    Example:
        >>> StepPlan(world_size=4, grad_accumulation_factor=1, per_step=64, per_process=16).on(2)
        {'global_batch_size': 64, 'micro_batch_size': 16, 'grad_accumulation_factor': 1}
        >>> StepPlan(world_size=4, grad_accumulation_factor=1).on(2)
        {'grad_accumulation_factor': 2}
    """

    world_size: int | None
    grad_accumulation_factor: int | None
    per_step: int | None = None
    per_process: int | None = None
    data: Mapping[str, str | int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, sizes: BatchSizes, loader: Any) -> StepPlan:
        """Return the step plan of the present run.

        Args:
            sizes: computed from its training loader and options.
            loader: the training loader.
        """
        inner = inner_loader(loader)
        data = order_of(loader)
        if isinstance(plan_of(inner), DealtBatchSampler) or getattr(
            getattr(inner, "dataset", None),
            "of_batches",
            False,
        ):
            # whole batches are dealt out, whatever their sizes
            return cls(sizes.division.number, sizes.factor, data=data)
        largest = None if sizes.per_process is None else sizes.per_process[1]
        return cls(sizes.division.number, sizes.factor, sizes.per_step, largest, data)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StepPlan:
        """Return the step plan of the run that wrote a checkpoint.

        Args:
            state: of the Brain, as its file holds it.
        """
        world_size, factor, per_step, per_process = (
            _whole(state.get(key))
            for key in ("world_size", "grad_accumulation_factor", "per_step", "per_process")
        )
        data = state.get("data")
        return cls(
            world_size,
            factor,
            per_step,
            per_process,
            data if isinstance(data, Mapping) else None,
        )

    def on(
        self,
        world_size: int,
        *,
        keeps_batches: bool = False,
    ) -> dict[str, int]:
        """Return the options that keep the samples of an optimizer step on another number of
        processes.

        On more processes a step is made of as many batches as before; on fewer of more batches, so
        that none is larger on a process than it was.

        Args:
            world_size: the number of ranks now.
            keeps_batches: whether a step must have as many batches of a process as before, since
                an epoch counts these.

        Returns:
            Values by the name of the option; empty where nothing is to be changed.

        Raises:
            ConfigError: so many processes cannot take a step of the same batches.
        """
        if (
            self.world_size is None
            or self.grad_accumulation_factor is None
            or self.world_size == world_size
        ):
            return {}
        if self.per_step is not None:
            if keeps_batches or self.per_process is None or world_size > self.world_size:
                return {
                    "global_batch_size": self.per_step,
                    "grad_accumulation_factor": self.grad_accumulation_factor,
                }
            return {
                "global_batch_size": self.per_step,
                "micro_batch_size": self.per_process,
                "grad_accumulation_factor": 1,
            }
        batches = self.grad_accumulation_factor * self.world_size
        if batches % world_size:
            raise ConfigError(
                f"this run was saved by {self.world_size} "
                f"process{'' if self.world_size == 1 else 'es'} with {batches} batches of a "
                f"sampler per optimizer step, which {world_size} processes cannot divide: start a "
                f"number of processes that divides {batches}."
            )
        return {"grad_accumulation_factor": batches // world_size}

    def batches_done(
        self,
        before: StepPlan,
        step: int,
        samples: int,
    ) -> tuple[int, str | None]:
        """Translate the position of a checkpoint into batches of the present size.

        Args:
            before: the step plan of the run that saved the checkpoint.
            step: batches of one process that it had done.
            samples: that all its ranks had seen.

        Returns:
            Batches of this process that are done, and a warning about it, or None.
        """
        changed = None not in {before.per_step, self.per_step} and before.per_step != self.per_step
        factor = self.grad_accumulation_factor or 1
        if counts_batches(self.data) and before.per_step and before.grad_accumulation_factor:
            # whatever their sizes
            samples = step * before.per_step // before.grad_accumulation_factor
        # Samples per step have changed: only the number of samples still means the same. Whole new
        # steps count as done; the samples after them are trained on again.
        if changed and self.per_step and samples:
            steps = samples // self.per_step
            return steps * factor, (
                f"The checkpoint has {before.per_step} samples per optimizer step, now there are "
                f"{self.per_step}: the epoch goes on after {steps * self.per_step} of the "
                f"{samples} samples that were done."
            )
        # Where a sampler decides how many samples a batch has, only batches can be counted.
        if self._deals_others(before):
            return self._batches_dealt(before, step)
        if before.grad_accumulation_factor in {None, factor}:
            return step, None  # as many batches to a step as before
        # The same samples per step, in other micro-batches: count steps. A checkpoint stands at the
        # end of a step; only the last step of an epoch has fewer batches, and is a step all the
        # same: hence rounded up.
        return -(-step // (before.grad_accumulation_factor or 1)) * factor, None

    def _deals_others(self, before: StepPlan) -> bool:
        """Return whether whole batches are dealt out, and the number of them in a step has
        changed.
        """
        is_counted = self.per_step is None or before.per_step is None
        return (
            is_counted
            and None not in {_dealt(self), _dealt(before)}
            and _dealt(self) != _dealt(before)
        )

    def _batches_dealt(self, before: StepPlan, step: int) -> tuple[int, str]:
        """Go on at the same batch of the data, though it may be inside of a step: the first step is
        then a shorter one.

        On another number of ranks the batches of a round that is not whole are done again.
        """
        done = step * (before.world_size or 1)
        own, again = divmod(done, self.world_size or 1)
        repeated = f" ({again} of them are done again)" if again else ""
        return own, (
            f"The checkpoint has {_dealt(before)} batches per optimizer step, now there are "
            f"{_dealt(self)}: the epoch goes on after {done - again} of the {done} batches that "
            f"were done{repeated}."
        )

    def changes(self, before: StepPlan) -> list[str]:
        """Name the differences between the samples of a step now and in the checkpoint.

        Args:
            before: the step plan of the run that saved the checkpoint.

        Returns:
            One text, or none.
        """
        if self._deals_others(before):
            return [f"{_dealt(self)} batches per optimizer step, before {_dealt(before)}"]
        if None in {before.per_step, self.per_step} or before.per_step == self.per_step:
            return []
        return [f"{self.per_step} samples per optimizer step, before {before.per_step}"]

    def other_data(self, before: StepPlan) -> str | None:
        """Say that the rest of an epoch will not be the rest of what was begun, because the data is
        another.

        Args:
            before: how the run went that stopped in the middle of an epoch.

        Returns:
            A sentence for the user; None where nothing has changed, or the checkpoint does not
            tell.
        """
        was = before.data or {}
        now = self.data or {}
        changed = [
            f"{name} {now[name]}, before {was[name]}"
            for name in now
            if name in was and was[name] != now[name]
        ]
        if not changed:
            return None
        return (
            "The data has changed since the checkpoint was made inside of an epoch: "
            f"{'; '.join(changed)}. Samples may come twice in this epoch, and others not at all."
        )


def sizes_in_run(loader: Any, context: RunContext) -> BatchSizes:
    """Compute the batch sizes of a run's training loader, over the ranks that its strategy divides
    the data over.

    Args:
        loader: of this rank.
        context: of the run.

    Ranks: local; equal on all ranks.
    """
    division = context.strategy.division()
    length = length_of(loader)
    return batch_sizes(
        loader,
        length and length // division.each,
        context.accumulation.factor // division.each,
        division,
    )


def _dealt(plan: StepPlan) -> int | None:
    """Return the batches of all ranks per optimizer step."""
    factor = plan.grad_accumulation_factor
    return None if plan.world_size is None or factor is None else plan.world_size * factor


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
