"""What a run's log says, sorted: its attempts, its curves, its checkpoints and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ddpkit.see.report.attempts import (
    FAILED,
    FINISHED,
    STOPPED,
    WITHOUT_A_WORD,
    Attempt,
    words_of_exception,
)
from ddpkit.see.report.columns import STEP, Table
from ddpkit.see.report.records import Record, number_of, numbers_in
from ddpkit.step_times import PHASES

TRAIN = "train"
META = "meta"
SPREAD_WORDS = ("min", "median", "max")
PLAIN = (
    "seconds",
    "samples_per_second",
    "tokens_per_second",
    "gradient_norm",
    "learning_rate",
    "loss",
    "mfu",
    "flops_per_second",
    "host_bound",
    "exchanged_bytes",
    "world_size",
)
MOST_RANKS = 4096  # a rank of a record above it is no rank


class LateRanks:
    """How often each rank was the slowest in a phase, and how far behind the others' median."""

    def __init__(self) -> None:
        self.seconds = 0
        self.counts: dict[tuple[int, str], int] = {}
        self.behind: dict[tuple[int, str], float] = {}

    def add(
        self,
        phase: str,
        spread: Mapping[str, Any],
        world_size: float,
    ) -> None:
        """Take in who was the slowest in a phase, in one second."""
        numbers = numbers_in(spread)
        others = _median_of_others(numbers, world_size)
        if others is None or not {"max_rank", "max"} <= numbers.keys():
            return
        rank = numbers["max_rank"]
        behind = numbers["max"] - others
        if not (0 <= rank < MOST_RANKS and math.isfinite(behind)):
            return
        key = int(rank), phase
        self.counts[key] = self.counts.get(key, 0) + 1
        self.behind[key] = self.behind.get(key, 0.0) + behind


def _median_of_others(spread: Mapping[str, float], world_size: float) -> float | None:
    """Return the median of all ranks but the slowest, as well as a spread knows it.

    The other one of two ranks is the fastest, and two others of three are the fastest and the
    median. Of more ranks the median of all is close to it.
    """
    least = spread.get("min")
    median = spread.get("median")
    if median is None or least is None:
        return median
    of_few_ranks = {2: least, 3: (least + median) / 2}
    return of_few_ranks.get(int(world_size), median)


def _stage_and_set(record: Record) -> str:
    """Return the stage of a record in words, with the name of its set if it has one."""
    return f"{str(record.get('stage', '')).lower()} {record.get('set', '')}".rstrip()


