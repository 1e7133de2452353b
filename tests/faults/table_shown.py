"""The rows of the table that tests and the campaign of kills show: they are run, and what they say
is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from .table_trials import say

ROOT = Path(__file__).resolve().parents[2]
STORAGE = "tests/checkpointing/test_storage_faults.py"
CONTRACT = "tests/contract/test_bad_input.py"

# Rows that are kills, with words for tests.faults.campaign.
CAMPAIGNS = {"F4": (), "F20": ("--virtual",)}


@dataclass(frozen=True)
class Shown:
    """A row that is shown by tests.

    Attributes:
        fault: what is done.
        line: when it has passed.
        tests: words for pytest: files, names of tests.
        names: part of the names of those that are meant; empty: all.
        missing: what of the row is not shown.
        environment: for the tests.
    """

    fault: str
    line: str
    tests: tuple[str, ...] = ()
    names: str = ""
    missing: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


SHOWN = {
    "F4": Shown(
        "SIGKILL of ranks at random: in a step, a save, validation, between epochs, at the "
        "start; up to three times",
        "goes on by itself; the same bits as without; every sample once (the trials are kills)",
    ),
    "F5": Shown(
        "SIGKILL at random moments of saves, and at every file operation",
        "no checkpoint unreadable, torn or lost", ("tests/faults/test_storage_crashes.py", STORAGE),
        "f5",
    ),
    "F6": Shown(
        "loss of power at every moment of a save", "what was acknowledged is found",
        ("tests/faults/test_storage_power_loss.py", STORAGE), "f6",
    ),
    "F7": Shown(
        "a file cut off, deleted, empty, swapped, with a flipped bit",
        "all is detected; the newest good one is taken",
        ("tests/faults/test_damaged_checkpoints.py", STORAGE), "f7 or every_damage or closely",
    ),
    "F8": Shown(
        "no space, EIO, EDQUOT, read-only, at every operation",
        "what was there is whole; the message says why",
        ("tests/faults/test_storage_errors.py", "tests/ranks/test_async_checkpoints.py", CONTRACT),
        "f8",
    ),
    "F13": Shown(
        "another number of batches on each rank",
        "no steps of different epochs together; all end together",
        ("tests/ranks/test_streams.py", "tests/ranks/test_brain.py",
        "tests/training/test_feed_streams.py", CONTRACT),
        "d4 or different_batch_counts or smaller_than_the_world or empty_on_one_rank",
    ),
    "F14": Shown(
        "another model, order of parameters, options, on a rank or when going on",
        "refused before the first step, on every rank, with the names",
        (CONTRACT, "tests/ranks/test_exact_resume.py"), "f14 or k13",
    ),
    "F16": Shown(
        "malicious checkpoints", "nothing is executed; the file is named",
        ("tests/faults/test_hostile_checkpoints.py", "tests/ranks/test_async_checkpoints.py"),
        "f16",
    ),
    "F17": Shown(
        "malicious YAML", "nothing is executed", ("tests/base/test_plain_yaml.py",), "k7",
        missing="shown for the YAML of checkpoints; ddpkit has no safe mode for "
                "hyperparameters, which recipes load",
    ),
    "F18": Shown(
        "two runs in one folder; a restart while the old run lives",
        "the second is refused; never a mixed checkpoint",
        ("tests/faults/test_run_lock.py", "tests/contract/test_other_saves.py"), "f18",
    ),
    "F19": Shown(
        "1 000 000 tiny steps; 10 000 checkpoints",
        "no growth of memory, files, threads; 2 % of a step of 10 ms",
        ("tests/faults/test_endurance.py",),
        missing="what a step costs is measured by benchmarks/loop_overhead.py",
        environment={"ENDURANCE_STEPS": "1000000", "ENDURANCE_CHECKPOINTS": "10000"},
    ),
    "F20": Shown(
        "SIGKILL of all ranks at random with --virtual_ranks; another number of processes goes "
        "on: one, two or three",
        "the same bits as without (the trials are kills)",
    ),
}  # fmt: skip


def show(name: str, options: argparse.Namespace, folder: Path) -> tuple[int, int, str]:
    """Run what shows a row.

    Returns:
        How many trials there were, how many passed, and a note.
    """
    if name in CAMPAIGNS:
        return _campaign(options, folder / f"{name}.json", CAMPAIGNS[name])
    row = SHOWN[name]
    report = folder / f"{name}.xml"
    chosen = ["-k", row.names] if row.names else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not gpu",
        f"--junitxml={report}",
        *row.tests,
        *chosen,
    ]
    environment = {**os.environ, **row.environment}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.exists():
        say(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return 1, 0, "the tests did not run"
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in failed:
        test = f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}"
        say(f"{name} FAILED: OMP_NUM_THREADS=1 python -m pytest -m '' '{test}'")
    notes = [f"{len(skipped)} tests were skipped"] if skipped else []
    tried = len(cases) - len(skipped)
    return tried, tried - len(failed), "; ".join([*notes, *([row.missing] if row.missing else [])])


def _campaign(
    options: argparse.Namespace,
    report: Path,
    more: tuple[str, ...],
) -> tuple[int, int, str]:
    """Run the campaign of kills; what it says is shown as it comes."""
    words = [
        "--kills",
        str(options.kills),
        "--seed",
        str(options.seed),
        "--json",
        str(report),
        *more,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.campaign", *words],
        cwd=ROOT,
        check=False,
    )
    if not report.exists():
        return 1, 0, "the campaign did not come to its end"
    rows = json.loads(report.read_text())
    problems = rows.pop("problems")
    kills = sum(row["kills"] for row in rows.values())
    different = sum(row["different runs"] for row in rows.values())
    failed = different + len(problems)
    return kills, kills - max(failed, int(done.returncode != 0)), f"{different} runs differ"
