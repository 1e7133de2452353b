"""Faults in parts: who hears what, in which order, and what is kept of it."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

EVENTS = "tests/parts/test_events.py"
AVERAGES = "tests/parts/test_averaged_weights.py"
VALIDATION = "tests/parts/test_validation_schedule.py"
PROGRESS = "tests/parts/test_kubeflow_progress.py"
SETS = "tests/contract/test_sets_by_name.py"

FAULTS = [
    *in_room(
        "parts",
        EVENTS,
        [
            Fault(
                "an event that a part has as an attribute is not heard",
                "_overrides",
                "getattr(type(part), event) is not getattr(Part, event) or event in vars(part)",
                "getattr(type(part), event) is not getattr(Part, event)",
            ),
            Fault(
                "a part that another needs may stand after it",
                "_check",
                "parts[:number]",
                "parts",
            ),
            Fault(
                "parts of the YAML come last",
                "parts_of",
                "[*in_yaml, *(part for part in own"
                " if all(part is not other for other in in_yaml))]",
                "[*own, *(part for part in in_yaml if all(part is not other for other in own))]",
            ),
            Fault(
                "a part that fails is not named",
                "PartEvents.bound.call_all",
                "note_part(error, name)",
                "pass",
            ),
            Fault(
                "an error of the data has the name of the part that its batches go through",
                "_Below.above",
                "error is not self._passing",
                "True",
            ),
            Fault(
                "early stopping goes on counting in a further call of fit",
                "EarlyStopping.on_fit_start",
                "self._begin_anew()",
                "pass",
                "tests/parts/test_early_stopping.py",
            ),
            Fault(
                "an epoch in which a call of fit has ended is begun again by the next call",
                "_leave_unfinished",
                "epoch_counter.leave_unfinished()",
                "pass",
                "tests/parts/test_early_stopping.py",
            ),
            Fault(
                "a step that is made again counts twice in the recipe's metrics",
                "AutoMicroBatch._divide",
                "self._kept.put_back()",
                "pass",
                "tests/ranks/test_auto_micro_batch.py -k made_again",
            ),
            Fault(
                "a batch is counted as skipped before its step is known to be over",
                "Progress.count_skipped_batch",
                "self.skipped_at = self.step",
                "self.meter.skipped += 1",
                "tests/ranks/test_auto_micro_batch.py -k made_again",
            ),
            Fault(
                "parts do not hear that a step has found no memory",
                "MemoryReport.tell",
                'parts.tell("on_out_of_memory", error)',
                "pass",
                "tests/run/test_memory_report.py",
            ),
            Fault(
                "allocations are recorded after fit",
                "MemorySnapshots.around_fit",
                "stop_memory_history(self.device)",
                "pass",
                "tests/parts/test_memory_snapshots.py",
            ),
            Fault(
                "the garbage collector runs after one step too many",
                "GarbageCollection.on_step_counted",
                "brain.optimizer_step % self.interval == 0",
                "brain.optimizer_step % self.interval == 1",
                "tests/contract/test_garbage.py",
            ),
            Fault(
                "every process posts its progress to Kubeflow",
                "KubeflowProgress.on_fit_start",
                "url and if_main_process()",
                "url",
                PROGRESS,
            ),
            Fault(
                "a second call of fit begins where the first has ended, to Kubeflow",
                "KubeflowProgress._part_done",
                "brain.optimizer_step - self.done_before",
                "brain.optimizer_step",
                PROGRESS,
            ),
            Fault(
                "what Kubeflow does not take ends the thread that tells it",
                "LatestPoster._try",
                "logger.warning",
                "raise error; logger.warning",
                PROGRESS,
            ),
            Fault(
                "a context of a part ends the failure of a run",
                "_leaving.leave",
                "context.__exit__(kind, passing, trace)",
                "return context.__exit__(kind, passing, trace)",
                "tests/parts/test_around_fit.py",
            ),
            Fault(
                "parts of options hear before those that were given",
                "PartEvents.with_own",
                "(*self.parts, *own)",
                "(*own, *self.parts)",
                "tests/parts/test_around_fit.py",
            ),
            Fault(
                "patience is a validation too long",
                "EarlyStopping._is_exhausted",
                "self.waited >= self.patience",
                "self.waited > self.patience",
                "tests/parts/test_early_stopping.py",
            ),
            Fault(
                "a value that is not finite is the best one",
                "EarlyStopping._is_better",
                "not math.isfinite(value)",
                "False",
                "tests/parts/test_early_stopping.py",
            ),
        ],
    ),
    *in_room(
        "run",
        EVENTS,
        [
            Fault(
                "parts do not hear the end of a validation",
                "StageRunner.evaluate",
                'self.context.parts.tell("on_stage_end", brain, stage, loss, epoch)',
                "pass",
            ),
            Fault(
                "each rank ends by its own word",
                "EarlyEnd.is_due",
                "if not self._is_asked():\n    return False",
                "if not self.reason:\n    return False",
            ),
            Fault(
                "a validation between two steps draws from the training's random streams",
                "StageRunner._keeping_training",
                "restore_rng_state(random)",
                "pass",
                VALIDATION,
            ),
            Fault(
                "a repeated step counts again what was listed in it",
                "AutoMicroBatch.begin",
                "metrics_among(*owners)",
                "KeptMetrics(())",
                "tests/ranks/test_auto_micro_batch.py",
            ),
            Fault(
                "the set that decides comes first, before the values of the others",
                "EvaluationSets.deciding_last",
                "return [*others, first]",
                "return [first, *others]",
                SETS,
            ),
            Fault(
                "each set of a validation decides",
                "Validations.validate",
                "name == sets.deciding",
                "True",
                SETS,
            ),
            Fault(
                "the last step of an epoch has a validation of its own",
                "StepValidations._is_at_end",
                "return self._feed.is_at_end(progress.step)",
                "return False",
                VALIDATION,
            ),
            Fault(
                "each step is told to the event of gradients",
                "Run.hearing",
                'parts.bound("after_step", brain)',
                'parts.bound("on_gradients", brain)',
            ),
        ],
    ),
    *in_room(
        "training",
        VALIDATION,
        [
            Fault(
                "a validation that is saved is made again",
                "Progress.note_validation",
                "self.resolved.optimizer_step",
                "-1",
            ),
        ],
    ),
    *in_room(
        "training",
        EVENTS,
        [
            Fault(
                "gradients are heard before they are divided by the count",
                "TrainStep._step_with_gradients_heard",
                "self.final_gradients(brain)",
                "contextlib.nullcontext()",
            ),
        ],
    ),
    *in_room(
        "parts",
        AVERAGES,
        [
            Fault(
                "weights of the steps before a late start are averaged",
                "ScheduledAverage.update",
                "self.has_begun()",
                "True",
            ),
            Fault(
                "renewed statistics stay in the modules and not in the average",
                "ScheduledAverage.take_statistics",
                "average.copy_(statistic.now())",
                "statistic.now()",
            ),
            Fault(
                "to renew statistics moves the random numbers of the training",
                "_random_streams_kept",
                "restore_rng_state(state)",
                "pass",
            ),
            Fault(
                "renewed statistics are moving averages",
                "_only_statistics_move",
                "layer.momentum = None",
                "pass",
            ),
        ],
    ),
]
