"""Whether this code runs on one rank alone, and what must not be called then."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ddpkit.base import is_distributed_initialized
from ddpkit.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator


# 0: every rank is here. Above 0: this code runs on the main process (or on one process per node)
# alone.
ALONE: ContextVar[int] = ContextVar("ddpkit_alone", default=0)


def ddp_prevent_block() -> bool:
    """Say whether a collective would be pointless here: no group, or only this process runs this
    code.

    Ranks: local.

    Example:
        >>> ddp_prevent_block()
        True
    """
    return ALONE.get() > 0 or not is_distributed_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Mark a block that this process runs without the others: barriers and broadcasts in it do
    nothing.

    Ranks: local.

    Example:
        >>> with alone():
        ...     ddp_prevent_block()
        True
    """
    token = ALONE.set(ALONE.get() + 1)
    try:
        yield
    finally:
        ALONE.reset(token)


def require_all_ranks(call: str) -> None:
    """Refuse main-only code where every rank must take part.

    Args:
        call: what was called, for the message.

    Raises:
        LaunchError: this code runs inside ``run_on_main`` or another main-only call of a
            distributed run.

    Ranks: local.

    Example:
        >>> require_all_ranks("Mean.compute")
    """
    if is_distributed_initialized() and ALONE.get():
        raise LaunchError(
            f"{call} was called inside main-only code (run_on_main, main_process_only): the other "
            f"ranks are not there, so their part would be missing. Call {call} on every rank "
            "first, and pass its result in."
        )
