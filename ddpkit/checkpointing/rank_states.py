"""The state of each rank in a checkpoint: random streams, running loss, and position in its data.

Weights are equal on all ranks, rank states are not. When the Brain saves in the middle of an epoch, it first gathers
the states of all ranks. When a recipe saves there, perhaps on the main process alone, only the main process's state is
saved. A save at the end of an epoch needs no random streams: every epoch starts from streams that follow from the seed
(:func:`ddpkit.seed.seed_epoch_streams`).
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import map_values
from ddpkit.comm import get_runtime
from ddpkit.distributed import (
    ddp_prevent_block,
    gather_objects,
    get_rank,
    get_world_size,
    if_main_process,
    run_on_main,
)
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

FORMAT = 1
WAIT_SECONDS = 10.0  # for the other ranks, when a recipe saves inside an epoch for the first time
SHORT_WAIT_SECONDS = 0.5  # once they have not come
TELL_SECONDS = 10.0  # until a longer wait is told
ALONE = (
    "The main process has waited %.0f s for the other ranks to %s, too, and waits %.0f s in all. It is called on every "
    "rank: not under `if if_main_process():`."
)


class RankStates:
    """A recoverable that holds one state per rank.

    Args:
        collect: returns the state of this rank as plain containers, numbers and tensors.

    Attributes:
        gathered: the states of all ranks, for the saves that follow until it is set to None; on other ranks than rank 0
            only how many they are. None: nothing was gathered.
        loaded: this rank's state from the checkpoint that was loaded last, until it is used; else None.
        is_of_as_many: whether that checkpoint was made by as many ranks.
        is_complete: whether it also had the state of every one.

    Ranks: local, but for :meth:`gather` and :meth:`gather_if_all_come`.

    State: the states of all ranks if gathered, else the main process's state.

    Example:
        >>> states = RankStates(lambda: {"drawn": 3})
        >>> states.gather(); states.state_dict()
        {'format': 1, 'world_size': 1, 'ranks': [{'drawn': 3}]}
    """

    is_of_inside_an_epoch = True  # a checkpoint of the end of an epoch may lack it

    def __init__(self, collect: Callable[[], dict[str, Any]]) -> None:
        self._collect = collect
        self.gathered: list[dict[str, Any] | None] | None = None
        self.loaded: dict[str, Any] | None = None
        self.is_of_as_many = self.is_complete = False
        self._have_been_waited_for = False

    def gather(self) -> None:
        """Collect the states of all ranks, into :attr:`gathered`.

        Raises:
            RankFailedError: a rank could not tell its state; on every rank.

        Ranks: collective.
        """
        gathered: list[dict[str, Any] | None] = [*gather_objects(self._collect)]
        self.gathered = gathered if if_main_process() else [None] * len(gathered)

    def gather_if_all_come(self) -> bool:
        """Collect the states as :meth:`gather` does, if every rank makes this call and not the main process alone.

        Returns:
            Whether every rank has come. The main process waits for them: some seconds at first, and for a moment once
            they have not come.

        Raises:
            RankFailedError: as :meth:`gather`.

        Ranks: all, or the main process alone.
        """
        if get_world_size() > 1:
            seconds = SHORT_WAIT_SECONDS if self._have_been_waited_for else WAIT_SECONDS
            if not all_ranks_come("save", seconds):
                self._have_been_waited_for = True
                return False
        self.gather()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, None for one that is not known.

        Ranks: local; the main process saves it.
        """
        ranks = self.gathered
        if ranks is None:
            ranks = [None] * get_world_size()
            ranks[get_rank() or 0] = self._collect()
        return {"format": FORMAT, "world_size": len(ranks), "ranks": list(ranks)}

    def load_state_dict(self, state_dict: Any, *, end_of_epoch: bool = True) -> None:
        """Take this rank's state from those of all ranks; of another number of ranks, only what is the same on all.

        Args:
            state_dict: as :meth:`state_dict` returns it.
            end_of_epoch: the checkpoint is from the end of an epoch, where missing states do not matter.

        Raises:
            CheckpointError: it is of a later format.

        Ranks: local.
        """
        known, ranks = state_dict["format"], list(state_dict["ranks"])
        if known != FORMAT:
            raise CheckpointError(f"the states of ranks have format {known!r}; this ddpkit reads format {FORMAT}.")
        rank, world_size = get_rank() or 0, get_world_size()
        self.is_of_as_many = len(ranks) == world_size
        self.loaded = ranks[rank] if self.is_of_as_many else _common(ranks) | _counted(ranks)
        self.is_complete = self.is_of_as_many and None not in ranks
        unknown = [number for number, one in enumerate(ranks) if one is None or one.get("random", True) is None]
        if unknown and self.is_of_as_many and not end_of_epoch:
            logger.warning_once(
                "The checkpoint does not have the random states of rank %s: a recipe saved it on fewer ranks in the "
                "middle of an epoch. Until that ends they draw other numbers than the run that was never stopped.",
                ", ".join(map(str, unknown)),
            )


def all_ranks_come(what: str, seconds: float) -> bool:
    """Find out whether every rank makes this call: the main process may be alone, and must not wait for ever.

    Args:
        what: is about to be done; in the key in the store.
        seconds: for which the main process waits.

    Returns:
        Whether all have come; False in main-only code and without a process group.

    Ranks: all, or the main process alone.

    Example:
        >>> all_ranks_come("load", 1.0)
        False
    """
    if ddp_prevent_block():
        return False
    key = f"ddpkit/{what}/{run_on_main(lambda: uuid.uuid4().hex)}"
    store = get_runtime().store
    if not if_main_process():
        store.add(key, 1)

    def wait() -> bool:
        begin, is_told = time.monotonic(), False
        while store.add(key, 0) < get_world_size() - 1:
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            if waited > TELL_SECONDS and not is_told:
                is_told = True
                logger.warning(ALONE, waited, what, seconds)
            time.sleep(0.001)
        store.delete_key(key)
        return True

    return bool(run_on_main(wait))


def _common(ranks: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return where the data goes on if all ranks say the same of it, as they do of a stream that all of them read."""
    known = [one for one in ranks if one is not None]
    if not known or len(known) < len(ranks):
        return {}
    first = known[0]
    names = [name for name in ("loader", "loader_end") if name in first]
    return {name: first[name] for name in names if all(_listed(one.get(name)) == _listed(first[name]) for one in known)}


def _counted(ranks: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Return what all ranks have counted, if there is anything: for the main process, which stands for the others."""
    names = ("logged", "metrics")
    found = {name: [one[name] for one in ranks if one is not None and one.get(name)] for name in names}
    return {name: [] if get_rank() else states for name, states in found.items() if states}


def _listed(state: Any) -> Any:
    """Write a state's tensors as lists, which can be compared."""
    return map_values(state, lambda one: one.tolist() if isinstance(one, torch.Tensor) else one)
