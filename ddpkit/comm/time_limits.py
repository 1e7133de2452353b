"""How long collectives wait, and by which option."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist

from ddpkit.base import is_distributed_initialized
from ddpkit.errors import ConfigError

DEFAULT_TIMEOUT_MINUTES = 30.0
AFTER_WATCH_SECONDS = 30.0  # that collectives wait longer, so that it is the watchdog that says why


def longest_wait(minutes: float | None, hang_timeout: float) -> float:
    """Return how long collectives wait: longer than the watchdog, which says why, unless the user
    wants something else.

    Args:
        minutes: the option ``distributed_timeout_minutes``; None: its default.
        hang_timeout: seconds; 0: never.

    Returns:
        Seconds.

    Ranks: local; every rank must give the same.

    Example:
        >>> longest_wait(30.0, 1800.0), longest_wait(None, 0.0), longest_wait(5.0, 1800.0)
        (1830.0, 1800.0, 300.0)
    """
    seconds = 60.0 * float(minutes or DEFAULT_TIMEOUT_MINUTES)
    if seconds != 60.0 * DEFAULT_TIMEOUT_MINUTES:
        return seconds
    return max(seconds, hang_timeout + AFTER_WATCH_SECONDS)


def limits_by_option(minutes: float | None, hang_timeout: float) -> dict[int, str]:
    """Say by which option collectives have their limits of time.

    Args:
        minutes: the option ``distributed_timeout_minutes``; None: its default.
        hang_timeout: seconds; 0: never.

    Returns:
        The option, for messages, by milliseconds: as the errors of backends give them.

    Example:
        >>> limits_by_option(5.0, 60.0)
        {90000: '30 s more than --hang_timeout=60', 300000: '--distributed_timeout_minutes=5'}
    """
    found = {}
    if hang_timeout:
        seconds = hang_timeout + AFTER_WATCH_SECONDS
        found[round(1000 * seconds)] = (
            f"{AFTER_WATCH_SECONDS:g} s more than --hang_timeout={hang_timeout:g}"
        )
    longest = longest_wait(minutes, hang_timeout)
    found.setdefault(round(1000 * longest), f"--distributed_timeout_minutes={longest / 60:g}")
    return found


def shorten_timeout(seconds: float) -> None:
    """Set how long the collectives of the default process group wait from now on.

    Startup may be slow (compiling, reading data). After the first step a missing rank should be
    detected quickly. Nothing happens without a process group, nor where this torch or the backend
    cannot do it (``mpi``).

    Args:
        seconds: the new limit.

    Raises:
        ConfigError: it is not above zero.

    Ranks: local; every rank should call it, with the same number.

    State: the default process group's limit, on each of its backends.
    """
    if not seconds > 0:
        raise ConfigError(
            f"a timeout of {seconds!r} seconds would end every collective at once. Give one above "
            "0."
        )
    if not is_distributed_initialized():
        return
    set_timeout = getattr(dist.group.WORLD, "set_timeout", None)
    if set_timeout is not None:
        with contextlib.suppress(RuntimeError):  # a backend that has none says so by this
            set_timeout(timedelta(seconds=seconds))
