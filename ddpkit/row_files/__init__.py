"""Results of samples in files: rows in ascending order of their samples, written batch by batch."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
