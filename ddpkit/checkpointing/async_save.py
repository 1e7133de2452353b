"""One piece of work at a time in a thread that ends with it: how a checkpoint is written while training goes on.

The thread is no daemon: a process that ends in the usual way, or by an exception, ends after it. A process that is
killed loses what was being written and nothing else. In a forked process, such as a loader worker, there is no thread
and nothing to wait for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddpkit.logger import get_logger

__all__ = ["BackgroundSave", "wait_for_folder"]

logger = get_logger(__name__)

HEAD_START_SECONDS = 0.001  # for training: a thread that has just begun keeps Python's lock for up to 5 ms

_writers: dict[str, threading.Thread] = {}  # who writes in a folder, or was the last to do so


class BackgroundSave:
    """Writes one checkpoint in a thread.

    Attributes:
        path: what is being written, or was last.

    Ranks: main only.

    State: a thread while something is being written; its error until :meth:`wait`.

    Example:
        >>> done, background = [], BackgroundSave()
        >>> background.start(Path("CKPT+one"), lambda: done.append(1))
        >>> background.wait()
        >>> done
        [1]
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, path: Path, work: Callable[[], object]) -> None:
        """Begin some work; what was begun before must have been waited for.

        Args:
            path: the directory that appears by it.
            work: done in the thread.

        Ranks: main only.
        """
        self.path = path
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"ddpkit saves {path.name}")
        _writers[os.path.realpath(path.parent)] = self._thread
        self._thread.start()

    def wait(self) -> None:
        """Wait for the work that was begun last.

        Raises:
            BaseException: what the work raised, once.

        Ranks: main only.
        """
        if self._thread is not None:
            _join(self._thread)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, for nobody who could be told of an error: it is logged.

        Ranks: main only.
        """
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 -- called when an object or the process ends
            logger.error("A checkpoint is lost: %s", error)  # noqa: TRY400 -- the message says it all

    def _run(self, work: Callable[[], object]) -> None:
        time.sleep(HEAD_START_SECONDS)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- raised in `wait`
            self._error = error


def wait_for_folder(folder: Path) -> None:
    """Wait until nothing in this process writes in a folder in the background, for whomever it does so.

    Args:
        folder: the folder that holds the checkpoints.

    Ranks: main only.

    Example:
        >>> wait_for_folder(Path("save"))
    """
    thread = _writers.get(os.path.realpath(folder))
    if thread is not None:
        _join(thread)


def _join(thread: threading.Thread) -> None:
    is_own = thread is threading.current_thread()  # which may collect a Checkpointer
    if not is_own and thread.ident is not None:  # else the system has granted none
        thread.join()
