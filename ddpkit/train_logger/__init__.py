"""Train loggers: text, tables, JSON lines, TensorBoard, W&B, MLflow, Trackio; and several as one.
The run's log, ``metrics.jsonl``.

All of it happens on the main process only. Calls from other ranks return at once, so ``log_stats``
may be called by all ranks or under ``if if_main_process():``.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = [
    "CSVTrainLogger",
    "FileTrainLogger",
    "JSONLTrainLogger",
    "MLflowLogger",
    "ProgressSampleLogger",
    "RunLog",
    "TensorboardLogger",
    "TrackioLogger",
    "TrainLogger",
    "TrainLoggers",
    "WandBLogger",
    "run_event",
    "set_run_log",
]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
