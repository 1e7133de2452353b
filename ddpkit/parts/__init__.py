"""Parts: features of a run that come in by a list, the library's and a user's alike."""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = ["AveragedWeights", "EarlyStopping", "KubeflowProgress", "Part", "ValidationSchedule"]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
