"""A run never hangs: heartbeat, watchdog, failure report, signals, and the status of each rank."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)
