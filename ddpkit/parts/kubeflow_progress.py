"""Tells Kubeflow Trainer how far a training is: percent, time left, metrics.

Source: the protocol, https://www.kubeflow.org/docs/components/trainer/ , "TrainJob progress", of
Kubeflow Trainer 2.2 and newer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import ssl
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from ddpkit.distributed import if_main_process
from ddpkit.errors import ConfigError
from ddpkit.parts.latest_poster import LatestPoster
from ddpkit.parts.part import Part
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpkit.types import FitResult

#: Variables that the controller sets: an address, and paths of files.
URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 -- the name of a variable

LEAST_SECONDS = 5.0  # between two posts; the controller's own limit
TIMEOUT = 5.0  # seconds of each exchange with the server
LAST_SECONDS = 5.0  # for the last post, when `fit` ends
MOST_METRICS = 256
LONGEST_WORD = 64  # of a metric's name, and of its value
LARGEST = 2**31 - 1


class KubeflowProgress(Part):
    """Posts the progress of each call of ``fit`` to Kubeflow Trainer, where ``kubectl get
    trainjob`` shows it.

    It posts percent, the seconds left, epoch, optimizer step, losses, and what the recipe logs.
    Where the controller has not said where to, it does nothing. Posts are made in a thread: the
    training waits for none, and a controller that does not answer costs a warning.

    Args:
        seconds: from one post to the next, at least 5. The end of a validation is posted, too.

    Raises:
        ConfigError: ``seconds`` cannot be used; in ``fit``, the controller's address is none.

    Ranks: all; the main process posts.

    State: optimizer steps of the calls of ``fit`` that are over.

    Example:
        >>> KubeflowProgress(seconds=60).seconds
        60.0
    """

    def __init__(self, seconds: float = 30.0) -> None:
        given: Any = seconds  # of the YAML
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not LEAST_SECONDS <= seconds < math.inf:
            raise ConfigError(
                f"KubeflowProgress: seconds={seconds!r} must be a number from {LEAST_SECONDS:g} "
                "on: the controller does not take more."
            )
        self.seconds = float(seconds)
        self.done_before = 0
        self._poster: LatestPoster | None = None
        self._due = 0.0
        self._metrics: dict[str, float] = {}
        self._began_at = 0.0  # part of the call that was done when this process began
        self._began = 0.0

    def start_rows(self, brain: Any) -> Mapping[str, str]:
        """Return one row: where the progress goes."""
        url = os.environ.get(URL)
        if not url:
            return {"progress": f"not posted to Kubeflow: {URL} is not set"}
        return {"progress": f"to {place_of(url).netloc}, every {self.seconds:g} s"}

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Leave no thread behind, whatever ends the call."""
        try:
            yield
        finally:
            if self._poster is not None:
                self._poster.drop()
                self._poster = None

    def on_fit_start(self, brain: Any) -> None:
        """Post where the call begins."""
        self._metrics = {}
        self._due = 0.0
        self._began = time.monotonic()
        self._began_at = self._part_done(brain) or 0.0
        url = os.environ.get(URL)
        if url and if_main_process():
            place_of(url)
            server = StatusServer(url, os.environ.get(CA_CERTIFICATE), os.environ.get(TOKEN))
            self._poster = LatestPoster("Kubeflow Trainer", server.post, pause=LEAST_SECONDS)
            self._offer(brain)

    def on_sync(self, brain: Any) -> None:
        """Post what is known in the middle of an epoch."""
        if self._poster is not None and time.monotonic() >= self._due:
            self._metrics["train_loss"] = brain.avg_train_loss
            self._offer(brain)

    def on_stage_end(
        self,
        brain: Any,
        stage: Stage,
        stage_loss: float,
        epoch: int | None,
    ) -> None:
        """Post the losses of a stage, and what the recipe has logged."""
        if self._poster is None:
            return
        prefix = stage.name.lower()
        self._metrics[f"{prefix}_loss"] = stage_loss
        self._metrics |= {f"{prefix}_{name}": value for name, value in brain.logged.items()}
        self._metrics["epoch"] = float(epoch or 0)
        self._offer(brain)

    def on_fit_end(self, brain: Any, result: FitResult) -> None:
        """Post that the call is over, and wait some seconds at most for that."""
        if self._poster is not None:
            self._poster.offer(status(100, 0.0, self._all_metrics(brain)))
            self._poster.close(LAST_SECONDS)
            self._poster = None
        # a call that a limit has ended goes on in a later start of the run
        if result.reason != "optimizer_step_limit":
            self.done_before = brain.optimizer_step

    def _offer(self, brain: Any) -> None:
        if self._poster is None:
            return
        self._due = time.monotonic() + self.seconds
        done = self._part_done(brain)
        # 100 is for a call that is over: its last validation may still be to come
        percent = None if done is None else min(math.floor(100 * done), 99)
        self._poster.offer(status(percent, self._seconds_left(done), self._all_metrics(brain)))

    def _all_metrics(self, brain: Any) -> dict[str, float]:
        return {"optimizer_step": float(brain.optimizer_step), **self._metrics}

    def _part_done(self, brain: Any) -> float | None:
        """Return how much of the call is done, 0 to 1; None where its length is not known."""
        if not brain.total_steps:
            return None
        made: int = brain.optimizer_step - self.done_before
        total: int = brain.total_steps
        return min(max(made / total, 0.0), 1.0)

    def _seconds_left(self, done: float | None) -> float | None:
        """Estimate the time left, from all that this process has done in the call."""
        if done is None or done <= self._began_at:
            return None
        took = time.monotonic() - self._began
        return took / (done - self._began_at) * (1.0 - done)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps of the calls that are over."""
        return {"done_before": self.done_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        self.done_before = int(state["done_before"])


@dataclass(frozen=True)
class StatusServer:
    """The controller's server.

    Attributes:
        url: of the job's status.
        ca_certificate: path of the certificate that the server's own comes from; None: the
            system's.
        token: path of the token; None: none is sent.

    Ranks: local.
    """

    url: str
    ca_certificate: str | None
    token: str | None

    def post(self, document: Mapping[str, Any]) -> None:
        """Post a document. Certificate and token are read each time: they are renewed.

        Args:
            document: becomes JSON.

        Raises:
            OSError: the server is not there, or does not take it.
        """
        place = place_of(self.url)
        connection: http.client.HTTPConnection
        if place.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_certificate)
            connection = http.client.HTTPSConnection(place.netloc, timeout=TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(place.netloc, timeout=TIMEOUT)
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            words = Path(self.token).read_text(encoding="ascii").strip()
            if not words.isprintable():  # the error of a header shows all of it
                raise OSError(f"the token in {self.token} has several lines, or is none")
            headers["Authorization"] = f"Bearer {words}"
        with contextlib.closing(connection):
            connection.request("POST", place.path, json.dumps(document), headers)
            answer = connection.getresponse()
            text = answer.read(2000).decode("utf-8", "replace")
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"{self.url} answers {answer.status} {answer.reason}: {text[:200]}")


def place_of(url: str) -> SplitResult:
    """Part the controller's address.

    Args:
        url: of the job's status.

    Raises:
        ConfigError: it is no address that can be posted to.

    Ranks: local.

    Example:
        >>> place_of("https://controller:10443/status").netloc
        'controller:10443'
    """
    try:
        place = urlsplit(url)
        is_address = place.scheme in {"http", "https"} and bool(place.hostname)
        is_address = is_address and place.port != 0  # a port that is none raises
    except ValueError:
        is_address = False
    if not is_address or " " in url or not url.isprintable():
        raise ConfigError(
            f"{URL}={url!r} is no address, such as https://HOST:PORT/PATH. Kubeflow Trainer's "
            "controller sets it; unset it to train without its progress, or take KubeflowProgress "
            "out of the parts."
        )
    return place


def status(
    percent: int | None,
    seconds_left: float | None,
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Return the document that the controller takes.

    Args:
        percent: 0 to 100; None: not known.
        seconds_left: estimated; None: not known.
        metrics: by name. Names are cut to 64 letters, and 256 metrics are kept.

    Ranks: local.

    Example:
        >>> found = status(45, 60.2, {"loss": 0.25})["trainerStatus"]
        >>> found.pop("lastUpdatedTime")[-1], found["estimatedRemainingSeconds"], found["metrics"]
        ('Z', 61, [{'name': 'loss', 'value': '0.25'}])
    """
    found: dict[str, Any] = {
        "lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "metrics": [
            {"name": name[:LONGEST_WORD], "value": f"{value:.6g}"}
            for name, value in list(metrics.items())[:MOST_METRICS]
        ],
    }
    if percent is not None:
        found["progressPercentage"] = percent
    if seconds_left is not None:
        found["estimatedRemainingSeconds"] = min(math.ceil(seconds_left), LARGEST)
    return {"trainerStatus": found}
