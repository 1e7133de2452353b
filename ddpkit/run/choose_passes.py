"""Chooses the kind of training pass that the options ask for. Only that kind is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.run.passes import Passes

if TYPE_CHECKING:
    from ddpkit.run.memory_report import MemoryReport
    from ddpkit.run.run_state import RunState
    from ddpkit.training import RunContext, TrainStep


def choose_passes(
    context: RunContext,
    train_step: TrainStep,
    run_state: RunState,
    memory: MemoryReport,
) -> Passes:
    """Choose how a call of ``fit`` makes its passes.

    Args:
        context: of the run.
        train_step: of the run.
        run_state: gets the step plan.
        memory: tells what took the memory, where no size fits.
    """
    if not context.options.auto_micro_batch:
        return Passes()
    from ddpkit.run.auto_micro_batch import AutoMicroBatch  # which few runs need

    return AutoMicroBatch(context, train_step, run_state, memory)
