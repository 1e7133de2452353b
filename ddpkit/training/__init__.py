"""One optimizer step and the loops around it, what they read, options on modules, and results of
all ranks.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
