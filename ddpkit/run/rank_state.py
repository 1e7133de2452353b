"""What each rank has of its own in a run: random streams, running loss, and its place in the data.

It begins an epoch, takes up what a checkpoint holds of this rank, and says what the next checkpoint
needs.

Weights are equal on all ranks, rank states are not. When the Brain saves in the middle of an epoch,
it first gathers the states of all ranks. When a recipe saves there, perhaps on the main process
alone, only the main process's state is saved. A save at the end of an epoch needs no random
streams: every epoch starts from streams that follow from the seed
(:func:`ddpkit.seed.seed_epoch_streams`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.base import do_nothing, map_values
from ddpkit.checkpointing import all_ranks_come
from ddpkit.data import (
    PLACES,
    StreamShard,
    begin_at,
    inner_loader,
    is_stateful,
    keep_states,
    places_after_call,
    places_of,
    resume_at,
    unread_places,
)
from ddpkit.distributed import gather_objects, get_rank, get_world_size, if_main_process
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger
from ddpkit.metrics import LossMeter
from ddpkit.seed import global_seed, restore_rng_state, rng_state, seed_epoch_streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.training import RunContext

logger = get_logger(__name__)

FORMAT = 1
STATES_OF_DDP = ("gradients", "hooks")  # names in the file, older than a state of a strategy
WAIT_SECONDS = 10.0  # for the other ranks, when a recipe saves inside an epoch for the first time
SHORT_WAIT_SECONDS = 0.5  # once they have not come
METRICS = (
    "The checkpoint has no totals of these metrics: %s. In this epoch they count the batches "
    "after batch %d only."
)


class RankStates:
    """A recoverable that holds one state per rank.

    Args:
        collect: returns the state of this rank as plain containers, numbers and tensors.

    Attributes:
        gathered: the states of all ranks, for the saves that follow until it is set to None; on
            other ranks than rank 0 only how many they are. None: nothing was gathered.
        loaded: this rank's state from the checkpoint that was loaded last, until it is used; else
            None.
        recovered: the states of all ranks from that checkpoint, until the training goes on: what is
            saved before that.
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
        self.recovered: dict[str, Any] | None = None
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
        self.recovered = None

    def gather_if_all_come(self) -> bool:
        """Collect the states as :meth:`gather` does, if every rank makes this call and not the main
        process alone.

        Returns:
            Whether every rank has come. The main process waits for them: some seconds at first, and
            for a moment once they have not come.

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
        """Return the states of all ranks; None for an unknown state.

        Ranks: local; the main process saves it.
        """
        if self.recovered is not None:
            return self.recovered
        ranks = self.gathered
        if ranks is None:
            ranks = [None] * get_world_size()
            ranks[get_rank() or 0] = self._collect()
        return {
            "format": FORMAT,
            "world_size": len(ranks),
            "ranks": list(ranks),
        }

    def load_state_dict(
        self,
        state_dict: Any,
        *,
        end_of_epoch: bool = True,
    ) -> None:
        """Load this rank's state from all states; with a different number of ranks, only the parts
        that all share.

        Args:
            state_dict: as :meth:`state_dict` returns it.
            end_of_epoch: the checkpoint is from the end of an epoch, where missing states do not
                matter.

        Raises:
            CheckpointError: it is of a later format.

        Ranks: local.
        """
        known = state_dict["format"]
        ranks = list(state_dict["ranks"])
        if known != FORMAT:
            raise CheckpointError(
                f"the states of ranks have format {known!r}; this ddpkit reads format {FORMAT}."
            )
        rank = get_rank() or 0
        world_size = get_world_size()
        self.is_of_as_many = len(ranks) == world_size
        self.loaded = ranks[rank] if self.is_of_as_many else _common(ranks) | _counted(ranks)
        self.is_complete = self.is_of_as_many and None not in ranks
        unknown = [
            number
            for number, state in enumerate(ranks)
            if state is None or state.get("random", True) is None
        ]
        if unknown and self.is_of_as_many and not end_of_epoch:
            logger.warning_once(
                "The checkpoint does not have the random states of rank %s: a recipe saved it on "
                "fewer ranks in the middle of an epoch. Until that ends they draw other numbers "
                "than the run that was never stopped.",
                ", ".join(map(str, unknown)),
            )


class RankState:
    """The state of this rank. In a checkpoint, :class:`RankStates` holds the states of all.

    Args:
        context: of the run.
        saves: whether there is a checkpointer.

    Attributes:
        states: the recoverable with the states of all ranks; None without a checkpointer.
        base_seed: of the run; None before ``fit``.
        is_inside_batch: while a recipe saves in a hook of a training batch, after it has begun to
            train on it.
        goes_back_to_begin: while a recipe saves in the first batch of an epoch, before it has begun
            to train on it.
        metrics: of the recipe, which count in the training stage; by name.

    Ranks: local, but for :meth:`gather_for_save`.

    Example:
        >>> from types import SimpleNamespace
        >>> from ddpkit.run_opts import RunOptions
        >>> from ddpkit.strategies import Strategy
        >>> from ddpkit.training import Accumulation, Recipe, RunContext
        >>> options = RunOptions(device="cpu")
        >>> context = RunContext(
        ...     Recipe("Line"),
        ...     options,
        ...     Accumulation(options),
        ...     torch.nn.ModuleDict(),
        ...     SimpleNamespace(),
        ...     Strategy(),
        ... )
        >>> RankState(context, saves=False).own_sums()
        [0.0, 0.0, 0]
    """

    def __init__(
        self,
        context: RunContext,
        *,
        saves: bool,
    ) -> None:
        self.context = context
        self.states: RankStates | None = None
        self.saves(saves)
        self.base_seed: int | None = None
        self.is_inside_batch = self.goes_back_to_begin = False
        self.metrics: dict[str, Any] = {}
        # that this class has given torch: a global seed like it is none of the recipe's
        self._epoch_seed: int | None = None
        # the loader of the call of fit before, and what a checkpoint of its end holds of this rank
        self._from_last_call: tuple[Any, dict[str, Any]] | None = None
        # the place in the data from which the present pass was resumed
        self._resumed_at: dict[str, Any] = {}
        # a loader that reads no batch in the present pass, and where the checkpoint has put it
        self._unread: tuple[Any, dict[str, Any]] | None = None

    def saves(self, saves: bool) -> None:
        """Gather the states of all ranks for a checkpointer from now on, or no longer.

        Args:
            saves: whether there is one.
        """
        self.states = RankStates(self.state_dict) if saves else None

    # ------------------------------------------------------------------ random streams

    def choose_seed(self) -> None:
        """Fix the run's seed when ``fit`` begins: from ``seed_everything``, or else torch's current
        seed.

        A seed that a hook sets later counts only until the end of that epoch.
        """
        seed = global_seed()
        if seed is None:
            seed = torch.initial_seed()
            seed = (
                self.base_seed if self.base_seed is not None and seed == self._epoch_seed else seed
            )
        self.base_seed = seed

    def adopt_seed(self, seed: Any) -> None:
        """Go on with the seed of a checkpoint's run, unless ``seed_everything`` has set one.

        Args:
            seed: as the checkpoint has it; None, or of another kind, where it does not tell.
        """
        if isinstance(seed, int) and global_seed() is None and seed != self.base_seed:
            logger.info(
                "No seed_everything was called: the run goes on with the checkpoint's seed, %d.",
                seed,
            )
            self.base_seed = seed

    def begin_epoch(self, epoch: int) -> None:
        """Seed this rank's random streams for an epoch; a resume in mid-epoch also starts from the
        epoch's seed.
        """
        progress = self.context.progress
        progress.begin_epoch(epoch)
        self._seed(epoch, progress.began_at)

    def end_streams(self) -> None:
        """Set the random streams to fixed values at the end of ``fit``, equal in a resumed and an
        uninterrupted run.
        """
        self._seed(0, self.context.progress.optimizer_step)

    def _seed_anew(self) -> None:
        """Seed in the middle of an epoch when the random state is lost: not with the seed of the
        epoch's beginning.
        """
        progress = self.context.progress
        self._seed(progress.epoch, progress.optimizer_step)

    def _seed(self, epoch: int, optimizer_step: int) -> None:
        rank = 0 if self.context.strategy.has_same_bits() else None
        self._epoch_seed = seed_epoch_streams(self.base_seed or 0, epoch, optimizer_step, rank)

    # -------------------------------------------------------------- one pass over the training data

    def begin_pass(self, loader: Any) -> tuple[int, Callable[[], object]]:
        """Put a training loader where a recovered checkpoint says, if one was recovered.

        Args:
            loader: of this rank.

        Returns:
            How many batches the loader yields again, to be left out; and what to call when those
            are behind.
        """
        progress = self.context.progress
        states = self.states
        progress.read_from(loader)
        self._resumed_at = {}
        self._unread = None
        own: dict[str, Any] = {}
        # False in a pass that is made again: what was recovered was used in the first.
        is_resumed = states is not None and states.loaded is not None
        if states is not None:
            keep_states(loader)
            _warn_out_of_reach(loader, resumed=is_resumed)
            states.gathered = states.recovered = None
            # What was recovered is for one pass: a later one goes on from where this process is.
            own = states.loaded or self._of_last_call(loader)
            states.loaded = None
            self._from_last_call = None
            if states.is_complete:
                self._load_strategy(own)
        if not progress.step:
            return begin_at(loader, own), do_nothing
        if own.get("loss") is not None and states is not None and states.is_complete:
            progress.meter.load_state_dict(own["loss"])
        logged = own.get("logged")
        if logged is not None:
            progress.logged.load_state_dicts(logged if isinstance(logged, list) else [logged])
        if is_resumed:
            skipped = own.get("skipped", 0)
            progress.meter.skipped = sum(skipped) if isinstance(skipped, list) else skipped
            self._load_metrics(own.get("metrics"))
        # Not restored here: making the loader's iterator and reading what is left out draw random
        # numbers, too.
        random = own.get("random")
        restore = (
            self._seed_anew if random is None else functools.partial(restore_rng_state, random)
        )
        same = states is not None and states.is_of_as_many
        if same and is_resumed:
            self._resumed_at = unread_places(own)
        return resume_at(
            loader,
            progress.step,
            own.get("loader"),
            same_batches=same,
        ), restore

    def read_nothing(self) -> None:
        """Note that the pass that has begun reads no batch: its data stays where the recovered
        checkpoint has it.

        A loader that is not iterated cannot tell where it is.
        """
        self._unread = self.context.progress.loader, self._resumed_at

    def _load_metrics(self, saved: Any) -> None:
        """Restore the recipe's metrics in mid-epoch; with a different number of ranks, all counts
        on rank 0.
        """
        states = saved if isinstance(saved, list) else [saved or {}]
        missing = []
        for name, metric in self.metrics.items():
            totals = [state[name] for state in states if name in state]
            if totals:
                metric.load_state_dict(
                    {key: sum(total[key] for total in totals) for key in totals[0]}
                )
            else:
                missing.append(name.partition(".")[2])
        if missing:
            logger.warning(METRICS, ", ".join(missing), self.context.progress.step)

    def gather_for_save(self) -> None:
        """Collect what a save that follows needs of every rank: at the end of a pass, and before a
        save in its middle.
        """
        if self.context.strategy.has_same_bits():
            self._seed_anew()  # after what each rank has drawn in its batches
        if self.states is not None:
            self.states.gather()

    def release(self, loader: Any, *, keep_end: bool) -> None:
        """Drop what was recovered or gathered for a call of ``fit``.

        Args:
            loader: the training loader of the call.
            keep_end: whether the next call takes over what data keeps at the end of an epoch.
        """
        if self.states is None:
            return
        loaded = self.states.loaded
        self.states.loaded = None
        if loaded is not None and keep_end:
            self._from_last_call = loader, loaded

    def _of_last_call(self, loader: Any) -> dict[str, Any]:
        """Return what a checkpoint from the end of the previous call of ``fit`` holds for this
        call.
        """
        before, left = self._from_last_call or (None, {})
        own = {name: left.get(name, {}) for name in (*STATES_OF_DDP, "strategy")}
        return own | places_after_call(before, left, loader)

    # ------------------------------------------------------------------ what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own part of a checkpoint."""
        loader = self.context.progress.loader
        step = self.context.progress.step
        losses = self._losses_so_far()
        return {
            "seed": self.base_seed,
            "random": rng_state(),
            "loss": losses.state_dict(),
            **({"skipped": losses.skipped} if losses.skipped else {}),
            "logged": self.context.progress.logged.state_dict(step),
            "metrics": {name: metric.state_dict() for name, metric in self.metrics.items()},
            **places_of(loader, step, has_begin=self.goes_back_to_begin),
            **self._strategy_state(),
            **self._unread_place(loader),
        }

    def _load_strategy(self, own: dict[str, Any]) -> None:
        """Hand over to the strategy what a checkpoint has of it on this rank, if anything."""
        state = {**own.get("strategy", {}), **{name: own.get(name) for name in STATES_OF_DDP}}
        known = {name: value for name, value in state.items() if value or name not in STATES_OF_DDP}
        if known:
            self.context.strategy.load_rank_state(self.context.modules, known)

    def _strategy_state(self) -> dict[str, Any]:
        """Return what the strategy keeps on this rank, in the form that the file has always had."""
        known = self.context.strategy.rank_state()
        states: dict[str, Any] = {name: known.pop(name, {}) for name in STATES_OF_DDP}
        return {**states, "strategy": known} if known else states

    def _unread_place(self, loader: Any) -> dict[str, Any]:
        """Return where a checkpoint has put a loader that has read nothing since; empty if it
        has.
        """
        unread, place = self._unread or (None, {})
        return place if unread is loader else {}

    def own_sums(self) -> list[Any]:
        """Return this rank's sum of losses, its weight, and the samples seen."""
        meter = self._losses_so_far()
        return [*meter.totals()[:2], meter.samples]

    def _losses_so_far(self) -> LossMeter:
        """Return the losses of this rank, including the current batch if it has been trained on."""
        progress = self.context.progress
        if (
            not self.is_inside_batch
            or progress.result is None
            or progress.result_of != progress.step
        ):
            return progress.meter
        meter = progress.meter.copy()
        window = progress.window
        result = progress.result
        if isinstance(result, tuple):
            meter.append_sum(*result)
        else:
            meter.append(result, window.weight)
        meter.samples += window.count
        meter.skipped += progress.skipped_at == progress.step
        return meter


