"""Objects of a store such as S3: URLs, requests with their repetitions and errors, an index
of names, and a lock.

Nothing here knows a checkpoint. ``fsspec``, and what it needs for a store, is imported on first
use.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
