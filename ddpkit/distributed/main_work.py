"""Work of the main process, whose value or error reaches all ranks that make the same call.

It is not built on collectives but on :mod:`ddpkit.comm.mailbox`: a value or an error is left in the
process group's store for ranks that make the same call. So such calls may be made by all ranks or
by the main process alone, may be nested, and have no time limit while the main process is alive.

Source: ``docs/decisions/0002`` gives the reasons; torch's stores are described at
https://pytorch.org/docs/stable/distributed.html#distributed-key-value-store.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch.distributed as dist

from ddpkit.base import POSITION, Reason
from ddpkit.comm import Outcome, call_site, get_runtime, outside_frame, raise_as_reader
from ddpkit.distributed.main_only_code import ALONE, alone, ddp_prevent_block
from ddpkit.distributed.ranks import if_main_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


T = TypeVar("T")


def call_on_rank(
    call: Callable[[], T],
    poster: int,
    readers: int,
    *,
    mine: bool,
    site: str,
) -> T | None:
    """Run ``call`` on one rank and give its value or its failure to the ``readers`` other ranks
    that ask.

    Ranks: those of which one makes the call and the others ask.
    """
    mailbox = get_runtime().mailbox
    count = mailbox.next_count(site)
    if not mine:
        # the work may take hours, in which this rank is not stuck
        with POSITION.no_limit():
            outcome = mailbox.read(site, count, poster=poster, readers=readers)
        if outcome.reason is not None:
            raise_as_reader(outcome.reason, site, poster)
        value: T | None = outcome.value
        return value
    try:
        with alone(), POSITION.no_limit():
            value = call()
    except BaseException as error:
        # Not final: the caller may catch it, and so may the callers on the other ranks.
        mailbox.post(
            site,
            count,
            Outcome(reason=Reason.of(poster, error, is_final=False)),
            readers,
        )
        raise
    mailbox.post(site, count, Outcome(value), readers)
    return value


def call_on_main(call: Callable[[], T], site: str) -> T | None:
    """Run ``call`` on the main process; every rank that asks gets its value or its failure.

    Ranks: all, or the main process alone.
    """
    world = dist.get_world_size()
    return call_on_rank(
        call,
        0,
        world - 1,
        mine=dist.get_rank() == 0,
        site=site,
    )


def run_on_main(
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_main: bool = False,
) -> T | None:
    """Run ``func`` on the main process; every rank that makes this call gets its value, or raises.

    Args:
        func: the work, such as preparing a data manifest.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: run afterwards on the other ranks, such as loading what ``func`` wrote.
        post_args: positional arguments of ``post_func``.
        post_kwargs: keyword arguments of ``post_func``.
        run_post_on_main: run ``post_func`` on the main process as well.

    Returns:
        What ``func`` returned on the main process. It reaches the others through pickle; a value
        that cannot be pickled reaches them as None, with a warning.

    Raises:
        MainProcessError: on the other ranks, when ``func`` raised on the main process; the message
            holds that traceback. On the main process the original exception is raised.

    Ranks: all, or the main process alone under ``if if_main_process():``. The main process never
    waits for the others; the others wait as long as it lives. Inside ``func`` barriers and
    broadcasts do nothing, and an all-reduce is an error.

    Example:
        >>> run_on_main(sorted, args=[[3, 1, 2]])
        [1, 2, 3]
    """
    work = functools.partial(
        func,
        *(args or ()),
        **(kwargs or {}),
    )
    # asked before the work, in which a process group may start or end
    main = if_main_process()
    value = work() if ddp_prevent_block() else call_on_main(work, call_site(outside_frame()))
    if post_func is not None and (run_post_on_main or not main):
        post_func(*(post_args or ()), **(post_kwargs or {}))
    return value


@overload
def main_process_only(function: Callable[..., T]) -> Callable[..., T]: ...


@overload
def main_process_only(
    function: None = None,
    *,
    hand_over: bool = True,
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...


def main_process_only(
    function: Callable[..., T] | None = None,
    *,
    hand_over: bool = True,
) -> Callable[..., Any]:
    """Make a function run on the main process only; all callers get its value, or raise.

    Args:
        function: the function to wrap.
        hand_over: give the value or the error to the other ranks. With ``False`` they get None at
            once and nobody learns of a failure but the main process: for functions that return
            nothing, such as loggers.

    Returns:
        The wrapped function.

    Ranks: all, or the main process alone under ``if if_main_process():``.

    Example:
        >>> @main_process_only
        ... def prepare():
        ...     return 3
        >>> prepare()
        3
    """
    if function is None:
        return functools.partial(main_process_only, hand_over=hand_over)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> T | None:
        if ddp_prevent_block():
            # Without a group only the environment tells which process this is.
            return function(*args, **kwargs) if ALONE.get() or if_main_process() else None
        work = functools.partial(function, *args, **kwargs)
        if hand_over:
            return call_on_main(work, call_site(outside_frame()))
        # nothing is posted, so nobody need count this call or wait for it
        if dist.get_rank() != 0:
            return None
        with alone():
            return work()

    return wrapper
