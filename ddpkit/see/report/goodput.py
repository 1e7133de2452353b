"""What the wall time of a run went into, and how much of it went into steps that counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpkit.see.report.attempts import Attempt, Span
from ddpkit.see.report.history import RunHistory
from ddpkit.see.report.records import Record, number_of

#: Where the wall time went, in the order in which the page shows it.
COUNTED = "counted steps"
AGAIN = "steps done again"
EVALUATION = "validation and test"
SAVING = "saving"
STARTING = "starting"
DOWN = "not running"
OTHER = "other"
PARTS = (COUNTED, AGAIN, EVALUATION, SAVING, STARTING, DOWN, OTHER)


@dataclass(frozen=True)
class Restart:
    """What it cost that a run was started again.

    Attributes:
        number: of the attempt that began, from 2.
        time: when it began, in seconds since 1970.
        reason: how the attempt before it ended.
        resumed_at: optimizer steps that it went on from; None: unknown, as it has not trained.
        resumed_from: name of the checkpoint; empty where that is not known.
        steps: of the attempt before it that were done again.
        again: seconds of these steps.
        down: seconds without a process.
        starting: seconds until it trained.
    """

    number: int
    time: float
    reason: str
    resumed_at: float | None
    resumed_from: str
    steps: float
    again: float
    down: float
    starting: float

    @property
    def cost(self) -> float:
        """All seconds that it cost."""
        return self.again + self.down + self.starting


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run, divided.

    Attributes:
        wall: seconds from its first start to its last record.
        parts: seconds of each of :data:`PARTS`; they add up to the wall time.
        restarts: what each cost.
        limits: for each attempt, its last optimizer step that counts.
    """

    wall: float
    parts: Mapping[str, float]
    restarts: tuple[Restart, ...]
    limits: tuple[float, ...]

    @property
    def share(self) -> float:
        """Goodput: the share of the wall time that went into steps that counted."""
        return self.parts[COUNTED] / self.wall if self.wall > 0 else math.nan


def goodput_of(history: RunHistory) -> Goodput:
    """Divide the wall time of a run.

    A step counts unless it was done again: after a kill, a run goes on from its last checkpoint,
    and the steps since then are repeated.

    Example:
        >>> history = RunHistory()
        >>> for time, seconds, steps in ((0.0, 0.0, 0), (11.0, 10.0, 100)):
        ...     event = "stage" if steps else "start"
        ...     history.add({"event": event, "time": time, "stage": "TRAIN", "epoch": 1,
        ...                  "optimizer_step": steps, "seconds": seconds})
        >>> round(goodput_of(history).share, 3)
        0.909
    """
    attempts = history.attempts
    resumed = _resume_points(attempts, history.checkpoints)
    limits = _limits(attempts, resumed)
    attempts = [
        _with_begins(attempt, at or 0.0) for attempt, at in zip(attempts, resumed, strict=True)
    ]
    wall = attempts[-1].end - attempts[0].begin if attempts else 0.0
    parts = dict.fromkeys(PARTS, 0.0)
    again = []
    for attempt, limit in zip(attempts, limits, strict=True):
        own = _divide(attempt, limit)
        again.append(own[AGAIN])
        for name, seconds in own.items():
            parts[name] += seconds
    gaps = _gaps(attempts)
    parts[DOWN] = sum(gaps)
    parts = _fitted(parts, wall)
    restarts = _restarts(attempts, resumed, limits, again, gaps)
    return Goodput(wall, parts, restarts, tuple(limits))


# ---------------------------------------------------------------------------- which steps count


def _resume_points(
    attempts: Sequence[Attempt],
    checkpoints: Mapping[str, Record],
) -> list[float | None]:
    """Return for each attempt how many optimizer steps it went on from; None where it has not
    trained.
    """
    points: list[float | None] = [0.0] if attempts else []
    if attempts and attempts[0].resumed_at is not None:
        points[0] = attempts[0].resumed_at
    for number, attempt in enumerate(attempts[1:], 1):
        points.append(_resume_point(attempt, attempts[:number], checkpoints))
    return points


