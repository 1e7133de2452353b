"""Makes parts and strategies unimportable, and runs the tests that are not their own.

``make delete-test`` runs each quick test once, without all features that it is not of: a quarter of
an hour. ``make delete-test DELETE_ARGS="--only fsdp"`` takes one file after the other away whose
path has the word, and runs all tests for each. Tests may be named, to run these alone:
``--only fsdp tests/unit tests/golden``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.trial import MARKS

from . import all_at_once
from .copies import copy_of_files
from .features import Feature, features, goes_with, made_unimportable
from .own_tests import DELETED


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    every = features()
    chosen = [feature for feature in every if not options.only or set_of(feature, options.only)]
    if options.list or not chosen:
        sys.stdout.write("".join(f"{feature.path}\n" for feature in every))
        return 0 if options.list else 2
    if not options.only:
        with tempfile.TemporaryDirectory(prefix="ddpkit-deletion-") as folder:
            return all_at_once.main(Path(folder), options.jobs, options.tests)
    failed = []
    for feature in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ddpkit-deletion-") as folder:
            copy = copy_of_files(Path(folder) / "ddpkit")
            for gone in goes_with(feature, every):
                path = copy / gone.path
                path.write_text(made_unimportable(path.read_text(encoding="utf-8")))
            code = _run_tests(copy, feature, options)
        if code:
            failed.append(feature.path)
        word = "FAILS" if code else "passes"
        sys.stdout.write(f"{word}: without {feature.path} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return 1 if failed else 0


def set_of(feature: Feature, words: Sequence[str]) -> bool:
    """Say whether a feature was asked for."""
    return any(word in feature.path for word in words)


def _run_tests(copy: Path, feature: Feature, options: argparse.Namespace) -> int:
    environment = {**os.environ, "PYTHONPATH": str(copy), DELETED: feature.path}
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.deletion.own_tests"),
        *("-p", "no:cacheprovider", "-m", MARKS, "-n", str(options.jobs)),
        *options.tests,
    ]
    return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.deletion", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="files whose path has the word"
    )
    parser.add_argument("--list", action="store_true", help="print the files, and delete none")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest")
    parser.add_argument("tests", nargs="*", help="tests to run; none: all quick ones")
    return parser


if __name__ == "__main__":
    sys.exit(main())
