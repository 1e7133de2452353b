"""One stage of a run: loader, loop, sync, bar, checkpoints and the hooks around them."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import POSITION, do_nothing, is_sharded
from ddpkit.control import PeriodicSync
from ddpkit.data import StreamLoader
from ddpkit.dataloader import plan_of, set_epoch
from ddpkit.distributed import (
    get_world_size,
    if_main_process,
    start_sum_over_ranks,
    sum_exactly,
    sum_over_ranks,
)
from ddpkit.errors import ConfigError, RunStopped
from ddpkit.launch import find_slice
from ddpkit.logger import get_logger
from ddpkit.metrics import begin_stage, counted_by, metrics_of
from ddpkit.options import READING
from ddpkit.reporting import ProgressBar, RunFacts, TimeLeft
from ddpkit.run.choose_passes import choose_passes
from ddpkit.run.evaluation_stops import StopsOfEvaluation, added_over_store
from ddpkit.run.intra_epoch_saves import IntraEpochSaves
from ddpkit.run.learning_rates import rate_of_bar
from ddpkit.run.memory_report import MemoryReport
from ddpkit.run.module_modes import kept_modes, stage_mode
from ddpkit.run.own_observers import OwnObservers
from ddpkit.run.passes import Passes
from ddpkit.run.prediction import predicted_rows
from ddpkit.run.prediction_files import OutputFiles, OutputsInMemory
from ddpkit.run.skipped_steps import SkippedSteps
from ddpkit.run.speed_report import SpeedReport
from ddpkit.run.stage_errors import explaining
from ddpkit.run.step_validations import StepValidations
from ddpkit.seed import restore_rng_state, rng_state
from ddpkit.train_logger import as_train_logger, run_event
from ddpkit.training import (
    Feed,
    PassedThrough,
    StageBatches,
    StreamFeed,
    compared,
    counting,
    counts_of,
    cuda_graph_steps,
    evaluate_epoch,
    first_of,
    has_cuda_graphs,
    is_divided,
    kept_metrics,
    length_of,
    on_cpu,
    require_same_draw,
    size_of,
    train_epoch,
)
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from ddpkit.control import SyncReport
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run.evaluation_sets import EvaluationSets
    from ddpkit.run.prediction_path import PredictionPath
    from ddpkit.run.stage_hooks import StageHooks
    from ddpkit.run.stop_control import StopControl
    from ddpkit.run.validations import Validations
    from ddpkit.training import LossMeter, RunContext, TrainStep

logger = get_logger(__name__)

BAR_SECONDS = 1.0
_PARTS = (
    "the recipe has sharded its model, so all ranks must make the same forward passes, and here "
    "each has a part of"
)
EVALUATE = (
    f"shard_evaluation={{}}: {_PARTS} the data. Let each rank evaluate all of it: leave "
    "shard_evaluation out, and give data that is not divided."
)
PREDICT = (
    f"predict: {_PARTS} the data. Give the Brain a model that is not sharded; or collect the "
    "outputs in compute_objectives and call evaluate, without shard_evaluation, in which each "
    "rank runs over all of the data."
)
CUT = (
    "optimizer_step_limit=%s ends epoch %d after batch %d. With a larger limit a run goes on from "
    "there."
)


class StageRunner:
    """Runs one stage: a training epoch, a validation, a test, or a prediction.

    Args:
        context: of the run.
        train_step: makes the optimizer steps.
        policy: saves in the middle of an epoch; its rank state puts the data where a checkpoint
            left it.
        stop: knows what has asked to stop; tightens its limits after the first steps.
        validations: when to validate.

    Attributes:
        prepare_new_optimizers: called when the training of an epoch begins, since
            ``on_stage_start`` may have made other optimizers.
        time_left: estimates how long this call of ``fit`` still takes.
        memory: tells what took the memory, where a step runs out of it.
        passes: makes each training pass, of this call of ``fit``.
        speed: measures steps and reports them.
        observers: look on while it trains.

    Ranks: collective.
    """

    def __init__(
        self,
        context: RunContext,
        train_step: TrainStep,
        policy: CheckpointPolicy,
        stop: StopControl,
        validations: Validations,
    ) -> None:
        self.context = context
        self.train_step = train_step
        self.policy = policy
        self.stop = stop
        self.memory = MemoryReport(context, train_step)
        self.rank_state = policy.rank_state
        self.passes = Passes()  # until a call of fit begins
        self.prepare_new_optimizers: Callable[[StageHooks], object] = (
            do_nothing  # until a run sets it
        )
        self.time_left = TimeLeft()
        self.validations = validations
        self._has_graphs = False
        self.speed = SpeedReport(context, train_step)
        self.observers = OwnObservers(context, train_step, self.speed)
        add_up = self.speed.adding(context.progress.logged.sync)
        self._sync = PeriodicSync(add_up, get_world_size(), is_main=if_main_process())
        self._sync_of_bar = PeriodicSync(list, 1, is_main=True)
        self._stop_sync = StopsOfEvaluation(context.progress, stop.cause)
        self._skipped = SkippedSteps(context.progress)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Mark the time of a call of ``fit``, in which a recovered checkpoint sets the position."""
        self.context.progress.begin_fit()
        self._read_options()
        self.passes = choose_passes(
            self.context,
            self.train_step,
            self.policy.run_state,
            self.memory,
        )
        self.speed.prepare()
        self.context.progress.restart()
        self.train_step.forget_window()
        try:
            with self.observers.session():
                yield
            self.speed.tell_if_nothing_found()
        finally:
            self.context.progress.end_fit()
            self.speed.stop()

    def _read_options(self) -> None:
        """Read, when a call begins, the options that its steps are not to ask for."""
        self._has_graphs = has_cuda_graphs(self.context.options)
        if self._has_graphs:
            self.context.progress.copy_losses()

    # ------------------------------------------------------------------ training

    def train_or_measure(
        self,
        brain: StageHooks,
        loader: Any,
        epoch: int,
        *,
        enable_bar: bool,
    ) -> None:
        """Train one epoch; a measured slice of a run trains until enough is measured, and ends.

        Args:
            brain: of the recipe.
            loader: this rank's batches.
            epoch: from 1.
            enable_bar: show progress (main process only, whatever is given).
        """
        plan = find_slice()
        if plan is None or plan.replayed_to:
            self.train(brain, loader, epoch, enable_bar=enable_bar)
            return
        # nothing else needs these
        if plan.learning_rates:
            from ddpkit.run.lr_sweep import sweep_learning_rates

            sweep_learning_rates(plan, self, brain, loader, epoch)
        if plan.estimated_on:
            from ddpkit.run.memory_rehearsal import rehearse_memory

            rehearse_memory(plan, self, brain, loader, epoch)
        from ddpkit.run.measured_slice import measure_slice

        measure_slice(plan, self, brain, loader, epoch)

    def train(
        self,
        brain: StageHooks,
        loader: Any,
        epoch: int,
        *,
        enable_bar: bool,
    ) -> None:
        """Train one epoch.

        Args:
            brain: of the recipe.
            loader: this rank's batches.
            epoch: from 1.
            enable_bar: show progress (main process only, whatever is given).
        """
        self.note_logger(brain)
        with self._logging(Stage.TRAIN, epoch):
            progress = self.context.progress
            train_step = self.train_step
            # a hook or loop of the recipe may have made a step that is not counted yet
            progress.resolve_pending()
            self.time_left.begin_training(epoch, self._done_before(loader))
            self.policy.run_state.check_epoch(epoch)
            self.rank_state.begin_epoch(epoch)
            progress.begin_training()
            # After begin_epoch, which seeds the random streams: what the hook draws is the same in
            # a resumed run. Before all that reads what it may change: what the loader draws from,
            # metrics, frozen parameters, optimizers.
            with stage_mode(lambda: self.context.modules, training=True):
                brain.on_stage_start(Stage.TRAIN, epoch)
                self.context.parts.tell("on_stage_start", brain, Stage.TRAIN, epoch)
            progress.resolve_pending()  # the hook may have made steps
            if (plan := plan_of(loader)) is not None and not hasattr(plan.source, "__next__"):
                # The plan draws its order once per epoch, and the hook may have changed what it
                # draws from, such as weights of samples. A generator cannot be drawn from twice.
                plan.epoch = 0
                set_epoch(loader, epoch)
            self.rank_state.metrics = metrics_of(brain, brain.hparams)
            self.passes.begin(brain, brain.hparams, *self.context.parts.parts)
            self.context.strategy.begin_epoch(self.context.modules)
            self.prepare_new_optimizers(brain)
            train_step.average.follow()
            brain.zero_grad()  # gradients that the hook has computed belong to no step
            one_pass = functools.partial(
                self._pass,
                brain,
                loader,
                epoch,
                enable_bar=enable_bar,
            )
            with self._explaining(brain), self.context.options.held(READING):
                found = self.passes.run(one_pass, loader)
            progress.note_train_loss(found)
            self.validations.plan_after_epoch()
            brain.zero_grad(set_to_none=True)  # frees memory for the validation
            # Before the hook: a checkpoint that it saves has the schedule after this epoch.
            if train_step.schedule is not None and progress.is_whole:
                train_step.schedule.after_stage(
                    Stage.TRAIN,
                    progress.avg_train_loss,
                    progress.optimizer_step,
                )
            with self.context.progress.unsaved(), self._explaining(brain):
                loss = progress.avg_train_loss
                self.context.parts.tell("on_stage_end", brain, Stage.TRAIN, loss, epoch)
                brain.on_stage_end(Stage.TRAIN, progress.avg_train_loss, epoch)
            progress.end_training()

    def _pass(
        self,
        brain: StageHooks,
        loader: Any,
        epoch: int,
        *,
        enable_bar: bool,
    ) -> float:
        """Train on every batch of the epoch; return the mean loss over all samples of all ranks."""
        progress = self.context.progress
        length = length_of(loader)
        if length is not None:
            # On another number of ranks the last step of the epoch may have fewer batches.
            progress.limit_step(length)
        left_out, ready = self.rank_state.begin_pass(loader)
        # after begin_pass: the state that it loads into a stream may name the epoch before
        set_epoch(loader, epoch)
        require_same_draw(loader)
        ready = self.passes.ready(ready)
        source = self._feed(brain, loader, left_out, ready)
        strategy = self.context.strategy
        strategy.begin_pass(progress)
        feed: Any = strategy.feed(source, progress, self.rank_state.base_seed or 0)
        feed = self.passes.feed(feed)
        progress.begin_pass()
        self._begin(
            Stage.TRAIN,
            loader,
            feed if isinstance(feed, StreamFeed) else None,
        )
        feed = self.speed.begin_pass(feed, loader)
        feed = self.observers.feed(feed)
        self.train_step.forget_window()
        saves = IntraEpochSaves(self.context, self.train_step, self.policy, self.stop)
        started = time.monotonic()
        samples_before = int(sum_over_ranks([progress.meter.samples])[0])
        bar_of_pass = self._bar(
            Stage.TRAIN,
            epoch,
            feed.length,
            initial=progress.step,
            enable=enable_bar,
        )
        with self._skipped.written_whatever_ends(), bar_of_pass as bar:

            def on_sync(report: SyncReport) -> None:
                progress.resolve_at_sync()
                self.stop.tighten_timeouts()
                self._write_steps(report.step)
                progress.note_average_loss(report.loss)
                self.speed.on_sync(report, self._sync)
                bar.show(report.step, report.loss, report.samples - samples_before)
                self.context.parts.tell("on_sync", brain)
                saves.on_sync(report)

            limit = self._step_limit(ready)
            inside = self._step_validations(brain, saves, source, bar)
            with self.train_step.warning_without_steps(), self.observers.during_pass():
                is_limited = train_epoch(
                    brain,
                    feed,
                    self._sync,
                    on_sync,
                    limit,
                    on_window=_after_windows(saves, inside),
                    tell=saves.tell,
                )
            self.speed.pause()
            self._end_batches(feed, is_limited=is_limited, inside=inside)
            self._after_last_batch(brain, saves)
            trained = epoch, progress.optimizer_step
            return self._finish(
                Stage.TRAIN,
                trained,
                time.monotonic() - started,
                bar,
                samples_before,
            )

    def _end_batches(
        self,
        feed: Any,
        *,
        is_limited: bool,
        inside: StepValidations | None,
    ) -> None:
        """Note, and say, whether the pass has read all of its data."""
        progress = self.context.progress
        is_read = feed.length is not None and progress.step >= feed.length
        has_ended = inside is not None and inside.has_ended
        progress.end_batches(is_whole=is_read or not (is_limited or has_ended))
        if not progress.is_whole and not has_ended:
            limit = self.context.options.optimizer_step_limit
            logger.info(CUT, limit, progress.epoch, progress.step)

    def _step_validations(
        self,
        brain: StageHooks,
        saves: IntraEpochSaves,
        feed: Feed | StreamFeed,
        bar: ProgressBar,
    ) -> StepValidations | None:
        """Return what validates between the steps of a pass; None where no part asks for that."""
        if not self.validations.follows_steps:
            return None
        keeping = functools.partial(self._keeping_training, brain, bar)
        inside = StepValidations(self.validations, saves, feed, keeping)
        feed.ready = inside.after(feed.ready)
        return inside

    @contextlib.contextmanager
    def _keeping_training(self, brain: StageHooks, bar: ProgressBar) -> Iterator[None]:
        """Return a context for a validation between two steps, after which the training is as it
        was.
        """
        progress = self.context.progress
        progress.resolve_at_sync()
        began = time.monotonic()
        progress.note_average_loss(_mean_over_ranks(progress.meter))  # hooks may report it
        random = rng_state()
        self.observers.end_batch()
        with (
            self.speed.suspended(),
            bar.suspended(),
            kept_modes(self.context.modules),
            kept_metrics(brain, self.context.hparams, *self.context.parts.parts),
            self.policy.between_steps(),
            progress.between_steps(),
            counted_by(progress.window),
        ):
            yield
        restore_rng_state(random)
        self._sync.leave_out(time.monotonic() - began)

    def _after_last_batch(self, brain: StageHooks, saves: IntraEpochSaves) -> None:
        """Step on what a cut window has left; make equal on all ranks what a pass lets differ."""
        progress = self.context.progress
        train_step = self.train_step
        if train_step.prepare_flush(brain):
            brain.optimizers_step()
        progress.resolve_at_sync()
        train_step.end_window()
        progress.window.stepped()
        train_step.drop_frozen_gradients()
        self.context.strategy.end_pass(self.context.modules)
        saves.on_average()
        train_step.warn_if_diverged()
        # an evaluation follows, whose batches all count
        progress.window.count = 1
        progress.window.weight = 1.0
        self.rank_state.gather_for_save()

    def _step_limit(self, ready: Callable[[], object]) -> float:
        """Return the optimizer step that ends the pass; if it is made already, do what the feed
        would have done.
        """
        limit = self.context.options.optimizer_step_limit
        if limit is None:
            return float("inf")
        if self.context.progress.optimizer_step >= limit:
            ready()  # the feed calls it before its next batch, and none is read
            self.rank_state.read_nothing()
        return limit

    def _feed(
        self,
        brain: StageHooks,
        loader: Any,
        left_out: int,
        ready: Callable[[], object],
    ) -> Feed | StreamFeed:
        """Make the feed of a training pass. For a stream the ranks exchange the sizes of their
        batches.
        """
        options = self.context.options
        strategy = self.context.strategy
        length = length_of(loader)
        batches = self.observers.batches(self._batches(brain, loader, Stage.TRAIN), left_out)
        known: dict[str, Any] = {
            "factor": self.context.accumulation.factor,
            "weighting": options.loss_weighting,
            "world_size": get_world_size(),
            "start": self.context.progress.step,
            "left_out": left_out,
            "ready": ready,
        }
        if length is not None:
            known["length"] = self._limited(length, strategy.division().each)
            return Feed(loader=batches, counts=counts_of(loader), **known)
        if isinstance(loader, StreamLoader):
            loader.keep_step = True
        if options.debug:
            most = options.debug_batches * strategy.division().each
            batches = first_of(batches, max(most - self.context.progress.step + left_out, 0))
        return StreamFeed(
            loader=batches,
            whole_batches=getattr(loader, "batch_size", None) is None,
            start_sum=start_sum_over_ranks,
            size_of=size_of(loader),
            uneven=strategy.recording_use,
            **known,
        )

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self,
        brain: StageHooks,
        loader: Any,
        stage: Stage,
        epoch: int | None,
        *,
        enable_bar: bool,
    ) -> float:
        """Evaluate a loader.

        Args:
            brain: of the recipe.
            loader: this rank's batches: the whole set, or its part of it.
            stage: VALID or TEST.
            epoch: of the training, or None.
            enable_bar: show progress (main process only, whatever is given).

        Returns:
            The mean loss over all samples, one number for all ranks.
        """
        if not self.context.progress.is_fitting:
            self._read_options()
        self.note_logger(brain)
        self.context.progress.resolve_pending()  # of a hook or loop of the recipe
        trained = epoch, self.context.progress.optimizer_step
        if epoch is None:
            trained = self.policy.run_state.epoch_and_steps_of_weights()
        with self._logging(stage, *trained), self._modes_of_fit(stage):
            progress = self.context.progress
            is_inside = stage is Stage.TEST and progress.is_fitting  # a hook of fit evaluates
            kept = (progress.step, progress.meter) if is_inside else None
            if stage is Stage.VALID and not progress.is_between_steps:
                self.time_left.begin_validation()
            with stage_mode(lambda: self.context.modules, training=False):
                brain.on_stage_start(stage, epoch)
                self.context.parts.tell("on_stage_start", brain, stage, epoch)
            progress.resolve_pending()
            with (
                self._explaining(brain),
                self._stoppable(),
                self.train_step.average.evaluated(stage),
                self._evaluating(loader),
            ):
                loss = self._evaluate(
                    brain,
                    loader,
                    stage,
                    epoch,
                    trained,
                    enable_bar=enable_bar,
                )
            if stage is Stage.VALID and progress.set_decides:
                self._end_validation(loss)
            with torch.no_grad(), self.context.progress.unsaved(), self._explaining(brain):
                if progress.set_decides:
                    self.context.parts.tell("on_stage_end", brain, stage, loss, epoch)
                    brain.on_stage_end(stage, loss, epoch)
                else:
                    brain.on_set_end(stage, loss, epoch)
                    progress.logged.set_aside(loss)
            progress.end_evaluation(kept)
            return loss

    def _end_validation(self, loss: float) -> None:
        """Note the loss of a validation, on the set that decides; step a schedule that follows
        it.
        """
        progress = self.context.progress
        schedule = self.train_step.schedule
        progress.end_validation(loss)
        progress.logged.take_other_sets()
        if schedule is not None and (progress.is_whole or progress.is_between_steps):
            schedule.after_stage(Stage.VALID, loss, progress.optimizer_step)

    def test(
        self,
        brain: StageHooks,
        sets: EvaluationSets,
        *,
        enable_bar: bool,
    ) -> float | dict[str, float]:
        """Evaluate one set, or several by name; return the mean loss of each.

        Args:
            brain: of the recipe.
            sets: this rank's batches.
            enable_bar: as for :meth:`evaluate`.
        """
        losses: dict[str, float] = {}
        for name, loader in sets.loaders.items():
            with self.context.progress.on_set(name):
                losses[name] = self.evaluate(brain, loader, Stage.TEST, None, enable_bar=enable_bar)
        return losses if sets.are_named else losses[sets.deciding]

    def _evaluate(
        self,
        brain: StageHooks,
        loader: Any,
        stage: Stage,
        epoch: int | None,
        trained: tuple[int | None, int],
        *,
        enable_bar: bool,
    ) -> float:
        """Evaluate every batch; ``trained``: the epoch and the optimizer steps of the weights."""
        progress = self.context.progress
        progress.begin_evaluation()
        require_same_draw(loader)
        self._begin(stage, loader)
        started = time.monotonic()
        strategy = self.context.strategy
        is_shared = self.context.options.shard_evaluation
        shards = strategy.division().each if is_shared else 1
        most = self.validations.most_batches if stage is Stage.VALID else math.inf
        with self._bar(
            stage,
            epoch,
            self._limited(length_of(loader), shards, most),
            enable=enable_bar,
        ) as bar:
            plan = plan_of(loader)
            sync = self._sync_of_bar
            bar.partial = plan is not None and plan.world_size > 1
            stop_sync = self._stop_sync
            stop_sync.sync.start(progress.step)
            batches: Iterable[Any] = first_of(
                self._batches(brain, loader, stage),
                self._limited(None, shards, most),
            )
            if is_shared:
                seed = self.rank_state.base_seed or 0
                key = progress.epoch, progress.optimizer_step
                batches = strategy.evaluated(batches, seed, *key)
            evaluate_epoch(
                brain,
                batches,
                stage,
                bar,
                count=counting(loader),
                sync=sync,
                after_batch=stop_sync,
            )
            stop_sync.await_others()
            return self._finish(stage, trained, time.monotonic() - started, bar)

    # ------------------------------------------------------------------ prediction

    def predict(
        self,
        brain: StageHooks,
        loader: Any,
        precision: Any,
        target: PredictionPath | None,
        *,
        enable_bar: bool,
    ) -> list[Any]:
        """Run the model over a loader.

        Args:
            brain: of the recipe.
            loader: this rank's batches.
            precision: a context for each batch.
            target: where the outputs are written; None: they are kept and gathered.
            enable_bar: as for :meth:`evaluate`.

        Returns:
            One output per sample of all ranks, in dataset order, on every rank; or the files that
            were written.
        """
        with self._modes_of_fit(Stage.TEST):
            self.context.modules.eval()
            return self._predict(brain, loader, precision, target, enable_bar=enable_bar)

    def _predict(
        self,
        brain: StageHooks,
        loader: Any,
        precision: Any,
        target: PredictionPath | None,
        *,
        enable_bar: bool,
    ) -> list[Any]:
        progress = self.context.progress
        progress.resolve_pending()
        stage_batches = StageBatches(
            Stage.TEST,
            loader,
            divided=get_world_size() > 1 and is_divided(loader),
        )
        begin_stage(divided=stage_batches.divided)
        POSITION.stage_begins()
        with contextlib.ExitStack() as stack:
            stack.enter_context(progress.predicting(stage_batches))
            stack.enter_context(self._stoppable())
            stack.enter_context(progress.logged.during(None, None))
            kept: OutputsInMemory | OutputFiles = OutputsInMemory(stage_batches)
            if target is not None:
                kept = OutputFiles(target, stage_batches)
                stack.enter_context(kept.open())
            with (
                self._explaining(brain),
                self.train_step.average.evaluated(Stage.TEST),
                self._evaluating(loader, PREDICT),
            ):
                self._outputs(brain, loader, precision, kept, enable_bar=enable_bar)
            return kept.finish()

    @torch.no_grad()
    def _outputs(
        self,
        brain: StageHooks,
        loader: Any,
        precision: Any,
        kept: OutputsInMemory | OutputFiles,
        *,
        enable_bar: bool,
    ) -> None:
        """Run the model over this rank's batches; keep one output per sample, on the CPU."""
        progress = self.context.progress
        counts = counts_of(loader)
        makes_batches = (
            getattr(loader, "batch_size", 0) is None
            and getattr(loader, "batch_sampler", None) is None
        )
        # An output may be wrong on one rank alone: the others would wait for that rank in a
        # collective.
        due = time.monotonic() + BAR_SECONDS
        stop_sync = StopsOfEvaluation(progress, self.stop.cause, added_over_store)
        total = self._limited(length_of(loader))
        with ProgressBar("predict", total, enable=enable_bar and if_main_process()) as bar:
            seed = self.rank_state.base_seed or 0
            key = progress.epoch, progress.optimizer_step
            batches = first_of(self._batches(brain, loader, Stage.TEST), self._limited(None))
            for number, batch in enumerate(self.context.strategy.evaluated(batches, seed, *key), 1):
                progress.begin_batch()
                with precision:
                    output = on_cpu(brain.predict_batch(batch))
                count = None if counts is None else counts.count(number - 1)
                kept.add(
                    [output]
                    if makes_batches
                    else predicted_rows(output, count, type(brain).__name__)
                )
                if time.monotonic() >= due:
                    due = time.monotonic() + BAR_SECONDS
                    bar.show(number, None, kept.count)
                stop_sync(number)
            stop_sync.await_others()
            bar.show(progress.step, None, kept.count)
        if progress.stage_batches is not None:
            progress.stage_batches.close(progress.step)

    # ------------------------------------------------------------------ around every stage

    @contextlib.contextmanager
    def _logging(
        self,
        stage: Stage,
        epoch: int | None,
        evaluated: int | None = None,
    ) -> Iterator[None]:
        """Return a context for a stage with its hooks, in which a recipe may log values.

        Args:
            stage: TRAIN, VALID or TEST.
            epoch: or None.
            evaluated: the optimizer steps of the weights in an evaluation.
        """
        progress = self.context.progress

        def step() -> int:
            return progress.optimizer_step if evaluated is None else evaluated

        with progress.logged.during(stage, epoch, step, progress.set_name):
            self.context.progress.window.weight = 1.0  # of what is logged before the first batch
            yield

    def note_logger(self, brain: StageHooks) -> None:
        """Note the train logger of the recipe, which gets what is logged per step."""
        found = getattr(brain.hparams, "train_logger", None)
        self.context.progress.logged.train_logger = as_train_logger(found)

    def _modes_of_fit(self, stage: Stage) -> AbstractContextManager[None]:
        """Return a context after which the modules are in their modes again, where a hook of
        ``fit`` evaluates.
        """
        is_inside = stage is Stage.TEST and self.context.progress.is_fitting
        return kept_modes(self.context.modules) if is_inside else contextlib.nullcontext()

    def _begin(
        self,
        stage: Stage,
        loader: Any,
        stream: StreamFeed | None = None,
    ) -> None:
        """Note, for gathering and for the metrics, what a stage runs over, and whether it is
        divided over the ranks.
        """
        is_training = stage is Stage.TRAIN
        if is_training:
            self._skipped = SkippedSteps(self.context.progress)
        divided = get_world_size() > 1 and (
            is_training or is_divided(loader, unknown=self.context.options.shard_evaluation)
        )
        begin_stage(divided=divided, steps_together=is_training)
        POSITION.stage_begins()
        before = self.context.progress.meter.samples
        first = self.context.progress.step if is_training else 0
        self.context.progress.begin_stage(
            StageBatches(
                stage,
                loader,
                divided,
                first=first,
                stream=stream,
                samples_before=before,
            )
        )

    def _batches(self, brain: StageHooks, loader: Any, stage: Stage) -> Iterable[Any]:
        batches = compared(loader, stage)
        parts = self.context.parts
        if parts.hears("wrap_batches"):
            batches = PassedThrough(
                batches,
                lambda inner: iter(parts.wrapped(brain, inner, stage)),
            )
        return PassedThrough(batches, cuda_graph_steps) if self._has_graphs else batches

    def _limited(
        self,
        length: int | None,
        shards: int = 1,
        most: float = math.inf,
    ) -> int | None:
        """Return how many batches of a loader are used, with the option ``debug`` only a few; None:
        all.
        """
        if self.context.options.debug:
            most = min(most, self.context.options.debug_batches)
        if math.isinf(most):
            return length
        used = int(most) * shards
        return used if length is None else min(length, used)

    def _bar(
        self,
        stage: Stage,
        epoch: int | None,
        length: int | None,
        *,
        initial: int = 0,
        enable: bool,
    ) -> ProgressBar:
        options = self.context.options
        last = self.time_left.last
        of_how_many = "" if epoch is None or last is None or epoch > last else f" of {last}"
        what = f"{stage.name.lower()} {self.context.progress.set_name}".rstrip()
        return ProgressBar(
            what if epoch is None else f"epoch {epoch}{of_how_many} {what}",
            length,
            initial=initial,
            enable=enable and if_main_process(),
            colour=options.tqdm_barcolor.get(stage.name.lower())
            if options.tqdm_colored_bar
            else None,
            of_run=functools.partial(self._facts_of_run, stage, length),
        )

    def _facts_of_run(
        self,
        stage: Stage,
        length: int | None,
        step: int,
    ) -> RunFacts:
        """Return what the bar shows of the run; asked about once a second, on the main process."""
        if stage is Stage.TEST:
            return RunFacts()
        rate = (
            rate_of_bar(self.train_step.named_optimizers().values()) if stage is Stage.TRAIN else ""
        )
        if self.context.progress.is_between_steps:  # it counts for the training around it
            return RunFacts()
        left = self.time_left.estimate(step / length if length else None)
        return RunFacts(
            rate,
            left,
            self.speed.data_wait() if stage is Stage.TRAIN else 0.0,
        )

    def _done_before(self, loader: Any) -> float | None:
        """Return the part of an epoch's training that was done before a restart; None: a part that
        is not known.
        """
        if not self.context.progress.step:
            return 0.0
        length = length_of(loader)
        return self.context.progress.step / length if length else None

    def _evaluating(self, loader: Any, words: str = EVALUATE) -> AbstractContextManager[None]:
        divided = is_divided(loader, unknown=self.context.options.shard_evaluation)
        strategy = self.context.strategy
        divided_modules = strategy.divided_modules()
        gathered = {id(weight) for module in divided_modules for weight in module.parameters()}
        if divided and any(
            is_sharded(parameter) and id(parameter) not in gathered
            for parameter in self.context.modules.parameters()
        ):
            raise ConfigError(words.format(self.context.options.shard_evaluation))
        return strategy.evaluating(None if divided else length_of(loader))

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        try:
            yield
        except RunStopped as stopped:
            self.stop.stop_evaluation(stopped)

    def _explaining(self, brain: StageHooks) -> AbstractContextManager[None]:
        return explaining(brain, self.context.options, self.context.strategy, self.memory)

    def _finish(
        self,
        stage: Stage,
        trained: tuple[int | None, int],
        seconds: float,
        bar: ProgressBar,
        before: int = 0,
    ) -> float:
        """Compute the mean loss over all ranks, report and return it.

        Args:
            stage: that is over.
            trained: the epoch and the optimizer steps of the weights.
            seconds: that it took.
            bar: shows the loss.
            before: samples trained before a restart.
        """
        epoch, steps = trained
        progress = self.context.progress
        # how many times the sum over the ranks has each sample: once, where they share the data
        times_counted = 1
        meter = progress.meter
        stage_batches = progress.stage_batches
        if stage_batches is not None:
            stage_batches.close(progress.step, meter.samples)
            # not divided: every rank has evaluated all samples
            times_counted = 1 if stage_batches.divided else get_world_size()
        own = [*meter.totals(), meter.samples, meter.skipped]
        loss_sum, count, bad, samples, skipped = progress.logged.sync(own, at_end=True)
        mean = float(loss_sum / count) if count else float("nan")
        if stage is Stage.TRAIN:
            progress.note_trained((loss_sum, count, int(samples)))
        bad = int(bad) // times_counted
        samples = int(samples) // times_counted
        skipped = int(skipped) // times_counted
        bar.partial = False
        bar.show(progress.step, mean, samples - before)
        if stage is not Stage.TRAIN and not samples and not count:
            logger.warning("%s: there was nothing to evaluate: the mean loss is NaN.", stage.name)
        if skipped:
            self._tell_skipped_batches(stage, skipped, is_all=not count and not bad)
        if bad:
            words = "%s: %d batches had a loss that is not finite; they are left out of the mean."
            logger.warning(words, stage.name, int(bad))
        facts: dict[str, Any] = {"loss": mean, "samples": int(samples), "optimizer_step": steps}
        if stage is Stage.TRAIN:
            self._report_clipping(epoch)
            facts["clipped_share"] = progress.clipped_share
            facts["skipped"] = progress.nonfinite
            self._write_steps(progress.step)
            facts |= {"empty_steps": progress.empty_steps} if progress.empty_steps else {}
        facts |= {"skipped_batches": skipped} if skipped else {}
        values = progress.logged.values.get(stage.name.lower())
        facts |= {"logged": dict(values)} if values else {}
        facts |= {"set": progress.set_name} if progress.set_name else {}
        facts |= self._part_of_epoch()
        run_event(
            "stage",
            stage=stage.name,
            epoch=epoch,
            **facts,
            seconds=round(seconds, 3),
        )
        return mean

    def _tell_skipped_batches(self, stage: Stage, skipped: int, *, is_all: bool) -> None:
        """Say for how many batches of a stage the recipe has returned no loss."""
        if is_all:
            words = (
                "%s: compute_objectives returned None for all %d batches: the mean loss is NaN. "
                "Look for a missing return; None skips a batch."
            )
            logger.warning(words, stage.name, skipped)
            return
        words = "%s: %d batches were skipped, as compute_objectives returned None for them."
        logger.info(words, stage.name, skipped)
        empty = self.context.progress.empty_steps
        if stage is Stage.TRAIN and empty:
            words = "TRAIN: %d optimizer steps were left out: none of their batches had a loss."
            logger.info(words, empty)

    def _part_of_epoch(self) -> dict[str, float]:
        """Return the part of its epoch after which a validation between two steps was made, if it
        is known.
        """
        progress = self.context.progress
        length = length_of(progress.loader) if progress.is_between_steps else None
        return {"epoch_part": round(progress.window_end / length, 6)} if length else {}

    def _write_steps(self, step: int) -> None:
        """Write what was logged per step, and which steps were skipped, since the last time."""
        progress = self.context.progress
        progress.logged.write_steps(step, progress.optimizer_step)
        self._skipped.write()

    def _report_clipping(self, epoch: int | None) -> None:
        """Say in how many steps of the epoch gradients were clipped; the first time also without
        any logging.
        """
        progress = self.context.progress
        if progress.clipped:
            say = logger.info if progress.has_reported_clipping else logger.announce
            progress.note_clipping_reported()
            words = (
                "epoch %s: the gradients of %d of %d optimizer steps were clipped to norm %s "
                "(--max_grad_norm)."
            )
            say(
                words,
                epoch,
                progress.clipped,
                progress.optimizer_step - progress.began_at,
                self.context.options.max_grad_norm,
            )


def _mean_over_ranks(meter: LossMeter) -> float:
    """Return the mean loss of all ranks; 0.0 before the first. Collective."""
    loss_sum, count, _ = sum_exactly(meter.totals())
    return float(loss_sum / count) if count else 0.0


def _after_windows(
    saves: IntraEpochSaves,
    inside: StepValidations | None,
) -> Callable[[], object] | None:
    """Return what a pass calls after each optimizer step; None: nothing."""
    if inside is not None:
        return inside.on_window
    return saves.on_window if saves.follows_windows else None
