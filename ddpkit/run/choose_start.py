"""What a call of ``fit`` starts from: which checkpoint of the folder, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.checkpointing import REMOTES, Checkpoint, ckpt_recency
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger
from ddpkit.run.brain_file import BRAIN_FILE, DEBUG, EVALUATED, brain_file_or_nothing
from ddpkit.run.step_plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpkit.checkpoints import Checkpointer

logger = get_logger(__name__)

# what the option `resume` says, or else a path
NEWEST = "auto"
NEVER = "never"
REHEARSED = "%s was saved with --debug: its epochs had a few batches each, and count as whole ones."


@dataclass(frozen=True, eq=False)
class Start:
    """What a call of ``fit`` starts from.

    Attributes:
        resume: for the checkpointer: ``"auto"``, ``"never"``, the path of a checkpoint, or one that
            is whole.
        num_found: number of checkpoints that were in the folder.
        step_plan: step plan of that checkpoint; None without a checkpoint, or if it does not say.
        state: run state of that checkpoint until it is recovered; None: it could not be read.

    Ranks: local; the main process makes it, all ranks use it.
    """

    resume: str | Checkpoint
    num_found: int = 0
    step_plan: StepPlan | None = None
    state: Mapping[str, Any] | None = None


#: Run states by the directory of their checkpoint and its time: another checkpoint may come to have
#: the same name.
States = dict[tuple[Path, float], dict[str, Any]]


def choose_start(
    checkpointer: Checkpointer,
    resume: str,
    *,
    is_first: bool = True,
    known: States | None = None,
    is_debug: bool = False,
) -> Start:
    """Decide what a call of ``fit`` starts from.

    When the launcher itself has restarted the run, it goes on with the newest checkpoint of this
    launch, whatever the option says. A folder holds the checkpoints of one run: with ``"never"`` or
    a path, those that do not belong to this run are moved into a subfolder.

    Args:
        checkpointer: its folder is looked into.
        resume: the option: ``"auto"``, ``"never"`` or the path of a checkpoint.
        is_first: whether it is the first call of this process. For a recipe that recovers something
            in every call, a later one starts from the newest checkpoint, whatever the option says.
        known: run states that were read before; what is read now is added, so that no file is read
            twice.
        is_debug: whether the run has the option ``debug``. Another run does not go on from what a
            run with ``debug`` has saved, whose epochs had a few batches: it moves such checkpoints
            into a subfolder, too.

    Raises:
        CheckpointError: the folder cannot be read, or holds nothing that is whole; or the path is
            not a checkpoint.

    Ranks: main only.

    Example:
        >>> import tempfile
        >>> from ddpkit.checkpoints import Checkpointer
        >>> choose_start(Checkpointer(tempfile.mkdtemp()), "auto").resume
        'auto'
    """
    found = checkpointer.list_checkpoints()
    states = _states_of(found, {} if known is None else known)
    if is_first and resume == NEWEST and not is_debug:
        found = _without_rehearsals(checkpointer, found, states)
    trained = [
        checkpoint for checkpoint in found if states[checkpoint.path].get(EVALUATED) is not True
    ]
    # where only evaluations have saved, theirs
    own = trained or found
    chosen = None
    if not is_first:
        return Start(str(max(own, key=ckpt_recency).path) if own else resume)
    if resume != NEWEST:
        own = _of_this_launch(own, states)
    if own:
        chosen = checkpointer.find_checkpoint(ckpt_predicate=lambda checkpoint: checkpoint in own)
        _say_why(chosen, found, states, resume)
    elif resume != NEWEST:
        chosen = None if resume == NEVER else checkpointer.named(resume)
        checkpointer.set_aside(chosen)
    if chosen is None:
        return Start(resume, len(found))
    state = states[chosen.path] if chosen.path in states else brain_file_or_nothing(chosen.path)
    if not is_debug and state.get(DEBUG) is True:
        logger.warning(REHEARSED, chosen.path)
    # the step plan as the options gave it, before a change for another number of processes
    asked = state.get("asked")
    return Start(
        chosen,
        len(found),
        StepPlan.read(asked if isinstance(asked, Mapping) else state),
        state or None,
    )


def _without_rehearsals(
    checkpointer: Checkpointer,
    found: list[Checkpoint],
    states: Mapping[Path, Mapping[str, Any]],
) -> list[Checkpoint]:
    """Move checkpoints of runs with the option ``debug`` away, and return the others."""
    rehearsals = [checkpoint for checkpoint in found if states[checkpoint.path].get(DEBUG) is True]
    if rehearsals:
        words = "%d checkpoint(s) in %s were saved with --debug: this run does not go on from them."
        logger.warning(words, len(rehearsals), checkpointer.checkpoints_dir)
        checkpointer.set_these_aside(rehearsals)
    return [checkpoint for checkpoint in found if checkpoint not in rehearsals]


def _states_of(
    found: Iterable[Checkpoint],
    known: States,
) -> dict[Path, dict[str, Any]]:
    keys = [(checkpoint.path, ckpt_recency(checkpoint)) for checkpoint in found]
    known.update({key: _brain_file(key[0]) for key in keys if key not in known})
    return {key[0]: known[key] for key in keys}


def _brain_file(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run, also where it is in a store and not here."""
    return brain_file_or_nothing(REMOTES.of(checkpoint.parent).folder_with(checkpoint, BRAIN_FILE))


def _of_this_launch(found: list[Checkpoint], states: Mapping[Path, Any]) -> list[Checkpoint]:
    """Return the checkpoints of the launch that has restarted this run; none, where it has not been
    restarted.
    """
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if not find_launch().restart_count or launch in {None, "none"}:
        return []
    return [checkpoint for checkpoint in found if states[checkpoint.path].get("launch") == launch]


def _say_why(
    chosen: Checkpoint | None,
    found: list[Checkpoint],
    states: Mapping[Path, Any],
    resume: str,
) -> None:
    newest = max(found, key=ckpt_recency)
    if chosen is not None and resume != NEWEST:
        logger.info("The launcher has restarted this run: it goes on from %s.", chosen.path)
    elif chosen is not None and chosen != newest and states[newest.path].get(EVALUATED) is True:
        words = "%s was saved by a process that only evaluated: the training goes on from %s."
        logger.info(words, newest.path, chosen.path)
