"""Ranks, the process group, main-only work and the few collectives that recipes use.

Main-only work (:func:`run_on_main`, :func:`main_process_only`) is not built on collectives but on
:mod:`ddpkit.comm.mailbox`: a value or an error is left in the process group's store for ranks that
make the same call. So such calls may be made by all ranks or by the main process alone, may be
nested, and have no time limit while the main process is alive.

Source: ``docs/decisions/0002`` gives the reasons; torch's stores are described at
https://pytorch.org/docs/stable/distributed.html#distributed-key-value-store.
"""

from __future__ import annotations

import functools
import os
import pickle
import traceback
import zlib
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ddpkit.base import (
    POSITION,
    Reason,
    get_rank,
    get_world_size,
    is_distributed_initialized,
    line_of,
    this_place,
    waits_for_ranks,
)
from ddpkit.comm import (
    Outcome,
    call_site,
    control_group,
    get_runtime,
    is_exchanged,
    keep_alive,
    outside_frame,
    raise_as_reader,
    start_sum,
)
from ddpkit.errors import LaunchError, RankFailedError, RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpkit.launch import LaunchInfo

__all__ = [
    "ReduceOp",
    "alone",
    "control_group",
    "ddp_all_reduce",
    "ddp_barrier",
    "ddp_broadcast",
    "ddp_init_group",
    "ddp_prevent_block",
    "environment_without_launch",
    "exchange",
    "gather_objects",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "if_main_process",
    "is_distributed_initialized",
    "is_local_rank_zero",
    "main_process_only",
    "once_per_node",
    "rank_prefixed_message",
    "require_all_ranks",
    "run_on_main",
    "run_once_per_node",
    "start_sum_over_ranks",
    "sum_exactly",
    "sum_over_ranks",
]

T = TypeVar("T")
MARKED_NUMBERS = 30  # that travel with the mark of a call

# 0: every rank is here. Above 0: this code runs on the main process (or on one process per node)
# alone.
_alone: ContextVar[int] = ContextVar("ddpkit_alone", default=0)


def ddp_init_group(run_opts: Mapping[str, Any]) -> None:
    """Start the default process group if a launcher started this process; otherwise do nothing.

    The device is bound to the local rank first, and given to the group. A group that somebody else
    has started already is accepted and will not be destroyed; one that is started here is destroyed
    at exit. From then on the exception that ends a rank is told to the other ranks, and to
    torchrun's summary.

    Args:
        run_opts: a mapping, such as ``parse_arguments`` returns; ``["distributed_backend"]``,
            ``["device"]``, ``["distributed_timeout_minutes"]`` and ``["hang_timeout"]`` are read
            where present.

    Raises:
        ConfigError: the backend is unknown, or not built into this torch, or does not fit the
            device.
        LaunchError: the environment contradicts itself or does not say where to meet, the port is
            taken, or the other processes do not come or cannot be reached; or a rank has started
            this process, with its own variables.
        RankFailedError: another process has ended meanwhile; the message says which.
        RankMismatchError: the processes differ in their versions of Python, torch, numpy or ddpkit,
            in their script or in the backend; on every rank.

    Ranks: collective.

    State: ``sys.excepthook`` (see :func:`ddpkit.control.failure.watch_uncaught`), a hook at the end
    of the process, once per group, and ``DDPKIT_RANK_PROCESS`` in the environment: programs that a
    rank starts see that it is taken.

    Example:
        >>> ddp_init_group({"distributed_backend": "gloo"})  # no launcher: nothing happens
    """
    # the watchdog and all: not for those who ask for a rank alone
    from ddpkit.comm import init_group

    init_group(run_opts)


def get_local_rank() -> int | None:
    """Return this process's number on its machine, as the launcher has it, or None without a
    launcher.

    In a process group that was made without a launcher (``mp.spawn`` and ``init_process_group``)
    nothing tells it: the answer is None until the first :func:`run_once_per_node`, in which the
    ranks tell each other where they are.

    Ranks: local.

    Example:
        >>> get_local_rank() is None
        True
    """
    machine = get_runtime().machine if is_distributed_initialized() else None
    if machine is not None:
        return machine[1].index(dist.get_rank())
    rank = os.environ.get("LOCAL_RANK")
    if rank:
        return int(rank)
    info = _find_launch()
    return info.local_rank if info.is_distributed else None


def _find_launch() -> LaunchInfo:
    from ddpkit.launch import find_launch  # all launchers: not for those who ask for a rank alone

    return find_launch()


