"""How the modules run on one device or several: DataParallel, DDP, FSDP2, ZeRO-1, post-local SGD,
virtual ranks, and strategies of your own.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = [
    "Strategy",
    "average_over_ranks",
    "refuse_with",
    "register",
    "registered_names",
    "unregister",
]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