def _warn_out_of_reach(loader: Any, *, resumed: bool) -> None:
    """Warn if the state of a stream is in persistent workers, which no checkpoint can reach."""
    inner = inner_loader(loader)
    if not (
        isinstance(inner, DataLoader)
        and isinstance(inner.dataset, IterableDataset)
        and inner.persistent_workers
    ):
        return
    stream = inner.dataset.whole if isinstance(inner.dataset, StreamShard) else inner.dataset
    if is_stateful(stream):
        when = "it begins anew now" if resumed else "after a restart it would begin anew"
        logger.warning_once(
            "The state of %s is in workers that outlive an epoch, out of reach of a checkpoint: "
            "%s. Give num_workers=0 or persistent_workers=False.", type(stream).__name__, when,
        )  # fmt: skip


def _common(ranks: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return where the data goes on if all ranks say the same of it, as they do of a stream that
    all of them read.
    """
    known = [state for state in ranks if state is not None]
    if not known or len(known) < len(ranks):
        return {}
    first = known[0]
    names = [name for name in PLACES if name in first]
    return {
        name: first[name]
        for name in names
        if all(_listed(state.get(name)) == _listed(first[name]) for state in known)
    }


def _counted(ranks: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Return what all ranks have counted, if there is anything: for the main process, which stands
    for the others.
    """
    names = ("logged", "metrics", "skipped")
    found = {
        name: [state[name] for state in ranks if state is not None and state.get(name)]
        for name in names
    }
    return {name: [] if get_rank() else states for name, states in found.items() if states}


def _listed(state: Any) -> Any:
    """Write a state's tensors as lists, which can be compared."""
    return map_values(
        state, lambda value: value.tolist() if isinstance(value, torch.Tensor) else value
    )
