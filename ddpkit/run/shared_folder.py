"""Whether every rank can write its part of a checkpoint where the main process commits: a shard, or
what a saver writes that runs on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.base import this_place
from ddpkit.checkpointing import NOT_SHARED_BY_SAVERS, require_shared_folder
from ddpkit.distributed import exchange
from ddpkit.errors import ConfigError
from ddpkit.launch import find_slice
from ddpkit.logger import get_logger, shown_path
from ddpkit.mirror import mirror_holding

if TYPE_CHECKING:
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.strategies import Strategy

logger = get_logger(__name__)

GATHERED = (
    "Rank 0 gathers and writes whole checkpoints, as with --ckpt_layout=whole: each machine has a "
    "folder of its own."
)
OWN_FOLDERS = (
    "{} cannot be saved: its saver runs on every rank, and each of the {} machines has a folder of "
    "its own for {}. What the others write there would be missing in the checkpoint, which rank 0 "
    "completes. {}, or have the main process alone save it, with what the other ranks have sent it "
    "before (ddpkit.distributed.exchange)."
)
OF_MIRROR = "Give an output folder on a file system that all machines share"
OF_REHEARSAL = "Give --debug_persistently, with which --debug saves in the run's own folder"


def prepare_saving_by_each_rank(
    checkpointer: Checkpointer,
    strategy: Strategy,
    *,
    is_temporary: bool,
) -> None:
    """Find out before the training where each rank can write. Where machines have a folder of
    ddpkit's own each, states that are divided are saved whole.

    Args:
        checkpointer: saves the run.
        strategy: divides the states, or not.
        is_temporary: whether the folder is one for a rehearsal.

    Raises:
        ConfigError: a rank cannot write where the main process commits. On every rank.

    Ranks: collective.
    """
    strategy.gathers_states = False
    savers = checkpointer.saved_by_each_rank()
    if not (savers or strategy.writes_shards()):
        return
    folder = checkpointer.checkpoints_dir
    if is_temporary or mirror_holding(folder) is not None:
        _use_own_folders(strategy, folder, savers, is_temporary=is_temporary)
    elif savers:
        try:
            require_shared_folder(folder, NOT_SHARED_BY_SAVERS)
        except ConfigError as error:
            raise ConfigError(f"{_shown(savers)} cannot be saved: {error}") from error
    else:
        try:
            require_shared_folder(folder)
        except ConfigError as error:
            if not strategy.gathers_if_needed:
                raise
            strategy.gathers_states = True
            logger.info("Rank 0 gathers and writes whole checkpoints: %s", error)


def _use_own_folders(
    strategy: Strategy,
    folder: Path,
    savers: Sequence[str],
    *,
    is_temporary: bool,
) -> None:
    machines = set(exchange(this_place(), site="machines"))
    if len(machines) == 1:
        return
    if savers and find_slice() is None:  # a measured slice saves nothing
        where = "--debug" if is_temporary else shown_path(folder)
        advice = OF_REHEARSAL if is_temporary else OF_MIRROR
        raise ConfigError(OWN_FOLDERS.format(_shown(savers), len(machines), where, advice))
    if strategy.writes_shards():
        strategy.gathers_states = True
        logger.info(GATHERED)


def _shown(names: Sequence[str]) -> str:
    return f"The recoverable {', '.join(map(repr, names))}"
