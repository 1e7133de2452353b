"""Ranks and a checkpoint: what it holds of each rank, and how its files are loaded on all of them.

The state of a rank is its random streams, running loss, and position in its data.

Weights are equal on all ranks, rank states are not. When the Brain saves in the middle of an epoch, it first gathers
the states of all ranks. When a recipe saves there, perhaps on the main process alone, only the main process's state is
saved. A save at the end of an epoch needs no random streams: every epoch starts from streams that follow from the seed
(:func:`ddpkit.seed.seed_epoch_streams`).

Every rank reads the files of a checkpoint, or rank 0 reads them and sends the others copies.
"""

from __future__ import annotations

import functools
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import LoadHook, map_values
from ddpkit.checkpointing.folder import Checkpoint, checkpoint_work_on_main
from ddpkit.comm import failures_of, get_runtime
from ddpkit.distributed import (
    control_group,
    ddp_prevent_block,
    exchange,
    gather_objects,
    get_rank,
    get_world_size,
    if_main_process,
    run_on_main,
)
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

logger = get_logger(__name__)

LoadMode = Literal["all", "broadcast"]

FORMAT = 1
WAIT_SECONDS = 10.0  # for the other ranks, when a recipe saves inside an epoch for the first time
SHORT_WAIT_SECONDS = 0.5  # once they have not come
LOAD_WAIT_SECONDS = 30.0
BLOCK_BYTES = 16 << 20
TELL_SECONDS = 10.0  # until a longer wait is told
ALONE = (
    "The main process waits for the other ranks to %s, too, %.0f s in all, and some have not come. It is called on "
    "every rank: not under `if if_main_process():`."
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
        begin = time.monotonic()
        while store.add(key, 0) < get_world_size() - 1:
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            if waited > TELL_SECONDS:
                logger.warning_once(ALONE, what, seconds)
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


# ---------------------------------------------------------------------------------------- loading


def load_recoverables(
    hooks: Mapping[str, LoadHook], objects: Mapping[str, Any], checkpoint: Checkpoint, mode: LoadMode = "all"
) -> None:
    """Load objects from a checkpoint.

    Args:
        hooks: what loads each, by name.
        objects: by name.
        checkpoint: has a file for each of them.
        mode: ``"all"``: every rank reads. ``"broadcast"``: rank 0 reads, and the others load copies of its files from a
            temporary folder, one at a time: for folders that only rank 0 sees.

    Raises:
        CheckpointError: one cannot be loaded. With ``"broadcast"`` it is raised on every rank, whichever failed.

    Ranks: local; with ``"broadcast"`` collective. Ranks that do not come within half a minute are not waited for: then
        every rank reads. In main-only code the main process reads.

    State: the objects.

    Example:
        >>> load_recoverables({}, {}, Checkpoint(Path("CKPT+a"), {}, {}))
    """
    together = mode == "broadcast" and all_ranks_come("load", LOAD_WAIT_SECONDS)
    if together:
        _require_alike(list(hooks))
    end_of_epoch = bool(checkpoint.meta.get("end-of-epoch", True))
    for name, hook in hooks.items():
        path = checkpoint.paramfiles[name]
        if together:
            _load_on_all(name, path, functools.partial(_load_copy, hook, objects[name], path, end_of_epoch))
        else:
            _load_one(name, path, functools.partial(hook, objects[name], path, end_of_epoch))


def _load_one(name: str, path: Path, load: Callable[[], object]) -> None:
    try:
        load()
    except (CheckpointError, MemoryError):  # without memory for what is sent a rank must end: the others wait for it
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot load the recoverable {name!r} from {path}: {type(error).__name__}: {error}"
        ) from error


def _load_on_all(name: str, path: Path, load: Callable[[], object]) -> None:
    """Load on every rank; raise on every rank if it failed on one."""
    own, failures = failures_of(lambda: _load_one(name, path, load), CheckpointError)
    if failures:
        raise CheckpointError(
            f"{name!r} could not be loaded on every rank: {failures}. The other ranks have a copy of this "
            "one file, in TMPDIR: what saves a directory, or reads other files too, needs ckpt_load=all."
        ) from own


def _load_copy(hook: LoadHook, obj: Any, path: Path, end_of_epoch: bool) -> None:
    """Load rank 0's file: there the file itself, on other ranks a copy of it."""
    content = _bytes_of_main(path)
    if if_main_process():
        hook(obj, path, end_of_epoch)
        return
    with tempfile.TemporaryDirectory(prefix="ddpkit-") as folder:
        copy = Path(folder, path.parent.name, path.name)
        copy.parent.mkdir()
        copy.write_bytes(content.numpy().data)
        del content
        hook(obj, copy, end_of_epoch)


def _bytes_of_main(path: Path) -> torch.Tensor:
    """Read a file on rank 0 and give every rank its bytes."""
    read: list[torch.Tensor] = []

    def read_file() -> int:
        read.append(torch.from_numpy(np.fromfile(path, np.uint8)))
        return read[0].numel()

    size = checkpoint_work_on_main(read_file)
    content = read[0] if read else torch.from_numpy(np.empty(size or 0, np.uint8))  # MemoryError, and not torch's
    for start in range(0, len(content), BLOCK_BYTES):
        dist.broadcast(content[start : start + BLOCK_BYTES], src=0, group=control_group())
    return content


def _require_alike(own: list[str]) -> None:
    """Refuse to send files where the ranks would load different ones."""
    for rank, other in enumerate(exchange(own)):
        if other != own:
            raise CheckpointError(
                f"the ranks would load different recoverables: {own} here, {other} on rank {rank}. Add the same ones "
                "in the same order on every rank, or load with 'all'."
            )