def environment_without_launch(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for a program that a rank starts and that is to run as a single
    process.

    A program inherits the variables of the rank that starts it. Where it uses ddpkit, too, it is
    refused as a second process of that rank, unless it is started with this.

    Args:
        environ: the environment to copy; None copies ``os.environ``.

    Returns:
        A copy without what a launcher (torchrun, ``--nproc``, Slurm, MPI) says about ranks.

    Ranks: local.

    Example:
        >>> import subprocess, sys
        >>> words = [sys.executable, "-c", "import os; raise SystemExit('RANK' in os.environ)"]
        >>> run_on_main(lambda: subprocess.run(words, env=environment_without_launch()).returncode)
        0
    """
    from ddpkit.launch import without_launch  # likewise

    return without_launch(os.environ if environ is None else environ)


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


def is_local_rank_zero() -> bool:
    """Say whether this is the first process of its machine.

    Where :func:`get_local_rank` does not know, every process takes itself for the first. In a group
    that was made without a launcher use :func:`run_once_per_node`, or ask after it.

    Ranks: local.

    Example:
        >>> is_local_rank_zero()
        True
    """
    return get_local_rank() in {None, 0}


def ddp_prevent_block() -> bool:
    """Say whether a collective would be pointless here: no group, or only this process runs this
    code.

    Ranks: local.

    Example:
        >>> ddp_prevent_block()
        True
    """
    return _alone.get() > 0 or not is_distributed_initialized()


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
    token = _alone.set(_alone.get() + 1)
    try:
        yield
    finally:
        _alone.reset(token)


# ----------------------------------------------------------------------------------- main-only work


def _on_one_rank(
    call: Callable[[], T],
    poster: int,
    readers: int,
    *,
    mine: bool,
    site: str,
) -> T | None:
    """Run ``call`` on one rank and give its value or its failure to the ``readers`` other ranks
    that ask.
    """
    mailbox = get_runtime().mailbox
    count = mailbox.next_count(site)
    if not mine:
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
        mailbox.post(
            site,
            count,
            Outcome(reason=Reason.of(poster, error, is_final=False)),
            readers,
        )
        raise
    mailbox.post(site, count, Outcome(value), readers)
    return value


def _main_call(call: Callable[[], T], site: str) -> T | None:
    world = dist.get_world_size()
    return _on_one_rank(
        call,
        0,
        world - 1,
        mine=dist.get_rank() == 0,
        site=site,
    )


def _node_call(call: Callable[[], T], site: str) -> T | None:
    number, (first, *others) = _machine()
    return _on_one_rank(
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
    info = _find_launch()
    runtime = get_runtime()
    if info.is_distributed and info.world_size == dist.get_world_size():
        near = info.node_ranks or range(
            info.first_on_node,
            info.first_on_node + info.local_world_size,
        )
        return info.node_rank, tuple(near)
    if runtime.machine is None:
        places = exchange(this_place(), site="the machine of each rank")
        here = places[dist.get_rank()]
        runtime.machine = (
            places.index(here),
            tuple(n for n, place in enumerate(places) if place == here),
        )
    return runtime.machine


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
    main = if_main_process()
    value = work() if ddp_prevent_block() else _main_call(work, call_site(outside_frame()))
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
            return function(*args, **kwargs) if _alone.get() or if_main_process() else None
        work = functools.partial(function, *args, **kwargs)
        if hand_over:
            return _main_call(work, call_site(outside_frame()))
        if dist.get_rank() != 0:
            return None
        with alone():
            return work()

    return wrapper


def once_per_node(function: Callable[..., T]) -> Callable[..., T | None]:
    """Make a function run on the first process of every machine; the others get None. Nobody waits.

    Ranks: local. Which process is the first, :func:`is_local_rank_zero` tells: in a group that was
    made without a launcher every one, until the first :func:`run_once_per_node`.

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


def exchange(value: T, site: str | None = None) -> list[T]:
    """Give every rank the list of all ranks' values, in rank order, over the store.

    Unlike a collective it works between ranks that are about to discover that they differ: the
    sizes need not agree, and a rank that dies is noticed.

    Args:
        value: anything that pickles.
        site: names the call; None: the lines of code that lead to it do, which must be the same on
            every rank.

    Returns:
        One value per rank; ``[value]`` without a process group or in main-only code.

    Ranks: collective.

    Example:
        >>> exchange({"batches": 12})
        [{'batches': 12}]
    """
    if ddp_prevent_block():
        return [value]
    site = call_site(outside_frame()) if site is None else site
    mailbox = get_runtime().mailbox
    rank = mailbox.rank
    world = mailbox.world_size

    def gather() -> list[T]:
        values = [value]
        for other in range(1, world):
            own_site = f"from rank {other} {site}"
            values.append(
                mailbox.read(
                    own_site,
                    mailbox.next_count(own_site),
                    poster=other,
                    readers=1,
                ).value
            )
        return values

    if rank != 0:
        own_site = f"from rank {rank} {site}"
        mailbox.post(
            own_site,
            mailbox.next_count(own_site),
            Outcome(value),
            readers=1,
        )
    return _main_call(gather, f"all {site}") or []


# -------------------------------------------------------------------------------------- collectives


def ddp_barrier() -> None:
    """Wait until every rank is here. Does nothing in one process and in main-only code.

    There is no time limit outside of ``fit`` and ``evaluate`` while the other ranks live. After
    half a minute it is said where they are. Work of the main process alone is better given to
    :func:`run_on_main`.

    Raises:
        RankFailedError: a rank has come to its end without making this call.
        RankMismatchError: another rank has come to another call.

    Ranks: collective.

    Example:
        >>> ddp_barrier()
    """
    if not ddp_prevent_block():
        with get_runtime().mailbox.forgetting():
            start_sum_over_ranks([], "ddp_barrier", is_patient=True)()


def ddp_broadcast(communication_object: T, src: int = 0) -> T:
    """Give every rank the object of rank ``src``. Returns it unchanged in one process and in
    main-only code.

    Args:
        communication_object: anything that pickles; only ``src``'s object counts.
        src: the sending rank.

    Returns:
        The object of rank ``src``.

    Ranks: collective.

    Example:
        >>> ddp_broadcast([1, 2])
        [1, 2]
    """
    if ddp_prevent_block():
        return communication_object
    box: list[Any] = [communication_object]
    start_sum_over_ranks([], "ddp_broadcast", is_patient=True)()
    dist.broadcast_object_list(box, src=src, group=control_group())
    result: T = box[0]
    return result


def ddp_all_reduce(
    communication_object: torch.Tensor,
    reduce_op: Any = ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place.

    Args:
        communication_object: tensor of any shape, the same on every rank.
        reduce_op: a ``torch.distributed.ReduceOp``.

    Returns:
        The same tensor, reduced; unchanged in one process.

    Raises:
        LaunchError: called inside main-only code, where the result could not be what was asked for.

    Ranks: collective.

    Example:
        >>> ddp_all_reduce(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_distributed_initialized():
        return communication_object
    if _alone.get():
        raise LaunchError(
            "ddp_all_reduce was called inside main-only code (run_on_main, main_process_only): "
            "the other ranks are not there, so the tensor cannot be reduced. Reduce before the "
            "main-only call and pass the result in."
        )
    if communication_object.device.type != "cpu":
        dist.all_reduce(communication_object, op=reduce_op)
        return communication_object
    from ddpkit.comm import await_late  # nobody else in this module needs it

    work = dist.all_reduce(
        communication_object,
        op=reduce_op,
        group=control_group(),
        async_op=True,
    )
    await_late(work, "ddp_all_reduce")
    return communication_object


def gather_objects(make: Callable[[], T]) -> list[T]:
    """Make a value on every rank and give every rank the list of all of them, in rank order,
    whatever their size.

    The values travel in collectives on the CPU group, not through the store as in :func:`exchange`:
    use it for large results. Meanwhile a rank holds the values of all ranks, and one of them
    pickled as well.

    Args:
        make: makes this rank's value, which must pickle; tensors best on the CPU.

    Returns:
        One value per rank, copies each; ``[make()]`` itself without a process group.

    Raises:
        LaunchError: called inside main-only code, where the others are not there.
        RankFailedError: ``make`` failed on another rank, or its value does not pickle there.
        Exception: ``make`` failed on this rank; the original exception.

    Ranks: collective.

    Example:
        >>> gather_objects(lambda: "here")
        ['here']
    """
    if not is_distributed_initialized():
        return [make()]
    require_all_ranks("gather_objects")
    failure: Exception | None = None
    try:
        data = pickle.dumps(make())
    except Exception as error:  # noqa: BLE001 -- raised below, once the others know
        failure = error
        data = pickle.dumps(f"{type(error).__name__}: {error}")
    with get_runtime().mailbox.forgetting():
        start_sum_over_ranks([], "gather_objects", is_patient=True)()
        payloads, failed = _gather_bytes(data, failed=failure is not None)
    if failure is not None:
        raise failure
    if any(failed):
        words = [
            f"rank {rank}: {pickle.loads(payloads[rank])}"  # noqa: S301 -- a rank of this very job
            for rank, bad in enumerate(failed)
            if bad
        ]
        raise RankFailedError(
            f"nothing could be gathered, because it failed elsewhere: {'; '.join(words)}"
        )
    values: list[T] = []
    while payloads:
        values.append(pickle.loads(payloads.pop(0)))  # noqa: S301 -- as above
    return values


@waits_for_ranks
def _gather_bytes(
    data: bytes,
    *,
    failed: bool,
) -> tuple[list[Any], list[bool]]:
    """Give every rank all ranks' bytes, and whether each failed: sizes first, then each rank
    broadcasts its own.
    """
    group = control_group()
    rank = dist.get_rank()
    facts = keep_alive(torch.tensor([len(data), int(failed)]))
    everybody = [keep_alive(torch.empty_like(facts)) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, facts, group=group)
    payloads = []
    for source, (size, _) in enumerate(one.tolist() for one in everybody):
        mine = source == rank
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if mine
            else torch.empty(size, dtype=torch.uint8)
        )
        dist.broadcast(buffer, src=source, group=group)
        payloads.append(buffer.numpy())
    return payloads, [bool(one[1]) for one in everybody]


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
    if is_distributed_initialized() and _alone.get():
        raise LaunchError(
            f"{call} was called inside main-only code (run_on_main, main_process_only): the other "
            f"ranks are not there, so their part would be missing. Call {call} on every rank "
            "first, and pass its result in."
        )


def sum_over_ranks(values: list[float], call: str = "sum_over_ranks") -> list[float]:
    """Add up a few numbers over all ranks in float64, up to 30 in one message; every rank gets the
    same bits.

    Args:
        values: the same number of them on every rank.
        call: names the call, the same on every rank.

    Returns:
        The sums; the values themselves without a process group.

    Ranks: collective.

    Example:
        >>> sum_over_ranks([1.5, 2.0])
        [1.5, 2.0]
    """
    if not is_distributed_initialized():
        return list(values)
    first = values[:MARKED_NUMBERS]
    rest = values[MARKED_NUMBERS:]
    with get_runtime().mailbox.forgetting():
        sums = start_sum_over_ranks(first, f"{call} ({len(values)} number(s))")()
        return sums + (
            ddp_all_reduce(keep_alive(torch.tensor(rest, dtype=torch.float64))).tolist()
            if rest
            else []
        )


def sum_exactly(values: list[Any]) -> list[Any]:
    """Add up a few numbers over all ranks without rounding: whole numbers and fractions stay what
    they are.

    Args:
        values: the same number of them on every rank.

    Returns:
        The sums, on every rank.

    Ranks: collective.

    Example:
        >>> sum_exactly([1, 2.5])
        [1, 2.5]
    """
    return [sum(numbers) for numbers in zip(*gather_objects(lambda: values), strict=True)]


@waits_for_ranks
def start_sum_over_ranks(
    values: list[float],
    call: str = "start_sum_over_ranks",
    *,
    is_patient: bool = False,
) -> Callable[[], list[float]]:
    """Start to add up a few numbers over all ranks, as :func:`sum_over_ranks` does, and do not wait
    for the sums.

    A mark of the call travels with them. It has one size for all calls: of different sizes gloo
    would end the process.

    Args:
        values: the same number of them on every rank, at most :data:`MARKED_NUMBERS`.
        call: names the call, the same on every rank.
        is_patient: wait without a limit for ranks that come late, as after work of the main process
            alone.

    Returns:
        What waits for the sums and returns them; it may be called once, later, or not at all. Other
        collectives may come in between.

    Raises:
        RankMismatchError: by that, on every rank: another rank has come to another call.

    Ranks: collective.

    Example:
        >>> start_sum_over_ranks([1.5, 2.0])()
        [1.5, 2.0]
    """
    if not is_distributed_initialized():
        return lambda: list(values)
    require_all_ranks(call)
    # whose squares are added up exactly
    mark = zlib.crc32(call.encode()) % 2**20
    world_size = dist.get_world_size()
    numbers = [
        float(mark),
        float(mark**2),
        *values,
        *[0.0] * (MARKED_NUMBERS - len(values)),
    ]
    tensor = keep_alive(torch.tensor(numbers, dtype=torch.float64))
    wait = _start_patient_sum(tensor, call) if is_patient else start_sum(tensor, control_group())

    def finish() -> list[float]:
        wait()
        sums: list[float] = tensor.tolist()
        if sums[:2] != [world_size * one for one in numbers[:2]]:
            raise RankMismatchError(
                f"rank {dist.get_rank()} has come to {call}, at "
                f"{line_of(traceback.extract_stack())}, and another rank to another collective: "
                "their numbers do not belong together. Make each of these calls on every rank, "
                "not under `if if_main_process():`, and use only its result there."
            )
        return sums[2 : 2 + len(values)]

    return finish


def _start_patient_sum(total: torch.Tensor, call: str) -> Callable[[], object]:
    from ddpkit.comm import start_patient_sum  # not for those who ask for a rank alone

    group = control_group()
    return start_patient_sum(
        total,
        call,
        group,
        exchanges=is_exchanged([total], group),
    )
