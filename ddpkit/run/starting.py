"""What a run starts from, decided once on the main process; and what a person should know of it before it trains."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.checkpointing import Checkpoint, ckpt_recency, read_checkpoint, verify
from ddpkit.errors import CheckpointError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger
from ddpkit.run.resuming import BRAIN_FILE, EVALUATED, NEVER, NEWEST, Lineage, StepPlan, state_or_nothing

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer

logger = get_logger(__name__)


@dataclass(frozen=True)
class Start:
    """What a call of ``fit`` starts from.

    Attributes:
        resume: for the checkpointer: ``"auto"``, ``"never"`` or the path of a checkpoint.
        lineage: of the run.
        step_plan: step plan of that checkpoint; None without a checkpoint, or if it does not say.
        num_found: number of checkpoints in the folder.
        others: checkpoints of other runs, which this run never touches.
        checkpoint: the expected start; the checkpointer decides.
        state: run state of that checkpoint until it is recovered; None: it could not be read.

    Ranks: local; the main process makes it, all ranks use it.

    Example:
        >>> Start("never", Lineage.new()).step_plan is None
        True
    """

    resume: str
    lineage: Lineage
    step_plan: StepPlan | None = None
    num_found: int = 0
    others: tuple[Path, ...] = ()
    checkpoint: Path | None = None
    state: Mapping[str, Any] | None = None


def choose_start(checkpointer: Checkpointer, resume: str, world_size: int) -> Start:
    """Decide what a run starts from.

    When the launcher itself has restarted the run, it goes on with the newest checkpoint of this launch, whatever the
    option says.

    Args:
        checkpointer: its folder is looked into.
        resume: the option: ``"auto"``, ``"never"`` or the path of a checkpoint.
        world_size: number of ranks.

    Raises:
        CheckpointError: the folder cannot be read, or holds nothing that is whole.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> choose_start(Checkpointer(tempfile.mkdtemp()), "auto", 1).resume
        'auto'
    """
    found = sorted(checkpointer.list_checkpoints(), key=ckpt_recency, reverse=True)
    states = {one.path: state_or_nothing(one.path) for one in found}
    start = _choose(checkpointer, found, states, resume, world_size)
    others = tuple(one.path for one in found if not start.lineage.owns(one, states[one.path], resume))
    return replace(start, num_found=len(found), others=others)


def _choose(
    checkpointer: Checkpointer, found: list[Checkpoint], states: Mapping[Path, Any], resume: str, world_size: int
) -> Start:
    if resume == NEWEST:
        return _newest(checkpointer, found, states, world_size)
    own = _of_this_launch(checkpointer, found, states)
    if own is not None:
        logger.info("The launcher has restarted this run: it goes on from %s.", own.path)
        return _start_at(own, states[own.path])
    if found:
        logger.warning(
            "--resume=%s, and %s holds %d checkpoint(s) of another run: they stay, and do not count for this one. "
            "Better give this run an output folder of its own.", resume, checkpointer.checkpoints_dir, len(found),
        )  # fmt: skip
    if resume == NEVER:
        return Start(NEVER, Lineage.new())
    path = Path(resume).absolute()
    state, last = state_or_nothing(path), -math.inf
    with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):  # who loads it says what is wrong
        last = ckpt_recency(read_checkpoint(path))
    plan = _asked(state) if _looks_whole(path) else None
    return Start(resume, Lineage.new(state, last), plan, checkpoint=path, state=state or None)


def start_again(checkpointer: Checkpointer, resume: str, lineage: Lineage) -> Start:
    """Say what a later call of ``fit`` starts from, for a recipe that recovers something in every one.

    Args:
        checkpointer: its folder is looked into.
        resume: the option.
        lineage: of the run.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> start_again(Checkpointer(tempfile.mkdtemp()), "never", Lineage.new()).resume
        'never'
    """
    own = list(filter(lineage.includes, checkpointer.list_checkpoints()))
    own = _of_training(own, {one.path: state_or_nothing(one.path) for one in own})
    return Start(str(max(own, key=ckpt_recency).path) if own else resume, lineage)


def lineage_of(checkpoints: Iterable[Checkpoint]) -> Lineage | None:
    """Return the lineage of the run that has saved last; None if none of the checkpoints tells.

    Args:
        checkpoints: in any order.

    Ranks: local.

    Example:
        >>> lineage_of([]) is None
        True
    """
    newest_first = sorted(checkpoints, key=ckpt_recency, reverse=True)
    known = next(filter(None, (Lineage.read(state_or_nothing(one.path)) for one in newest_first)), None)
    return None if known is None else Lineage(known.run, -math.inf, known.before)  # includes what does not tell


def _newest(checkpointer: Checkpointer, found: list[Checkpoint], states: Mapping[Path, Any], world_size: int) -> Start:
    """Start from the newest that is whole; where its samples per step must be kept, make sure of that beforehand."""
    trained = _of_training(found, states)
    newest = next((one for one in trained if _looks_whole(one.path)), None)
    if newest is None:
        return Start(NEWEST, Lineage.new())
    start = _start_at(newest, states[newest.path])
    if len(trained) == len(found) and (start.step_plan is None or start.step_plan.world_size in {None, world_size}):
        return replace(start, resume=NEWEST)  # the checkpointer finds it, and verifies all of it
    chosen = checkpointer.find_checkpoint(ckpt_predicate=lambda one: one in trained)
    if trained[0] is not found[0] and chosen is not None:
        words = "%s was saved by a process that only evaluated: the training goes on from %s."
        logger.info(words, found[0].path, chosen.path)
    return start if chosen is None else _start_at(chosen, states[chosen.path])


def _of_training(found: list[Checkpoint], states: Mapping[Path, Any]) -> list[Checkpoint]:
    """Return the checkpoints that a training has saved; all, where only evaluations have."""
    return [one for one in found if states[one.path].get(EVALUATED) is not True] or found


def _looks_whole(path: Path) -> bool:
    return not (verify(path, "size") or verify(path, "full", only=BRAIN_FILE))


def _start_at(checkpoint: Checkpoint, state: Mapping[str, Any]) -> Start:
    lineage = Lineage.read(state) or Lineage.new({}, ckpt_recency(checkpoint))
    return Start(str(checkpoint.path), lineage, _asked(state), checkpoint=checkpoint.path, state=state or None)


def _of_this_launch(
    checkpointer: Checkpointer, found: list[Checkpoint], states: Mapping[Path, Any]
) -> Checkpoint | None:
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if not find_launch().restart_count or launch in {None, "none"}:
        return None
    own = [one for one in found if states[one.path].get("launch") == launch]
    own = [one for one in own if states[one.path].get(EVALUATED) is not True]
    return checkpointer.find_checkpoint(ckpt_predicate=lambda one: one in own) if own else None


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
