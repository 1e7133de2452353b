"""The events of the run's log about a call of ``fit``: with what it begins, and how it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ddpkit.distributed import get_world_size, if_main_process
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run.preflight import Preflight
    from ddpkit.training import BatchSizes, RunContext, RunLength
    from ddpkit.types import FitResult


class RunRecord:
    """Writes the begin and the end of each call of ``fit``.

    Args:
        context: of the run.
        policy: knows what the run goes on from.
        preflight: knows where each rank runs.

    Ranks: all; the main process writes.
    """

    def __init__(
        self,
        context: RunContext,
        policy: CheckpointPolicy,
        preflight: Preflight,
    ) -> None:
        self._context = context
        self._policy = policy
        self._preflight = preflight
        self._began = 0.0

    def begin(self, sizes: BatchSizes, length: RunLength) -> None:
        """Write with what a call of ``fit`` begins.

        Args:
            sizes: of a step.
            length: of the call.
        """
        self._began = time.monotonic()
        if not if_main_process():
            return
        context = self._context
        state = self._policy.run_state
        run_event(
            "fit",
            call=state.calls.number,
            epochs=length.epochs,
            total_steps=length.total_steps,
            steps_per_epoch=length.steps_per_epoch,
            samples_per_step=sizes.per_step,
            grad_accumulation_factor=sizes.factor,
            world_size=get_world_size(),
            strategy=context.strategy.name,
            ranks=[
                {"host": place.host, "device": place.device} for place in self._preflight.places
            ],
            parameters=_parameters(context.modules),
            options=context.options.changed(context.accumulation.in_use()),
            optimizer_step=context.progress.optimizer_step,
            resumed_from=self._resumed_from(),
        )

    def end(self, result: FitResult) -> None:
        """Write how a call of ``fit`` has ended.

        Args:
            result: what it returns.
        """
        run_event(
            "fit_end",
            call=self._policy.run_state.calls.number,
            reason=result.reason,
            epochs=result.epochs,
            optimizer_step=result.optimizer_steps,
            train_loss=result.train_loss,
            valid_loss=result.valid_loss,
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _resumed_from(self) -> dict[str, Any] | None:
        """Return the checkpoint that the run goes on from; None where it begins."""
        progress = self._context.progress
        state = self._policy.run_state
        if state.recovered is None:
            return None
        return {
            "checkpoint": state.recovered,
            "epoch": state.expected_epoch,
            "step": progress.step,
            "optimizer_step": progress.optimizer_step,
        }


def _parameters(modules: Any) -> dict[str, int]:
    """Return how many parameters there are, and how many of them are trained."""
    found = list(modules.parameters())
    return {
        "all": sum(parameter.numel() for parameter in found),
        "trained": sum(parameter.numel() for parameter in found if parameter.requires_grad),
    }
