"""The command line of the package itself: ``python -m ddpkit``.

A recipe has its own command line (see :func:`ddpkit.run_opts.parse_arguments`). This one is for what
concerns no single recipe. It has no sub-commands yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddpkit import __version__

__all__ = ["main"]

_EPILOG = """\
There are no sub-commands yet. To train, run a recipe:

  python train.py hparams.yaml                                             one process
  torchrun --standalone --nproc_per_node=2 train.py hparams.yaml           two processes on this machine
  python train.py --help                                                   the options of a recipe
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m ddpkit`` and return its exit status.

    Without arguments it prints its help. ``--version``, ``--help`` and a wrong argument leave through
    :class:`SystemExit`, as :mod:`argparse` does.

    Args:
        arguments: The words after ``python -m ddpkit``; ``None`` takes them from ``sys.argv``.

    Returns:
        The exit status: 0.

    Raises:
        SystemExit: With status 0 after ``--version`` or ``--help``, with 2 for an argument it does not know.

    Ranks: local.

    Example:
        >>> main([])  # doctest: +ELLIPSIS
        usage: python -m ddpkit [-h] [--version]
        ...
        0
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddpkit",
        description="ddpkit: a data-parallel training loop for PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0
