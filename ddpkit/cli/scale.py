"""``python -m ddpkit scale``: does a recipe get faster on more processes, and if not, why not.

The measuring is in :mod:`ddpkit.see.scale`. What is no option of this command goes to the recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, say, whole_number
from ddpkit.cli.recipe_words import positive, require_recipe_words, split_words, tell

__all__ = ["run"]

PROGRAM = "python -m ddpkit scale"

DESCRIPTION = """\
Measure short slices of a recipe on one process and on several, in turns: samples per second, speed-up,
where the time of a step goes, and what holds it back. Nothing of a run is written or disturbed: no
output folder, checkpoint or log."""  # noqa: E501

EPILOG = """\
All other words go to the recipe: its YAML, run options, overrides. A recipe's option with the name of
one above goes after --.

examples:
  python -m ddpkit scale train.py hparams.yaml --nproc 1,2,4
  python -m ddpkit scale train.py hparams.yaml --nproc 1,2 --ways ddp,fsdp --precision=bf16
  python -m ddpkit scale train.py hparams.yaml --nproc 1,2,4 --weak --plot scale.svg --json scale.json

several nodes: one result file for each size, then all of them in one table
  torchrun --nnodes=2 --nproc_per_node=4 ... -m ddpkit scale train.py hparams.yaml --json 8.json
  python -m ddpkit scale --join 1.json 4.json 8.json --plot scale.svg
"""  # noqa: E501

_SWITCHES = ("-h", "--help", "--strong", "--weak")
_WITH_VALUE = ("--nproc", "--ways", "--rounds", "--seconds", "--plot", "--json")
_JOIN = "--join"


def run(words: Sequence[str]) -> int:
    """Measure a recipe, or join results; say what was found.

    Args:
        words: what stands after ``scale`` on the command line.

    Returns:
        The exit status: 0, or 1 if a size has failed.

    Raises:
        ConfigError: something asked for cannot work here.
        LaunchError: the recipe has failed.
        MissingExtraError: a plot is asked for, and there is no matplotlib.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Ranks: one process; or every rank of a launch.
    """
    own, recipe = split_words(words, _SWITCHES, _WITH_VALUE, (_JOIN,))
    parser = _parser()
    options = parser.parse_args(own)
    if options.join is None:
        require_recipe_words(parser, recipe)
    from ddpkit.see import ScaleRequest, join_results, run_scale  # loads torch

    if options.join is not None:
        if recipe:
            parser.error(f"--join measures nothing, and takes no recipe: {' '.join(recipe)}")
        return join_results(options.join, options.plot, options.json, say)
    request = ScaleRequest(
        words=recipe,
        nproc=options.nproc,
        ways=options.ways,
        scaling=options.scaling,
        rounds=options.rounds,
        seconds=options.seconds,
        plot=options.plot,
        json=options.json,
    )
    return run_scale(request, say, tell)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, DESCRIPTION, EPILOG)
    parser.usage = (
        "%(prog)s SCRIPT [HPARAMS] --nproc N,N,... [options] [options of the recipe]\n"
        "       %(prog)s --join FILE FILE ..."
    )
    add = parser.add_argument
    add("--nproc", default="1,2", metavar="N,N,...", help="numbers of processes (default: 1,2)")
    add(
        "--ways",
        metavar="WAY,...",
        help="single, dp, ddp, fsdp, zero1 (default: as the recipe runs)",
    )
    kinds = parser.add_mutually_exclusive_group()
    strong = "the samples of a step stay the same on all sizes"
    weak = "the samples of each process stay the same"
    kinds.add_argument(
        "--strong",
        dest="scaling",
        action="store_const",
        const="strong",
        help=strong,
    )
    kinds.add_argument(
        "--weak",
        dest="scaling",
        action="store_const",
        const="weak",
        help=weak,
    )
    add(
        "--rounds",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="slices of each size (default: 3)",
    )
    add(
        "--seconds",
        type=positive,
        default=2.0,
        metavar="S",
        help="of steps in a slice (default: 2)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw speed-up and steps: .svg, .png or .pdf")
    add("--json", type=Path, metavar="FILE", help="write all results, for programs and for --join")
    add(
        "--join",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: one table of these results",
    )
    return parser
