"""The entry of ``python -m ddpkit``, and of the command ``ddpkit``."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from ddpkit.cli import main

if TYPE_CHECKING:
    from typing import NoReturn


def command() -> NoReturn:
    """Run the command line of this process, and end the process.

    Ranks: local.
    """
    # the reader of the output may close it, as `head` does
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())


if __name__ == "__main__":
    command()
