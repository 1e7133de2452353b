"""An output folder in an object store. The run works in a folder of this machine, the mirror. Its
contents are copied into the store, and at a later start back from there.

Recipes, loggers and hooks see the mirror alone. Nothing here, nor ``fsspec``, is loaded unless a
URL is given.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
