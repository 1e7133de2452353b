"""How the Brain is saved and recovered: the loop's position, and checkpoints in the middle of an epoch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base.marks import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.base.plain_yaml import dump_plain_yaml
from ddpkit.checkpointing.index import SUFFIX
from ddpkit.checkpoints import Checkpointer
from ddpkit.control.periodic_sync import terminating_later
from ddpkit.distributed import alone, get_world_size, sum_over_ranks
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger
from ddpkit.run.hooks import Hooks
from ddpkit.run.registering import Registering
from ddpkit.run.resuming import DAMAGED, TELLING, Pace, changed_options, read_brain_state
from ddpkit.run.starting import (
    EVALUATED,
    TrainedFlags,
    changed_rates,
    learning_rates,
    modules_not_saved,
    optimizers_not_saved,
    rates_in_use,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

logger = get_logger(__name__)

INTRA_EPOCH_KEY = "brain_intra_epoch_ckpt"
EARLIER = (
    "The checkpoint was made in the middle of an epoch, in call %s of fit, and this is call %d: its weights are taken, "
    "its place in the data is not."
)
OTHER_RATES = (
    "The learning rate is not that with which the checkpoint's run began (%s), and has no effect: the optimizer goes "
    "on with the checkpoint's. To change it, set it in the optimizer's param_groups after on_fit_start, or begin anew "
    "with --resume=never."
)


class Recovering(Registering):
    """The half of the Brain that takes its place up again, and says what is otherwise than it was.

    Ranks: local; every rank recovers.

    Example:
        >>> issubclass(Recovering, Registering)
        True
    """

    avg_train_loss: float
    _pace: Pace = Pace(None, None)
    _asked_pace: Pace | None = None
    _rates: dict[str, Any] | None = None  # with which the training of each optimizer has begun
    _set_rates: dict[str, list[float]] | None = None  # by the script, at this start
    _taken_from: Path | None = None  # the checkpoint that was recovered in this call of fit or evaluate
    _flags: TrainedFlags | None = None
    _wanted_flags: Any = None  # those of the checkpoint that was recovered, until they are restored
    _recalled: Mapping[str, Any] | None = None  # what the checkpoint said that was recovered outside of fit

    def _recall(self, path: Path) -> None:
        """Note how far a training had come that is not this process's, for a save of what is made of it."""
        with contextlib.suppress(CheckpointError, OSError):
            state = read_brain_state(path)
            self._recalled = state if "step" in state else None

    def _as_recalled(self) -> dict[str, Any]:
        """Return what a save says otherwise where nothing was trained: all is as in what was recovered."""
        if self._fitting or self._fits or self.optimizers_dict or self.optimizer_step:
            return {}
        lineage = {} if self._evaluated is None else self._evaluated.state_dict()
        return {**(self._recalled or {}), **lineage, EVALUATED: True}

    def _take_flags(self, modules: nn.ModuleDict) -> None:
        """Note which parameters are trained as the first call of ``fit`` begins; freeze and set free what had been.

        What a recipe does in ``on_fit_start`` it does at every start. Hooks of earlier epochs do not run again.

        Args:
            modules: without any wrapper.
        """
        if self._flags is None:
            self._flags = TrainedFlags(modules)
        wanted, self._wanted_flags = self._wanted_flags, None
        count = self._flags.restore(wanted, exactly=self._fits > 1)
        if count:
            logger.info("%d parameter(s) are frozen, or trained, as they were when the checkpoint was saved.", count)

    def _before_recovery(self) -> None:
        """Note the learning rates that the script has set, and name the modules that no checkpoint will hold.

        Raises:
            CheckpointError: a recoverable cannot be saved, or cannot be loaded: it is told before an epoch is spent.
        """
        self._rates = self._set_rates = learning_rates(self.optimizers_dict)
        if isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.require_hooks()
        recoverables = self._others_saved()
        lost = modules_not_saved(self.modules, recoverables)
        if lost:
            logger.warning(
                "The checkpointer saves no weights of the module(s) %s: what they learn is lost when the run is "
                "stopped and goes on. Give them to it: checkpointer.add_recoverable(name, module).",
                ", ".join(lost),
            )
        forgotten = optimizers_not_saved(self.optimizers_dict, recoverables)
        if forgotten:
            logger.warning(
                "The checkpointer saves nothing of the optimizer(s) %s: when the run stops and goes on, they start "
                "anew. Give them to it in init_optimizers: self.checkpointer.add_recoverable(name, optimizer).",
                ", ".join(forgotten),
            )

    def _others_saved(self) -> dict[str, Any]:
        """Return what the checkpointer saves, but for the Brain itself and its averages."""
        own, saved = (self, self.ema), getattr(self.checkpointer, "recoverables", {})
        return {name: one for name, one in saved.items() if all(one is not other for other in own)}

    def _tell_not_taken(self) -> None:
        """Name what is in the checkpoint that the training goes on from, and nothing has taken up."""
        checkpointer = self.checkpointer
        if self._taken_from is None or self._taken_from != getattr(checkpointer, "last_loaded", None):
            return
        # Without fp16 there is nothing to scale, and a loader's place is in the Brain's own file as well.
        lost = [name for name in checkpointer.not_taken if name != "scaler" and "dataloader" not in name]
        if lost:
            logger.warning(
                "%s holds %s, and no recoverable of this name has taken that up: the training goes on without it. What "
                "is made in a later hook, such as on_stage_start, comes too late: make it, and add it to the "
                "checkpointer, in init_optimizers or before fit.%s",
                self._taken_from,
                ", ".join(map(repr, lost)),
                " 'ema' is the average of the weights, which is kept with ema_decay." if "ema" in lost else "",
            )

    def _recover_place(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch."""
        if state.get("lacks") is not None:
            logger.warning(
                "The checkpoint was made inside of fit_batch: the loss of batch %s is not in it, and the mean that is "
                "reported for this epoch will be without.",
                state["lacks"],
            )
        samples = state.get("samples", 0)
        before = Pace.read(state)
        self.step, words = self._pace.place(before, state["step"], samples)
        for told in (words, self._pace.other_data(before) if state["step"] else None):
            if told is not None:
                logger.warning("%s", told)
        if "loss_sum" not in state and self.step:
            logger.warning(
                "This checkpoint was made by SpeechBrain in the middle of an epoch, and the order of the data is "
                "ddpkit's own: %d batches are left out now, but not those that were done. To avoid it, go on from the "
                "end of an epoch.",
                self.step,
            )
        self.progress.began_at = state.get("epoch_began_at", self.optimizer_step)
        self.nonfinite_count = state.get("nonfinite", 0)
        self.progress.clipped = state.get("clipped", 0)
        self.avg_train_loss = state["avg_train_loss"]
        if self.rank == 0:
            count = state.get("loss_count", self.step)
            loss_sum = state.get("loss_sum", self.avg_train_loss * count)
            self.progress.meter.restore(loss_sum, count, samples=samples)

    def _tell_changes(self, state: Mapping[str, Any]) -> None:
        options = state.get("options")
        changes = changed_options(options, self.run_opts) if isinstance(options, Mapping) else []
        changes += self._pace.changes(Pace.read(state))
        seed = state.get("seed")
        if None not in {seed, self._base_seed} and seed != self._base_seed:
            changes.append(f"seed {self._base_seed}, before {seed}")
        if changes:
            logger.warning(
                "The run goes on with other options than those of its checkpoint: %s. It will not be the run that was "
                "never stopped.",
                "; ".join(changes),
            )

    def _take_rates(self, state: Mapping[str, Any], folder: Path) -> list[str]:
        """Note the learning rates that the optimizers go on with; return which of the script's have no effect.

        Args:
            state: what the checkpoint holds of the Brain.
            folder: the checkpoint; an optimizer that has no file in it goes on with the script's.
        """
        given = self._set_rates or learning_rates(self.optimizers_dict)
        taken = {name: one for name, one in self._others_saved().items() if (folder / f"{name}{SUFFIX}").exists()}
        self._rates = rates_in_use(state.get("rates"), given, optimizers_not_saved(self.optimizers_dict, taken))
        return changed_rates(self._rates, given)


@register_checkpoint_hooks
class Saving(Recovering):
    """The recoverable half of the Brain: what a checkpoint holds of it, and when one is made by itself.

    Attributes:
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.

    State: ``brain.ckpt`` is YAML with ``step``, ``avg_train_loss``, ``optimizer_step``, the running sums of the epoch's
    loss, what an optimizer step is made of, and the options that bear on the numbers; ``ranks.ckpt`` has the random
    streams, sums and loader of every rank. A checkpoint of the end of an epoch gives back ``optimizer_step`` and what
    loaders take over into the next epoch; outside of ``fit`` nothing.

    Ranks: collective.

    Example:
        >>> issubclass(Saving, Recovering)
        True
    """

    avg_train_loss: float
    _saved_sums: list[float] | None = None
    _lacks: int | None = None  # the batch whose loss no checkpoint that is made in it can know

    @contextlib.contextmanager
    def _saving_session(self, epoch_counter: Any) -> Iterator[None]:
        """Keep the folder while ``fit`` runs, save in the background, finish what is begun.

        Args:
            epoch_counter: of this call of ``fit``.
        """
        checkpointer = self.checkpointer
        self._take_checkpointer()
        self._require_no_other()
        self._choose_seed()
        self._takes_place = True
        if not isinstance(checkpointer, Checkpointer):
            self._choose_start(epoch_counter)
            yield
            self._end_call()
            return
        before = checkpointer.asynchronous
        with checkpointer.hold_folder():
            self._choose_start(epoch_counter)
            checkpointer.asynchronous = self.ckpt_async
            try:
                yield
                self._end_call()
                checkpointer.wait()
            except BaseException as error:
                if self.rank == 0:
                    self._bring_to_safety(checkpointer, error)
                raise
            finally:
                checkpointer.asynchronous = before
                self._let_go()

    def _end_call(self) -> None:
        """Leave this call of ``fit`` as any run leaves it that has come here, whether it was stopped before or not."""
        self._end_streams()
        self._finished = (*self._finished, self.optimizer_step)
        self._note_trainer()

    def _bring_to_safety(self, checkpointer: Checkpointer, error: BaseException) -> None:
        """Finish what is being written, and save once more if asked; on the main process alone, whoever has failed."""
        wanted = self.ckpt_on_error and isinstance(error, (Exception, KeyboardInterrupt))
        with alone(), terminating_later():
            try:
                checkpointer.wait()
                if wanted:
                    self._save_failure(checkpointer, error)
            except Exception as failure:  # noqa: BLE001 -- what ended the training must not be hidden
                logger.warning("No checkpoint is made of the failure: %s: %s", type(failure).__name__, failure)

    def _save_failure(self, checkpointer: Checkpointer, error: BaseException) -> None:
        """Save what had been trained when training failed."""
        progress, states = self.progress, self._rank_states
        if states is None or progress.trained is None or progress.closed <= self._resumed_step:
            return  # nothing has been trained since the epoch began, or since the checkpoint it goes on from
        if self._is_stepping or checkpointer.saves_on_every_rank:
            reason = "it came in the middle of an optimizer step" if self._is_stepping else "a saver needs every rank"
            logger.warning("No checkpoint is made of the failure: %s.", reason)
            return
        step, meter = progress.step, progress.meter
        progress.step, progress.meter = progress.closed, progress.trained
        own = self._collect_own_state() | {"random": None}  # which has been drawn from since
        if progress.sums is not None:  # the pass is over: the sums of all ranks are known
            self._saved_sums = list(progress.sums)
            own["loss"] = None
        states.set_own(own)
        checkpointer.asynchronous = False
        try:
            meta = {INTRA_EPOCH_KEY: True, "error": f"{type(error).__name__}: {error}"[:500]}
            with self._between_batches():
                checkpointer.save_and_keep_only(
                    meta=meta, end_of_epoch=False, ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta
                )
        finally:
            progress.step, progress.meter, self._saved_sums = step, meter, None
            states.forget()

    def _save_now(self) -> None:
        """Save in the middle of an epoch, as a signal has asked for."""
        with self._between_batches():
            self._save_intra_epoch_ckpt()

    @contextlib.contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Return a context for a save after a batch, whose loss has been taken in."""
        self._is_between_batches = True
        try:
            yield
        finally:
            self._is_between_batches = False

    def _should_save_intra_epoch_ckpt(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Decide from numbers that all ranks agree on whether to save in the middle of an epoch."""
        minutes, steps = self.ckpt_interval_minutes, self.ckpt_interval_steps
        return 0 < minutes * 60 <= seconds_since_ckpt or 0 < steps <= steps_since_ckpt

    def _save_intra_epoch(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was."""
        due = self._should_save_intra_epoch_ckpt(seconds_since_ckpt, steps_since_ckpt)
        if due:
            with self._between_batches():
                self._save_intra_epoch_ckpt()
        elif self.progress.optimizer_step > 0 and isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.prepare_copies()
        return due

    def _save_intra_epoch_ckpt(self) -> None:
        """Save in the middle of an epoch; only the newest such checkpoint is kept."""
        if self.checkpointer is None:
            return
        self._saved_sums = sum_over_ranks(self._own_sums())
        if self._rank_states is not None:
            self._rank_states.gather()
        try:
            self.checkpointer.save_and_keep_only(
                end_of_epoch=False,
                num_to_keep=1,
                ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta,
                meta={INTRA_EPOCH_KEY: True},
            )
        finally:
            self._saved_sums = None
            if self._rank_states is not None:
                self._rank_states.forget()

    @mark_as_saver
    def _save(self, path: Path) -> None:
        # In a save that a recipe makes, perhaps on the main process alone, its own share stands for all; in an
        # evaluation the sums are not those of the training.
        ranks = get_world_size() if self.modules.training else 0
        loss_sum, loss_count, samples = self._saved_sums or [one * ranks for one in self._own_sums()]
        state = {
            "step": self._step_to_save,
            "epoch": self.progress.epoch,
            "avg_train_loss": float(self.avg_train_loss),
            "optimizer_step": self.optimizer_step,
            "epoch_began_at": self.progress.began_at,
            "nonfinite": self.nonfinite_count,
            "clipped": self.progress.clipped,
            **({} if self._sum_divisor is None else {"sum_divisor": self._sum_divisor}),
            "loss_sum": loss_sum,
            "loss_count": loss_count,
            "samples": int(samples),
            **self._pace.state_dict(),
            "asked": (self._asked_pace or self._pace).state_dict(),
            "fit": self._fits,
            "finished": list(self._finished),
            "counters": list(self._counters),
            **({} if self._start is None else self._start.lineage.state_dict()),
            "lacks": self._lacks,
            "seed": self._base_seed,
            "rates": self._rates,
            "trained": {} if self._flags is None else self._flags.changes(),
            "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
            "grad_accumulation_factor": self.grad_accumulation_factor,
            "options": {name: self.run_opts[name] for name in TELLING},
            **self._as_recalled(),
        }
        Path(path).write_text(dump_plain_yaml(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: Path, end_of_epoch: bool) -> None:
        self._taken_from = Path(path).parent
        if not self._fitting:
            self._recall(Path(path))
            return
        state = read_brain_state(Path(path))
        if "step" not in state:
            raise CheckpointError(f"{path} does not say how far the run had come: it has no 'step'. {DAMAGED}")
        self.optimizer_step = state.get("optimizer_step", state["step"])
        other_rates = self._take_rates(state, Path(path).parent)
        self._sum_divisor = state.get("sum_divisor")
        self._takes_place = self._place_in_calls(Path(path).parent, state)
        if not self._takes_place:
            if self._later is None and not end_of_epoch:
                logger.warning(EARLIER, state["fit"], self._fits)
            return
        if other_rates:
            logger.warning(OTHER_RATES, "; ".join(other_rates))
        self._tell_changes(state)
        self._wanted_flags = state.get("trained")
        if isinstance(state.get("epoch"), int):
            self._expected_epoch = state["epoch"] + int(end_of_epoch)
        if not end_of_epoch:
            self._recover_place(state)

    @contextlib.contextmanager
    def _saving_inside(self) -> Iterator[None]:
        """Return a context for a save that a recipe makes in a hook of a training batch, with what that lacks."""
        progress, step = self.progress, self.progress.step
        own_fit_batch = type(self).fit_batch is not Hooks.fit_batch
        is_known = progress.result is not None and progress.result_at == step
        pending = progress.window.pending(step) or (0 if is_known else progress.window.pending(step - 1))
        if pending:
            logger.warning_once(
                "A checkpoint is made in the middle of an optimizer step: the gradients of %d batch(es) are not in it. "
                "Save where should_step is true, and after the step.",
                pending,
            )
        elif not own_fit_batch and not is_known and progress.closed == step - 1:
            self._done = progress.closed  # this batch has not been trained on yet
        self._lacks = step if own_fit_batch and not is_known else None
        self._is_inside_batch, states = True, self._rank_states
        try:
            if states is not None and states.gather_if_all_come():
                self._saved_sums = sum_over_ranks(self._own_sums())
            yield
        finally:
            self._is_inside_batch, self._saved_sums, self._lacks, self._done = False, None, None, None
            if states is not None:
                states.forget()

    def _own_sums(self) -> list[float]:
        """Return this rank's sum of losses, what it counts, and the samples seen."""
        meter = self._losses_so_far()
        return [*meter.sums()[:2], meter.samples]
