"""The output folder in an object store, where it is a URL: does the store answer, may this machine
list, write, read and delete there, can it lock, and how fast is that.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from ddpkit.errors import DdpkitError, ObjectStoreError
from ddpkit.object_store import Objects, shown_url
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding

T = TypeVar("T")

PREFIX = ".ddpkit-doctor-"
TRIES = 3
BLOCK = b"x" * 4096
LONGEST_SECONDS = 60.0  # a request is repeated for half a minute, and the other ranks wait
SLOW_SECONDS = 0.5


def look(site: Site) -> Iterator[Finding]:
    """Make a small object in the folder, make it again, write it, read it and delete it."""
    if not site.run.output_url:
        return
    trial = _Trial(site.run.output_url)
    fault = trial.run(min(LONGEST_SECONDS, site.run.timeout / 2))
    yield _access(trial, fault)
    if not fault:
        yield _lock(trial)
        yield _latency(trial)


class _Trial:
    """Requests to a store, by a thread: one that is not answered holds nothing up.

    Attributes:
        url: as it is shown.
        seconds: of each request that was answered, by what it did.
        excludes: whether the store refuses to make an object that is there.
    """

    def __init__(self, url: str) -> None:
        self.url = shown_url(url)
        self.seconds: dict[str, list[float]] = {}
        self.excludes = False
        self._given = url
        self._doing = "open"
        self._error: Exception | None = None

    def run(self, limit: float) -> str:
        """Make the requests; return why the store cannot be used, or nothing.

        Raises:
            Exception: what no store has to do with.
        """
        thread = threading.Thread(target=self._noting_errors, name="ddpkit store", daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            return f"{self.url} has not answered for {limit:g} s, last to: {self._doing}"
        if self._error is None:
            return ""
        if isinstance(self._error, DdpkitError):
            return str(self._error)
        raise self._error

    def median(self, doing: str) -> float:
        """Return the seconds of a request."""
        return statistics.median(self.seconds[doing])

    def _noting_errors(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 -- raised by the thread that waits
            self._error = error

    def _ask(self) -> None:
        objects = Objects(self._given)
        name = f"{PREFIX}{uuid.uuid4().hex}"
        self._timed("list", lambda: objects.sizes(name))
        try:
            self._change(objects, name)
        except BaseException:
            with contextlib.suppress(ObjectStoreError):  # the first error says why
                objects.delete(name)
            raise
        self._timed("delete", lambda: objects.delete(name))

    def _change(self, objects: Objects, name: str) -> None:
        self._timed("create", lambda: _is_created(objects, name))
        is_replaced = self._timed("create again", lambda: _is_created(objects, name))
        self.excludes = objects.kind.creates and not is_replaced
        for _ in range(TRIES):
            self._timed("write", lambda: objects.write(name, BLOCK))
        if self._timed("read", lambda: _content(objects, name)) != BLOCK:
            raise ObjectStoreError(f"{self.url} does not return what was written a moment ago.")

    def _timed(self, doing: str, request: Callable[[], T]) -> T:
        self._doing = doing
        began = time.perf_counter()
        result = request()
        self.seconds.setdefault(doing, []).append(time.perf_counter() - began)
        return result


def _is_created(objects: Objects, name: str) -> bool:
    try:
        objects.create(name, BLOCK)
    except FileExistsError:
        return False
    return True


def _content(objects: Objects, name: str) -> bytes | None:
    try:
        return objects.read(name)
    except FileNotFoundError:
        return None


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _access(trial: _Trial, fault: str) -> Finding:
    done = ", ".join(f"{doing} {_milliseconds(trial.median(doing))}" for doing in trial.seconds)
    return Finding(
        "object store",
        PROBLEM if fault else OK,
        fault or f"{trial.url} answers, with the credentials of this machine: {done}",
        "a folder in which this machine may list, read, write and delete",
        "checkpoints, logs and metrics.jsonl are kept there (--output_folder)",
        cost="the run ends before its first step",
        advice="Do what is said above. `aws s3 ls s3://BUCKET/` (gcloud storage ls, az storage "
        f"blob list) tells whether this machine has access at all. An object {PREFIX}* that is "
        "left there may be deleted.",
        details={
            "url": trial.url,
            "seconds": {doing: trial.median(doing) for doing in trial.seconds},
        },
    )


def _lock(trial: _Trial) -> Finding:
    return Finding(
        "lock of the store",
        OK if trial.excludes else LOOK,
        f"an object that is there is not made again ({_milliseconds(trial.median('create again'))})"
        if trial.excludes
        else "an object that is there is made again: the store does not say who was first",
        "a store that makes an object only where there is none",
        "that object is the lock: one run at a time writes into the folder",
        cost="nothing stops a second run with the same URL, and what interrupted saves leave there "
        "is not deleted",
        advice="Give each run a URL of its own, or take a store with conditional writes, as S3 and "
        "GCS have them.",
        details={"excludes": trial.excludes},
    )


def _latency(trial: _Trial) -> Finding:
    seconds = trial.median("write")
    return Finding(
        "store latency",
        OK if seconds < SLOW_SECONDS else LOOK,
        f"{_milliseconds(seconds)} for 4 kB",
        f"at most {_milliseconds(SLOW_SECONDS)}",
        f"the median of {TRIES} writes; a save makes some requests for each file",
        cost="each save is complete seconds later, and the next one waits for it",
        advice="Take a bucket in the region of this machine, save less often, or save on a disk "
        "first, from where a thread copies up (--ckpt_local).",
        details={"seconds": seconds},
    )
