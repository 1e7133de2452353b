"""Repeats a request whose error may pass: a few times, with longer and longer waits. Each
repetition is reported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ddpkit.logger import get_logger
from ddpkit.object_store.failures import explained, first_line, is_of_store, may_pass

logger = get_logger(__name__)

T = TypeVar("T")

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


def repeated(
    request: Callable[[], T],
    url: str,
    doing: str,
    *,
    attempts: int = ATTEMPTS,
) -> T:
    """Make a request, and make it again while its error may pass.

    Args:
        request: makes it; must be safe to make twice.
        url: of the folder, for messages.
        doing: what it does, for messages.
        attempts: at most.

    Raises:
        ObjectStoreError: the store refuses, or the last attempt failed.
        FileNotFoundError: there is no such object.
        FileExistsError: there is one already.
    """
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if not is_of_store(error):
                raise
            if attempt == attempts or not may_pass(error):
                raise explained(url, doing, error) from error
            pause = pause_after(attempt)
            logger.warning(
                "%s: cannot %s (attempt %d of %d, again in %.1f s): %s",
                url,
                doing,
                attempt,
                attempts,
                pause,
                first_line(error),
            )
            time.sleep(pause)
    raise AssertionError(attempts)  # at least one is made


def pause_after(attempt: int) -> float:
    """Return the seconds before the next attempt: twice as long each time, not the same for all."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)
