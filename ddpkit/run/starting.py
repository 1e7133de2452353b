"""What a run starts from, decided once on the main process; and what a person should know of it before it trains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.checkpointing import Checkpoint, ckpt_recency
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger
from ddpkit.run.resuming import EVALUATED, NEVER, NEWEST, StepPlan, state_or_nothing

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer

logger = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """What a call of ``fit`` starts from.

    Attributes:
        resume: for the checkpointer: ``"auto"``, ``"never"``, the path of a checkpoint, or one that is whole.
        num_found: number of checkpoints that were in the folder.
        step_plan: step plan of that checkpoint; None without a checkpoint, or if it does not say.
        state: run state of that checkpoint until it is recovered; None: it could not be read.

    Ranks: local; the main process makes it, all ranks use it.

    Example:
        >>> Start("never").step_plan is None
        True
    """

    resume: str | Checkpoint
    num_found: int = 0
    step_plan: StepPlan | None = None
    state: Mapping[str, Any] | None = None


def choose_start(checkpointer: Checkpointer, resume: str) -> Start:
    """Decide what a run starts from.

    When the launcher itself has restarted the run, it goes on with the newest checkpoint of this launch, whatever the
    option says. A folder holds the checkpoints of one run: what a run leaves behind that is told to begin at another
    place is moved out of the way.

    Args:
        checkpointer: its folder is looked into.
        resume: the option: ``"auto"``, ``"never"`` or the path of a checkpoint.

    Raises:
        CheckpointError: the folder cannot be read, or holds nothing that is whole; or the path is not a checkpoint.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> choose_start(Checkpointer(tempfile.mkdtemp()), "auto").resume
        'auto'
    """
    found = checkpointer.list_checkpoints()
    states = {one.path: state_or_nothing(one.path) for one in found}
    own, chosen = _of_training(found, states), None
    if resume != NEWEST:
        own = _of_this_launch(own, states)
    if own:
        chosen = checkpointer.find_checkpoint(ckpt_predicate=lambda one: one in own)
        _say_why(chosen, found, states, resume)
    elif resume != NEWEST:
        chosen = None if resume == NEVER else checkpointer.named(resume)
        checkpointer.set_aside(chosen)
    if chosen is None:
        return Start(resume, len(found))
    state = states[chosen.path] if chosen.path in states else state_or_nothing(chosen.path)
    return Start(chosen, len(found), _asked(state), state or None)


def start_again(checkpointer: Checkpointer, resume: str) -> Start:
    """Say what a later call of ``fit`` starts from, for a recipe that recovers something in every one.

    Args:
        checkpointer: its folder is looked into.
        resume: the option.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> start_again(Checkpointer(tempfile.mkdtemp()), "never").resume
        'never'
    """
    found = checkpointer.list_checkpoints()
    own = _of_training(found, {one.path: state_or_nothing(one.path) for one in found})
    return Start(str(max(own, key=ckpt_recency).path) if own else resume)


def _of_training(found: list[Checkpoint], states: Mapping[Path, Any]) -> list[Checkpoint]:
    """Return the checkpoints that a training has saved; all, where only evaluations have."""
    return [one for one in found if states[one.path].get(EVALUATED) is not True] or found


def _of_this_launch(found: list[Checkpoint], states: Mapping[Path, Any]) -> list[Checkpoint]:
    """Return the checkpoints of the launch that has restarted this run; none, where it has not been restarted."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if not find_launch().restart_count or launch in {None, "none"}:
        return []
    return [one for one in found if states[one.path].get("launch") == launch]


def _say_why(chosen: Checkpoint | None, found: list[Checkpoint], states: Mapping[Path, Any], resume: str) -> None:
    newest = max(found, key=ckpt_recency)
    if chosen is not None and resume != NEWEST:
        logger.info("The launcher has restarted this run: it goes on from %s.", chosen.path)
    elif chosen is not None and chosen != newest and states[newest.path].get(EVALUATED) is True:
        words = "%s was saved by a process that only evaluated: the training goes on from %s."
        logger.info(words, newest.path, chosen.path)


def _asked(state: Mapping[str, Any]) -> StepPlan:
    """Return the step plan as the options gave it, before a change for another number of processes."""
    asked = state.get("asked")
    return StepPlan.read(asked if isinstance(asked, Mapping) else state)


# ---------------------------------------------------------------------------------------- what should be known


def modules_not_saved(modules: Mapping[str, nn.Module] | nn.ModuleDict, recoverables: Mapping[str, Any]) -> list[str]:
    """Name the modules with trained parameters that no recoverable holds: after a restart they would be untrained.

    Args:
        modules: by name.
        recoverables: of a checkpointer: modules, or objects with modules among their attributes.

    Returns:
        Names, and how many of the parameters are in no checkpoint.

    Ranks: local.

    Example:
        >>> net, head = nn.Linear(1, 1), nn.Linear(2, 1)
        >>> modules_not_saved({"net": net, "head": head}, {"net": net})
        ['head (2 of 2 parameters)']
    """
    saved = [one for one in _parts_of(recoverables) if isinstance(one, nn.Module)]
    held = {_storage(parameter) for module in saved for parameter in module.parameters()}
    found = []
    for name, module in modules.items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        lost = [parameter for parameter in trained if _storage(parameter) not in held]
        if lost:
            found.append(f"{name} ({len(lost)} of {len(trained)} parameters)")
    return found


def optimizers_not_saved(optimizers: Mapping[str, Any] | None, recoverables: Mapping[str, Any]) -> list[str]:
    """Name the optimizers that no recoverable holds: a restart would lose their moments.

    Args:
        optimizers: by name, or None.
        recoverables: of a checkpointer; one may have the optimizer among its attributes.

    Returns:
        Names.

    Ranks: local.

    Example:
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> optimizers_not_saved({"opt_class": sgd}, {"net": nn.Linear(1, 1)})
        ['opt_class']
    """
    held = set(map(id, _parts_of(recoverables)))
    return [name for name, optimizer in (optimizers or {}).items() if id(optimizer) not in held]


def _parts_of(recoverables: Mapping[str, Any]) -> Iterator[Any]:
    """Yield recoverables, their attributes, and what is in the containers among those."""
    for one in recoverables.values():
        yield one
        for value in getattr(one, "__dict__", {}).values():
            inner = list(value.values()) if isinstance(value, dict) else value
            yield from inner if isinstance(inner, (list, tuple)) else (inner,)


def _storage(parameter: torch.Tensor) -> int:
    """Return an id that a parameter shares with the parameter of a scripted copy."""
    try:
        return parameter.data_ptr() or id(parameter)
    except RuntimeError:  # a parameter without storage
        return id(parameter)
