"""Draws recipes one after the other, and counts what came of them."""

from __future__ import annotations

import argparse
import time

from tests.model.same_bits.comparing import Found, look_at
from tests.model.same_bits.described import COMBINATIONS
from tests.model.same_bits.drawing import draw
from tests.rank_pool import RankPool


def run(arguments: argparse.Namespace) -> Found:
    """Run the recipes that a command line asks for, and print what differs as soon as it does.

    Args:
        arguments: of ``python -m tests.model --same_bits``.
    """
    found = Found()
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes if arguments.minutes else float("inf")
    numbers = range(arguments.first, arguments.first + arguments.recipes)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    with RankPool() as ranks:
        for number in numbers:
            if time.monotonic() > end:
                break
            if arguments.show:
                print(number, draw(arguments.seed, number), flush=True)
            known = len(found.differences)
            look_at(
                arguments.seed,
                number,
                ranks,
                found,
                every=arguments.all,
                only=arguments.way,
            )
            for text in found.differences[known:]:
                print(f"--- {text}", flush=True)
            if arguments.show:
                print(f"{time.monotonic() - begin:.0f} s: {summary(found)}", flush=True)
    return found


def summary(found: Found) -> str:
    """Return the counts in one line."""
    runs = ", ".join(
        f"{strategy} on {world}: {found.runs[strategy, world]}" for strategy, world in COMBINATIONS
    )
    refused = ", ".join(f"{word}: {number}" for word, number in sorted(found.refused.items()))
    return (
        f"{found.recipes} recipes, {found.runs.total()} runs beside those of one process, of which "
        f"{found.killed} were killed and have gone on: {len(found.differences)} differ. "
        f"Refused by name and drawn again: {found.refused.total()} ({refused or 'none'}). "
        f"Runs: {runs}."
    )
