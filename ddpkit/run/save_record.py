"""The events of the run's log about checkpoints: saved, deleted, or lost."""

from __future__ import annotations

import functools
from numbers import Real
from typing import TYPE_CHECKING, Any

from ddpkit.checkpointing import OWN_META
from ddpkit.errors import ConfigError
from ddpkit.logger import address_of, get_logger
from ddpkit.reporting import plain, run_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpkit.checkpointing import Retained, SaveReport
    from ddpkit.training import Progress

logger = get_logger(__name__)


class SaveRecord:
    """Writes what saves have done; a :class:`~ddpkit.checkpointing.save_report.SaveListener`.

    Args:
        progress: of the run, read when a save begins: files may be written while training goes on.

    Ranks: main only.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self) -> Callable[[SaveReport], object]:
        """Note where the run is; return what writes the event, perhaps in a thread."""
        progress = self._progress
        position = {
            "epoch": progress.epoch,
            "step": progress.step,
            "optimizer_step": progress.optimizer_step,
        }
        return functools.partial(_write_saved, position)

    def deleted(self, retained: Retained) -> None:
        """Write what a deletion has left that came apart from a save."""
        _write("checkpoints_deleted", **_left(retained))

    def failed(self, error: BaseException) -> None:
        """Write that a checkpoint is lost, and that training goes on."""
        progress = self._progress
        _write(
            "checkpoint_failed",
            message=str(error),
            epoch=progress.epoch,
            step=progress.step,
        )


def _write_saved(position: Mapping[str, int], report: SaveReport) -> None:
    left = {} if report.retained is None else _left(report.retained)
    numbers = {
        str(name): value
        for name, value in plain(dict(report.meta)).items()
        if name not in OWN_META and isinstance(value, Real)  # the event says those by itself
    }
    _write(
        "checkpoint",
        path=address_of(report.path),
        **position,
        end_of_epoch=report.end_of_epoch,
        seconds=round(report.seconds, 4),
        asynchronous=report.asynchronous,
        bytes=report.size,
        meta=numbers,
        **left,
    )


def _left(retained: Retained) -> dict[str, Any]:
    return {
        "deleted": retained.deleted,
        "kept": retained.kept,
        "best": dict(retained.best),
    }


def _write(event: str, **fields: Any) -> None:
    """Write an event. The checkpoint is complete: a log that cannot be written is only warned of
    here.
    """
    try:
        run_event(event, **fields)
    except ConfigError as error:
        logger.warning("%s", error)
