"""One run from its start to its end: what Brain does in fit, evaluate and predict around the
loops.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
