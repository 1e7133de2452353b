"""What measured steps tell of a run: what makes it slow, by how much, and what to try."""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
