"""Draws trainings, and compares them with the plain loop, for as long as one likes.

``make model MODEL_ARGS="--seed 3 --minutes 60"``; one of them again: ``--only 17``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.model.comparing import complaints_of
from tests.model.drawing import draw
from tests.model.shrinking import report_of
from tests.rank_pool import RankPool


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draws")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no draw begins")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, help="number of the only draw")
    parser.add_argument("--show", action="store_true", help="print each draw before it begins")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    end = time.monotonic() + 60 * arguments.minutes
    number = arguments.first if arguments.only is None else arguments.only
    failed = 0
    print(f"seed {arguments.seed}; what the ranks write is in {keep_quiet()}", flush=True)
    with RankPool() as ranks:
        while time.monotonic() < end:
            training = draw(arguments.seed, number)
            if arguments.show:
                print(number, training, flush=True)
            said = complaints_of(training, ranks)
            if said:
                failed += 1
                print(f"--- seed {arguments.seed}, draw {number}")
                print(report_of(training, said, ranks), flush=True)
            number += 1
            if arguments.only is not None:
                break
    print(f"{number - arguments.first} draws, {failed} failed")
    return int(failed > 0)


def keep_quiet() -> str:
    """Have what ranks write go to a file, and return its name."""
    descriptor, name = tempfile.mkstemp(prefix="ddpkit-model-", suffix=".log")
    os.dup2(descriptor, 2)
    os.close(descriptor)
    return name


if __name__ == "__main__":
    sys.exit(main())
