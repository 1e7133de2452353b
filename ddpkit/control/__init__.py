"""A run never hangs: heartbeat, watchdog, failure notice, periodic sync of the ranks, and the loader's workers.

What the ranks tell each other, the failure report and the rank status, is in :mod:`ddpkit.base`.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
