"""Logs a line per call to a text file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.base import require_writable, writing
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.mirror import local_file
from ddpkit.reporting import Current, Stats, append, move_logs_away, plain
from ddpkit.train_logger.main_logger import MainTrainLogger

if TYPE_CHECKING:
    from collections.abc import Mapping


logger = get_logger(__name__)


class FileTrainLogger(MainTrainLogger):
    """Writes one line per call to a text file: ``epoch: 1 - train loss: 2.31 - valid loss:
    9.10e-01``.

    The same statistics go to the run's log, at full precision (``metrics.jsonl`` beside
    ``save_file`` where no run log is set).

    The line is also logged to the console, unless ``log_stats`` is called with ``verbose=False``.

    Args:
        save_file: the text file; it is appended to. A run with ``--resume=never`` moves an earlier
            one away.
        precision: digits after the point. Floats between 1 and 100 are written plainly, others with
            an exponent.

    Raises:
        ConfigError: ``precision`` is no such number.

    Ranks: all, or the main process alone; only it writes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train_logger = FileTrainLogger(f"{folder}/train_log.txt")
        ...     train_logger.log_stats({"epoch": 1, "lr": 0.1}, {"loss": 2.31}, verbose=False)
        ...     Path(train_logger.save_file).read_text().strip()
        'epoch: 1, lr: 1.00e-01 - train loss: 2.31'
    """

    save_file: str

    def __init__(self, save_file: str | os.PathLike[str], precision: int = 2) -> None:
        self.save_file = local_file("save_file", save_file)
        given: Any = precision  # of the YAML
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigError(
                f"FileTrainLogger: precision={precision!r} must be a whole number >= 0: digits "
                "after the point."
            )
        self.precision = precision
        self.run_log_beside = Path(self.save_file).with_name("metrics.jsonl")
        self._has_written = False

    def begin_anew(self) -> None:
        """Move the text file, and ``metrics.jsonl`` beside it where no run log is set, to
        ``earlier-<time>``.

        Raises:
            ConfigError: as :meth:`TrainLogger.begin_anew`.

        Ranks: the main process alone.
        """
        if not self._has_written:
            beside = [] if Current.log or self.run_log_beside is None else [self.run_log_beside]
            move_logs_away([Path(self.save_file), *beside])

    def require_writable(self) -> None:
        """Refuse a file that cannot be written, before the first epoch.

        Raises:
            ConfigError: :attr:`save_file` cannot be written.

        Ranks: the main process alone.
        """
        require_writable(f"save_file={self.save_file!r}", self.save_file)

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._has_written = True
        parts = [
            self._line(meta),
            *(self._line(stats, f"{name} ") for name, stats in stages.items()),
        ]
        line = " - ".join(parts)
        path = Path(self.save_file)
        with writing(f"save_file={self.save_file!r}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            append(path, line + "\n")
        if verbose is not False:
            logger.info("%s", line)

    def _line(self, stats: Stats, stage: str = "") -> str:
        return ", ".join(
            f"{stage}{name}: {self._text(plain(value))}" for name, value in stats.items()
        )

    def _text(self, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        kind = "f" if 1.0 < value < 100.0 else "e"  # noqa: PLR2004 -- the recipe contract fixes the format
        return f"{value:.{self.precision}{kind}}"
