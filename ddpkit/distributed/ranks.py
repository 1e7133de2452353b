"""Whether this is the main process, and the rank as messages give it."""

from __future__ import annotations

from ddpkit.base import get_rank


def rank_prefixed_message(message: str) -> str:
    """Put ``[rank: r]`` before a message where a rank is known.

    Ranks: local.

    Example:
        >>> rank_prefixed_message("hello")
        'hello'
    """
    rank = get_rank()
    return message if rank is None else f"[rank: {rank}] {message}"


def if_main_process() -> bool:
    """Say whether this is the main process: rank 0, or the only one. Right before the group starts,
    too.

    Ranks: local. What stands under ``if if_main_process():`` may call main-only functions; nobody
    waits.

    Example:
        >>> if_main_process()
        True
    """
    return get_rank() in {None, 0}
