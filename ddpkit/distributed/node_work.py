"""Work of the first process of each machine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ddpkit.base import this_place
from ddpkit.comm import call_site, get_runtime, outside_frame
from ddpkit.distributed.local_rank import is_local_rank_zero
from ddpkit.distributed.main_only_code import alone, ddp_prevent_block
from ddpkit.distributed.main_work import call_on_rank
from ddpkit.distributed.store_exchange import exchange
from ddpkit.launch import find_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


T = TypeVar("T")


def _node_call(call: Callable[[], T], site: str) -> T | None:
    number, (first, *others) = _machine()
    return call_on_rank(
        call,
        first,
        len(others),
        mine=dist.get_rank() == first,
        site=f"node{number} {site}",
    )


def _machine() -> tuple[int, tuple[int, ...]]:
    """Return the number of this machine and its ranks: the launcher's, or else what the ranks tell
    each other once.
    """
    info = find_launch()
    runtime = get_runtime()
    if info.is_distributed and info.world_size == dist.get_world_size():
        near = info.node_ranks or range(
            info.first_on_node,
            info.first_on_node + info.local_world_size,
        )
        return info.node_rank, tuple(near)
    # asked once for the life of the group: nobody moves to another machine
    if runtime.machine is None:
        places = exchange(this_place(), site="the machine of each rank")
        here = places[dist.get_rank()]
        runtime.machine = (
            places.index(here),
            tuple(n for n, place in enumerate(places) if place == here),
        )
    return runtime.machine


def once_per_node(function: Callable[..., T]) -> Callable[..., T | None]:
    """Make a function run on the first process of every machine; the others get None. Nobody waits.

    Ranks: local. Which process is the first, :func:`is_local_rank_zero` tells: in a group that was
    made without a launcher every one, until the first :func:`ddp_init_group`.

    Example:
        >>> @once_per_node
        ... def unpack():
        ...     return "here"
        >>> unpack()
        'here'
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> T | None:
        if not is_local_rank_zero():
            return None
        with alone():
            return function(*args, **kwargs)

    return wrapper


def run_once_per_node(
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_all: bool = False,
) -> Any:
    """Run ``func`` on the first process of every machine, for files on machine-local disks.

    Args:
        func: the work.
        args: its positional arguments.
        kwargs: its keyword arguments.
        post_func: run afterwards on the machine's other processes.
        post_args: positional arguments of ``post_func``.
        post_kwargs: keyword arguments of ``post_func``.
        run_post_on_all: run ``post_func`` on the first process, too.

    Returns:
        ``post_func``'s value where it ran, else ``func``'s value (handed to all processes of the
        machine).

    Raises:
        RankFailedError: on the machine's other processes, when ``func`` raised on its first.

    Ranks: all processes of a machine, or its first alone. In a group that was made without a
    launcher, or inside of a single process of one, the first call is collective: in it the ranks
    find out which of them share a machine (host, boot, and namespace of processes).

    State: what they have found out, kept as long as the group.

    Example:
        >>> run_once_per_node(len, args=["four"])
        4
    """
    work = functools.partial(
        func,
        *(args or ()),
        **(kwargs or {}),
    )
    value = work() if ddp_prevent_block() else _node_call(work, call_site(outside_frame()))
    if post_func is not None and (run_post_on_all or not is_local_rank_zero()):
        return post_func(*(post_args or ()), **(post_kwargs or {}))
    return value
