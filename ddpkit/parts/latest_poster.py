"""A thread that sends documents to something that may be slow, or away for a while. Only the newest
one is sent.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)


class LatestPoster:
    """Posts documents in a thread of its own, so that the training never waits.

    One document waits at most: a newer one takes its place. What fails is not tried again; a
    warning says so once.

    Args:
        what: receives the documents, in words.
        post: called with a document.
        pause: seconds from the end of a post to the next one, at least.

    Ranks: local.

    Example:
        >>> got = []
        >>> poster = LatestPoster("a list", got.append, pause=0.0)
        >>> poster.offer({"step": 3})
        >>> poster.close(seconds=5.0), got
        (True, [{'step': 3}])
    """

    def __init__(self, what: str, post: Callable[[Any], None], pause: float) -> None:
        self._what = what
        self._post = post
        self._pause = pause
        self._waiting: Any = None
        self._is_ending = False
        self._has_warned = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"ddpkit to {what}", daemon=True)
        self._thread.start()

    def offer(self, document: Any) -> None:
        """Have a document posted as the next one, and return at once."""
        with self._news:
            self._waiting = document
            self._news.notify()

    def close(self, seconds: float) -> bool:
        """Post what waits, and end the thread.

        Args:
            seconds: to wait for that at most; the thread is left to itself then.

        Returns:
            Whether the thread has ended.
        """
        with self._news:
            self._is_ending = True
            self._news.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def drop(self) -> None:
        """End the thread after the post that it is at, and post nothing more."""
        with self._news:
            self._waiting = None
        self.close(seconds=0.0)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting is not None or self._is_ending)
                document = self._waiting
                self._waiting = None
            if document is None:
                return
            self._try(document)
            with self._news:
                self._news.wait_for(lambda: self._is_ending, timeout=self._pause)

    def _try(self, document: Any) -> None:
        try:
            self._post(document)
        except Exception as error:  # noqa: BLE001 -- news of a training end no training
            if self._has_warned:  # the words of an error may be others each time
                return
            self._has_warned = True
            logger.warning(
                "%s does not take news of the training: %s: %s. Training goes on, and the next "
                "news are sent again.",
                self._what,
                type(error).__name__,
                error,
            )
