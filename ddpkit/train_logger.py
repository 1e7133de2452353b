"""Where statistics go: a line per epoch, TensorBoard, W&B, and a JSONL file always.

The work is in :mod:`ddpkit.reporting`.
"""

from __future__ import annotations

from ddpkit.reporting import (
    FileTrainLogger,
    RunLog,
    TensorboardLogger,
    TrainLogger,
    TrainLoggers,
    WandBLogger,
    run_event,
    run_log,
    set_run_log,
)

__all__ = [
    "FileTrainLogger",
    "RunLog",
    "TensorboardLogger",
    "TrainLogger",
    "TrainLoggers",
    "WandBLogger",
    "run_event",
    "run_log",
    "set_run_log",
]
