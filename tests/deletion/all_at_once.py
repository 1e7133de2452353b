"""The whole suite of quick tests once, and each test without every feature that it is not of.

A test that passes with many files gone passes with each of them gone alone, unless what has gone
together with a file would have failed. So one run of each test stands for one run per feature. What
hides something is code that asks whether a feature can be imported, and goes on without it if not:
the package has none, and a test says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.__main__ import LINES_OF_A_REASON, POLL_SECONDS, ending_at_sigterm, preload
from tests.mutants.trial import BROKEN, SURVIVED, Trial, Verdict

from .copies import Copy, copy_of_files
from .features import Feature, features
from .own_tests import DELETED, LISTED, OWNERS

COLLECTS_WITHIN = 600.0  # seconds
RUNS_WITHIN = 3600.0


@dataclass(frozen=True)
class Group:
    """The tests that are of the same features, and so run without all others.

    Attributes:
        owners: paths of the features; none for most tests.
        files: in which the tests stand.
        count: how many there are.
    """

    owners: tuple[str, ...]
    files: tuple[str, ...]
    count: int


def groups_of_tests(copy: Copy, tests: Sequence[str]) -> list[Group]:
    """Collect the quick tests, and divide them by the features that they are of.

    Args:
        copy: of the repository.
        tests: files and folders; none: all.
    """
    copy.take_away([])
    os.environ[LISTED] = str(copy.folder / "owners.json")
    try:
        trial = Trial(
            copy.folder,
            ["-p", "tests.deletion.own_tests", "--collect-only", *tests],
            every_test=True,
            limit_seconds=COLLECTS_WITHIN,
        )
        verdict = _wait(trial)
    finally:
        del os.environ[LISTED]
    if verdict.kind != SURVIVED:
        sys.exit(f"{verdict.output}\nThe tests cannot be collected.")
    listed = json.loads((copy.folder / "owners.json").read_text())
    found = [Group(tuple(owners), tuple(files), count) for owners, files, count in listed]
    return sorted(found, key=lambda group: -group.count)


def run_groups(
    groups: Sequence[Group],
    copies: Sequence[Copy],
) -> Iterator[tuple[Group, Verdict, float]]:
    """Run the tests of each group without all features that they are not of.

    Args:
        groups: the largest first.
        copies: as many groups run at a time.

    Yields:
        A group, what came of it, and seconds.
    """
    every = features()
    waiting = list(reversed(groups))
    idle = list(copies)
    running: list[tuple[Group, Copy, Trial]] = []
    try:
        while waiting or running:
            while waiting and idle:
                group = waiting.pop()
                copy = idle.pop()
                gone = [feature for feature in every if feature.path not in group.owners]
                copy.take_away(gone)
                running.append((group, copy, _start(copy, group, gone)))
            time.sleep(POLL_SECONDS)
            for group, copy, trial in list(running):
                if verdict := trial.verdict():
                    running.remove((group, copy, trial))
                    idle.append(copy)
                    yield group, verdict, time.monotonic() - trial.began
    finally:
        for _, _, trial in running:
            trial.end()


def main(folder: Path, jobs: int, tests: Sequence[str]) -> int:
    """Run all groups; print those that fail, and how to find the feature that is missed."""
    preload()
    failed = []
    with ending_at_sigterm():
        copies = [Copy(copy_of_files(folder / str(number))) for number in range(jobs)]
        groups = groups_of_tests(copies[0], tests)
        _say(f"{sum(group.count for group in groups)} tests, of {len(groups)} sets of features")
        for group, verdict, seconds in run_groups(groups, copies):
            word = "passes" if verdict.kind == SURVIVED else "FAILS"
            names = ", ".join(group.owners) or "no feature"
            _say(f"{word}: {group.count} tests of {names} ({seconds:.0f} s)")
            if verdict.kind != SURVIVED:
                failed += verdict.tests
                _say(_reasons(verdict))
            if verdict.kind == BROKEN:
                failed.append(f"(tests of {names})")
    if failed:
        _say("\n".join(["These need a feature that they are not of:", *failed]))
        _say("Which one: python -m tests.deletion --only . TESTS")
    return 1 if failed else 0


def _start(copy: Copy, group: Group, gone: Sequence[Feature]) -> Trial:
    told = {
        DELETED: os.pathsep.join(feature.path for feature in gone),
        OWNERS: os.pathsep.join(group.owners),
    }
    os.environ.update(told)
    try:
        return Trial(
            copy.folder,
            ["-p", "tests.deletion.own_tests", "--continue-on-collection-errors", *group.files],
            every_test=True,
            limit_seconds=RUNS_WITHIN,
        )
    finally:
        for name in told:
            del os.environ[name]


def _wait(trial: Trial) -> Verdict:
    while (verdict := trial.verdict()) is None:
        time.sleep(POLL_SECONDS)
    return verdict


def _reasons(verdict: Verdict) -> str:
    lines = verdict.output.splitlines()
    telling = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  ", "____"))]
    return "\n".join(telling or lines[-LINES_OF_A_REASON:])


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
