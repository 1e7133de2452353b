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
BACKGROUND = "tests/ranks/test_async_checkpoints.py"

# Rows that are kills, with words for tests.faults.campaign.
CAMPAIGNS = {
    "F4": (),
    "F20": ("--virtual",),
    "F22": ("--strategy", "fsdp", "--place", "save"),
}


@dataclass(frozen=True)
class Shown:
    """A row that is shown by tests.

    Attributes:
        fault: what is done.
        line: when it has passed.
        tests: files, or tests of a file.
        missing: what of the row is not shown.
        environment: for the tests.
    """

    fault: str
    line: str
    tests: tuple[str, ...] = ()
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
        "no checkpoint unreadable, torn or lost", (
            "tests/faults/test_storage_crashes.py",
            f"{STORAGE}::test_death_at_some_points_of_a_save",
        ),
    ),
    "F6": Shown(
        "loss of power at every moment of a save", "what was acknowledged is found",
        (
            "tests/faults/test_storage_power_loss.py",
            f"{STORAGE}::test_a_loss_of_power_at_any_moment_of_two_saves",
        ),
    ),
    "F7": Shown(
        "a file cut off, deleted, empty, swapped, with a flipped bit",
        "all is detected; the newest good one is taken",
        (
            "tests/faults/test_damaged_checkpoints.py",
            f"{STORAGE}::test_random_damage_is_detected_or_harmless",
        ),
    ),
    "F8": Shown(
        "no space, EIO, EDQUOT, read-only, at every operation",
        "what was there is whole; the message says why",
        (
            "tests/faults/test_storage_errors.py",
            (f"{BACKGROUND}::test_an_error_in_the_background_is_raised_on_every_rank_at_the_next_call"
            "_and_once"),
            f"{BACKGROUND}::test_with_warn_no_rank_raises",
            f"{BACKGROUND}::test_a_failed_save_is_raised_also_where_each_rank_lists_by_itself",
            f"{BACKGROUND}::test_with_warn_a_save_that_every_rank_takes_part_in_fails_alike_on_all",
            f"{CONTRACT}::test_a_read_only_folder_for_real",
        ),
    ),
    "F13": Shown(
        "another number of batches on each rank",
        "no steps of different epochs together; all end together",
        (
            "tests/ranks/test_streams.py::test_ranks_with_three_and_four_batches",
            "tests/ranks/test_streams.py::test_a_stream_that_is_much_longer_on_one_rank",
            "tests/ranks/test_brain.py::test_streams_give_every_item_once_and_end_together",
            "tests/ranks/test_brain.py::test_a_stream_too_short_for_the_ranks_ends_all_of_them",
            ("tests/ranks/test_brain.py::"
            "test_a_stream_of_fewer_items_than_ranks_is_dealt_out_like_a_dataset"),
            ("tests/training/test_stream_feed.py::"
            "test_streams_of_different_lengths_end_together_and_lose_nothing"),
            f"{CONTRACT}::test_ranks_with_different_batch_counts",
            f"{CONTRACT}::test_dataset_smaller_than_the_world",
            f"{CONTRACT}::test_a_dataset_that_is_empty_on_one_rank",
        ),
    ),
    "F14": Shown(
        "another model, order of parameters, options, on a rank or when going on",
        "refused before the first step, on every rank, with the names",
        (
            f"{CONTRACT}::test_ranks_that_differ",
            f"{CONTRACT}::test_three_ranks_that_differ",
            f"{CONTRACT}::test_ranks_with_different_batch_counts",
            "tests/ranks/test_exact_resume.py::test_another_number_of_ranks_takes_the_same_steps",
            "tests/ranks/test_exact_resume.py::test_batches_that_cannot_be_divided_are_refused",
            "tests/ranks/test_exact_resume.py::test_a_restarted_launch_keeps_the_samples_of_a_step",
        ),
    ),
    "F16": Shown(
        "malicious checkpoints", "nothing is executed; the file is named",
        (
            "tests/faults/test_hostile_checkpoints.py",
            f"{BACKGROUND}::test_no_rank_runs_code_from_a_file_that_it_is_sent",
        ),
    ),
    "F17": Shown(
        "malicious YAML", "nothing is executed", ("tests/base/test_plain_yaml.py",),
        missing="shown for the YAML of checkpoints; ddpkit has no safe mode for "
                "hyperparameters, which recipes load",
    ),
    "F18": Shown(
        "two runs in one folder; a restart while the old run lives",
        "the second is refused; never a mixed checkpoint",
        (
            "tests/faults/test_run_lock.py",
            ("tests/contract/test_other_saves.py::"
            "test_a_second_run_in_the_folder_is_refused_before_it_trains"),
        ),
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
    "F21": Shown(
        "SIGKILL at random moments of saves to an S3 server, 200 times, and at every request that "
        "changes a store",
        "no checkpoint unreadable, torn or lost; nothing is left over",
        ("tests/checkpointing/test_store_crashes.py",),
        environment={"STORE_KILLS": "200"},
    ),
    "F22": Shown(
        "SIGKILL of ranks at file operations of saves in shards (fsdp), on 2 and 3 processes; "
        "up to three times",
        "goes on by itself; the same bits as without; none from an incomplete checkpoint (the "
        "trials are kills)",
    ),
    "F23": Shown(
        "SIGKILL right before or after requests that change a store, of trainings with their "
        "output folder on an S3 server; up to three times, each time an empty disk",
        "goes on from what is complete in the store; the same bits and the same rows as without",
        ("tests/mirror/test_campaign.py",),
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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not gpu",
        f"--junitxml={report}",
        *row.tests,
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
