"""Faults in steps, loops, feeds and gathering."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

FEED = "tests/training/test_step_sizes.py tests/training/test_stream_feed.py"
STEP = (
    "tests/training/test_loop_train_step.py tests/training/test_loop.py "
    "tests/contract/test_brain_gradients.py"
)
RANKS = "tests/ranks/test_arithmetic.py"
MODEL = "tests/model/test_model.py"

FAULTS = in_room(
    "training",
    STEP,
    [
        Fault(
            "a loss is weighed without the number of ranks that DDP divides by",
            "Feed.batches",
            "window.weight * self.world_size / total",
            "window.weight / total",
            f"{FEED} {RANKS}",
        ),
        Fault(
            "the last window of an epoch is not closed where it is short",
            "Feed.batches",
            "index_in_window == self.factor - 1 or number == length - 1",
            "index_in_window == self.factor - 1",
            f"{FEED} {STEP}",
        ),
        Fault(
            "the samples of a short window are counted as if it were whole",
            "Feed.batches",
            "range(number, min(after, length))",
            "range(number, after)",
            f"{FEED} {STEP}",
        ),
        Fault(
            "a training loader that ends early is not noticed",
            "Feed.batches",
            "done < length",
            "done < 0",
            f"{FEED} {STEP}",
        ),
        Fault(
            "a stream's first window is as long as any, though it goes on in its middle",
            "StreamFeed.batches",
            "self.start % self.factor",
            "0",
            FEED,
        ),
        Fault(
            "the gradients of a stream's short window are not corrected",
            "StreamFeed.batches",
            "assumed_weight / seen_weight if window.closes and seen_weight else 1.0",
            "1.0",
            FEED,
        ),
        Fault(
            "a stream's window ends one micro-batch late where the stream ends",
            "StreamFeed.batches",
            "position == self.factor or not ahead[0].sums().ranks",
            "position == self.factor",
            FEED,
        ),
        Fault(
            "a global batch that micro-batches do not fill is rounded down",
            "micro_batches",
            "-(-whole // (micro * shards))",
            "whole // (micro * shards)",
            f"{FEED} tests/unit/test_run_opts.py tests/contract/test_steps_of_a_window.py",
        ),
        Fault(
            "a run's length does not know of its step limit",
            "RunLength.of",
            "min(whole, limit or whole)",
            "whole",
            f"{FEED} tests/contract/test_schedules.py",
        ),
        Fault(
            "a divided evaluation leaves samples out where the recipe has drop_last",
            "LoaderFactory._sharding",
            "Sharding.of_this_rank(division, keep_step=False, may_drop=False)",
            "Sharding.of_this_rank(division, keep_step=False)",
            f"{FEED} tests/contract/test_evaluation_drops_nothing.py "
            "tests/ranks/test_evaluation_drops_nothing.py",
        ),
        Fault(
            "evaluation leaves samples out where the recipe has drop_last",
            "LoaderFactory._sharding",
            "Sharding(seed=default_seed(), may_drop=False)",
            "Sharding(seed=default_seed())",
            f"{FEED} tests/contract/test_evaluation_drops_nothing.py",
        ),
        Fault(
            "the last batch that is moved ahead is lost",
            "moved_ahead",
            """
            if ahead is not None:
                yield _arrived(*ahead, device)
            ahead = coming
            """,
            """
            if ahead is not None:
                yield _arrived(*ahead, device)
                ahead = None
            else:
                ahead = coming
            """,
            "tests/training/test_device_prefetch.py",
        ),
        Fault(
            "an empty training set is not told",
            "check_train_data",
            "batches == 0",
            "batches == -1",
            f"{FEED} tests/contract/test_bad_input.py",
        ),
        Fault(
            "the window counts a micro-batch twice where a recipe defers it twice",
            "Window.defer",
            "step != self.deferred_at",
            "True",
        ),
        Fault(
            "an epoch goes on with the skipped steps of the one before",
            "Progress.begin_pass",
            "self.nonfinite = 0",
            "pass",
            "tests/training/test_late_steps.py",
        ),
        Fault(
            "an epoch goes on with the clipped steps of the one before",
            "Progress.begin_epoch",
            "self.clipped = 0",
            "pass",
            "tests/contract/test_what_is_told.py",
        ),
        Fault(
            "the losses of a validation stay for the next epoch",
            "Progress.end_evaluation",
            "(0, self.new_meter()) if kept is None else kept",
            "(0, self.meter) if kept is None else kept",
            "tests/golden",
        ),
        Fault(
            "averaged weights move after every batch of a window",
            "TrainStep.backward",
            "scale = 0.0",
            """
            scale = 0.0
            if self.average.weights is not None:
                self.average.weights.update()
            """,
            MODEL,
        ),
        Fault(
            "a schedule by steps counts the batches of a window",
            "TrainStep.backward",
            "scale = 0.0",
            """
            scale = 0.0
            if self.schedule is not None and self.progress.optimizer_step:
                self.schedule.after_step(list(self.named_optimizers().values()))
            """,
            MODEL,
        ),
        Fault(
            "the reported loss of a training is a mean over batches of any size",
            "train_epoch",
            "meter.append(one_number(loss, name, 'fit_batch'), window.weight)",
            "meter.append(one_number(loss, name, 'fit_batch'), 1.0)",
            MODEL,
        ),
        Fault(
            "counts that are no whole numbers are rounded to single precision",
            "_column",
            "torch.full((), number, dtype=wide, device=device)",
            "torch.full((), number, device=device)",
            f"tests/unit/test_metrics.py {MODEL}",
        ),
        Fault(
            "a mean loss is planned for a window of which a batch was skipped before",
            "SkippedBatches._require_one_kind",
            "{MEAN, SKIPPED} <= self._seen",
            "{MEAN, SKIPPED} <= set()",
            "tests/ranks/test_skipped_batches.py",
        ),
        Fault(
            "each step copies all that metrics have listed",
            "_GrowingList.copied",
            "self._has_only_grown(current)",
            "False",
            "tests/training/test_kept_metrics.py",
        ),
        Fault(
            "a list that was emptied in a step is taken for one that has grown",
            "_GrowingList._has_only_grown",
            "current[count - 1] is self._copy[-1]",
            "True",
            "tests/training/test_kept_metrics.py",
        ),
        Fault(
            "a validation between two steps leaves its own counts in the training's metrics",
            "KeptMetrics.put_back",
            "vars(holder).update({name: _copied(value) for name, value in contents.items()})",
            "pass",
            "tests/parts/test_validation_schedule.py",
        ),
    ],
)
