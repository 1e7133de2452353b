"""The attempts of a run: each start of its command, what it did, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ddpkit.see.report.records import Record, number_of

STOPPED = "stopped"
FAILED = "failed"
FINISHED = "finished"
WITHOUT_A_WORD = "ended without a word"


@dataclass
class Span:
    """A stretch of training.

    Attributes:
        begin: optimizer steps before it.
        end: optimizer steps after it.
        seconds: that it took.
        time: when it ended, in seconds since 1970.
    """

    begin: float
    end: float
    seconds: float
    time: float

    def share_up_to(self, limit: float) -> float:
        """Return the share of its steps that are not after a limit.

        Example:
            >>> Span(10, 20, 5.0, 0.0).share_up_to(15)
            0.5
        """
        if self.end <= limit:
            return 1.0
        return max(0.0, limit - self.begin) / (self.end - self.begin)


@dataclass
class Attempt:
    """One start of a run.

    Attributes:
        begin: time of its first record, or earlier where the process's own start is known.
        end: time of its last record.
        start: the record of its start; empty where there is none.
        fit: the record of its last call of ``fit``; likewise.
        resumed_from: the checkpoint that it went on from; empty where that is not told.
        resumed_at: optimizer steps that it went on from; None where that is not told.
        first: the first optimizer step that it tells of after training; None before one.
        reached: the last optimizer step that it tells of.
        training: whole training stages.
        tail: training after the last whole stage.
        evaluating: seconds of validation and test.
        saving: time and seconds of saves for which training stood still.
        outcome: how it ended: one of the constants of this module.
        words: what is known of the end.
    """

    begin: float
    end: float
    start: Record = field(default_factory=dict)
    fit: Record = field(default_factory=dict)
    resumed_from: str = ""
    resumed_at: float | None = None
    first: float | None = None
    reached: float = 0.0
    training: list[Span] = field(default_factory=list)
    tail: list[Span] = field(default_factory=list)
    evaluating: float = 0.0
    saving: list[tuple[float, float]] = field(default_factory=list)
    outcome: str = WITHOUT_A_WORD
    words: str = ""

    @property
    def spans(self) -> list[Span]:
        """All training that is known of."""
        return [*self.training, *self.tail]

    def note_steps(self, steps: float | None) -> float:
        """Note that so many optimizer steps have been made; return how many were known before."""
        before = self.reached
        if steps is not None and math.isfinite(steps):
            if self.first is None:
                self.first = steps
            self.reached = max(self.reached, steps)
        return before

    def note_training(self, record: Record) -> None:
        """Take in a training stage that has ended."""
        begin = self.training[-1].end if self.training else math.nan
        self._add(self.training, begin, record)
        self.tail.clear()  # a part of this stage

    def note_second(self, record: Record) -> None:
        """Take in about a second of training, of a stage that has not ended."""
        latest = self.tail or self.training
        self._add(
            self.tail,
            latest[-1].end if latest else math.nan,
            record,
        )

    def _add(
        self,
        spans: list[Span],
        begin: float,
        record: Record,
    ) -> None:
        steps = number_of(record.get("optimizer_step"))
        seconds = number_of(record.get("seconds"))
        if steps is None or seconds is None or not math.isfinite(seconds):
            return
        self.note_steps(steps)
        spans.append(
            Span(
                begin,
                steps,
                max(0.0, seconds),
                number_of(record.get("time")) or 0.0,
            )
        )

    def note_save(self, record: Record) -> None:
        """Take in a save."""
        seconds = number_of(record.get("seconds"))
        time = number_of(record.get("time"))
        if seconds is not None and time is not None and math.isfinite(seconds):
            self.saving.append((time, max(0.0, seconds)))

    def note_end(self, outcome: str, words: str) -> None:
        """Note how it ended; the first reason stays, as later ones follow from it.

        What comes after a call of ``fit`` that has finished, such as an evaluation, may still fail.
        """
        if self.outcome in {WITHOUT_A_WORD, FINISHED}:
            self.outcome = outcome
            self.words = words


def words_of_exception(record: Record) -> str:
    """Return an exception of a record in one line.

    Example:
        >>> words_of_exception({"type": "ValueError", "message": "bad" + chr(10) + "more"})
        'ValueError: bad'
    """
    message: Any = record.get("message", "")
    first = next((line for line in str(message).splitlines() if line.strip()), "")
    kind = str(record.get("type", "exception"))
    return f"{kind}: {first}" if first else kind
