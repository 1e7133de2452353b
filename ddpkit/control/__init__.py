"""A run never hangs: periodic agreement, heartbeat, watchdog, failure report, and where each rank is."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
