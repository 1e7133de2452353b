"""Measures optimizer steps: how long each phase takes on each rank, and what that tells."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
