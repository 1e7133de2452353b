"""The entry of ``python -m ddpkit``."""

from __future__ import annotations

import sys

from ddpkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
