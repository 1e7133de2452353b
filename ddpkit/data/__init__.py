"""Which rank sees which sample: the plan of an epoch, batch samplers, streams and their
positions.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
