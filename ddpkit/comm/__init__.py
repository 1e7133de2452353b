"""How the ranks talk: process group, mailbox over the store, ordered sums, and checks that all run
the same training.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
