"""How the modules run on one device or several: DataParallel, DDP, FSDP2, ZeRO-1, post-local SGD,
virtual ranks.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use
