"""Which launcher started this process, and as which rank; and ``--nproc``, which has torch's
launcher start the ranks.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
