"""Faults in what is measured, reported and told: step times, verdicts, bars, metrics, logs, scale,
doctor.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

VERDICTS = "tests/step_times/test_verdicts.py tests/step_times/test_verdicts_of_a_run.py"
METRICS = "tests/unit/test_metrics.py"
METRICS_OF_RANKS = "tests/unit/test_metrics.py tests/ranks/test_metrics.py"
REPORT = "tests/reporting/test_stage_report.py"
SCALE = "tests/see/scale"
DOCTOR = "tests/see/doctor"

STEP_TIMES = in_room(
    "step_times",
    VERDICTS,
    [
        Fault(
            "the exchange of gradients is judged by the rank that waits longest",
            "pure_exchange",
            "stretch.exchange.min(axis=0)",
            "stretch.exchange.max(axis=0)",
        ),
        Fault(
            "a rank that is early is told as late",
            "_is_late",
            "stretch.lateness[rank] >= SHARE * stretch.step",
            "stretch.lateness[rank] <= -SHARE * stretch.step",
        ),
        Fault(
            "a rank that is late by turns with the others is told as late",
            "is_steadily_late",
            "np.mean(found > 0.0) >= AGREEING / LOOKED_AT",
            "True",
            "tests/step_times/test_late_rank_on_a_busy_machine.py",
        ),
        Fault(
            "a machine whose ranks wait for its cores is judged like a quiet one",
            "History.is_crowded",
            "bool(waits[ranks].min() >= CROWDED)",
            "False",
            "tests/step_times/test_late_rank_on_a_busy_machine.py",
        ),
        Fault(
            "a rank with larger batches is told as late",
            "LateRank.find",
            "SizeEffect.of(history.recent).explains(rank) >= EXPLAINED * late",
            "False",
        ),
        Fault(
            "a verdict needs no stretches that agree",
            "History.agrees",
            "len(self.recent) - AGREEING",
            "len(self.recent) - 1",
        ),
        Fault(
            "the first seconds of a run are judged, too",
            "History.note",
            "is_first or self._passed < WARM_UP_SECONDS",
            "False",
        ),
        Fault(
            "a verdict is told again each second",
            "VerdictFinder._is_new",
            "self._said.add(verdict.subject)",
            "pass",
        ),
        Fault(
            "the loader is the limit where one rank alone waits for it",
            "typical_wait",
            "waits[(len(waits) - 1) // 2]",
            "waits[-1]",
        ),
        Fault(
            "a GPU at its highest clock is throttled",
            "reason",
            "clocks is None or clocks[rank]['share'] > SHARE",
            "clocks is None",
        ),
        Fault(
            "memory that rises once grows",
            "growth_per_step",
            "is_even & is_much",
            "is_much",
        ),
        Fault(
            "batches of uneven size are told though times do not follow them",
            "UnevenBatches.find",
            "effect.largest < LARGER or effect.correlation < CORRELATION",
            "effect.largest < LARGER",
        ),
        Fault(
            "waiting for a core is not taken from a rank's lateness",
            "Stretch.lateness",
            "np.minimum(by_times, by_waits) - explained",
            "np.minimum(by_times, by_waits)",
        ),
        Fault(
            "samples per second are those of one rank",
            "SecondOfSteps.samples_per_second",
            "sum(self.samples)",
            "max(self.samples)",
            VERDICTS,
        ),
        Fault(
            "operations of a backward convolution are counted as one product",
            "_convolution_backward",
            "forward * (int(output_mask[0]) + int(output_mask[1]))",
            "forward",
            "tests/step_times/test_flops.py",
        ),
        Fault(
            "operations of blocks that are computed again are counted",
            "FlopCounter.__torch_dispatch__",
            "packet in self._formulas and (not self._is_repeated())",
            "packet in self._formulas",
            "tests/step_times/test_flops.py tests/run/test_step_flops.py",
        ),
    ],
)

METRIC_FAULTS = in_room(
    "metrics",
    METRICS,
    [
        Fault(
            "a metric is not added up over the ranks",
            "_Metric._read",
            "not reduces",
            "True",
            METRICS_OF_RANKS,
        ),
        Fault(
            "a metric of data that all ranks see is added up",
            "Reducing._reduces",
            "StageData.last_divided >= self._since if self._divided is None else self._divided",
            "True",
            METRICS_OF_RANKS,
        ),
        Fault(
            "a repeated batch counts in metrics",
            "Reducing._counts",
            "if not StageData.window.count:\n    return False",
            "pass",
            METRICS_OF_RANKS,
        ),
        Fault(
            "the mean of a metric weighs each batch alike",
            "Mean.update",
            """
            values = (values * counts).sum()
            counts = counts.sum()
            """,
            """
            values = values.mean()
            counts = counts.new_ones(())
            """,
        ),
        Fault(
            "an accuracy counts what is wrong",
            "Accuracy.update",
            "predictions == labels.to(predictions.device)",
            "predictions != labels.to(predictions.device)",
        ),
        Fault(
            "a loss that is not finite makes the mean of the epoch so",
            "_finite_sums",
            "~(torch.isfinite(values) & torch.isfinite(counts)) & ~empty",
            "torch.zeros_like(empty)",
        ),
        Fault(
            "losses are added up in single precision",
            "_column",
            "widest_float(device)",
            "torch.float32",
        ),
        Fault(
            "losses of CUDA graphs are overwritten before they are added up",
            "LossMeter.append",
            "loss.clone() if self._copies else loss",
            "loss",
        ),
        Fault(
            "a saved meter leaves out what was not added up yet",
            "LossMeter.load_state_dict",
            "append(_thawed(loss), _thawed(count))",
            "pass",
            "tests/contract/test_exact_resume.py",
        ),
        Fault(
            "a score without a number is the best of its statistics",
            "MetricStats.summarize",
            "[pair for pair in pairs if not math.isnan(pair[0])] or pairs",
            "pairs",
            "tests/unit/test_metric_stats.py",
        ),
        Fault(
            "statistics of samples are those of one rank",
            "MetricStats.summarize",
            "gather_objects(self._pairs) if self._reduces(None) else [self._pairs()]",
            "[self._pairs()]",
            "tests/unit/test_metric_stats.py tests/ranks/test_metric_stats.py",
        ),
    ],
)

LOGS = in_room(
    "train_logger",
    "tests/unit/test_train_logger.py",
    [
        Fault(
            "one record of the run's log is written twice",
            "RunLog.write_stats",
            "self._last_stats = repr(stats)",
            "pass",
        ),
        Fault(
            "the logs of an earlier run are written on",
            "FileTrainLogger.begin_anew",
            "not self._has_written",
            "False",
            "tests/unit/test_train_logger.py tests/contract/test_started_again.py",
        ),
        Fault(
            "TensorBoard's steps begin anew after a resume",
            "TensorboardLogger._recover",
            "int(saved['meta'])",
            "0",
        ),
        Fault(
            "a Brain that is done takes out the rows of another",
            "StepFileLogger.begin_fit",
            "self._file.go_on(optimizer_step)",
            "(self._file.go_on(optimizer_step), self._file.take_out_later())",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "rows of the step that a run goes on from are taken out of a table",
            "StepFile.take_out_later",
            "(self._kind.step_of(row) or 0) <= optimizer_step",
            "(self._kind.step_of(row) or 0) < optimizer_step",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "one value that W&B refuses takes the whole row with it",
            "WandBLogger._refused",
            "len(values) == 1",
            "True",
            "tests/train_logger/test_wandb.py",
        ),
        Fault(
            "a second run of a process moves its logs to the folder of the first",
            "move_to_earlier",
            "path.stat().st_mtime_ns < known_since",
            "True",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "a value that a tracker refuses holds up all others",
            "BatchSender._run",
            "self._refuses(error) or failures >= TRIES or self._is_ending",
            "False",
            "tests/train_logger/test_trackers.py tests/train_logger/test_mlflow.py",
        ),
        Fault(
            "values are left out while their tracker is away",
            "BatchSender._sift",
            "not taken",
            "False",
            "tests/train_logger/test_trackers.py",
        ),
        Fault(
            "a run that was stopped has finished for MLflow",
            "MLflowLogger.close",
            "PROCESS.is_stopped",
            "False",
            "tests/train_logger/test_mlflow.py",
        ),
        Fault(
            "a row of the step of a checkpoint that came after it stands twice",
            "StandingRows.has",
            "self._numbers[names] > 0",
            "self._numbers[names] > 1",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "a value of the step of a checkpoint that came after it is drawn twice",
            "StandingValues.take",
            "step != self._step",
            "step >= self._step",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "rows before a checkpoint that an evaluation has recovered are counted for a training",
            "StepFileLogger._recover",
            "is_fitting and if_main_process()",
            "if_main_process()",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "TensorBoard shows the steps after a checkpoint twice",
            "TensorboardLogger.begin_fit",
            "optimizer_step + 1",
            "None",
            "tests/train_logger/test_files.py",
        ),
        Fault(
            "a run that goes on has a new run of the tracker",
            "TrackerLogger._recover",
            "not self._is_open",
            "False",
            "tests/train_logger/test_trackers.py",
        ),
        Fault(
            "values that a tracker has not taken at the end are not counted",
            "BatchSender.close",
            "self.dropped + len(self._waiting)",
            "self.dropped",
            "tests/train_logger/test_trackers.py",
        ),
        Fault(
            "a sample of progress is written under its final name",
            "ProgressSampleLogger.save_item",
            "form['saver'](data, str(unfinished), **form.get('kwargs', {}))",
            "form['saver'](data, str(path), **form.get('kwargs', {}))",
        ),
    ],
)

REPORTING = in_room(
    "reporting",
    REPORT,
    [
        Fault(
            "a name that is logged in two ways is taken",
            "LoggedValues._hold",
            "before is not None and (before != kind or self._is_over)",
            "False",
            f"{REPORT} tests/contract/test_log.py",
        ),
        Fault(
            "values that are logged per step are added to the next ones",
            "LoggedValues._take",
            "meter.restore(0.0, 0.0)",
            "pass",
            f"{REPORT} tests/contract/test_log.py",
        ),
        Fault(
            "a line without a terminal is written each second",
            "ProgressBar.show",
            "self._bar is None and now - self._last_line < LINE_SECONDS",
            "False",
        ),
        Fault(
            "the time left counts the epochs that are over",
            "TimeLeft.estimate",
            "max(self.last - self._epoch, 0)",
            "self.last",
            "tests/reporting/test_time_left.py",
        ),
        Fault(
            "the bar is wider than the terminal",
            "fitting_format",
            "not columns or _columns_of(shown, meter) <= columns",
            "True",
            "tests/reporting/test_bar_layout.py",
        ),
        Fault(
            "the time of an operation contains that of those inside",
            "_add_own_times",
            "found[running[-1].name].nanoseconds -= length",
            "pass",
            "tests/reporting/test_profile_table.py",
        ),
    ],
)

SEE = in_room(
    "see",
    SCALE,
    [
        Fault(
            "scale: efficiency grows with the number of processes",
            "Row.efficiency",
            "self.speed_up * self.base.size / self.slice.size",
            "self.speed_up * self.slice.size / self.base.size",
            f"{SCALE}/test_table.py {SCALE}/test_reasons.py",
        ),
        Fault(
            "scale: of several rounds the best counts",
            "_median_slice",
            "ordered[(len(ordered) - 1) // 2]",
            "ordered[-1]",
            f"{SCALE}/test_table.py {SCALE}/test_reasons.py",
        ),
        Fault(
            "scale: time that is lost does not follow the samples of a step",
            "losses_of",
            "now - row.work * before",
            "now - before",
            f"{SCALE}/test_table.py {SCALE}/test_reasons.py",
        ),
        Fault(
            "scale: sizes are measured in the order of the command line",
            "sizes_of",
            "sorted(set(map(int, words)))",
            "list(map(int, words))",
            f"{SCALE}/test_cells.py",
        ),
        Fault(
            "scale: a slice trains with other samples per step than the base",
            "batch_options",
            "step if is_strong else step * cell.size // base.size",
            "step * cell.size // base.size if is_strong else step",
            f"{SCALE}/test_cells.py {SCALE}/test_slices.py",
        ),
        Fault(
            "lr-find: what follows the lowest loss counts as a fall",
            "suggest",
            "slopes[:lowest + 1].argmin()",
            "slopes.argmin()",
            "tests/see/lr_find",
        ),
        Fault(
            "lr-find: a schedule of the recipe sets the rate that is tried",
            "sweep_learning_rates.on_gradients",
            "sweep.set_rate()",
            "None",
            "tests/run/test_lr_sweep.py",
        ),
        Fault(
            "lr-find: the loss is that of the main process",
            "LrSweep._after_window",
            "sum_over_ranks(own, 'learning rates')",
            "own",
            "tests/run/test_lr_sweep.py",
        ),
        Fault(
            "doctor: memory is judged without the limit of the container",
            "_free",
            "limit is not None and limit.value < free",
            "False",
            f"{DOCTOR}/test_memory.py {DOCTOR}/test_planted_faults.py",
        ),
        Fault(
            "doctor: too few cores are no problem",
            "_cores",
            "share.usable < share.processes",
            "False",
            f"{DOCTOR}/test_processor_cores.py {DOCTOR}/test_planted_faults.py",
        ),
        Fault(
            "doctor: a variable that switches something off hurts when it is 0",
            "is_on",
            "value.strip().lower() not in {'', '0', 'false', 'no', 'off', 'n', 'f'}",
            "bool(value)",
            f"{DOCTOR}/test_variables.py {DOCTOR}/test_planted_faults.py",
        ),
        Fault(
            "doctor: variables that differ between ranks are not seen",
            "_differences",
            "len(groups) > 1",
            "len(groups) > 2",
            f"{DOCTOR}/test_variables.py {DOCTOR}/test_planted_faults.py",
        ),
        Fault(
            "doctor: a narrow PCIe link is fine",
            "_pcie_row",
            "OK if share >= 1 else PROBLEM if share < 0.5 else LOOK",
            "OK",
            f"{DOCTOR}/test_gpus.py",
        ),
        Fault(
            "report: steps that were done again count as progress",
            "_divide",
            "span.share_up_to(limit)",
            "1.0",
            "tests/see/report/test_goodput.py",
        ),
        Fault(
            "report: time between two attempts is lost",
            "_gaps",
            "max(0.0, now.begin - old.end)",
            "0.0",
            "tests/see/report/test_goodput.py",
        ),
        Fault(
            "report: a late rank is held against itself",
            "_median_of_others",
            "of_few_ranks.get(int(world_size), median)",
            "median",
            "tests/see/report/test_late_ranks.py",
        ),
    ],
)

FAULTS = [*STEP_TIMES, *METRIC_FAULTS, *LOGS, *REPORTING, *SEE]
