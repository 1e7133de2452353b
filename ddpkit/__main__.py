"""The entry of ``python -m ddpkit``."""

from __future__ import annotations

import signal
import sys

from ddpkit.cli import main

if __name__ == "__main__":
    # the reader of the output may close it, as `head` does
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
