"""``--estimate``: this process becomes ``python -m ddpkit estimate``, with the running script as
the recipe.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpkit.errors import ConfigError
from ddpkit.launch.platforms import script_and_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

NOT_A_SCRIPT = (
    "--estimate starts the running script again, and there is none: this is an interactive Python, "
    "or code from a pipe. Put the code into a file, and start that."
)


def become_estimate(
    asked: str,
    nproc: str | None,
) -> NoReturn:
    """Turn this process into the command that estimates the memory of the running script.

    Args:
        asked: numbers of processes, and an amount of memory, in any order, such as ``"4,8,24GB"``.
        nproc: as given to ``--nproc``: the number of processes that is meant; or None.

    Raises:
        ConfigError: the running script cannot be started again.

    Ranks: local.

    State: the program of this process.
    """
    words = script_and_arguments(sys.orig_argv[1:])
    if not words or sys.argv[0] in {"", "-"}:
        raise ConfigError(NOT_A_SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ddpkit",
        "estimate",
        *options_of(asked, nproc),
        "--",
        *without_options(words),
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)  # noqa: S606 -- as meant


def options_of(
    asked: str,
    nproc: str | None,
) -> list[str]:
    """Return the options of the command.

    Args:
        asked: as in :func:`become_estimate`.
        nproc: likewise.

    Example:
        >>> options_of("4,8,24GB", None), options_of("1,2", "4")
        (['--nproc=4,8', '--memory=24GB'], ['--nproc=4,1,2'])
        >>> options_of("24GB", None)
        ['--memory=24GB']
    """
    words = [word.strip() for word in asked.split(",")]
    numbers = [word for word in words if word.isdecimal()]
    amounts = [word for word in words if not word.isdecimal()]
    # words such as "gpu" mean what is here, and an estimate asks for what could be
    if nproc is not None and nproc.strip().isdecimal():
        numbers.insert(0, nproc.strip())
    found = [f"--nproc={','.join(numbers)}"] if numbers else []
    return found + [f"--memory={amount}" for amount in amounts]


def without_options(words: Sequence[str]) -> list[str]:
    """Return a command line without ``--estimate`` and ``--nproc``.

    Args:
        words: of it.

    Example:
        >>> without_options(["train.py", "--nproc", "2", "h.yaml", "--estimate=4", "--lr=1"])
        ['train.py', 'h.yaml', '--lr=1']
    """
    left = []
    is_value = False
    for word in words:
        name = word.partition("=")[0]
        if not is_value and name not in {"--estimate", "--nproc"}:
            left.append(word)
        is_value = word == "--nproc"
    return left
