"""The few places where ddpkit uses private parts of other packages.

Each is a function with its reason. It looks only where the inside is as expected, has a way through
the public API that is taken otherwise, and is tested both ways.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
