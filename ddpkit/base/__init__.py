"""What every package may import; it imports none of them.

Which rank this is, rank status and failure report, what is saved of objects, and plain YAML.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
