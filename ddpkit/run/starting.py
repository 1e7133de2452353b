"""What a run starts from, decided once and on the main process; and what a person should know of it before it trains.

A run has a name of its own, which its checkpoints carry. So those of another run in the same folder can be told apart,
also after the run was killed and has gone on.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddpkit.checkpointing import Checkpoint, ckpt_recency, read_checkpoint, verify
from ddpkit.errors import CheckpointError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger
from ddpkit.run.resuming import BRAIN_FILE, StepPlan, read_brain_file

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer

logger = get_logger(__name__)

NEWEST, NEVER = "auto", "never"  # what the option `resume` says, or else a path
UNKNOWN = ""  # the run of a checkpoint that does not say
EVALUATED = "only_evaluated"  # said by a checkpoint if the Brain that saved it had trained nothing


@dataclass(frozen=True)
class Lineage:
    """Which checkpoints are a run's: its own, and those before the one that it went on from.

    Attributes:
        run: the run's name.
        since: when it began, in seconds since 1970.
        before: for each run that it goes on from, the time of the last checkpoint that is a part of it; those of an
            unknown run under an empty name.

    Ranks: local; the main process makes it.

    Example:
        >>> first = Lineage.new()
        >>> Lineage.read(first.state_dict()) == first
        True
    """

    run: str
    since: float
    before: dict[str, float] = field(default_factory=dict)

    @classmethod
    def new(cls, state: Mapping[str, Any] | None = None, last: float = -math.inf) -> Lineage:
        """Return that of a run that begins now.

        Args:
            state: what the Brain had saved in the checkpoint that it goes on from, if there is one.
            last: when that was made, in seconds since 1970.
        """
        before: dict[str, float] = {}
        if state is not None:
            known = cls.read(state)
            before = {UNKNOWN: last} if known is None else {**known.before, known.run: last}
        return cls(uuid.uuid4().hex, time.time(), before)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Lineage | None:
        """Return that of the run that wrote a checkpoint; None if it does not say.

        Args:
            state: of the Brain, as its file holds it.
        """
        run, since, before = (state.get(key) for key in ("run", "run_since", "run_before"))
        if not isinstance(run, str) or not isinstance(since, (int, float)):
            return None
        return cls(run, float(since), dict(before) if isinstance(before, Mapping) else {})

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`read` reads."""
        return {"run": self.run, "run_since": self.since, "run_before": dict(self.before)}

    def includes(self, checkpoint: Checkpoint) -> bool:
        """Say whether a checkpoint is one of this run's, or one that it goes on from.

        Args:
            checkpoint: one that says nothing of its run counts if it was made since this one began.
        """
        return self._includes(Lineage.read(_state_of(checkpoint.path)), ckpt_recency(checkpoint))

    def _includes(self, known: Lineage | None, saved: float) -> bool:
        if known is None:
            return saved >= self.since or saved <= self.before.get(UNKNOWN, -math.inf)
        return known.run == self.run or saved <= self.before.get(known.run, -math.inf)

    def owns(self, checkpoint: Checkpoint, state: Mapping[str, Any], resume: str) -> bool:
        """Say whether this run made a checkpoint itself, and may delete it.

        Args:
            checkpoint: one that says nothing of its run is taken for its own only where it goes on by itself.
            state: of the Brain, as its file holds it.
            resume: the option. Under a path, that one and those beside it were there before, and the same command needs
                them again.
        """
        known = Lineage.read(state)
        if known is None:
            return resume == NEWEST and self._includes(None, ckpt_recency(checkpoint))
        return known.run == self.run


