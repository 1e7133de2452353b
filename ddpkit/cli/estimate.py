"""``python -m ddpkit estimate``: how much memory a recipe takes on each process, and what fits.

The rehearsal is in :mod:`ddpkit.run.memory_rehearsal`, the rest in :mod:`ddpkit.see.estimate`. What
is no option of this command goes to the recipe. The recipe's own option ``--estimate`` becomes this
command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, say
from ddpkit.cli.recipe_words import require_recipe_words, split_words, tell

__all__ = ["run"]

PROGRAM = "python -m ddpkit estimate"

DESCRIPTION = """\
Make a few steps of a recipe on its first batch, in one process, and say how much memory each
process would take under each strategy: weights, gradients, states of optimizers, activations, and
the peak. Nothing of a run is written or disturbed: no output folder, checkpoint or log."""

EPILOG = """\
All other words go to the recipe: its YAML, run options, overrides. A recipe's option with the name
of one above goes after --.

examples:
  python -m ddpkit estimate train.py hparams.yaml
  python -m ddpkit estimate train.py hparams.yaml --nproc 4,1,2,8 --memory 24GB --strategy=fsdp
  python train.py hparams.yaml --estimate=4,8,24GB            the same, as an option of the recipe
"""

_SWITCHES = ("-h", "--help")
_WITH_VALUE = ("--nproc", "--memory", "--json")


def run(words: Sequence[str]) -> int:
    """Estimate the memory of a recipe; say what fits.

    Args:
        words: what stands after ``estimate`` on the command line.

    Returns:
        The exit status: 0, or 1 if the run does not fit.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Ranks: one process.
    """
    own, recipe = split_words(words, _SWITCHES, _WITH_VALUE)
    parser = _parser()
    options = parser.parse_args(own)
    require_recipe_words(parser, recipe)
    from ddpkit.see import EstimateRequest, run_estimate  # loads torch

    request = EstimateRequest(
        words=recipe,
        nproc=options.nproc,
        memory=options.memory,
        json=options.json,
    )
    return run_estimate(request, say, tell)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = "%(prog)s SCRIPT [HPARAMS] [options] [options of the recipe]"
    add = parser.add_argument
    add(
        "--nproc",
        default="1,2,4,8",
        metavar="N,N,...",
        help="processes; the first number is the one that is meant (default: 1,2,4,8)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="of a GPU, such as 24GB (default: that of the GPU here)",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures, for programs")
    return parser
