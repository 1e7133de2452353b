"""``notebook_launch``: a cell of a notebook runs a function as several ranks."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddpkit.base import is_distributed_initialized, parse_device
from ddpkit.compat import is_lost_by_fork
from ddpkit.errors import ConfigError, LaunchError
from ddpkit.launch.launcher_variables import NOTEBOOK
from ddpkit.launch.launchers import find_launch, node_by_rank
from ddpkit.launch.nproc import cores, count_gpus, count_processes
from ddpkit.launch.own_ranks import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

T = TypeVar("T")

STORE_SECONDS = 300.0
USED = (
    "notebook_launch forks {} processes from this one, in which a GPU was used before, so that "
    "they could use none. Restart the kernel, and let nothing use a GPU before notebook_launch: "
    "make models and tensors in the function. torch.cuda.is_available() is a use, too, unless "
    "PYTORCH_NVML_BASED_CUDA_CHECK=1 was set before; so is training in a cell. Or train here, "
    "with nproc=1; or without GPUs, with device='cpu'."
)


def notebook_launch(
    fn: Callable[..., T],
    nproc: int | str,
    args: Sequence[Any] = (),
    *,
    device: str | None = None,
) -> T:
    """Run a function as the ranks of a training on this machine, from a cell of a notebook.

    The ranks are forked from this process: the function may be defined in a cell, and sees what the
    cells before have made. Changes that it makes to this stay in the ranks.

    Args:
        fn: the function. Every rank calls it with the same arguments; which rank it is, it asks
            ``ddpkit.distributed.get_rank()``. A Brain in it finds the other ranks by itself.
        nproc: number of processes, or ``"gpu"`` (one per GPU), ``"cpu"`` (one per core), ``"auto"``
            (one per GPU, else per core). With 1 the function is called in this process.
        args: positional arguments of the function. They are not pickled.
        device: ``"cpu"`` hides the GPUs from the ranks; None does not.

    Returns:
        What the function returned on rank 0, with tensors on the CPU.

    Raises:
        ConfigError: the number makes no sense, or the function cannot be called so.
        LaunchError: a launcher has started this process, or a GPU was used in it before.
        RankFailedError: a rank has failed. The message has its traceback. The other ranks have
            ended, too.
        RunStopped: the run was asked to stop on all ranks, as by ``time_limit``.
        KeyboardInterrupt: this process was interrupted. The ranks have stopped at the end of a
            step, and saved a checkpoint where they could; a second interrupt ends them at once.

    Ranks: local; the process becomes the parent of the ranks while it waits.

    State: that of the function in the ranks. Each finds torchrun's variables in its environment
        and a free port of this machine, and computes with cores / nproc threads, unless
        ``OMP_NUM_THREADS`` is set. What ranks write is shown by this process.

    Example:
        >>> notebook_launch(max, 1, args=(3, 4))
        4
        >>> notebook_launch(print("not a function"), 2)
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: fn must be a function, got None...
    """
    _check_call(fn, args)
    if nproc == 1:
        return fn(*args)
    gpus, are_lost = _look_for_gpus()
    number = count_processes(nproc, device, gpus=gpus, sign="")
    if number == 1:
        return fn(*args)
    _refuse_rank(number)
    is_on_cpu = device is not None and parse_device(device)[0] == "cpu"
    if gpus and are_lost and not is_on_cpu:
        raise LaunchError(USED.format(number))
    value: T = _run(fn, args, number, {"CUDA_VISIBLE_DEVICES": ""} if is_on_cpu else {})
    return value


def _run(
    fn: Callable[..., Any], args: Sequence[Any], number: int, variables: dict[str, str]
) -> Any:
    import torch

    from ddpkit.launch.forked_ranks import VALUE, ForkedCall, ForkedRanks
    from ddpkit.launch.rank_output import RankOutput

    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and int(given) else max(1, cores() // number)
    store = open_store(STORE_SECONDS)
    output = RankOutput()
    try:
        with tempfile.TemporaryDirectory(prefix="ddpkit-notebook-") as name:
            call = ForkedCall(
                fn,
                args,
                number,
                store.port,
                threads,
                Path(name),
                {NOTEBOOK: str(number), **variables},
            )
            ForkedRanks(call, output).run()
            # written by a process of this one, in a folder that no other user can write to
            file = Path(name, VALUE)  # there is none where rank 0 has called sys.exit
            return torch.load(file, "cpu", weights_only=False) if file.exists() else None
    finally:
        output.close()
        del store


# ------------------------------------------------------------------------------------------ refused


def _check_call(fn: Any, args: Any) -> None:
    if not callable(fn):
        raise ConfigError(
            f"fn must be a function, got {fn!r}. Give the function itself, as in "
            "notebook_launch(train, 2), and not what it has returned, as in "
            "notebook_launch(train(), 2)."
        )
    if not isinstance(args, (tuple, list)):
        raise ConfigError(
            f"args must be a tuple of the function's arguments, got {args!r}. One argument is "
            "args=(value,)."
        )
    try:
        inspect.signature(fn).bind(*args)
    except ValueError:  # a function of C that does not tell
        return
    except TypeError as error:
        raise ConfigError(
            f"{getattr(fn, '__name__', 'fn')} cannot be called with args={tuple(args)!r}: {error}. "
            "Every rank calls it with these alone; ddpkit.distributed.get_rank() tells its rank."
        ) from None


def _refuse_rank(number: int) -> None:
    """Raise if this process is a rank already."""
    if is_distributed_initialized():
        raise LaunchError(
            f"notebook_launch starts {number} processes itself, and this one is in a process group "
            "already: a cell, or the launcher's script, has made it. Restart the kernel, and make "
            "the group in the function alone (a Brain does so by itself)."
        )
    info = find_launch() if node_by_rank(os.environ) is None else None
    if info is not None and info.world_size > 1:
        raise LaunchError(
            f"notebook_launch starts {number} processes itself, but {info.launcher} has started "
            f"this one already, as rank {info.rank} of {info.world_size}. Use one of the two: call "
            "the function without notebook_launch, or start the kernel without a launcher."
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            f"notebook_launch forks {number} processes, and this system cannot fork. Put the "
            "function into a script, and start that with --nproc or torchrun."
        )


def _look_for_gpus() -> tuple[int, bool]:
    """Return the number of GPUs, and whether ranks that are forked from this process could not use
    them. To count is a use, so it is done in another process where none was used before.
    """
    are_lost = _asked_in_fork(_are_lost)
    return (count_gpus() if are_lost else _asked_in_fork(count_gpus)), are_lost


def _are_lost() -> bool:
    return any(map(is_lost_by_fork, ("cuda", "xpu", "mps")))


def _asked_in_fork(ask: Callable[[], T]) -> T:
    """Return what a function returns in a forked process."""
    from ddpkit.launch.forked_ranks import fork

    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = fork(_send, ask, sending)
    sending.close()
    try:
        answer: T = receiving.recv()
    except EOFError:
        process.join()
        raise LaunchError(
            "notebook_launch forks a process to look for GPUs, and that has ended with exit code "
            f"{process.exitcode}. Restart the kernel."
        ) from None
    process.join()
    return answer


def _send(ask: Callable[[], object], sending: Connection) -> None:
    sending.send(ask())
