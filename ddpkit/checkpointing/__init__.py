"""Checkpoints that are complete or not there: the folder, its storage and lock, the hooks of
objects, and writing in the background.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
