"""Logs to several train loggers at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpkit.base import kind_of
from ddpkit.errors import ConfigError
from ddpkit.reporting import Current, Stats
from ddpkit.train_logger.foreign import as_train_logger
from ddpkit.train_logger.interface import TrainLogger

if TYPE_CHECKING:
    from collections.abc import Iterator


class TrainLoggers(TrainLogger):
    """Several train loggers as one: each reports the same.

    A Brain makes one of a list under ``train_logger`` in its hparams, so that
    ``self.hparams.train_logger.log_stats`` reports to all of them.

    Args:
        loggers: each with a method ``log_stats``.

    Raises:
        ConfigError: an object is not a train logger.

    Ranks: as the loggers.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ddpkit.train_logger import FileTrainLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     both = TrainLoggers(
        ...         FileTrainLogger(f"{folder}/a.txt"),
        ...         FileTrainLogger(f"{folder}/b.txt", precision=3),
        ...     )
        ...     both.log_stats({"epoch": 1}, {"loss": 2.5}, verbose=False)
        ...     [Path(folder, name).read_text().split() for name in ("a.txt", "b.txt")]
        [['epoch:', '1', '-', 'train', 'loss:', '2.50'], ['epoch:', '1', '-', 'train', 'loss:',
        '2.500']]
    """

    def __init__(self, *loggers: Any) -> None:
        members: list[TrainLogger] = []
        for logger in loggers:
            member = as_train_logger(logger)
            if member is None:
                raise ConfigError(
                    f"train_logger: {logger!r} is not a train logger: it has no log_stats, or is a "
                    "class."
                )
            members.append(member)
        self.loggers = loggers
        self._members = members

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loggers)

    def members(self) -> list[TrainLogger]:
        """Return the loggers, those of other classes as ddpkit calls them.

        Ranks: local.
        """
        return list(self._members)

    def require_writable(self) -> None:
        """Refuse files that cannot be written, of every logger.

        Raises:
            ConfigError: a file or folder cannot be written.

        Ranks: the main process alone.
        """
        for logger in self._members:
            logger.require_writable()

    def begin_fit(self, optimizer_step: int) -> None:
        """Get every logger ready for a call of ``fit``.

        Args:
            optimizer_step: as in :meth:`TrainLogger.begin_fit`.

        Raises:
            ConfigError: as the loggers.

        Ranks: the main process alone.
        """
        for logger in self._members:
            logger.begin_fit(optimizer_step)

    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        stats: dict[str, Any] = {f"{name}_stats": stats for name, stats in stages.items()}
        for logger in self.loggers:
            logger.log_stats(
                meta,
                **stats,
                **({} if verbose is None else {"verbose": verbose}),
            )

    def begin_anew(self) -> None:
        """Have every logger move what an earlier run has written away.

        Raises:
            ConfigError: as the loggers.

        Ranks: the main process alone.
        """
        for logger in self._members:
            logger.begin_anew()

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Report to every logger.

        Args:
            values: as in :meth:`TrainLogger.log_step`.
            step: likewise.

        Ranks: the main process alone.
        """
        for logger in self._members:
            logger.log_step(values, step)


def log_places(train_logger: Any) -> list[str]:
    """Return the files and folders that the events and the statistics of a run are written to.

    Args:
        train_logger: of the recipe, or None.

    Ranks: local; what the main process writes.

    Example:
        >>> from ddpkit.train_logger import FileTrainLogger
        >>> log_places(FileTrainLogger("results/train_log.txt"))
        ['results/metrics.jsonl', 'results/train_log.txt']
    """
    if isinstance(train_logger, TrainLoggers):
        return list(
            dict.fromkeys(place for one in train_logger.members() for place in log_places(one))
        )
    known = as_train_logger(train_logger) or TrainLogger()
    run_log = known.run_log_beside if Current.log is None else Current.log.path
    paths = [
        path
        for path in (run_log, known.save_file, known.save_dir)
        if isinstance(path, (str, os.PathLike))
    ]
    return [os.fspath(path) for path in paths]


def loggers_of(hparams: Any) -> list[TrainLogger]:
    """Return each train logger of a recipe once; of several as one, each of them.

    Args:
        hparams: a namespace, or None.

    Ranks: local.

    Example:
        >>> from types import SimpleNamespace
        >>> board = TrainLogger()
        >>> loggers_of(SimpleNamespace(board=board, train_logger=TrainLoggers(board))) == [board]
        True
    """
    values = {} if hparams is None else dict(vars(hparams))
    values["train_logger"] = as_train_logger(values.get("train_logger"))
    found: list[TrainLogger] = []
    for value in values.values():
        if isinstance(value, TrainLoggers):
            found += value.members()
        elif isinstance(value, TrainLogger):
            found.append(value)
    return list({id(logger): logger for logger in found}.values())


def join_loggers(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters in which a list under ``train_logger`` is one :class:`TrainLoggers`.

    Args:
        hparams: as a recipe gives them; not changed.

    Raises:
        ConfigError: they are no mapping, or an object in the list is not a train logger.

    Ranks: local.

    Example:
        >>> len(
        ...     list(join_loggers({"train_logger": [TrainLogger(), TrainLogger()]})["train_logger"])
        ... )
        2
    """
    if not isinstance(hparams, Mapping):
        raise ConfigError(
            f"hparams is {kind_of(hparams)}, not a mapping: give what load_hparams returns."
        )
    found = hparams.get("train_logger")
    joined = {"train_logger": TrainLoggers(*found)} if isinstance(found, (list, tuple)) else {}
    return {**hparams, **joined}
