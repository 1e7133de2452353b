"""The options of a run: one table, the command line, and which source wins."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)
