"""What a checkpoint holds of the run: ``brain.ckpt``.

A resumed run has the same samples per optimizer step as before, and continues at the same position
in its data. The position counts batches of one process, so that it is converted for another number
of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpkit.checkpointing import Checkpoint, ckpt_recency, read_checkpoint
from ddpkit.distributed import get_rank, get_world_size
from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger
from ddpkit.run.brain_file import (
    DAMAGED,
    DEBUG,
    EPOCH,
    EVALUATED,
    OPTIMIZER_STEP,
    STEP,
    brain_file_or_nothing,
    read_brain_file,
)
from ddpkit.run.fit_calls import FitCalls
from ddpkit.run.new_settings import NewSettings
from ddpkit.run.optimizer_settings import changed_settings, optimizer_settings
from ddpkit.run.option_changes import TELLING, changed_options
from ddpkit.run.step_plan import StepPlan
from ddpkit.training import EpochPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ddpkit.run.choose_start import Start, States
    from ddpkit.run.rank_state import RankState
    from ddpkit.training import RunContext, TrainStep

logger = get_logger(__name__)

EARLIER = (
    "The checkpoint is of the middle of call %s of fit, and this is call %d: its data position is "
    "not used."
)
LACKS = (
    "The checkpoint was made inside of fit_batch: the mean loss of this epoch will be without "
    "batch %s. What fit_batch did after that save is lost."
)
OTHER_SETTINGS = (
    "The optimizer %r has other settings than those with which the checkpoint's run began (%s), "
    "without effect: it goes on with the checkpoint's. --resume_with_new=lr takes the script's "
    "learning rates, --resume_with_new=weight_decay its weight decay, and "
    "--resume_with_new=optimizer a new optimizer as the script makes it. A schedule of the script "
    "may set rates all the same."
)


class PassedOn(NamedTuple):
    """What a checkpoint said of the run, for a save before the training goes on.

    Attributes:
        state: its entries.
        end_of_epoch: whether it was of the end of an epoch.

    Ranks: local.

    Example:
        >>> PassedOn({"fit": 2}, end_of_epoch=False).end_of_epoch
        False
    """

    state: Mapping[str, Any]
    end_of_epoch: bool


class RunState:
    """The run's part of a checkpoint, ``brain.ckpt``.

    It is YAML with these keys:

    * ``step``: batches of the epoch that are done; 0 at its end. With virtual ranks, of each.
    * ``epoch``: its number.
    * ``avg_train_loss``: the mean training loss of the epoch so far.
    * ``optimizer_step``: optimizer steps since the run began.
    * ``epoch_began_at``: the same as the epoch began.
    * ``nonfinite``, ``clipped``: steps of the epoch that were skipped, windows that were
      clipped.
    * ``validated_at``: the optimizer step of the last validation; only where parts say when to
      validate.
    * ``sum_divisor``: what loss sums are divided by before fp16 scaling; only where it is
      agreed on.
    * ``loss_sum``, ``loss_count``, ``samples``: of the epoch's training over all ranks. The first
      two are texts, such as ``1/3``, where no bit may depend on the number of processes.
    * ``world_size``, ``grad_accumulation_factor``, ``per_step``, ``per_process``, ``data``: the
      :class:`~ddpkit.run.step_plan.StepPlan` of the run.
    * ``asked``: the step plan in the options, which another number of processes may have changed.
    * ``steps_per_epoch``, ``steps_ahead``: for ``total_steps`` of a run that goes on.
    * ``fit``, ``finished``: the number of this call of ``fit``; optimizer steps at the end of each
      call before it.
    * ``lacks``: the batch whose loss is not in ``loss_sum``, or None.
    * ``seed``: of the run.
    * ``settings``: with which the training of each optimizer has begun, by its name.
    * ``resume_with_new``: the option of the process that saved; only if it was given.
    * ``trained``: parameters that were frozen or set free since the training began, by name.
    * ``launch``: id of torchrun's launch, or None.
    * ``options``: those that bear on the numbers.
    * ``whole``, ``stages_done``: whether the epoch's training has read all of its data; whether the
      stages after it are over, too.
    * ``debug``: whether the run had the option ``debug``.
    * ``only_evaluated``: only where the Brain that saved had trained nothing: then the other keys
      are those of the checkpoint that it had recovered.

    A checkpoint of the end of an epoch gives back ``optimizer_step``; outside of ``fit`` nothing is
    given back.

    Args:
        context: of the run.
        train_step: has the optimizers, and the divisor of sums.
        rank_state: of this rank.

    Attributes:
        calls: of ``fit``.
        start: what the run started from; None before ``fit``.
        states: run states of checkpoints that this process has read; the main process alone.
        step_plan: what an optimizer step is made of.
        asked_plan: the step plan in the options, if another number of processes had to change it.
        steps_per_epoch: optimizer steps of an epoch; None where that is not known.
        steps_ahead: by how many steps the run is ahead of one that has always had the present
            batches.
        recovered: the checkpoint that was recovered in this call of ``fit`` or ``evaluate``.
        is_recovered_here: whether that checkpoint was made in this call of ``fit``.
        new_settings: what the script gives in place of the checkpoint's.
        expected_epoch: the epoch after a resume from the recovered checkpoint.
        loss_sums: sums over all ranks of losses, weights and samples, for the next save; None: use
            this rank's.
        lacks: the batch whose loss is missing in the next save; or None.

    Ranks: local; every rank recovers, the main process saves.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        rank_state: RankState,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.rank_state = rank_state
        self.new_settings = NewSettings(context, train_step)
        self.calls = FitCalls()
        self.start: Start | None = None
        self.states: States = {}
        self.step_plan = StepPlan(None, None)
        self.asked_plan: StepPlan | None = None
        self.steps_per_epoch: int | None = None
        self.steps_ahead = 0
        self.recovered: Path | None = None
        self.is_recovered_here = True
        self.expected_epoch: int | None = None
        self.loss_sums: list[Any] | None = None
        self.lacks: int | None = None
        # with which the training of each optimizer has begun
        self._settings: dict[str, Any] | None = None
        self._script_settings: dict[str, list[dict[str, Any]]] | None = None
        # whether each parameter was trained as training began
        self._flags: list[tuple[str, nn.Parameter, bool]] = []
        # of the checkpoint that was recovered, until they are restored
        self._saved_flags: Any = None
        # whether the checkpoint of a later call of fit was of the end of an epoch
        self._later_end = True
        # Of the checkpoint that was recovered outside of fit, as to evaluate it: its entries;
        self._evaluated_state: Mapping[str, Any] | None = None
        # whether it was of the end of an epoch;
        self._evaluated_end = True
        # calls of fit and optimizer steps of this process then: with others it has trained since,
        # and the weights are no longer those of the checkpoint
        self._evaluated_at = (0, 0)
        # the epoch of the checkpoint that was recovered in fit
        self._fitted_epoch: Any = None

    # ------------------------------------------------------------------ saving

    def save(self, path: Path) -> None:
        """Write the file.

        Args:
            path: of the file.
        """
        progress = self.context.progress
        divisor = self.train_step.sum_divisor
        loss_sum, loss_count, samples = self.loss_sums or self._loss_sums_by_itself()
        shards = self.context.strategy.division().each
        # a recipe may have changed it since fit began
        factor = self.context.accumulation.factor // shards
        # The order counts: `ckpt ls` reads the file up to FIRST_LONG_KEY, which is of the step
        # plan. What is before it must be short; STEP, EPOCH and OPTIMIZER_STEP must be there.
        state = {
            STEP: progress.step // shards,
            EPOCH: progress.epoch,
            # of an epoch that has begun: the next one begins with none
            "avg_train_loss": float(progress.avg_train_loss) if progress.step else 0.0,
            OPTIMIZER_STEP: progress.optimizer_step,
            "epoch_began_at": progress.began_at,
            "nonfinite": progress.nonfinite,
            "clipped": progress.clipped,
            **self._last_validation(),
            **({"empty_steps": progress.empty_steps} if progress.empty_steps else {}),
            **({} if divisor is None else {"sum_divisor": divisor}),
            "loss_sum": str(loss_sum) if isinstance(loss_sum, Fraction) else loss_sum,
            "loss_count": str(loss_count) if isinstance(loss_count, Fraction) else loss_count,
            "samples": int(samples),
            **vars(replace(self.step_plan, grad_accumulation_factor=factor)),
            "asked": vars(self.asked_plan or self.step_plan),
            "steps_per_epoch": self.steps_per_epoch,
            "steps_ahead": self.steps_ahead,
            "fit": self.calls.number,
            "finished": [self.calls.finished.get(number) for number in range(1, self.calls.number)],
            "lacks": self.lacks,
            "seed": self.rank_state.base_seed,
            "settings": self._settings,
            **({"resume_with_new": asked} if (asked := self.new_settings.asked) else {}),
            "trained": {
                name: parameter.requires_grad
                for name, parameter, begun in self._flags
                if parameter.requires_grad is not begun
            },
            "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
            "options": {name: self.context.options[name] for name in TELLING},
            "whole": progress.is_whole,
            "stages_done": progress.has_done_stages,
            DEBUG: bool(self.context.options.debug),
            **({} if (passed_on := self.passed_on) is None else passed_on.state),
        }
        from ddpkit.base import dump_plain_yaml  # loads yaml: not for a Brain alone

        path.write_text(dump_plain_yaml(state), encoding="utf-8")

    def _last_validation(self) -> dict[str, int]:
        """Return when the last validation was, where parts say when there is one."""
        is_asked = self.context.parts.hears("is_validation_due")
        return {"validated_at": self.context.progress.validated_at} if is_asked else {}

    def _loss_sums_by_itself(self) -> Sequence[Any]:
        """Return the sums for a save that a recipe makes, perhaps on the main process alone."""
        progress = self.context.progress
        if not self.context.modules.training:
            return 0.0, 0.0, 0  # the meter holds losses of an evaluation
        if progress.step and progress.train_sums is not None:
            return progress.train_sums  # the epoch's training is over
        # its own share stands for all
        return [own * get_world_size() for own in self.rank_state.own_sums()]

    @property
    def passed_on(self) -> PassedOn | None:
        """What a save holds that comes before any training: what the recovered checkpoint says of
        the run.
        """
        later = self.calls.later
        if later is not None:  # this call of fit is done; the next one goes on from there
            return PassedOn(later[1], self._later_end)
        # in an own loop
        trains = self.context.progress.is_fitting or (
            self.train_step.optimizers and not self.calls.number
        )
        if trains or self._evaluated_at != (
            self.calls.number,
            self.context.progress.optimizer_step,
        ):
            return None
        return PassedOn({**(self._evaluated_state or {}), EVALUATED: True}, self._evaluated_end)

    def epoch_and_steps_of_weights(self) -> tuple[Any, int]:
        """Return the epoch and the number of optimizer steps of the weights that the modules have
        now.

        They are those of the checkpoint that was recovered last outside of ``fit``, or of the last
        training. The epoch is None where nothing was trained, or the checkpoint does not say it.
        """
        progress = self.context.progress
        state = self._evaluated_state
        is_loaded = (
            self._evaluated_at == (self.calls.number, progress.optimizer_step)
            and not progress.is_fitting
        )
        if is_loaded and state is not None:
            return state.get("epoch") or None, state.get("optimizer_step", progress.optimizer_step)
        return progress.epoch or self._fitted_epoch, progress.optimizer_step

    # ------------------------------------------------------------------ recovering

    def find_again(self, path: Path) -> tuple[Checkpoint, Mapping[str, Any] | None]:
        """Return a checkpoint that was recovered before, with its run state if it is still the same
        one.

        Args:
            path: its directory.

        Raises:
            CheckpointError: it cannot be read any more.

        Ranks: main only.
        """
        found = read_checkpoint(path)
        return found, self.states.get((path, ckpt_recency(found)))

    def load(self, path: Path, *, end_of_epoch: bool) -> None:
        """Go on from the file; outside of ``fit`` only remember it.

        Args:
            path: of the file.
            end_of_epoch: whether the checkpoint was made there.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        self.context.progress.resolve_pending()
        folder = self.recovered = path.parent
        if not self.context.progress.is_fitting:
            found = brain_file_or_nothing(folder)
            at = (self.calls.number, self.context.progress.optimizer_step)
            self._evaluated_state = found if "step" in found else None
            self._evaluated_at = at
            self._evaluated_end = end_of_epoch
            return
        start = self.start
        is_start = (
            start is not None
            and isinstance(start.resume, Checkpoint)
            and start.resume.path == folder
        )
        # it was read for the choice
        known = start.state if start is not None and is_start else None
        state = read_brain_file(folder) if known is None else known
        if "step" not in state:
            raise CheckpointError(
                f"{path} does not say how far the run had come: it has no 'step'. {DAMAGED}"
            )
        self.context.progress.recover_updates(state.get("optimizer_step", state["step"]))
        self._fitted_epoch = state.get("epoch")
        self.new_settings.look_at(state)
        other_settings = self._take_settings(folder, state)
        self.train_step.sum_divisor = state.get("sum_divisor")
        self.is_recovered_here = self.calls.accept(folder, state)
        self.calls.later_ends_epoch = end_of_epoch
        if not self.is_recovered_here:
            self._later_end = end_of_epoch
            if self.calls.later is None and not end_of_epoch:
                logger.warning(EARLIER, state["fit"], self.calls.number)
            return
        for name, changes in other_settings.items():
            logger.warning(OTHER_SETTINGS, name, ", ".join(changes))
        self.context.progress.recover_validation(state.get("validated_at", -1))
        self.rank_state.adopt_seed(state.get("seed"))
        self._warn_of_changes(state)
        self._saved_flags = state.get("trained")
        if isinstance(state.get("epoch"), int):
            self.expected_epoch = state["epoch"] + int(end_of_epoch)
        if not end_of_epoch:
            self._go_on_inside_epoch(state)

    def _go_on_inside_epoch(self, state: Mapping[str, Any]) -> None:
        progress = self.context.progress
        if state.get("lacks") is not None:
            logger.warning(LACKS, state["lacks"])
        samples = state.get("samples", 0)
        before = StepPlan.read(state)
        batches, change = self.step_plan.batches_done(before, state["step"], samples)
        step = batches * self.context.strategy.division().each
        for warning in filter(
            None,
            (change, self.step_plan.other_data(before) if state["step"] else None),
        ):
            logger.warning("%s", warning)
        if "loss_sum" not in state and step:
            logger.warning(
                "This checkpoint was made by SpeechBrain in the middle of an epoch: %d batches "
                "are left out now, but in ddpkit's order. To avoid it, go on from the end of an "
                "epoch.", step,
            )  # fmt: skip
        progress.recover_position(
            step,
            began_at=state.get("epoch_began_at", progress.optimizer_step),
            nonfinite=state.get("nonfinite", 0),
            clipped=state.get("clipped", 0),
            empty_steps=state.get("empty_steps", 0),
            avg_train_loss=state["avg_train_loss"],
        )
        count = Fraction(state.get("loss_count", step))
        loss_sum = Fraction(state.get("loss_sum", progress.avg_train_loss * float(count)))
        exact = isinstance(state.get("loss_sum"), str)
        if progress.phase is EpochPhase.OUTSIDE:
            progress.recover_inside(
                (loss_sum, count, samples) if exact else (float(loss_sum), float(count), samples),
                is_whole=bool(state.get("whole")),
                is_validated=bool(state.get("stages_done")),
            )
        if not get_rank():
            progress.meter.restore(loss_sum, count, samples=samples)

    def _warn_of_changes(self, state: Mapping[str, Any]) -> None:
        options = state.get("options")
        own_seed = self.rank_state.base_seed
        changes = (
            changed_options(options, self.context.options) if isinstance(options, Mapping) else []
        )
        changes += self.step_plan.changes(StepPlan.read(state))
        seed = state.get("seed")
        if None not in {seed, own_seed} and seed != own_seed:
            changes.append(f"seed {own_seed}, before {seed}")
        if changes:
            words = (
                "The run goes on with other options than its checkpoint's, and will not be the "
                "same: %s."
            )
            logger.warning(words, "; ".join(changes))

    def check_epoch(self, epoch: int) -> None:
        """Warn where the epoch counter does not go on with the epoch of the checkpoint."""
        expected = self.expected_epoch
        self.expected_epoch = None
        if expected is not None and epoch == expected + 1 and self.context.progress.is_whole:
            self.context.progress.forget_position()  # saved between two epochs: the next one begins
        elif expected not in {None, epoch}:
            words = (
                "The checkpoint goes on with epoch %d, and fit was given epochs that begin with "
                "%d, so epochs are trained again. Give fit a ddpkit.epoch_loop.EpochCounter, and "
                "make it a recoverable of the checkpointer."
            )
            logger.warning(words, expected, epoch)

    # ---------------------------------------------------- settings of optimizers, frozen parameters

    @property
    def begun_settings(self) -> dict[str, list[dict[str, Any]]]:
        """Settings with which the training of each optimizer has begun, by name; what is missing is
        not known.
        """
        return self._settings or {}

    def note_script_settings(self, saved: Mapping[str, Any]) -> None:
        """Note the settings of optimizers that the script has made, before a checkpoint's are
        loaded.

        Args:
            saved: the optimizers that checkpoints hold, by name.
        """
        self._settings = self._script_settings = optimizer_settings(saved)
        begins_at = self.start is not None and isinstance(self.start.resume, Checkpoint)
        known = self.start.state if self.start is not None and begins_at else None
        self.new_settings.begin(self._settings, known)

    def apply_new_settings(self) -> None:
        """Put settings of the script in the place of those of the checkpoint that was recovered,
        where that was asked for.

        Raises:
            ConfigError: the schedule of the script ends before the step of the run.
        """
        if self.calls.later is None:
            self.new_settings.apply(max((self.expected_epoch or 1) - 1, 0))

    def _take_settings(
        self,
        path: Path,
        state: Mapping[str, Any],
    ) -> dict[str, list[str]]:
        """Note the settings that the optimizers go on with; return which of the script's have no
        effect.

        Raises:
            CheckpointError: an optimizer of the script cannot go on with the state of the
                checkpoint's.
        """
        given = self._script_settings
        if given is None:
            given = optimizer_settings(self.train_step.named_optimizers())
        before = state.get("settings") or {}  # of an earlier version nothing is known
        self._settings = {
            name: self.new_settings.merged(name, before.get(name, settings), settings)
            for name, settings in given.items()
        }
        changes = {
            name: changed_settings(
                path,
                name,
                self._settings[name],
                given[name],
            )
            for name in given
        }
        return {name: told for name, told in changes.items() if told}

    def restore_trained_flags(self, modules: nn.ModuleDict) -> None:
        """Freeze and set free the parameters as they were when the checkpoint was saved.

        Hooks of earlier epochs do not run again, and may have done that. The first call notes how
        they begin.

        Args:
            modules: without any wrapper.
        """
        self._flags = self._flags or [
            (name, parameter, parameter.requires_grad)
            for name, parameter in modules.named_parameters()
        ]
        saved = self._saved_flags
        self._saved_flags = None
        count = 0
        for name, parameter, begun in self._flags if isinstance(saved, Mapping) else ():
            wanted = bool(
                saved.get(name, begun if self.calls.number > 1 else parameter.requires_grad)
            )
            count += wanted is not parameter.requires_grad
            parameter.requires_grad_(wanted)
        if count:
            logger.info(
                "%d parameter(s) are frozen, or trained, as they were when the checkpoint was "
                "saved.",
                count,
            )
