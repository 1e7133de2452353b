"""Finds out whether every rank makes a call, or the main process alone."""

from __future__ import annotations

import time
import uuid

from ddpkit.base import waits_for_ranks
from ddpkit.comm import get_runtime
from ddpkit.distributed import ddp_prevent_block, get_world_size, if_main_process, run_on_main
from ddpkit.logger import get_logger

logger = get_logger(__name__)

TELL_SECONDS = 10.0  # until a longer wait is told
ALONE = (
    "The main process waits for the other ranks to %s, too, %.0f s in all, and some have not "
    "come. It is called on every rank: not under `if if_main_process():`."
)


@waits_for_ranks
def all_ranks_come(what: str, seconds: float) -> bool:
    """Find out whether every rank makes this call: the main process may be alone, and must not wait
    for ever.

    Args:
        what: is about to be done; in the key in the store.
        seconds: for which the main process waits.

    Returns:
        Whether all have come; False in main-only code and without a process group.

    Ranks: all, or the main process alone.

    Example:
        >>> all_ranks_come("load", 1.0)
        False
    """
    if ddp_prevent_block():
        return False
    key = f"ddpkit/{what}/{run_on_main(lambda: uuid.uuid4().hex)}"
    store = get_runtime().store
    if not if_main_process():
        store.add(key, 1)

    def wait() -> bool:
        begin = time.monotonic()
        while store.add(key, 0) < get_world_size() - 1:
            waited = time.monotonic() - begin
            if waited > TELL_SECONDS:
                logger.warning_once(ALONE, what, seconds)
            if waited > seconds:
                return False
            time.sleep(0.001)
        store.delete_key(key)
        return True

    return bool(run_on_main(wait))
