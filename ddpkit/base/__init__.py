"""What every package may import; it imports none of them.

Rank, signals, failure report, rank status, checkpoint marks, plain YAML, states of modules, and the process probe.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
