"""The environment of a program that a rank starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpkit.launch import without_launch

if TYPE_CHECKING:
    from collections.abc import Mapping


def environment_without_launch(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for a program that a rank starts and that is to run as a single
    process.

    A program inherits the variables of the rank that starts it. Where it uses ddpkit, too, it is
    refused as a second process of that rank, unless it is started with this.

    Args:
        environ: the environment to copy; None copies ``os.environ``.

    Returns:
        A copy without what a launcher (torchrun, ``--nproc``, Slurm, MPI) says about ranks.

    Ranks: local.

    Example:
        >>> import subprocess, sys
        >>> from ddpkit.distributed import run_on_main
        >>> words = [sys.executable, "-c", "import os; raise SystemExit('RANK' in os.environ)"]
        >>> run_on_main(lambda: subprocess.run(words, env=environment_without_launch()).returncode)
        0
    """
    return without_launch(os.environ if environ is None else environ)
