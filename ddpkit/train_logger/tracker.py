"""What loggers have in common that write to an experiment tracker."""

from __future__ import annotations

import abc
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddpkit.base import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from ddpkit.distributed import if_main_process
from ddpkit.errors import ConfigError, MissingExtraError
from ddpkit.logger import get_logger
from ddpkit.train_logger.main_logger import MainTrainLogger
from ddpkit.train_logger.step_axis import StepAxis, flat

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from ddpkit.reporting import Stats

logger = get_logger(__name__)


@register_checkpoint_hooks
class TrackerLogger(MainTrainLogger, abc.ABC):
    """The base of loggers whose statistics go to a tracker of experiments.

    The tracker's run is opened on the main process when ``fit`` begins, or at the first statistics.
    A tracker that cannot be opened is a ``ConfigError`` before the first epoch. Of a tracker that
    fails later, a warning is shown once, and training goes on: ``metrics.jsonl`` has the values.

    Attributes:
        tracker: its name in messages, and that of its package.
        run_id: of the tracker's run; None before it is opened.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``run_id``, so that a run that is started again goes on in the tracker's run. The
    Brain gives the logger to the checkpointer, unless the recipe does.
    """

    tracker: ClassVar[str]
    package: ClassVar[str]

    def __init__(self) -> None:
        self.run_id: str | None = None
        self.axis = StepAxis()
        self.lost = 0
        self._is_open = False

    @abc.abstractmethod
    def open_run(self) -> str:
        """Open the tracker's run, or go on in ``run_id``; return what identifies it."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Hand values over to the tracker."""

    def require_package(self) -> None:
        """Refuse a tracker that is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise MissingExtraError(
                f"{type(self).__name__} needs {self.package}, which is not installed. "
                f"Run `pip install {self.package}`, or leave the logger out of the recipe."
            )

    def opened(self) -> None:
        """Open the tracker's run, if it is not open.

        Raises:
            ConfigError: it cannot be opened; the tracker's own error is the cause.
        """
        if self._is_open or not if_main_process():
            return
        try:
            self.run_id = self.open_run()
        except Exception as error:
            raise ConfigError(
                f"{type(self).__name__}: {self.tracker} cannot be opened: "
                f"{type(error).__name__}: {error}. Mend that, or leave the logger out of the "
                "recipe: metrics.jsonl, in the experiment's folder, has all values."
            ) from error
        self._is_open = True

    def begin_fit(self, optimizer_step: int) -> None:
        """Open the tracker's run; arguments as in :meth:`TrainLogger.begin_fit`.

        Raises:
            ConfigError: the tracker does not answer, or refuses.

        Ranks: the main process alone.
        """
        self.opened()

    def begin_anew(self) -> None:
        """Forget the run of the tracker: a run that begins from scratch has one of its own.

        Ranks: the main process alone.
        """
        if not self._is_open:
            self.run_id = None

    def log_step(self, values: Mapping[str, float], step: int) -> None:
        """Write values as ``train_step/<name>``; arguments as in :meth:`TrainLogger.log_step`.

        Ranks: the main process alone.
        """
        self.opened()
        self.go_on_without(lambda: self.write(flat({}, {"train_step": values}, "/"), step))

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self.opened()
        step = self.axis.step_of(meta)
        self.go_on_without(lambda: self.write(self.values_of(meta, stages), step))

    def values_of(self, meta: Stats, stages: Mapping[str, Stats]) -> dict[str, Any]:
        """Return what is written of statistics, by name."""
        return flat(meta, stages, "/")

    def go_on_without(self, send: Callable[[], None]) -> None:
        """Hand values over; if the tracker fails, warn once and go on.

        Args:
            send: hands them over.
        """
        try:
            send()
        except Exception as error:  # noqa: BLE001 -- a tracker may raise anything
            self.lost += 1
            if self.lost > 1:  # the words of an error may be others each time
                return
            logger.warning(
                "%s does not take values: %s: %s. Training goes on. metrics.jsonl, in the "
                "experiment's folder, has all values.",
                self.tracker,
                type(error).__name__,
                error,
            )

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps({"run_id": self.run_id}), encoding="utf-8")

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        if not self._is_open:
            self.run_id = json.loads(Path(path).read_text(encoding="utf-8"))["run_id"]
