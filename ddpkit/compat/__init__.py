"""The few places where ddpkit looks into what other packages keep to themselves.

Each is a function with its reason. Where the inside may differ between the versions that ddpkit supports, a way through
the public API is taken, and tested.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
