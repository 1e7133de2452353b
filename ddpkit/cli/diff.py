"""``python -m ddpkit diff``: where two runs part, to the bit, and what of a step differs first.

It reads what ``--hash_every`` has recorded. With ``--replay`` both recipes make the steps again in
which they part, in a scratch folder. Nothing of the runs is written to.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddpkit.cli import command_parser, say
from ddpkit.cli.recipe_words import tell

__all__ = ["run"]

PROGRAM = "python -m ddpkit diff"

_DESCRIPTION = """\
Say at which optimizer step two runs part, to the bit, and what of the step differs first: samples,
loss, gradients of which module, settings, states of optimizers, or weights; and what else differs
between the runs, such as versions and options. Both must have been run with --hash_every. A RUN is
the folder of an experiment, such as results/1234, or its metrics.jsonl."""

_EPILOG = """\
examples:
  python -m ddpkit diff results/1234 results/1235
  python -m ddpkit diff results/1234 results/1235 --json
  python -m ddpkit diff results/1234 results/1235 --replay

The exit status is 0 where all steps that both have recorded are equal, else 1.
"""


def run(words: Sequence[str]) -> int:
    """Compare two runs.

    Args:
        words: what stands after ``diff`` on the command line.

    Returns:
        The exit status: 0 where they are equal, else 1.

    Raises:
        ConfigError: a RUN is none, has no records to compare, or cannot make its steps again here.
        LaunchError: a RUN was to make its steps again, and has failed.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> run([folder, folder])
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: RUN='...' is no folder of a run: it has no metrics.jsonl ...
    """
    options = _parser().parse_args(words)
    from ddpkit.mirror import copied_down
    from ddpkit.see import run_diff

    runs = [str(copied_down(run)) for run in (options.one, options.other)]
    return run_diff(
        runs,
        say,
        as_json=options.json,
        tell=tell if options.replay else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    for name, metavar in (("one", "RUN_A"), ("other", "RUN_B")):
        parser.add_argument(
            name,
            metavar=metavar,
            help="folder of an experiment, or metrics.jsonl",
        )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write JSON, with all values",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help=(
            "start both recipes again from copies of their checkpoints before the difference, with "
            "a record of each step, to name the exact step and to tell whether it comes again"
        ),
    )
    return parser
