"""A run never hangs: watchdog, failure notice, requests to stop, and the workers of loaders.

What the ranks tell each other, the failure report and the rank status, is in :mod:`ddpkit.base`.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
