"""Whether a run that was killed and started again is the run that was not."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .campaign_ranks import Attempt
from .recipes_for_faults import Setting

Key = tuple[Any, ...]
Events = list[tuple[Key, list[Any]]]
FACTS = ("samples", "inputs", "batch loss")


@dataclass(frozen=True)
class Difference:
    """One way in which a run differs: what, and in words where."""

    what: str
    words: str


@dataclass
class Reference:
    """The uninterrupted run: per rank what happened in order, and how it ended."""

    events: list[Events]
    results: list[dict[str, Any]]

    @classmethod
    def of(cls, attempt: Attempt, folder: Path, number: int = 0) -> Reference:
        ranks = range(len(attempt.diaries))
        return cls(
            [events_of(diary) for diary in attempt.diaries],
            [result_of(folder, number, r) for r in ranks],
        )

    def problems(self, setting: Setting) -> list[Difference]:
        """Check the run in itself: every sample exactly once per epoch, all ranks with the same
        end.
        """
        size = setting.recipe.size
        found = []
        seen: dict[int, Counter[int]] = {}
        for events in self.events:
            for key, payload in events:
                if key[0] == "TRAIN":
                    seen.setdefault(key[1], Counter()).update(payload[0])
        for epoch, counts in seen.items():
            if counts != Counter(range(size)):
                found.append(
                    Difference(
                        "samples",
                        f"uninterrupted: epoch {epoch} has {sorted(counts.items())}",
                    )
                )
        is_divided = "strategy" in dict(setting.options)
        for rank, result in enumerate(self.results[:1] if is_divided else self.results):
            own = {name: value for name, value in result.items() if not name.startswith("random/")}
            main = {
                name: value
                for name, value in self.results[0].items()
                if not name.startswith("random/")
            }
            if own != main:
                found += [
                    Difference("ranks", f"uninterrupted: rank {rank} has {_first_other(own, main)}")
                ]
        return found


def result_of(folder: Path, number: int, rank: int) -> dict[str, Any]:
    """Return how a rank's attempt ended; empty if it did not come to its end."""
    path = folder / f"result.{number}.{rank}"
    return json.loads(path.read_text()) if path.exists() else {}


def events_of(diary: Sequence[Sequence[Any]]) -> Events:
    """Return what must be the same whenever it is done: batches and stage losses, each with its
    place.
    """
    events: Events = []
    for kind, *facts in diary:
        if kind in {"TRAIN", "VALID", "TEST"}:
            events.append(((kind, *facts[:2]), facts[2:]))
        elif kind == "stage":
            events.append((("stage", *facts[:2]), facts[2:]))
    return events


def compare(
    reference: Reference,
    attempts: Sequence[Attempt],
    folder: Path,
    *,
    most_lost: int,
) -> list[Difference]:
    """Compare a run that was interrupted with the one that was not.

    Args:
        reference: the uninterrupted run.
        attempts: of the other one, the last of which came to the end.
        folder: of the other one.
        most_lost: training batches that one kill may cost.
    """
    found = [
        Difference("error", f"attempt {n}: {one.error}")
        for n, one in enumerate(attempts)
        if one.error
    ]
    found += [
        Difference("hang", f"attempt {n}: ranks {one.hung} did not end{last_words(one)}")
        for n, one in enumerate(attempts)
        if one.hung
    ]
    told = [[events_of(diary) for diary in one.diaries] for one in attempts]
    keys = [key for key, _ in reference.events[0]]
    # A rank may be killed before it can tell what another one, ahead of it, has done and saved
    # already.
    furthest = [max(_furthest(keys, events) for events in ranks) for ranks in told]
    done = [0, *itertools.accumulate(furthest, max)]
    if done[-1] != len(keys):
        found.append(Difference("place", f"ended before {keys[done[-1]]}"))
    for rank, expected in enumerate(reference.events):
        for number, ranks in enumerate(told):
            where = f"rank {rank}, attempt {number}"
            found += _compare_events(dict(expected), ranks[rank], where)
            found += _compare_order(keys, ranks[rank], done[number], most_lost, where)
        result = result_of(folder, len(attempts) - 1, rank)
        if not result and not found:
            found.append(Difference("error", f"rank {rank} has no result"))
        elif result:
            found += _compare_results(reference.results[rank], result, rank)
    return found


def _furthest(keys: list[Key], events: Events) -> int:
    """Return how many events of the uninterrupted run are done when these are."""
    return max((keys.index(key) + 1 for key, _ in events if key in keys), default=0)


def _compare_events(expected: dict[Key, list[Any]], events: Events, where: str) -> list[Difference]:
    found = []
    for key, payload in events:
        if key not in expected:
            found.append(Difference("place", f"{where}: {key} is no part of the uninterrupted run"))
        elif payload != expected[key]:
            found.append(_difference(key, payload, expected[key], where))
    return found


def _compare_order(
    keys: list[Key],
    events: Events,
    done: int,
    most_lost: int,
    where: str,
) -> list[Difference]:
    """Check that an attempt left nothing out: not at its start, where ``done`` is what was done
    before, nor later.
    """
    found = []
    numbers = [keys.index(key) for key, _ in events if key in keys]
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            found.append(Difference("place", f"{where}: after {keys[before]} came {keys[after]}"))
    if not numbers:
        return found
    start = numbers[0]
    if start > done:
        found.append(
            Difference("place", f"{where}: went on with {keys[start]}; {keys[done]} was never done")
        )
    lost = sum(key[0] == "TRAIN" for key in keys[start:done])
    if lost > most_lost:
        words = f"{lost} batches done again, from {keys[start]} on, {most_lost} are allowed"
        found.append(Difference("work lost", f"{where}: {words}"))
    return found


def _difference(key: Key, payload: list[Any], expected: list[Any], where: str) -> Difference:
    if key[0] == "stage":
        return Difference(
            "stage loss",
            f"{where}: {key[1:]}: {payload[0]} instead of {expected[0]}",
        )
    fact = next(
        n for n, (one, other) in enumerate(zip(payload, expected, strict=True)) if one != other
    )
    return Difference(FACTS[fact], f"{where}: {key}: {payload[fact]} instead of {expected[fact]}")


def _compare_results(
    expected: dict[str, Any],
    result: dict[str, Any],
    rank: int,
) -> list[Difference]:
    found = []
    for part in dict.fromkeys(name.split("/")[0] for name in [*expected, *result]):
        own = {name: value for name, value in result.items() if name.split("/")[0] == part}
        other = {name: value for name, value in expected.items() if name.split("/")[0] == part}
        if own != other:
            found.append(Difference(part, f"rank {rank}: {_first_other(own, other)}"))
    return found


def _first_other(own: dict[str, Any], other: dict[str, Any]) -> str:
    name = next(name for name in [*other, *own] if own.get(name) != other.get(name))
    return f"{name} = {str(own.get(name))[:100]} instead of {str(other.get(name))[:100]}"


def last_words(attempt: Attempt) -> str:
    """Say what each rank that did not end noted last."""
    told = [(rank, attempt.diaries[rank]) for rank in attempt.hung if attempt.diaries[rank]]
    return "".join(f"; rank {rank} last noted {diary[-1]}" for rank, diary in told)