@dataclass(frozen=True)
class Start:
    """What a call of ``fit`` starts from.

    Attributes:
        resume: for the checkpointer: ``"auto"``, ``"never"`` or the path of a checkpoint.
        lineage: of the run.
        step_plan: what an optimizer step was made of in that checkpoint; None where there is none, or it does not tell.
        num_found: checkpoints in the folder.
        others: those of other runs, which this one leaves alone.

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
    states = {one.path: _state_of(one.path) for one in found}
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
    path = Path(resume)
    state, last = _state_of(path), -math.inf
    with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):  # who loads it says what is wrong
        last = ckpt_recency(read_checkpoint(path))
    return Start(resume, Lineage.new(state, last), _asked(state) if _looks_whole(path) else None)


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
    own = _of_training(own, {one.path: _state_of(one.path) for one in own})
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
    known = next(filter(None, (Lineage.read(_state_of(one.path)) for one in newest_first)), None)
    return None if known is None else Lineage(known.run, -math.inf, known.before)  # includes what does not tell


def _newest(checkpointer: Checkpointer, found: list[Checkpoint], states: Mapping[Path, Any], world_size: int) -> Start:
    """Start from the newest that is whole; where its samples per step must be kept, make sure of that beforehand."""
    trained = _of_training(found, states)
    newest = next((one for one in trained if _looks_whole(one.path)), None)
    if newest is None:
        return Start(NEWEST, Lineage.new())
    start = _start_at(newest, states[newest.path])
    if len(trained) == len(found) and (start.step_plan is None or start.step_plan.world_size in {None, world_size}):
        return Start(NEWEST, start.lineage, start.step_plan)  # the checkpointer finds it, and verifies all of it
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
    return Start(str(checkpoint.path), lineage, _asked(state))


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
    """Return the step plan that was asked for, and not what it came to on some number of processes in between."""
    asked = state.get("asked")
    return StepPlan.read(asked if isinstance(asked, Mapping) else state)


def _state_of(path: Path) -> dict[str, Any]:
    with contextlib.suppress(CheckpointError):
        return read_brain_file(path)
    return {}


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
    """Name the optimizers that no recoverable holds: after a restart their moments would be those of a new one.

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
    """Return what a parameter and that of a scripted copy have in common."""
    try:
        return parameter.data_ptr() or id(parameter)
    except RuntimeError:  # one without storage
        return id(parameter)


class TrainedFlags:
    """Which parameters have been frozen, or set free, since training began: a restart does not do that again.

    Args:
        modules: as they are when training begins.

    Ranks: local; equal on all ranks.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> flags = TrainedFlags(net)
        >>> net.bias.requires_grad_(False).requires_grad, flags.changes()
        (False, {'bias': False})
    """

    def __init__(self, modules: nn.Module) -> None:
        self._begun = [(name, one, one.requires_grad) for name, one in modules.named_parameters()]

    def changes(self) -> dict[str, bool]:
        """Return whether a parameter is trained, by its name; only for those of which that has changed."""
        return {name: one.requires_grad for name, one, begun in self._begun if one.requires_grad is not begun}

    def restore(self, changes: Any, *, exactly: bool) -> int:
        """Freeze and set free what had been when a checkpoint was saved.

        Args:
            changes: from the checkpoint; anything but a mapping says nothing.
            exactly: the other parameters, too, shall be as they were: as training began.

        Returns:
            Of how many parameters it has been changed.
        """
        if not isinstance(changes, Mapping):
            return 0
        count = 0
        for name, one, begun in self._begun:
            wanted = bool(changes.get(name, begun if exactly else one.requires_grad))
            count += wanted is not one.requires_grad
            one.requires_grad_(wanted)
        return count


def learning_rates(optimizers: Mapping[str, Any] | None) -> dict[str, list[float]]:
    """Return the learning rate of every parameter group.

    Args:
        optimizers: by name, or None.

    Ranks: local.

    Example:
        >>> learning_rates({"sgd": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)})
        {'sgd': [0.5]}
    """
    rates = {}
    for name, optimizer in (optimizers or {}).items():
        groups = getattr(optimizer, "param_groups", [])
        rates[name] = [float(group["lr"]) for group in groups if "lr" in group]
    return rates
