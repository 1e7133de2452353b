"""Where statistics go: a line per epoch, tables, TensorBoard, W&B, MLflow, and a JSONL file always.

The work is in :mod:`ddpkit.reporting`.
"""

from __future__ import annotations

from ddpkit.reporting import (
    CSVTrainLogger,
    FileTrainLogger,
    JSONLTrainLogger,
    MLflowLogger,
    ProgressSampleLogger,
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
    "CSVTrainLogger",
    "FileTrainLogger",
    "JSONLTrainLogger",
    "MLflowLogger",
    "ProgressSampleLogger",
    "RunLog",
    "TensorboardLogger",
    "TrainLogger",
    "TrainLoggers",
    "WandBLogger",
    "run_event",
    "run_log",
    "set_run_log",
]