class RunHistory:
    """All that a run's log tells; records are added in their order.

    Attributes:
        attempts: starts of the run.
        epochs: values by name and stage, then by epoch.
        steps: values of ``self.log(..., per_step=True)``.
        speed: the measured seconds of training.
        late: which rank was the slowest.
        clipped: share of steps whose gradients were clipped, by epoch.
        checkpoints: records of saves, by the directory's name.
        best: names of the best checkpoints, by the key that decides, as the last save tells.
        deleted: names of those that were deleted.
        verdicts: records of verdicts.
        failed_saves: records of checkpoints that are lost.
        skipped: optimizer steps and how many were skipped up to there.
        flops: the record of the counted operations; empty without one.
        world_sizes: how many processes there were, in the order of the attempts.

    Example:
        >>> history = RunHistory()
        >>> history.add({"event": "start", "time": 1.0, "world_size": 2})
        >>> history.add({"event": "stage", "time": 9.0, "stage": "TRAIN", "epoch": 1, "loss": 0.5,
        ...              "optimizer_step": 30, "seconds": 6.0})
        >>> history.epochs["loss", "train"], history.attempts[0].reached
        ({1.0: 0.5}, 30.0)
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.epochs: dict[tuple[str, str], dict[float, float]] = {}
        self.steps = Table()
        self.speed = Table()
        self.late = LateRanks()
        self.clipped: dict[float, float] = {}
        self.checkpoints: dict[str, Record] = {}
        self.best: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.verdicts: list[Record] = []
        self.failed_saves: list[Record] = []
        self.skipped: list[tuple[float, float]] = []
        self.flops: Record = {}
        self.world_sizes: list[int] = []
        self._epoch = 0.0
        self._handlers = {
            "start": self._start,
            "fit": self._fit,
            "fit_end": self._fit_end,
            "stage": self._stage,
            "stats": self._stats,
            "step": self._step,
            "logged": self._logged,
            "speed": self._speed,
            "checkpoint": self._checkpoint,
            "checkpoints_deleted": self._note_kept,
            "checkpoint_failed": self.failed_saves.append,
            "verdict": self.verdicts.append,
            "flops": self._flops,
            "skipped_steps": self._skipped,
            "stopped": self._stopped,
            "exception": self._exception,
        }

    def add(self, record: Record) -> None:
        """Take in a record; an unknown event moves the end of the run and nothing else."""
        time = number_of(record.get("time"))
        if not self.attempts and record["event"] != "start":
            self._begin(Attempt(time or 0.0, time or 0.0))
        handler = self._handlers.get(record["event"])
        if handler is not None:
            handler(record)
        if time is not None and math.isfinite(time):
            self.now.end = max(self.now.end, time)

    @property
    def now(self) -> Attempt:
        """The attempt that records are added to."""
        return self.attempts[-1]

    # ---------------------------------------------------------------------------- beginning and end

    def _begin(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.steps.begin_attempt()
        self.speed.begin_attempt()

    def _start(self, record: Record) -> None:
        time = number_of(record.get("time")) or 0.0
        begin = time if _is_notebook(record) else number_of(record.get("process_start")) or time
        if self.attempts:
            begin = max(begin, self.now.end)
        self._begin(Attempt(min(begin, time), time, record))
        self.now.resumed_from = _name(record.get("resumed_from"))
        world_size = number_of(record.get("world_size"))
        if world_size is not None:
            self.world_sizes.append(int(world_size))

    def _fit(self, record: Record) -> None:
        self.now.fit = record
        came_from = record.get("resumed_from")
        if isinstance(came_from, dict):
            came_from = came_from.get("checkpoint")
        if not self.now.resumed_from:
            self.now.resumed_from = _name(came_from)
        steps = number_of(record.get("optimizer_step"))
        if steps is not None and self.now.resumed_at is None and self.now.first is None:
            self.now.resumed_at = steps
            self.now.reached = max(self.now.reached, steps)

    def _fit_end(self, record: Record) -> None:
        del record
        self.now.note_end(FINISHED, "")

    def _stopped(self, record: Record) -> None:
        self.now.note_steps(number_of(record.get("optimizer_step")))
        self.now.note_end(STOPPED, f"stopped by {record.get('reason', 'a request')}")

    def _exception(self, record: Record) -> None:
        self.now.note_steps(number_of(record.get("optimizer_step")))
        self.now.note_end(FAILED, words_of_exception(record))

    # ---------------------------------------------------------------------------- values

    def _stage(self, record: Record) -> None:
        stage = _stage_and_set(record)
        epoch = self._epoch_of(record)
        values = {"loss": number_of(record.get("loss"))}
        self._set(
            stage,
            epoch,
            {name: value for name, value in values.items() if value is not None},
        )
        self._set(stage, epoch, numbers_in(record.get("logged")))
        if stage != TRAIN:
            self.now.evaluating += max(0.0, number_of(record.get("seconds")) or 0.0)
            return
        self._reopen()
        self.now.note_training(record)
        clipped = number_of(record.get("clipped_share"))
        if clipped is not None:
            self.clipped[epoch] = clipped

    def _stats(self, record: Record) -> None:
        meta = numbers_in(record.get("meta"))
        epoch = meta.pop("epoch", self._epoch)
        self._set(META, epoch, meta)
        for stage, values in record.items():
            if stage not in {"event", "time", "meta"} and isinstance(values, dict):
                self._set(str(stage), epoch, numbers_in(values))

    def _logged(self, record: Record) -> None:
        stage = _stage_and_set(record)
        self._set(
            stage,
            self._epoch_of(record),
            numbers_in(record.get("values")),
        )

    def _step(self, record: Record) -> None:
        steps = number_of(record.get(STEP))
        values = numbers_in(record.get("values"))
        if steps is None or not values:
            return
        self._reopen()
        self.now.note_steps(steps)
        self.steps.append({**values, STEP: steps})

    def _speed(self, record: Record) -> None:
        steps = number_of(record.get(STEP))
        if steps is None:
            return
        self._reopen()
        self.now.note_second(record)
        row = {name: one for name in PLAIN if (one := number_of(record.get(name))) is not None}
        row[STEP] = steps
        row |= _spread("step", record.get("step_seconds"))
        for group in ("phases", "memory"):
            spreads = record.get(group)
            for name, spread in spreads.items() if isinstance(spreads, dict) else ():
                row |= _spread(f"{group}.{name}", spread)
        self.speed.append(row)
        self._note_late(record)

    def _note_late(self, record: Record) -> None:
        phases = record.get("phases")
        world_size = number_of(record.get("world_size")) or 1
        if not isinstance(phases, dict) or world_size <= 1:
            return
        self.late.seconds += 1
        for phase in PHASES:
            spread = phases.get(phase)
            if isinstance(spread, dict):
                self.late.add(phase, spread, world_size)

    # ---------------------------------------------------------------------------- the rest

    def _checkpoint(self, record: Record) -> None:
        self.now.note_save(record)
        name = _name(record.get("path"))
        if name:
            self.checkpoints[name] = record
            self.deleted.discard(name)
        self._note_kept(record)

    def _note_kept(self, record: Record) -> None:
        deleted = record.get("deleted")
        if isinstance(deleted, list):
            self.deleted |= {_name(name) for name in deleted}
        best = record.get("best")  # of the keys by which this save has deleted, and of no others
        if isinstance(best, dict):
            self.best |= {str(key): _name(name) for key, name in best.items()}
        self.best = {key: name for key, name in self.best.items() if name not in self.deleted}

    def _flops(self, record: Record) -> None:
        self.flops = record

    def _skipped(self, record: Record) -> None:
        counts = (number_of(record.get(name)) for name in ("count", "steps", "skipped"))
        count = next((count for count in counts if count is not None), 1.0)
        steps = number_of(record.get(STEP))
        before = self.skipped[-1][1] if self.skipped else 0.0
        self.skipped.append((self.now.reached if steps is None else steps, before + count))

    def _epoch_of(self, record: Record) -> float:
        epoch = number_of(record.get("epoch"))
        if epoch is not None and math.isfinite(epoch):
            self._epoch = max(self._epoch, epoch)
            part = number_of(record.get("epoch_part"))  # of a validation between two steps
            return epoch if part is None else epoch - 1.0 + part
        return self._epoch

    def _set(
        self,
        stage: str,
        epoch: float,
        values: Mapping[str, float],
    ) -> None:
        for name, value in values.items():
            self.epochs.setdefault((name, stage), {})[epoch] = value

    def _reopen(self) -> None:
        """Training goes on: another call of ``fit`` in this process, or an error that was
        caught.
        """
        if self.now.outcome == FINISHED:
            self.now.outcome = WITHOUT_A_WORD


def _spread(name: str, spread: Any) -> dict[str, float]:
    numbers = numbers_in(spread)
    return {f"{name}.{word}": numbers[word] for word in SPREAD_WORDS if word in numbers}


def _name(path: Any) -> str:
    return PurePath(path).name if isinstance(path, str) else ""


def _is_notebook(record: Record) -> bool:
    """Say whether a start was in a notebook's process, which may be hours older."""
    arguments = record.get("arguments")
    program = str(arguments[0]) if isinstance(arguments, list) and arguments else ""
    return not program or "ipykernel" in program
