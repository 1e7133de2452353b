"""The number of optimizer steps of a call of ``fit`` that goes on with other batches than it began
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpkit.checkpointing import Checkpoint, ends_epoch
from ddpkit.run.step_plan import StepPlan
from ddpkit.training import RunLength

if TYPE_CHECKING:
    from ddpkit.run.run_state import RunState

__all__ = ["EpochPlan", "note_epoch"]


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """What an epoch is made of in this call of ``fit``.

    Attributes:
        steps: optimizer steps of an epoch.
        batches: batches of a process in an epoch.
        goes_on: whether the epoch counter goes on after the epochs that are done; a range begins
            anew.

    Ranks: local; equal on all ranks.

    Example:
        >>> EpochPlan(steps=3, batches=6, goes_on=True).steps
        3
    """

    steps: int
    batches: int
    goes_on: bool


def note_epoch(
    run_state: RunState,
    length: int | None,
    factor: int,
    epoch_counter: Any,
) -> int:
    """Note for the next checkpoints what an epoch is made of; return by how many steps the run is
    ahead of that.

    A run that has always had the present batches is not ahead. After a change of the batches a run
    may have made more steps until here, or fewer. The difference belongs to the steps of the whole
    call.

    Args:
        run_state: knows what this call of ``fit`` starts from, and has the step plan of now.
        length: batches of a process in an epoch; None where that is not known.
        factor: batches per optimizer step.
        epoch_counter: of this call; one with a ``limit`` goes on after the epochs that are done.

    Ranks: local; equal on all ranks.
    """
    steps = RunLength.of(length, factor, None, run_state.context.options).steps_per_epoch
    run_state.steps_per_epoch = steps
    run_state.steps_ahead = 0
    if steps is not None and length is not None:
        goes_on = isinstance(getattr(epoch_counter, "limit", None), int)
        state, end_of_epoch = _start_of(run_state)
        epoch = EpochPlan(steps, length, goes_on=goes_on)
        run_state.steps_ahead = _steps_ahead(
            run_state.step_plan,
            epoch,
            state,
            end_of_epoch=end_of_epoch,
        )
    return run_state.steps_ahead


def _start_of(run_state: RunState) -> tuple[Mapping[str, Any], bool]:
    """Return the state of the checkpoint that this call of ``fit`` goes on from, and whether an
    epoch ended there.
    """
    calls = run_state.calls
    start = run_state.start
    if calls.later is not None and calls.later[1].get("fit") == calls.number:
        return calls.later[1], calls.later_ends_epoch
    if start is None or start.state is None or not isinstance(start.resume, Checkpoint):
        return {}, True
    is_of_this_call = start.state.get("fit", calls.number) == calls.number
    return (start.state if is_of_this_call else {}), ends_epoch(start.resume.meta)


def _steps_ahead(
    plan: StepPlan,
    now: EpochPlan,
    state: Mapping[str, Any],
    *,
    end_of_epoch: bool,
) -> int:
    """Return the steps made so far, less the steps that the present batches make of the same data.

    While the steps of an epoch do not change, the difference stays what it was in the checkpoint.
    """
    before = StepPlan.read(state)
    known = state.get("steps_per_epoch")
    epoch = state.get("epoch")
    has_changed = bool(plan.changes(before)) if known is None else known != now.steps
    if not has_changed or not isinstance(epoch, int):
        return int(state.get("steps_ahead", 0))
    equivalent_steps = (epoch - 1 + int(end_of_epoch)) * now.steps if now.goes_on else 0
    if not end_of_epoch:
        batches, _ = plan.batches_done(
            before,
            state["step"],
            state.get("samples", 0),
        )
        is_over = batches >= now.batches
        equivalent_steps += (
            now.steps if is_over else batches // (plan.grad_accumulation_factor or 1)
        )
    finished = [number for number in state.get("finished") or () if number is not None]
    done: int = state["optimizer_step"] - (finished[-1] if finished else 0)
    return done - equivalent_steps