def _resume_point(
    attempt: Attempt,
    before: Sequence[Attempt],
    checkpoints: Mapping[str, Record],
) -> float | None:
    if attempt.resumed_at is not None:
        return attempt.resumed_at
    record = checkpoints.get(attempt.resumed_from, {})
    told = number_of(record.get("optimizer_step"))
    if told is not None:
        return told
    if attempt.first is None:
        return None
    times = [
        (number_of(checkpoint.get("time")) or 0.0, checkpoint)
        for checkpoint in checkpoints.values()
    ]
    saved = [
        number_of(event.get("optimizer_step")) for time, event in times if time <= attempt.begin
    ]
    known = [step for step in saved if step is not None]
    if not known:  # an old log: a run saves at the end of epochs, and when it is stopped
        known = [span.end for earlier in before for span in earlier.training]
        known += [earlier.reached for earlier in before if earlier.outcome == "stopped"]
    return max((step for step in known if step < attempt.first), default=0.0)


def _limits(attempts: Sequence[Attempt], resumed: Sequence[float | None]) -> list[float]:
    """Return for each attempt its last step that counts: the least that a later one went on
    from.
    """
    limits: list[float] = []
    least = math.inf
    for attempt, at in zip(reversed(attempts), reversed(resumed), strict=True):
        limits.append(least)
        if at is not None and (attempt.first is not None or attempt.resumed_at is not None):
            least = min(least, at)
    return limits[::-1]


def _with_begins(attempt: Attempt, resumed_at: float) -> Attempt:
    """Return an attempt whose first stretch of training begins where it went on from."""

    def known(spans: Sequence[Span]) -> list[Span]:
        return [
            replace(span, begin=min(resumed_at, span.end)) if math.isnan(span.begin) else span
            for span in spans
        ]

    return replace(
        attempt,
        training=known(attempt.training),
        tail=known(attempt.tail),
    )


# ---------------------------------------------------------------------------- where the time went


def _divide(attempt: Attempt, limit: float) -> dict[str, float]:
    """Divide the time of one attempt; what is left is :data:`OTHER`."""
    counted = again = 0.0
    for span in attempt.spans:
        training = max(0.0, span.seconds - _saving_in(span, attempt))
        share = span.share_up_to(limit)
        counted += training * share
        again += training * (1.0 - share)
    return {
        COUNTED: counted,
        AGAIN: again,
        EVALUATION: attempt.evaluating,
        SAVING: sum(seconds for _, seconds in attempt.saving),
        STARTING: starting_seconds(attempt),
    }


def _saving_in(span: Span, attempt: Attempt) -> float:
    begin = span.time - span.seconds
    return sum(
        seconds for time, seconds in attempt.saving if begin < time - seconds / 2 < span.time
    )


def starting_seconds(attempt: Attempt) -> float:
    """Return the seconds until an attempt trained, or until its end where it never did."""
    begins = [span.time - span.seconds for span in attempt.spans if span.time]
    if not begins:
        return max(0.0, attempt.end - attempt.begin - attempt.evaluating)
    return max(0.0, min(begins) - attempt.begin)


def _gaps(attempts: Sequence[Attempt]) -> list[float]:
    """Return the seconds before each attempt in which nothing ran; of the first none."""
    if not attempts:
        return []
    pairs = itertools.pairwise(attempts)
    return [0.0, *(max(0.0, now.begin - old.end) for old, now in pairs)]


def _fitted(parts: dict[str, float], wall: float) -> dict[str, float]:
    """Have the parts add up to the wall time: clocks and rounding may make them a little more."""
    known = sum(parts.values())
    if known > wall > 0:
        return {name: seconds * wall / known for name, seconds in parts.items()}
    return {**parts, OTHER: max(0.0, wall - known)}


def _restarts(
    attempts: Sequence[Attempt],
    resumed: Sequence[float | None],
    limits: Sequence[float],
    again: Sequence[float],
    gaps: Sequence[float],
) -> tuple[Restart, ...]:
    found = []
    for number in range(1, len(attempts)):
        before = attempts[number - 1]
        now = attempts[number]
        told = now.start.get("reason")
        restart = Restart(
            number=number + 1,
            time=now.begin,
            reason=str(told) if told else before.words or before.outcome,
            resumed_at=resumed[number],
            resumed_from=now.resumed_from,
            steps=max(
                0.0,
                before.reached - max(limits[number - 1], resumed[number - 1] or 0.0),
            ),
            again=again[number - 1],
            down=gaps[number],
            starting=starting_seconds(now),
        )
        found.append(restart)
    return tuple(found)
