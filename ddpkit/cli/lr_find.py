"""``python -m ddpkit lr-find``: which learning rate a recipe can begin with.

The training is in :mod:`ddpkit.run.lr_sweep`, the rest in :mod:`ddpkit.see.lr_find`. What is no
option of this command goes to the recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, say, whole_number
from ddpkit.cli.recipe_words import positive, require_recipe_words, split_words, tell

__all__ = ["run"]

PROGRAM = "python -m ddpkit lr-find"

DESCRIPTION = """\
Train a recipe for some optimizer steps, each with a higher learning rate than the one before, and
say at which rate its loss falls fastest. Nothing of a run is written or disturbed: no output
folder, checkpoint or log."""

EPILOG = """\
All other words go to the recipe: its YAML, run options, overrides. A recipe's option with the name
of one above goes after --.

examples:
  python -m ddpkit lr-find train.py hparams.yaml
  python -m ddpkit lr-find train.py hparams.yaml --nproc 2 --from 1e-5 --to 1 --plot lr.svg
"""

_SWITCHES = ("-h", "--help")
_WITH_VALUE = ("--nproc", "--from", "--to", "--steps", "--seconds", "--plot", "--json")


def run(words: Sequence[str]) -> int:
    """Try learning rates with a recipe; say what was found.

    Args:
        words: what stands after ``lr-find`` on the command line.

    Returns:
        The exit status: 0, or 1 if no rate is suggested.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.
        MissingExtraError: a plot is asked for, and there is no matplotlib.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Ranks: one process.
    """
    own, recipe = split_words(words, _SWITCHES, _WITH_VALUE)
    parser = _parser()
    options = parser.parse_args(own)
    require_recipe_words(parser, recipe)
    from ddpkit.see import LrFindRequest, run_lr_find  # loads torch

    request = LrFindRequest(
        words=recipe,
        nproc=options.nproc,
        first=options.first,
        last=options.last,
        steps=options.steps,
        max_seconds=options.seconds,
        plot=options.plot,
        json=options.json,
    )
    return run_lr_find(request, say, tell)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = "%(prog)s SCRIPT [HPARAMS] [options] [options of the recipe]"
    add = parser.add_argument
    add("--nproc", type=whole_number(1), default=1, metavar="N", help="processes (default: 1)")
    add(
        "--from",
        dest="first",
        type=positive,
        default=1e-6,
        metavar="RATE",
        help="the first learning rate (default: 1e-6)",
    )
    add(
        "--to",
        dest="last",
        type=positive,
        default=10.0,
        metavar="RATE",
        help="the last one, if the loss allows it (default: 10)",
    )
    add(
        "--steps",
        type=whole_number(1),
        default=100,
        metavar="N",
        help="learning rates, one for each optimizer step (default: 100)",
    )
    add(
        "--seconds",
        type=positive,
        default=600.0,
        metavar="S",
        help="of training, at most (default: 600)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the curve: .svg, .png or .pdf")
    add("--json", type=Path, metavar="FILE", help="write the curve and the suggestion")
    return parser
