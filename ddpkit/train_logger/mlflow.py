"""Logs to MLflow."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from ddpkit.base import PROCESS
from ddpkit.control import at_exit
from ddpkit.errors import ConfigError
from ddpkit.logger import get_logger
from ddpkit.train_logger.batch_sender import BatchSender, ReadyThread, within
from ddpkit.train_logger.tracker import TrackerLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = get_logger(__name__)

LAST_WORD_SECONDS = 1.0  # for the status, where the last values have taken all the time
UNDECIDED = {401, 403, 404, 408, 429}  # answers that another try may not get
TEST = "test/"  # of these a second value is no repetition: another set may have been evaluated


class MLflowLogger(TrackerLogger):
    """Writes statistics to a run of MLflow. Needs ``pip install mlflow``.

    Numbers become metrics such as ``train/loss``, at the optimizer step; everything else becomes a
    tag. A thread hands them over, so that training never waits for a server. Values that a server
    does not take are kept, up to 100,000 of them, and tried again. A value that it refuses is named
    in a warning, and left out.

    When the process ends, MLflow's run is ended, too: see :meth:`close`.

    A run that is started again goes on in the same run of MLflow. Steps that MLflow has already are
    not written again, except of a test.

    Args:
        experiment_name: of MLflow's experiment, which is made if need be; None: as the environment
            says (``MLFLOW_EXPERIMENT_NAME``), or MLflow's default experiment.
        tracking_uri: such as ``sqlite:///results/mlflow.db`` or ``http://host:5000``; None: as the
            environment says, or MLflow's default.
        run_name: of a new run; None: MLflow makes one up.
        tags: of a new run.
        timeout_seconds: for the server's first answer, and for the last values at the end.

    Attributes:
        run_id: of MLflow's run; None before it is opened.

    Raises:
        MissingExtraError: MLflow is not installed.
        ConfigError: ``timeout_seconds`` is not positive.

    Ranks: all, or the main process alone; only it writes.

    State: saves ``run_id``.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("mlflow"):
        ...     MLflowLogger("digits", "sqlite:///results/mlflow.db").run_id
    """

    tracker = "MLflow"
    package = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__()
        self.require_package()
        if not timeout_seconds > 0:
            raise ConfigError(
                f"MLflowLogger: timeout_seconds={timeout_seconds!r} is no time to wait. Give a "
                "number above 0."
            )
        self._experiment = experiment_name
        self._uri = tracking_uri
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._timeout = timeout_seconds
        self._client: Any = None
        self._sender: BatchSender | None = None
        self._last_thread: ReadyThread | None = None
        self._known: dict[str, int] = {}
        self._process = 0  # which has opened the run

    def open_run(self) -> str:
        """Find or make the run, on the server or in the local database."""
        run_id = within(self._timeout, self._find_run)
        self._last_thread = ReadyThread("ddpkit ends MLflow's run")
        self._sender = BatchSender(
            "MLflow",
            self._send,
            refuses=_is_refusal,
            name=lambda value: str(value[0]),
        )
        if self._process != os.getpid():
            self._process = os.getpid()
            at_exit(self.close)
        if self._close_as_failed not in PROCESS.at_hard_end:
            PROCESS.at_hard_end.append(self._close_as_failed)
        return run_id

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        """Put numbers and tags into the thread's list."""
        now = int(1000 * time.time())
        at = 0 if step is None else step
        named = {re.sub(r"[^\w.\- /]", "_", name): value for name, value in values.items()}
        known = {name for name in named if at <= self._known.get(name, -1)}
        if self._sender is not None:
            self._sender.add(
                (name, value, now, at) for name, value in named.items() if name not in known
            )

    def close(self) -> None:
        """Hand over what is left, and end MLflow's run; at the end of the process it is called by
        itself.

        The run is then ``FINISHED``, ``KILLED`` where a signal or the time limit has stopped it, or
        ``FAILED`` where an exception has ended the process. Both together take ``timeout_seconds``
        and one second more at most.

        Ranks: local.
        """
        if PROCESS.is_stopped:
            self._close("KILLED")
        else:
            has_failed = PROCESS.failed is not None or getattr(sys, "last_type", None) is not None
            self._close("FAILED" if has_failed else "FINISHED")

    def _close_as_failed(self) -> None:
        self._close("FAILED")

    def _close(self, status: str) -> None:
        sender = self._sender
        if sender is None or os.getpid() != self._process:  # a forked process has not opened it
            return
        self._sender = None
        self._is_open = False
        PROCESS.at_hard_end.remove(self._close_as_failed)
        end = time.monotonic() + self._timeout
        lost = sender.close(self._timeout)
        if lost:
            logger.warning("MLflow has not taken %d values; metrics.jsonl has all of them.", lost)
        left = max(LAST_WORD_SECONDS, end - time.monotonic())
        self.go_on_without(
            lambda: within(
                left,
                lambda: self._client.set_terminated(self.run_id, status),
                self._last_thread,
            )
        )

    # ------------------------------------------------------------------ in other threads

    def _find_run(self) -> str:
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=self._uri)
        self._client = client
        active = mlflow.active_run()
        run_id = self.run_id or (None if active is None else active.info.run_id)
        if run_id is None:
            made = client.create_run(
                self._experiment_id(client),
                tags=self._tags,
                run_name=self._run_name,
            )
            return str(made.info.run_id)
        run = client.get_run(run_id)
        client.update_run(run_id, status="RUNNING")
        for name in run.data.metrics:
            if not name.startswith(TEST):
                history = client.get_metric_history(run_id, name)
                self._known[name] = max(metric.step for metric in history)
        if self._known:
            logger.info(
                "MLflow's run %s has values up to step %d: they are not written a second time.",
                run_id,
                max(self._known.values()),
            )
        return str(run_id)

    def _experiment_id(self, client: Any) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        found = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if found is None else found.experiment_id)

    def _send(self, values: list[tuple[str, Any, int, int]]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = []
        tags = []
        for name, value, now, step in values:
            if isinstance(value, bool | int | float):
                metrics.append(Metric(name, float(value), now, step))
            else:
                tags.append(RunTag(name, str(value)))
        for start in range(0, len(tags), 100):  # the most that a server takes at once
            self._client.log_batch(self.run_id, tags=tags[start : start + 100])
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)


def _is_refusal(error: Exception) -> bool:
    """Say whether MLflow will never take what was sent: it has said so, or it is no number."""
    status = getattr(error, "get_http_status_code", None)
    if status is None:
        return isinstance(error, (OverflowError, TypeError, ValueError))
    return 400 <= status() < 500 and status() not in UNDECIDED  # noqa: PLR2004 -- of HTTP
