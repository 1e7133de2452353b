"""When a run saves, and what it resumes from: the part of a run that registers with the
Checkpointer.

All ranks save at the same place, between two optimizer steps. A save in the middle of an epoch
takes this way:

1. ``IntraEpochSaves.on_sync`` or ``on_window`` finds that a signal or an interval asks for it;
2. ``CheckpointPolicy.save_inside_epoch`` resolves a pending step and gathers the states of ranks;
3. ``Checkpointer.save_and_keep_only`` enters ``CheckpointPolicy._around_save``: the training's own
   position and weights;
4. its hooks ask ``RunState.save``, ``RankStates.state_dict`` and all other recoverables;
5. ``CheckpointFolder`` in ``checkpointing/folder.py`` writes the directory, and renames it.

A recipe's own save at the end of an epoch begins with 3. What a stop does is in
``run/stop_control.py``.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ddpkit.base import DEFAULT_SAVE_HOOKS, temporarily
from ddpkit.checkpointing import (
    all_ranks_come,
    checkpoint_work_on_main,
    ckpt_recency,
    get_default_hook,
    safe_load,
    words_of_keys,
)
from ddpkit.checkpoints import Checkpointer
from ddpkit.control import EXIT_DELAY
from ddpkit.distributed import alone, get_rank, get_world_size, run_on_main
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError
from ddpkit.launch import find_slice
from ddpkit.logger import get_logger, shown_path
from ddpkit.options import OPTION_BY_NAME
from ddpkit.run.brain_file import INTRA_EPOCH_KEY
from ddpkit.run.choose_start import NEVER, NEWEST, choose_start
from ddpkit.run.new_settings import OPTIMIZER, SCHEDULE
from ddpkit.run.rank_state import RankState
from ddpkit.run.run_state import RunState
from ddpkit.run.save_position import SavePosition
from ddpkit.run.save_record import SaveRecord
from ddpkit.run.shared_folder import prepare_saving_by_each_rank
from ddpkit.run.unsaved_objects import modules_not_saved, optimizers_not_saved
from ddpkit.strategies import batch_norms
from ddpkit.train_logger import loggers_of
from ddpkit.training import EpochPhase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpkit.checkpointing import Checkpoint
    from ddpkit.run.choose_start import Start
    from ddpkit.run.step_plan import StepPlan
    from ddpkit.training import RunContext, TrainStep

logger = get_logger(__name__)

WAIT_SECONDS = 300.0  # for the other ranks, where a save needs them: one may be late
RANKS = "ranks"  # the recoverable with what every rank has of its own
APART = (
    "{}: a checkpoint is saved in a hook of a training batch, where "
    "each rank has weights of its own. Give --ckpt_interval_steps or --ckpt_interval_minutes, "
    "which wait for the next average, or save in on_stage_end."
)
OTHER_ROWS = (
    " BatchNorm statistics are now computed over batches of another size, so the results differ{}."
)
NOTHING_SAVED = (
    "A checkpointer was given and fit has saved nothing: unless the script saves after it, the "
    "training is lost. Call self.checkpointer.save_and_keep_only() in on_stage_end, or give "
    "--ckpt_interval_minutes."
)


class CheckpointPolicy:
    """Saves and resumes a run with a checkpointer; without one it does nothing.

    The checkpointer saves the run's state as ``brain``, the state of each rank as ``ranks``, and
    where there are such ``optimizer``, ``scaler``, ``ema``, ``scheduler``, ``part-<name>``,
    ``logger-<class>``, and ``dataloader-TRAIN``: loaders that the Brain makes are under
    ``dataloader-`` and the stage.
    ``docs/reference/checkpoint-files.md`` says what is in each file.

    Args:
        context: of the run.
        train_step: has the optimizers, the scaler and the average of the weights.
        checkpointer: a :class:`~ddpkit.checkpoints.Checkpointer`, or None.

    Attributes:
        checkpointer: as given.
        run_state: what a checkpoint holds of the run.
        rank_state: and of this rank.

    Ranks: collective, but for what is said otherwise.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        checkpointer: Any,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.checkpointer: Checkpointer | None = _require_checkpointer(checkpointer)
        self.rank_state = RankState(context, saves=checkpointer is not None)
        self.run_state = RunState(context, train_step, self.rank_state)
        self.position = SavePosition(context, self.run_state)
        self._saved_scaler: Any = None  # as it is registered
        # of the checkpointer, while it saves into a temporary one
        self._real_folder: Path | None = None
        self._handed_on: set[str] = set()  # options that the checkpointer was given
        self._fit_loader: Any = None
        self._is_between_batches = False
        self._has_saved = False  # in this call of fit

    # ------------------------------------------------------------------ registering

    def register(self, brain: Any) -> None:
        """Give the checkpointer what the loop needs to continue; when debugging, a temporary folder
        as well.

        Args:
            brain: the recoverable ``brain``, whose class has the checkpoint hooks.

        Raises:
            ConfigError: another Brain, or something of the recipe, stands there already.
        """
        checkpointer = self.checkpointer
        states = self.rank_state.states
        if checkpointer is None or states is None:
            return
        self.apply_options()
        self._require_free("brain", "the training position", brain)
        self._require_free(RANKS, "the state of each rank", states)
        self.register_scaler()
        # before the ranks: loading it tells whether their states are of this call of fit
        checkpointer.add_recoverable("brain", brain)
        checkpointer.add_recoverable(
            RANKS,
            states,
            custom_load_hook=self._load_ranks,
            optional_load=True,
        )
        self.register_average()
        for name, part in self.context.parts.saved().items():
            self._require_free(f"part-{name}", f"the part {name}", part)
            checkpointer.add_recoverable(f"part-{name}", part, optional_load=True)
        self._register_loggers(checkpointer)
        checkpointer.around_save = self._around_save
        checkpointer.tell_epoch = lambda: self.context.progress.epoch or None
        checkpointer.listener = SaveRecord(self.context.progress)
        checkpointer.passes_over = self.run_state.new_settings.passes_over
        if self.context.strategy.overrides("divided_states"):
            checkpointer.divided_states = self._divided_states

    def _register_loggers(self, checkpointer: Checkpointer) -> None:
        """Have loggers saved that have a state, such as the run of a tracker, unless the recipe
        does it.
        """
        for train_logger in loggers_of(self.context.hparams):
            known = checkpointer.recoverables.items()
            name = f"logger-{type(train_logger).__name__}"
            own = [given for given, recoverable in known if recoverable is train_logger]
            if own or get_default_hook(train_logger, DEFAULT_SAVE_HOOKS) is None:
                continue
            names = (name, *(f"{name}-{number}" for number in range(2, len(known) + 3)))
            free = next(one for one in names if one not in checkpointer.recoverables)
            checkpointer.add_recoverable(free, train_logger, optional_load=True)

    def register_scaler(self) -> None:
        """Register the scaler of fp16 gradients with the checkpointer, in the place of an earlier
        one.
        """
        scaler = self.train_step.scaler
        before = self._saved_scaler
        if self.checkpointer is not None and scaler.is_enabled():
            self._require_free(
                "scaler",
                f"the gradient scaler of precision={self.context.options.precision!r}",
                before,
            )
            self.checkpointer.add_recoverable("scaler", scaler, optional_load=True)
            self._saved_scaler = scaler

    def register_average(self) -> None:
        """Register the average of the weights with the checkpointer, in the place of an earlier
        one.
        """
        self.train_step.average.register(self.checkpointer, self._require_free, self._bases)

    def _bases(self) -> dict[int, str]:
        """Return the fingerprints of base weights that the present save leaves out, by the ids of
        their parameters.
        """
        return {} if self.checkpointer is None else self.checkpointer.bases_of_save()

    def replace_checkpointer(self, checkpointer: Any, brain: Any) -> None:
        """Save with another checkpointer from now on, all that the one before has saved of the run.

        Args:
            checkpointer: or None.
            brain: as for :meth:`register`.

        Raises:
            ConfigError: it is no checkpointer; or ``fit`` is running and holds the folder of the
                present one.
        """
        before = self.checkpointer
        if checkpointer is before:
            return
        if self.context.progress.is_fitting:
            raise ConfigError(
                "checkpointer was assigned inside of fit, which keeps the folder of the one "
                "before. Assign it before fit, or give it to the Brain."
            )
        self.checkpointer = _require_checkpointer(checkpointer)
        # The run has registered these itself; whatever a recipe adds, it adds to the new one, too.
        own = [*self.train_step.named_optimizers().values(), self.train_step.schedule]
        kept = {
            name: recoverable
            for name, recoverable in _recoverables(before).items()
            if any(recoverable is other for other in own)
        }
        self._saved_scaler = None
        self.train_step.average.forget_registered()
        self._real_folder = None
        self._handed_on = set()
        self.rank_state.saves(checkpointer is not None)
        self.register(brain)
        for name, recoverable in kept.items():
            if name not in self._recoverables():
                self.add(name, recoverable)

    def apply_options(self) -> None:
        """Give the checkpointer what the options say now: how it reads and fails; a temporary
        folder when debugging.

        A measured slice has a temporary folder, too: it goes on from nothing and leaves nothing. A
        replay goes on from the copy of a checkpoint in its own.
        """
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        plan = find_slice()
        options = self.context.options
        if plan is not None and plan.replayed_to:
            # whichever folder the recipe names: that of the copy
            checkpointer.checkpoints_dir = plan.checkpoints_folder
            self._hand_on_options(checkpointer)
            return
        is_temporary = plan is not None or (options.debug and not options.debug_persistently)
        if is_temporary and self._real_folder is None:
            self._real_folder = checkpointer.checkpoints_dir
            where = None if plan is None else plan.scratch
            folder = (
                run_on_main(tempfile.mkdtemp, kwargs={"prefix": "ddpkit-debug-", "dir": where})
                or ""
            )
            checkpointer.checkpoints_dir = Path(folder)
            if not get_rank():
                weakref.finalize(checkpointer, shutil.rmtree, folder, ignore_errors=True)
        elif not is_temporary and self._real_folder is not None:
            checkpointer.checkpoints_dir = self._real_folder
            self._real_folder = None
        self._hand_on_options(checkpointer)

    def add(self, name: str, recoverable: Any) -> None:
        """Register an object of the run with the checkpointer, if there is one."""
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable(name, recoverable)

    def add_schedule(self, schedule: Any, before: Any) -> None:
        """Register the schedule of ``scheduler_class`` with the checkpointer.

        Args:
            schedule: the schedule.
            before: the schedule that it replaces, or None.

        Raises:
            ConfigError: the recipe has given its name to something else.
        """
        self._require_free("scheduler", "the schedule of scheduler_class", before)
        if self.checkpointer is not None:
            is_new = bool({SCHEDULE, OPTIMIZER} & set(self.run_state.new_settings.asked))
            self.checkpointer.add_recoverable("scheduler", schedule, optional_load=is_new)

    def _require_free(
        self,
        name: str,
        what: str,
        own: Any = None,
    ) -> None:
        other = self._recoverables().get(name, own)
        if other is own:
            return
        if hasattr(other, "fit_batch"):
            raise ConfigError(
                "this Checkpointer belongs to another Brain, and a checkpoint holds the training "
                "of one Brain. Give each Brain its own Checkpointer. To evaluate what another "
                "trained, give it one on the same folder."
            )
        raise ConfigError(
            f"the recoverable name {name!r} is reserved for {what}; rename your "
            f"{type(other).__name__}."
        )

    def recoverable_modules(self) -> dict[str, nn.Module]:
        """Return the modules that the checkpointer saves, by the names of their files."""
        return {
            name: recoverable
            for name, recoverable in self._recoverables().items()
            if isinstance(recoverable, nn.Module)
        }

    def _recoverables(self) -> Mapping[str, Any]:
        return _recoverables(self.checkpointer)

    def _hand_on_options(self, checkpointer: Checkpointer) -> None:
        """Give the checkpointer what the options say of it; what is left at its default is left
        alone there, too.
        """
        attributes = {
            "ckpt_verify": "verify_mode",
            "ckpt_load": "load_mode",
            "ckpt_errors": "on_error",
        }
        options = self.context.options
        for option, attribute in attributes.items():
            is_default = options[option] == OPTION_BY_NAME[option].default
            # an option that was handed on once is also set back to its default
            if not is_default or option in self._handed_on:
                self._handed_on.add(option)
                setattr(checkpointer, attribute, options[option])

    # ------------------------------------------------------------------ a call of fit

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep the folder while ``fit`` runs, save in the background, finish what is begun."""
        checkpointer = self.checkpointer
        self.apply_options()
        self.rank_state.choose_seed()
        self.run_state.is_recovered_here = True
        self._has_saved = False
        if checkpointer is None:
            yield
            self._end_call()
            return
        with (
            checkpointer.hold_folder(),
            temporarily(checkpointer, asynchronous=self.context.options.ckpt_async),
        ):
            try:
                yield
                self._end_call()
                checkpointer.wait()
            except BaseException:
                self._finish_save(checkpointer)
                raise
            finally:
                # what was recovered for this call goes, but for what the next one takes over from
                # its end
                keep_end = self.run_state.calls.later is None and not self.context.progress.step
                self.rank_state.release(self._fit_loader, keep_end=keep_end)
                self._fit_loader = self.run_state.expected_epoch = None

    def _end_call(self) -> None:
        """End a call of ``fit``: random streams and counts are equal in a resumed and an
        uninterrupted run.
        """
        self.context.progress.resolve_pending()
        self.rank_state.end_streams()
        calls = self.run_state.calls
        calls.finished[calls.number] = self.context.progress.optimizer_step
        if (
            self.checkpointer is not None
            and self.context.progress.epochs
            and not (self._has_saved or self.context.options.debug)
        ):
            logger.warning(NOTHING_SAVED)

    def choose_start(self) -> Start | None:
        """Choose, once for all ranks, the checkpoint that this call of ``fit`` starts from.

        Returns:
            The start; None without a checkpointer.

        Raises:
            CheckpointError: the folder cannot be read, or what was asked for is not there.
        """
        state = self.run_state
        checkpointer = self.checkpointer
        state.calls.number += 1
        if checkpointer is not None:
            self._note_url(checkpointer)
            choose = functools.partial(
                choose_start,
                is_first=state.start is None,
                known=state.states,
                is_debug=bool(self.context.options.debug),
            )
            state.start = checkpoint_work_on_main(choose, checkpointer, self.context.options.resume)
            prepare_saving_by_each_rank(
                checkpointer,
                self.context.strategy,
                is_temporary=self._real_folder is not None,
            )
        elif self.context.options.resume not in {"auto", "never"}:
            logger.warning(
                "Without effect, as the Brain has no checkpointer: resume=%s.",
                self.context.options.resume,
            )
        return state.start

    def _note_url(self, checkpointer: Checkpointer) -> None:
        """Have every rank know where a checkpoint stands that ``resume`` names by its URL."""
        resume = self.context.options.resume
        if resume not in {NEWEST, NEVER}:
            checkpointer.local_path(resume)

    @property
    def begins_anew(self) -> bool:
        """Whether this is the first call of ``fit`` of a run that was asked to begin from scratch,
        and does.
        """
        state = self.run_state
        is_from_scratch = state.start is None or state.start.resume == NEVER
        return self.context.options.resume == NEVER and is_from_scratch and state.calls.number == 1

    def keep_global_batch(
        self,
        before: StepPlan | None,
        *,
        keeps_batches: bool,
    ) -> None:
        """Keep the samples of an optimizer step when a checkpoint of another number of processes is
        resumed.

        Args:
            before: of the checkpoint's run; None without a checkpoint, or if it does not say.
            keeps_batches: whether the epochs of the training count batches of a process.

        Raises:
            ConfigError: so many processes cannot take such steps.
        """
        accumulation = self.context.accumulation
        state = self.run_state
        if before is None or accumulation.global_batch_size is not None:
            return
        division = self.context.strategy.division()
        changed = before.on(division.number, keeps_batches=keeps_batches)
        state.asked_plan = before if changed else None
        if changed:
            accumulation.use(changed)
            words = (
                "%d process(es) go on with what %d saved: %s keeps the samples of an optimizer "
                "step.%s"
            )
            values = ", ".join(f"{name}={value}" for name, value in changed.items())
            keeps_rows = changed.keys() == {"global_batch_size", "grad_accumulation_factor"}
            advice = (
                f"; --global_batch_size={before.per_step} alone keeps them"
                if before.per_step
                else ""
            )
            other_rows = (
                ""
                if keeps_rows or not batch_norms(self.context.modules)
                else OTHER_ROWS.format(advice)
            )
            logger.announce(words, get_world_size(), before.world_size, values, other_rows)

    # ------------------------------------------------------------------ recovering

    @contextlib.contextmanager
    def starting(self, start: Start | None) -> Iterator[None]:
        """Make every recovery, also a recipe's own, use the chosen checkpoint.

        Args:
            start: what was chosen.
        """
        checkpointer = self.checkpointer
        if checkpointer is None or start is None:
            yield
            return
        checkpointer.resume = start.resume
        try:
            with temporarily(self.run_state.new_settings, is_starting=True):
                yield
        finally:
            checkpointer.resume = NEWEST
            # from now on a checkpoint may be another of that name
            self.run_state.start = replace(start, state=None)

    def recover(self, modules: Mapping[str, Any] | Any) -> None:
        """Recover a checkpoint before training; first name what of the training no checkpoint will
        hold.

        Args:
            modules: of the Brain, by name.

        Raises:
            CheckpointError: a recoverable cannot be saved or loaded; raised before the first epoch.
        """
        if self.checkpointer is None:
            return
        self.checkpointer.require_hooks()
        average = self.train_step.average.weights
        optimizers = self.train_step.named_optimizers()
        others = {
            name: recoverable
            for name, recoverable in self._recoverables().items()
            if name != "brain" and recoverable is not average
        }
        lost = modules_not_saved(modules, others)
        if lost:
            words = (
                "The checkpointer saves no weights of the module(s) %s: add_recoverable(name, "
                "module) adds them."
            )
            logger.warning(words, ", ".join(lost))
        forgotten = optimizers_not_saved(optimizers, others)
        self.run_state.note_script_settings(
            {name: optimizer for name, optimizer in optimizers.items() if name not in forgotten}
        )
        if forgotten:
            words = (
                "The checkpointer saves nothing of the optimizer(s) %s: give it them in "
                "init_optimizers."
            )
            logger.warning(words, ", ".join(forgotten))
        self.checkpointer.recover_if_possible()

    def _load_ranks(
        self,
        states: Any,
        path: Path,
        end_of_epoch: bool,
    ) -> None:
        found = safe_load(path)
        is_fitting = self.context.progress.is_fitting
        if is_fitting and self.run_state.is_recovered_here:
            states.load_state_dict(found, end_of_epoch=end_of_epoch)
            self.rank_state.adopt_seed((states.loaded or {}).get("seed"))
        if not is_fitting or self.context.progress.phase in {
            EpochPhase.OUTSIDE,
            EpochPhase.RECOVERED,
        }:
            states.recovered = found  # in an epoch a recipe may recover something else

    def load_deferred(self) -> None:
        """Load a checkpoint that was made in this call of ``fit``, where it was found in an earlier
        one; then put in place what the script is to set and not the checkpoint.

        Raises:
            ConfigError: the schedule of the script ends before the step of the run.
        """
        self._load_later()
        if self.checkpointer is not None:
            self.checkpointer.find_bases(begins=True)
        self.run_state.apply_new_settings()

    def _load_later(self) -> None:
        state = self.run_state
        later = self.run_state.calls.later
        checkpointer = self.checkpointer
        if (
            checkpointer is None
            or later is None
            or later[1]["fit"] > state.calls.number
            or state.start is None
        ):
            return
        found, known = checkpoint_work_on_main(self._find_later, checkpointer, later[0])
        with (
            temporarily(state, start=replace(state.start, resume=found, state=known)),
            temporarily(state.new_settings, is_starting=True),
        ):
            checkpointer.load_checkpoint(found)

    def _find_later(
        self,
        checkpointer: Checkpointer,
        path: Path,
    ) -> tuple[Checkpoint, Mapping[str, Any] | None]:
        """Return the checkpoint of a later call; if a save between the calls has replaced it, that
        save.
        """
        newest = None if path.exists() else checkpointer.find_checkpoint()
        return self.run_state.find_again(path) if newest is None else (newest, None)

    def is_done_before(self, train_loader: Any) -> bool:
        """Return whether this call of ``fit`` is done, because the checkpoint is from a later call.

        Args:
            train_loader: of this call.
        """
        self._fit_loader = train_loader
        calls = self.run_state.calls
        if calls.later is None:
            return False
        path, state = calls.later
        words = (
            "Call %d of fit is done: %s was made in call %d, which goes on from it; else use "
            "another folder."
        )
        logger.announce(words, calls.number, path, state["fit"])
        steps = dict(enumerate(state.get("finished") or (), 1)).get(calls.number)
        if steps is not None:
            self.context.progress.recover_updates(steps)
        return True

    def warn_unused_entries(self) -> None:
        """Name what is in the checkpoint that the training goes on from, and nothing has taken
        up.
        """
        checkpointer = self.checkpointer
        recovered = self.run_state.recovered
        if checkpointer is None or recovered is None or recovered != checkpointer.last_loaded:
            return
        # Without fp16 there is nothing to scale, and a loader's place is in the Brain's own file as
        # well.
        lost = [
            name for name in checkpointer.not_taken if name != "scaler" and "dataloader" not in name
        ]
        if lost:
            logger.warning(
                "%s holds %s, and no recoverable of this name has taken that up: the training "
                "goes on without it. Add recoverables in init_optimizers or before fit, not "
                "later%s.",
                recovered,
                ", ".join(map(repr, lost)),
                self.train_step.average.advice_if_lost(lost),
            )

    def recover_for_evaluation(self, max_key: str | None, min_key: str | None) -> Any:
        """Recover the best checkpoint, or the checkpoint given by ``resume``.

        Args:
            max_key: the one with the highest value of this key.
            min_key: the one with the lowest; without either, the newest.

        Returns:
            What was loaded, or None.

        Raises:
            CheckpointUsageError: there are checkpoints, and none has the key; on every rank.
        """
        checkpointer = self.checkpointer
        resume = self.context.options.resume
        if checkpointer is None:
            return None
        if not self.context.progress.is_fitting:
            self.apply_options()
        if self.run_state.start is None and resume not in {NEWEST, NEVER}:
            logger.announce("--resume=%s: this checkpoint is evaluated.", resume)
            with temporarily(checkpointer, resume=resume):
                return checkpointer.recover_if_possible()
        if key := max_key or min_key:
            _require_key(checkpointer, key, "max_key" if max_key else "min_key")
        return checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)

    def newest(self) -> Path | None:
        """Return where the newest checkpoint is."""
        checkpointer = self.checkpointer
        return None if checkpointer is None else checkpoint_work_on_main(_newest, checkpointer)

    # ------------------------------------------------------------- saving in the middle of an epoch

    def save_if_due(self, seconds_since_ckpt: float, batches_since_ckpt: int) -> bool:
        """Save in the middle of an epoch if it is time, and say whether it was.

        Args:
            seconds_since_ckpt: by the main process's clock; the same on all ranks.
            batches_since_ckpt: the same on all ranks.
        """
        options = self.context.options
        minutes = options.ckpt_interval_minutes
        steps = options.ckpt_interval_steps
        due = 0 < minutes * 60 <= seconds_since_ckpt or 0 < steps <= batches_since_ckpt
        if due:
            self.save_inside_epoch()
        return bool(due)

    def save_inside_epoch(self) -> None:
        """Save after a batch; only the newest such checkpoint is kept."""
        if self.checkpointer is None:
            return
        progress = self.context.progress
        progress.resolve_at_sync()
        sums = progress.add_totals(self.rank_state.own_sums())
        self.rank_state.gather_for_save()
        with self.position.with_sums(sums):
            self._save_intra_epoch(self.checkpointer)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Return a context for a validation between two steps: a save in its hooks has the position
        and the states that the training of all ranks has now.
        """
        if self.checkpointer is None:
            yield
            return
        progress = self.context.progress
        sums = progress.add_totals(self.rank_state.own_sums())
        with temporarily(self.rank_state, goes_back_to_begin=not progress.window_end):
            self.rank_state.gather_for_save()
        with self.position.with_sums(sums):
            yield

    def save_before_evaluation(self) -> None:
        """Save where the training was before the evaluation that is now stopped."""
        progress = self.context.progress
        stood = progress.phase is EpochPhase.TRAINED or progress.is_between_steps
        is_trained = stood and progress.train_meter is not None
        if self.checkpointer is not None and progress.is_fitting and is_trained:
            self._save_intra_epoch(self.checkpointer)

    def _save_intra_epoch(self, checkpointer: Checkpointer) -> None:
        with temporarily(self, _is_between_batches=True):
            checkpointer.save_and_keep_only(
                meta={INTRA_EPOCH_KEY: True},
                end_of_epoch=False,
                ckpt_predicate=lambda checkpoint: INTRA_EPOCH_KEY in checkpoint.meta,
            )

    def _divided_states(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say how states are saved that are divided over the ranks, if every rank saves and not the
        main process alone.
        """
        if get_world_size() > 1 and not all_ranks_come("save", WAIT_SECONDS):
            given = self.context.options.strategy
            raise CheckpointError(
                f"strategy={given!r} divides weights or states of optimizers over "
                "the ranks, and the main process saves alone. Call save_checkpoint or "
                "save_and_keep_only on every rank: not under `if if_main_process():`, not in "
                "run_on_main."
            )
        if self.checkpointer is not None:
            self.checkpointer.find_bases()
        return self.context.strategy.divided_states(objects)

    @staticmethod
    def _finish_save(checkpointer: Checkpointer) -> None:
        """Let a save end that this rank is writing when training fails. Signals only ask for an
        end.
        """
        with alone(), EXIT_DELAY.held():
            try:
                checkpointer.wait()
            except Exception as failure:  # noqa: BLE001 -- what ended the training must not be hidden
                logger.warning("A checkpoint is lost: %s: %s", type(failure).__name__, failure)

    # ------------------------------------------------------------------ a save that a recipe makes

    @contextlib.contextmanager
    def _around_save(self, end_of_epoch: bool) -> Iterator[bool]:
        """Return a context for every save of the checkpointer: with the training's own position and
        weights.

        Yields:
            Whether the checkpoint is from the end of an epoch, which the recipe may not know.
        """
        self._has_saved = True
        self.context.progress.resolve_pending()  # the checkpoint counts it
        if self.context.strategy.weights_differ:
            raise CheckpointError(APART.format(self.context.strategy.name))
        self.train_step.end_window()  # an own fit_batch saves after its steps
        with (
            self.train_step.average.suspended(),
            self.position.of_save(
                end_of_epoch,
                is_between_batches=self._is_between_batches,
            ) as has_ended,
        ):
            yield has_ended


def _require_checkpointer(checkpointer: Any) -> Checkpointer | None:
    if checkpointer is not None and not isinstance(checkpointer, Checkpointer):
        raise ConfigError(
            f"checkpointer={checkpointer!r} is not a ddpkit.checkpoints.Checkpointer."
        )
    return checkpointer


def _recoverables(checkpointer: Checkpointer | None) -> Mapping[str, Any]:
    return {} if checkpointer is None else checkpointer.recoverables


def _require_key(checkpointer: Checkpointer, key: str, argument: str) -> None:
    """Refuse a key that no checkpoint has.

    ``recover_if_possible`` warns and loads nothing, as recipes that call it expect. For an
    evaluation that would mean other weights than those that were asked for.
    """
    words = checkpoint_work_on_main(_words_if_missing, checkpointer, key)
    if words:
        raise CheckpointUsageError(
            f"{argument}={key!r}: no checkpoint in {shown_path(checkpointer.checkpoints_dir)} has "
            f"{key!r} in its meta, so none can be the best by it. {words} Name one of them, or "
            f"leave {argument} out: then the newest checkpoint is taken."
        )


def _words_if_missing(checkpointer: Checkpointer, key: str) -> str:
    """Return what to say of the keys if there are checkpoints without this one; else nothing."""
    there = checkpointer.list_checkpoints()
    if not there or any(key in checkpoint.meta for checkpoint in there):
        return ""
    return words_of_keys(there, key)


def _newest(checkpointer: Checkpointer) -> Path | None:
    newest = max(checkpointer.list_checkpoints(), key=ckpt_recency, default=None)
    return None if newest is None else newest.path
