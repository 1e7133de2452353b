"""Features of a run that are given in a list, as parts: the library's own, and yours."""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = ["AveragedWeights", "EarlyStopping", "KubeflowProgress", "Part", "ValidationSchedule"]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
