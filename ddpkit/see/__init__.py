"""Commands that look at a machine, at a recipe on it, and at runs: ``scale``, ``estimate``,
``lr-find``, ``doctor``, ``report`` and ``diff``.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
