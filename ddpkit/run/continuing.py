"""How a rank begins an epoch and its batches where a checkpoint left them, and what it tells one of itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddpkit.checkpointing.index import ckpt_recency, read_checkpoint
from ddpkit.checkpointing.saving import on_main
from ddpkit.checkpoints import Checkpointer
from ddpkit.data.stream_position import is_stateful
from ddpkit.data.streams import StreamShard
from ddpkit.dataloader import LoopedLoader, go_on_after_end, go_on_at, state_at, state_at_end, want_states
from ddpkit.distributed import get_world_size
from ddpkit.logger import get_logger
from ddpkit.metrics import LossMeter
from ddpkit.run.hooks import Hooks
from ddpkit.run.starting import NEWEST, Lineage, Start, choose_start, lineage_of, saved_last, start_again
from ddpkit.seed import RngState, global_seed, seed_epoch_streams
from ddpkit.types import FitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpkit.checkpointing.rank_states import RankStates
    from ddpkit.run.resuming import Pace


logger = get_logger(__name__)


class Continuing(Hooks):
    """The half of the Brain that goes on with what every rank has of its own: random streams, losses, data.

    Ranks: collective.

    Example:
        >>> issubclass(Continuing, Hooks)
        True
    """

    _take_checkpointer: Callable[[], None]
    _rank_states: RankStates | None = None
    _base_seed: int | None = None
    _own_stream: int | None = None
    _resumed_step = 0
    _start: Start | None = None
    _evaluated: Lineage | None = None  # whose checkpoints a process that does not train looks at; known to rank 0
    _fits = 0  # calls of fit so far, this one included
    _finished: tuple[int | None, ...] = ()  # optimizer steps after each call of fit that is over
    _counters: tuple[str | None, ...] = ()  # which recoverable counted the epochs of each call
    _later: tuple[Path, Mapping[str, Any]] | None = None  # a checkpoint of a later call, and what it says of that
    _expected_epoch: int | None = None
    _left_over: tuple[Any, dict[str, Any]] | None = None
    _fit_loader: Any = None
    _trains_in: Path | None = None
    _num_found = 0  # checkpoints in the folder when the start was chosen; known to the main process
    _done: int | None = None  # batches that a checkpoint holds, where a recipe saves before the current one is trained
    _is_inside_batch = False  # while a recipe saves in a hook of a training batch

    def _begin_epoch(self, epoch: int) -> None:
        """Give this rank the random streams of an epoch; those of its beginning also where it goes on in the middle."""
        self.progress.epoch = epoch
        expected, self._expected_epoch = self._expected_epoch, None
        if expected not in {None, epoch}:
            logger.warning(
                "The checkpoint goes on with epoch %d, and the epoch counter begins with %d: it will not be the run "
                "that was never stopped. Use an EpochCounter that is a recoverable of the checkpointer.",
                expected,
                epoch,
            )
        if not self.step:
            self.progress.began_at, self.progress.clipped = self.optimizer_step, 0
        self._own_stream = seed_epoch_streams(self._base_seed or 0, epoch, self.progress.began_at)

    def _choose_seed(self) -> None:
        """Fix the run's seed when ``fit`` begins: that of ``seed_everything``, or what the script has given to torch.

        What a hook gives to torch afterwards is for the rest of that epoch.
        """
        seed = global_seed()
        if seed is None:
            seed = torch.initial_seed()
            seed = self._base_seed if self._base_seed is not None and seed == self._own_stream else seed
        self._base_seed = seed

    def _begin_pass(self, loader: Any) -> tuple[int, Callable[[], object]]:
        """Put a training loader where a recovered checkpoint says, if one was recovered.

        Args:
            loader: of this rank.

        Returns:
            How many batches the loader yields again, to be left out; and what to call when those are behind.
        """
        self.progress.loader, self._resumed_step = loader, self.step
        if self.checkpointer is not None:
            want_states(loader)
            resumed = self._rank_states is not None and self._rank_states.loaded is not None
            _tell_out_of_reach(loader, resumed=resumed)
        states = self._rank_states
        own: dict[str, Any] = {}
        if states is not None:
            states.forget()
            own, states.loaded = states.loaded or self._from_before(loader), None
            self._left_over = None
            if states.is_complete:
                self._strategy.show_gradient_orders(self.modules, own.get("gradients", {}))
        if not self.step:
            go_on_after_end(loader, own.get("loader_end"))
            return go_on_at(loader, 0, None), bool
        if own.get("loss") is not None and states is not None and states.is_complete:
            self.progress.meter.load_state_dict(own["loss"])
        random = own.get("random")
        restore = self._seed_anew if random is None else RngState.from_state_dict(random).restore
        same = states is not None and states.is_of_as_many
        return go_on_at(loader, self.step, own.get("loader"), same_batches=same), restore

    def _from_before(self, loader: Any) -> dict[str, Any]:
        """Return what a checkpoint of the end of the call of ``fit`` before has left to this one."""
        source, left = self._left_over or (None, {})
        own = {"gradients": left.get("gradients", {})}
        if source is not None and source is _source_of(loader):  # data that goes on from call to call
            own["loader_end"] = left.get("loader_end")
        return own

    def _end_epoch(self) -> None:
        """Note that an epoch is over, its evaluation and its checkpoint too."""
        self.progress.trained, self.progress.closed = None, 0
        self.progress.epochs += 1

    def _fit_result(self, reason: str) -> FitResult:
        """Say what this call of ``fit`` did.

        Args:
            reason: why it ends.
        """
        progress, checkpointer, newest, best = self.progress, self.checkpointer, None, None
        if isinstance(checkpointer, Checkpointer):
            newest, best = on_main(self._newest_and_best, checkpointer)
        return FitResult(
            reason,
            epochs=progress.epochs,
            optimizer_steps=progress.optimizer_step,
            train_loss=progress.train_loss,
            valid_loss=progress.valid_loss,
            best_checkpoint=best,
            newest_checkpoint=newest,
        )

    def _newest_and_best(self, checkpointer: Checkpointer) -> tuple[Path | None, Path | None]:
        """Return where the newest and the best of this run's own checkpoints are."""
        lineage = None if self._start is None else self._start.lineage
        own = [one for one in checkpointer.list_checkpoints() if lineage is None or lineage.includes(one)]
        newest, best = max(own, key=ckpt_recency, default=None), checkpointer.best_of(own)
        return None if newest is None else newest.path, None if best is None else best.path

    @contextlib.contextmanager
    def _no_failure_saved(self) -> Iterator[None]:
        """Return a context for a hook: what it changes before it fails must not be changed again by a resumed run."""
        trained, self.progress.trained = self.progress.trained, None
        yield
        self.progress.trained = trained

    def _end_streams(self) -> None:
        """Leave the random streams as any run leaves them that has come here, whether it was stopped before or not."""
        self._own_stream = seed_epoch_streams(self._base_seed or 0, 0, self.optimizer_step)

    def _seed_anew(self) -> None:
        """Go on in the middle of an epoch with other random numbers than at its beginning, where the true are lost."""
        self._own_stream = seed_epoch_streams(self._base_seed or 0, self.progress.epoch, self.optimizer_step)

    def _end_pass(self) -> None:
        """Collect what a save after the epoch will need of every rank."""
        if self._rank_states is not None and self.checkpointer is not None:
            self._rank_states.gather()

    @property
    def _step_to_save(self) -> int:
        """How many batches of the current stage a checkpoint holds."""
        return self.progress.step if self._done is None else self._done

    def _losses_so_far(self) -> LossMeter:
        """Return the losses of this rank, that of the current batch included, if it has been trained on."""
        progress = self.progress
        if not self._is_inside_batch or progress.result is None or progress.result_at != progress.step:
            return progress.meter
        meter, window, result = LossMeter(), progress.window, progress.result
        meter.load_state_dict(progress.meter.state_dict())
        if isinstance(result, tuple):
            meter.append_sum(*result)
        else:
            meter.append(result, window.weight)
        meter.samples += window.count
        return meter

    def _collect_own_state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank by itself."""
        progress = self.progress
        return {
            "random": RngState.capture().state_dict(),
            "loss": self._losses_so_far().state_dict(),
            "loader": state_at(progress.loader, self._step_to_save),
            "loader_end": state_at_end(progress.loader),
            "gradients": self._strategy.gradient_orders(),
        }

    # ------------------------------------------------------------------ what a run goes on from

    def _choose_start(self, epoch_counter: Any) -> None:
        """Decide, once for all ranks, what this call of ``fit`` starts from.

        Args:
            epoch_counter: of the call.
        """
        checkpointer = self.checkpointer
        self._fits += 1
        recoverables = getattr(checkpointer, "recoverables", {})
        name = next((name for name, one in recoverables.items() if one is epoch_counter), None)
        missing = (None,) * self._fits
        self._counters = (*(*self._counters, *missing)[: self._fits - 1], name)
        self._finished = (*self._finished, *missing)[: self._fits - 1]
        if not isinstance(checkpointer, Checkpointer):
            return
        self._trains_in = Path(checkpointer.checkpoints_dir)
        if self._start is None:
            self._start = on_main(self._choose, checkpointer)
        else:
            self._start = on_main(start_again, checkpointer, self.resume, self._start.lineage)

    def _choose(self, checkpointer: Checkpointer) -> Start:
        """Decide what the run starts from; the checkpoints of other runs are left alone from now on."""
        start = choose_start(checkpointer, self.resume, get_world_size())
        found = checkpointer.list_checkpoints()
        self._num_found = len(found)
        checkpointer.leave_alone(each.path for each in found if not start.lineage.owns(each, self.resume))
        return start

    def _pace_before(self) -> Pace | None:
        """Return what an optimizer step was made of in the checkpoint that will be resumed."""
        return None if self._start is None else self._start.pace

    @contextlib.contextmanager
    def _choosing_start(self) -> Iterator[None]:
        """Have the checkpointer recover what was decided, whoever asks it to. The Brain reports what that is."""
        checkpointer = self.checkpointer
        if not isinstance(checkpointer, Checkpointer) or self._start is None:
            yield
            return
        level = checkpointer.level_of_nothing
        checkpointer.resume, checkpointer.level_of_nothing = self._start.resume, logging.DEBUG
        try:
            yield
        finally:
            checkpointer.resume, checkpointer.level_of_nothing = NEWEST, level

    def _recover_for_evaluation(self, max_key: str | None, min_key: str | None) -> Any:
        """Recover the best of this run's own checkpoints, or the one that was asked for.

        Args:
            max_key: the one with the highest value of this key.
            min_key: the one with the lowest; without either, the newest.

        Returns:
            What was loaded, or None.
        """
        self._take_checkpointer()
        checkpointer = self.checkpointer
        if not isinstance(checkpointer, Checkpointer):
            return checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
        if self._start is None and self.resume not in {"auto", "never"}:
            logger.announce("--resume=%s: this checkpoint is evaluated.", self.resume)
            checkpointer.resume = self.resume
            try:
                return checkpointer.recover_if_possible()
            finally:
                checkpointer.resume = NEWEST
        lineage = on_main(self._lineage_in, checkpointer)
        own = None if lineage is None else lineage.includes
        return checkpointer.recover_if_possible(max_key=max_key, min_key=min_key, ckpt_predicate=own)

    def _lineage_in(self, checkpointer: Checkpointer) -> Lineage | None:
        """Return that of this run if it has trained here, else that of the run which has saved last."""
        found = checkpointer.list_checkpoints()
        if self._start is not None and Path(checkpointer.checkpoints_dir) == self._trains_in:
            lineage: Lineage | None = self._start.lineage
        else:
            lineage, self._evaluated = lineage_of(found), saved_last(found)
        return None if lineage is None or all(map(lineage.includes, found)) else lineage

    # ------------------------------------------------------------------ several calls of fit

    def _place_in_calls(self, path: Path, state: Mapping[str, Any]) -> bool:
        """Say whether a checkpoint that is being recovered was made in this call of ``fit``.

        Args:
            path: its directory.
            state: what it holds of the Brain.

        State: one of a later call is remembered: what comes before that call is done.
        """
        self._later = None
        number, counters = state.get("fit"), tuple(state.get("counters") or ())
        if not isinstance(number, int) or self._fits in {0, number}:  # 0: before any call
            return True
        if number < self._fits:
            return False
        mine, known = self._counters[-1], counters[: self._fits]
        if mine is not None and len(counters) == number and mine == counters[-1] and known[-1] != mine:
            logger.info("This call of fit is number %d of the run: the script has left out what is done.", number)
            self._fits, self._counters = number, counters
            self._finished = tuple(state.get("finished") or ())[: number - 1]
            return True
        self._later = path, state
        return False

    def _take_up(self) -> None:
        """Load a checkpoint that was made in this call, where it was found in an earlier one."""
        if self._later is None or self._later[1]["fit"] > self._fits:
            return
        path, _ = self._later
        if isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.load_checkpoint(on_main(read_checkpoint, path))
        else:
            self.checkpointer.recover_if_possible()

    def _is_done_before(self, train_set: Any) -> bool:
        """Say whether nothing is left to do in this call of ``fit``, because the checkpoint was made in a later one.

        Args:
            train_set: the training loader.
        """
        self._fit_loader = train_set
        if self._later is None:
            return False
        path, state = self._later
        finished = tuple(state.get("finished") or ())
        steps = finished[self._fits - 1] if len(finished) >= self._fits else None
        self.optimizer_step = self.optimizer_step if steps is None else steps
        logger.announce(
            "Call %d of fit is done already: %s was made in call %d, which will go on from it. If this script does not "
            "call fit as often, start it with --resume=never and an output folder of its own.",
            self._fits,
            path,
            state["fit"],
        )
        return True

    def _let_go(self) -> None:
        """Drop what was recovered or gathered for this call, but for what the next one takes over from its end."""
        states, loader, self._fit_loader = self._rank_states, self._fit_loader, None
        self._expected_epoch = None
        if states is None:
            return
        states.forget()
        left, states.loaded = states.loaded, None
        if left is not None and self._later is None and not self.step:
            self._left_over = _source_of(loader), left


def _source_of(loader: Any) -> Any:
    """Return what takes something over from one epoch into the next, if a loader has such a thing."""
    if loader is None or isinstance(loader, LoopedLoader):
        return loader
    marks = getattr(loader, "marks", None)
    return None if marks is None else marks.whole


def _tell_out_of_reach(loader: Any, *, resumed: bool) -> None:
    """Say it where data keeps its place in processes that no checkpoint can ask."""
    inner = loader.loader if isinstance(loader, LoopedLoader) else loader
    if not (isinstance(inner, DataLoader) and isinstance(inner.dataset, IterableDataset) and inner.persistent_workers):
        return
    stream = inner.dataset.whole if isinstance(inner.dataset, StreamShard) else inner.dataset
    if is_stateful(stream):
        logger.warning_once(
            "%s is read by workers that outlive an epoch (persistent_workers=True), and what it keeps there from epoch "
            "to epoch is out of reach of a checkpoint: %s. With num_workers=0 its state is saved; with "
            "persistent_workers=False every epoch begins as the first, with or without a restart.",
            type(stream).__name__,
            "it begins anew now, and the run is not the one that was never stopped"
            if resumed
            else "after a restart it would begin anew",
        )
