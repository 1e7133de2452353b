"""What of a recipe's hyperparameters is replaced in a measured slice, which writes nothing of the
user's.
"""

from __future__ import annotations

from typing import Any

from ddpkit.launch import find_slice
from ddpkit.train_logger import TrainLogger


class SilentLogger(TrainLogger):
    """Stands in for the train logger of a recipe in a slice: whatever it is told, it does nothing.

    Example:
        >>> SilentLogger().log_stats({"epoch": 1})
        >>> SilentLogger().log_audio("sample.wav")
    """

    def log_stats(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.log_stats


def hparams_of_slice(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters that let a slice write nothing of the user's; in another process, the
    same ones.

    Args:
        hparams: of the recipe.

    Example:
        >>> hparams_of_slice({"lr": 0.1})
        {'lr': 0.1}
    """
    plan = find_slice()
    if plan is None:
        return hparams
    silent = {
        name: SilentLogger()
        for name, value in hparams.items()
        if name == "train_logger" or isinstance(value, TrainLogger)
    }
    return {**hparams, **silent, "output_folder": str(plan.output_folder)}
