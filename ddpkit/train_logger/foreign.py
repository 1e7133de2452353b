"""Train loggers that are no subclass of ddpkit's: objects with a method ``log_stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.train_logger.interface import TrainLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpkit.reporting import Stats

PATHS = ("save_file", "save_dir", "run_log_beside")


class ForeignLogger(TrainLogger):
    """Passes on to an object of another class what its methods can take.

    Args:
        logger: with ``log_stats``, and with further methods of :class:`TrainLogger` or without.

    Ranks: as the object.

    Example:
        >>> class Own:
        ...     def log_stats(self, stats_meta, **stats):
        ...         print(stats_meta, stats)
        >>> ForeignLogger(Own()).log_stats({"epoch": 1}, valid_stats={"loss": 0.5})
        {'epoch': 1} {'valid_stats': {'loss': 0.5}}
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        for name in PATHS:
            setattr(self, name, getattr(logger, name, None))

    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        stats: dict[str, Any] = {f"{name}_stats": stats for name, stats in stages.items()}
        if verbose is not None:
            stats["verbose"] = verbose
        self._logger.log_stats(meta, **stats)

    def require_writable(self) -> None:
        """Ask the object, if it can tell."""
        self._call("require_writable")

    def begin_fit(self, optimizer_step: int) -> None:
        """Tell the object where the run goes on, if it hears it."""
        self._call("begin_fit", optimizer_step)

    def begin_anew(self) -> None:
        """Tell the object, if it hears it."""
        self._call("begin_anew")

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Pass values of steps on, if the object takes them."""
        self._call("log_step", values, step)

    def _call(self, name: str, *values: Any) -> None:
        method = getattr(self._logger, name, None)
        if callable(method):
            method(*values)


def as_train_logger(value: Any) -> TrainLogger | None:
    """Return a train logger as one of ddpkit's kind; None for what is no train logger.

    Args:
        value: an object with ``log_stats``, or anything else.

    Ranks: local.

    Example:
        >>> as_train_logger("results/train_log.txt") is None
        True
    """
    if isinstance(value, TrainLogger):
        return value
    if isinstance(value, type) or not callable(getattr(value, "log_stats", None)):
        return None
    return ForeignLogger(value)
