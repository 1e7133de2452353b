"""The base of ddpkit's own loggers, which write on the main process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.distributed import main_process_only
from ddpkit.reporting import Current, RunLog, Stats, plain
from ddpkit.train_logger.interface import TrainLogger

if TYPE_CHECKING:
    from collections.abc import Mapping


class MainTrainLogger(TrainLogger):
    """The base of ddpkit's own loggers, which override ``_log``: called on the main process
    alone.

    What it is given also goes to the run's log, and what was logged with ``self.log`` is in it.

    Ranks: all, or the main process alone.
    """

    @main_process_only(hand_over=False)
    def _report(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        self._log(meta, stages, verbose)
        log = Current.log or (self.run_log_beside and RunLog(self.run_log_beside))
        if log:
            log.write_stats(plain({"meta": meta, **stages}))

    def _log(
        self,
        meta: Stats,
        stages: Mapping[str, Stats],
        verbose: bool | None,
    ) -> None:
        raise NotImplementedError
