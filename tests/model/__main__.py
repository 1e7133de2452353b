"""Draws trainings, and compares them with the plain loop, for as long as one likes.

``make model MODEL_ARGS="--seed 3 --minutes 60"``; one of them again: ``--only 17``.

With ``--same_bits`` others are drawn, with virtual ranks, and each strategy and number of processes
is compared bit by bit with one process: ``MODEL_ARGS="--same_bits --recipes 100 --seed 1"``.
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
from tests.model.same_bits import campaign
from tests.model.shrinking import report_of
from tests.rank_pool import RankPool

MINUTES = 10.0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the draws")
    parser.add_argument(
        "--minutes", type=float, help="after which no draw begins [10; with --same_bits: no limit]"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, help="number of the only draw")
    parser.add_argument("--show", action="store_true", help="print each draw before it begins")
    bits = parser.add_argument_group("the same bits under any strategy")
    bits.add_argument("--same_bits", action="store_true", help="draw recipes with virtual ranks")
    bits.add_argument("--recipes", type=int, default=100, help="number of them [100]")
    bits.add_argument("--all", action="store_true", help="run each on all combinations, not on 4")
    bits.add_argument("--way", type=int, help="number of the only way of a recipe")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.same_bits:
        print(f"seed {arguments.seed}; what the ranks write is in {keep_quiet()}", flush=True)
        found = campaign.run(arguments)
        print(campaign.summary(found))
        return int(bool(found.differences))
    end = time.monotonic() + 60 * (arguments.minutes or MINUTES)
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
