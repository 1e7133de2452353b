"""How the Brain is saved and recovered: the loop's position, and checkpoints in the middle of an epoch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.checkpoint_hooks import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.checkpoints import Checkpointer
from ddpkit.continuing import Continuing
from ddpkit.control import SaveRequests, terminating_later
from ddpkit.distributed import alone, get_world_size, run_on_main, sum_over_ranks
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.logger import get_logger
from ddpkit.options import OPTION_BY_NAME
from ddpkit.plain_yaml import dump_plain_yaml, load_plain_yaml
from ddpkit.rank_states import RankStates
from ddpkit.resuming import TELLING, Pace, changed_options

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = get_logger(__name__)

RANKS = "ranks"  # the recoverable with what every rank has of its own
INTRA_EPOCH_KEY = "brain_intra_epoch_ckpt"


@register_checkpoint_hooks
class Saving(Continuing):
    """The recoverable half of the Brain: what a checkpoint holds of it, and when one is made by itself.

    Attributes:
        avg_train_loss: mean training loss of the epoch so far, over all ranks, about a second old.

    State: ``brain.ckpt`` is YAML with ``step``, ``avg_train_loss``, ``optimizer_step``, the running sums of the epoch's
    loss, what an optimizer step is made of, and the options that bear on the numbers; ``ranks.ckpt`` has the random
    streams, sums and loader of every rank. A checkpoint of the end of an epoch gives back ``optimizer_step`` and what
    loaders take over into the next epoch; outside of ``fit`` nothing.

    Ranks: collective.

    Example:
        >>> issubclass(Saving, Continuing)
        True
    """

    avg_train_loss: float
    _fitting: bool
    _saved_sums: list[float] | None = None
    save_requests: SaveRequests
    _pace: Pace = Pace(None, None)
    _asked_pace: Pace | None = None
    _fits = 0

    def register_with(self, checkpointer: Any) -> None:
        """Give the checkpointer what the loop needs to continue; when debugging, a temporary folder as well."""
        if self.debug and not self.debug_persistently and hasattr(checkpointer, "checkpoints_dir"):
            folder = run_on_main(tempfile.mkdtemp, kwargs={"prefix": "ddpkit-debug-"}) or ""
            checkpointer.checkpoints_dir = Path(folder)
            if self.rank == 0:
                weakref.finalize(checkpointer, shutil.rmtree, folder, ignore_errors=True)
        taken = getattr(checkpointer, "recoverables", {}).get(RANKS)
        if taken is not None and not isinstance(taken, RankStates):
            raise ConfigError(
                f"a recoverable of the recipe is named {RANKS!r}, and so is what the Brain saves of every rank. Give "
                "yours another name."
            )
        checkpointer.add_recoverable("brain", self)
        # The checkpointer may outlive the Brain, and the Brain holds the checkpointer.
        host = weakref.ref(self)
        self._rank_states = RankStates(lambda: _own_state(host()))
        checkpointer.add_recoverable(
            RANKS, self._rank_states, custom_load_hook=lambda *where: _load_ranks(host(), *where), optional_load=True
        )
        if self.scaler.is_enabled():
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        if self.ema is not None:
            self.ema.add_to(checkpointer)
        self.follow_options()

    def follow_options(self) -> None:
        """Give the checkpointer what the options say of it; what is left at its default is left alone there, too."""
        checkpointer, options = self.checkpointer, self.run_opts
        if not isinstance(checkpointer, Checkpointer):
            return
        attributes = {"ckpt_verify": "verify_mode", "ckpt_load": "load_mode", "ckpt_errors": "on_error"}
        for option, attribute in attributes.items():
            if options[option] != OPTION_BY_NAME[option].default:
                setattr(checkpointer, attribute, options[option])

    @contextlib.contextmanager
    def saving_session(self) -> Iterator[None]:
        """Keep the folder while ``fit`` runs, save in the background, hear the signal for it, finish what is begun."""
        checkpointer = self.checkpointer
        self._fits += 1
        self.choose_seed()
        with self.save_requests.heard():
            if not isinstance(checkpointer, Checkpointer):
                yield
                self.end_streams()
                return
            before = checkpointer.asynchronous
            with checkpointer.hold_folder():
                checkpointer.asynchronous = self.ckpt_async
                try:
                    yield
                    self.end_streams()
                    checkpointer.wait()
                except BaseException as error:
                    if self.rank == 0:
                        self._bring_to_safety(checkpointer, error)
                    raise
                finally:
                    checkpointer.asynchronous = before
                    self._let_go()

    def _let_go(self) -> None:
        """Drop what was recovered or gathered for this ``fit``: another one is another pass over perhaps other data."""
        if self._rank_states is not None:
            self._rank_states.forget()
            self._rank_states.loaded = None

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
        own = self.collect_own_state() | {"random": None}  # which has been drawn from since
        if progress.sums is not None:  # the pass is over: the sums of all ranks are known
            self._saved_sums = list(progress.sums)
            own["loss"] = None
        states.set_own(own)
        checkpointer.asynchronous = False
        try:
            meta = {INTRA_EPOCH_KEY: True, "error": f"{type(error).__name__}: {error}"[:500]}
            checkpointer.save_and_keep_only(
                meta=meta, end_of_epoch=False, ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta
            )
        finally:
            progress.step, progress.meter, self._saved_sums = step, meter, None
            states.forget()

    def save_now(self) -> None:
        """Save in the middle of an epoch, as a signal has asked for."""
        self._save_intra_epoch_ckpt()

    def _should_save_intra_epoch_ckpt(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Decide from numbers that all ranks agree on whether to save in the middle of an epoch."""
        minutes, steps = self.ckpt_interval_minutes, self.ckpt_interval_steps
        return 0 < minutes * 60 <= seconds_since_ckpt or 0 < steps <= steps_since_ckpt

    def save_intra_epoch(self, seconds_since_ckpt: float, steps_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was."""
        due = self._should_save_intra_epoch_ckpt(seconds_since_ckpt, steps_since_ckpt)
        if due:
            self._save_intra_epoch_ckpt()
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
            "step": self.step,
            "avg_train_loss": float(self.avg_train_loss),
            "optimizer_step": self.optimizer_step,
            "epoch_began_at": self.progress.began_at,
            "nonfinite": self.nonfinite_count,
            "loss_sum": loss_sum,
            "loss_count": loss_count,
            "samples": int(samples),
            **self._pace.state_dict(),
            "asked": (self._asked_pace or self._pace).state_dict(),
            "fit": self._fits,
            "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
            "grad_accumulation_factor": self.grad_accumulation_factor,
            "options": {name: self.run_opts[name] for name in TELLING},
        }
        Path(path).write_text(dump_plain_yaml(state), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: Path, end_of_epoch: bool) -> None:
        if not self._fitting:
            return
        state = load_plain_yaml(Path(path).read_text(encoding="utf-8"))
        if not isinstance(state, Mapping) or "step" not in state:
            raise CheckpointError(f"{path} does not say how far the run had come: it has no 'step'.")
        self.optimizer_step = state.get("optimizer_step", state["step"])
        self._tell_changes(state)
        if state.get("fit", self._fits) != self._fits:
            logger.warning(
                "The checkpoint was made in another call of fit (number %s) than this one (number %d): its place in "
                "the data is taken for that of this one.",
                state["fit"],
                self._fits,
            )
        if end_of_epoch:
            return
        samples = state.get("samples", 0)
        self.step, words = self._pace.place(Pace.read(state), state["step"], samples)
        if words is not None:
            logger.warning("%s", words)
        if "loss_sum" not in state and self.step:
            logger.warning(
                "This checkpoint was made by SpeechBrain in the middle of an epoch, and the order of the data is "
                "ddpkit's own: %d batches are left out now, but not those that were done. To avoid it, go on from the "
                "end of an epoch.",
                self.step,
            )
        self.progress.began_at = state.get("epoch_began_at", self.optimizer_step)
        self.nonfinite_count = state.get("nonfinite", 0)
        self.avg_train_loss = state["avg_train_loss"]
        if self.rank == 0:
            count = state.get("loss_count", self.step)
            loss_sum = state.get("loss_sum", self.avg_train_loss * count)
            self.progress.meter.restore(loss_sum, count, samples=samples)

    def _tell_changes(self, state: Mapping[str, Any]) -> None:
        options = state.get("options")
        changes = changed_options(options, self.run_opts) if isinstance(options, Mapping) else []
        before, now = Pace.read(state).per_step, self._pace.per_step
        if None not in {before, now} and before != now:
            changes.append(f"{now} samples per optimizer step, before {before}")
        if changes:
            logger.warning(
                "The run goes on with other options than those of its checkpoint: %s. It will not be the run that was "
                "never stopped.",
                "; ".join(changes),
            )

    def _own_sums(self) -> list[float]:
        """Return this rank's sum of losses, what it counts, and the samples seen."""
        meter = self.progress.meter
        return [*meter.sums()[:2], meter.samples]


def _own_state(host: Saving | None) -> dict[str, Any]:
    return {} if host is None else host.collect_own_state()


def _load_ranks(host: Saving | None, states: RankStates, path: Path, end_of_epoch: bool) -> None:
    if host is not None and host._fitting:  # noqa: SLF001 -- a part of the class
        states.load(path, end_of_epoch)
