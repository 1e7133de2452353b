"""Real ranks for tests: processes that start once and run many functions.

Importing torch costs each process seconds; running a function on ranks that are there already costs
milliseconds. On Linux the ranks are forked from a process that has imported torch, so that a pool
which starts again is back at once; they share its hash seed. Every run gets a process group of its
own on a store that the pool hosts, as torchrun's agent does.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ddpkit.base import Reason
from ddpkit.comm import get_runtime, given_group
from ddpkit.errors import DdpkitError
from tests.warm_starts import PRELOADED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from typing_extensions import Self

T = TypeVar("T")

CLOSE_SECONDS = 3.0
START_SECONDS = 300.0
READY = "ready"


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """What became of a function on one rank.

    Attributes:
        ok: whether it returned.
        value: its return value.
        error_type: the class name of its exception.
        error: the message of its exception.
        trace: the traceback.
        is_spent: whether its process cannot be used again.

    Ranks: local.

    Example:
        >>> RankOutcome(ok=True, value=3).value
        3
    """

    ok: bool
    value: Any = None
    error_type: str = ""
    error: str = ""
    trace: str = ""
    is_spent: bool = False


class RankPoolError(DdpkitError, RuntimeError):
    """A function raised, hung or ended its process on some rank of a :class:`RankPool`.

    Attributes:
        outcomes: one :class:`RankOutcome` per rank.
    """

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        parts = [
            f"--- rank {rank}: {outcome.error_type}\n{outcome.trace or outcome.error}"
            for rank, outcome in enumerate(self.outcomes)
            if not outcome.ok
        ]
        super().__init__("\n".join(parts))


class RankPool:
    """Processes that run functions as the ranks of a distributed run (gloo, on the CPU).

    Args:
        timeout: seconds after which a run counts as hung; its processes are killed and replaced.
            The start of the processes does not count.

    Ranks: local; the functions run on ranks of their own.

    Example:
        >>> with (
        ...     RankPool() as ranks
        ... ):  # starts two processes, which takes some seconds  # doctest: +SKIP
        ...     ranks.run(os.getenv, "RANK", world_size=2)
        ['0', '1']
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        # Elsewhere than on Linux a fork is unsafe with the libraries of the system.
        get = multiprocessing.get_context
        self._context = get("forkserver") if sys.platform == "linux" else get("spawn")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: Any = None  # the TCPStore of the ranks, once they have been started
        self._runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        world_size: int = 2,
        **options: Any,
    ) -> list[T]:
        """Run a module-level function on every rank and return what each returned.

        Args:
            function: importable by name in another process.
            args: its arguments; they must pickle.
            world_size: number of ranks.
            options: ``init``, ``env`` and ``timeout`` as in :meth:`outcomes`.

        Returns:
            One value per rank.

        Raises:
            RankPoolError: the function raised, hung or ended its process on some rank.
        """
        outcomes = self.outcomes(function, *args, world_size=world_size, **options)
        if not all(outcome.ok for outcome in outcomes):
            raise RankPoolError(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        init: bool = True,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[RankOutcome]:
        """Run a function as :meth:`run` does, and return what became of it on each rank.

        Args:
            function: importable by name in another process.
            args: its arguments.
            world_size: number of ranks.
            init: start the default process group first; otherwise only the launcher's environment
                is set.
            env: further environment variables.
            timeout: seconds; the pool's own by default.

        Returns:
            One outcome per rank; a rank that hung or died has ``error_type`` "Hang" or "Died".
        """
        self._start(world_size)
        self._runs += 1
        limit = time.monotonic() + (timeout or self.timeout)
        workers = self._workers[:world_size]
        for rank, (_, connection) in enumerate(workers):
            environment = self._environment(rank, world_size) | (env or {})
            connection.send((function, args, environment, init))
        waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
        found: dict[int, RankOutcome] = {}
        while waiting and time.monotonic() < limit:
            ready = wait(list(waiting), timeout=0.2)
            for connection in [known for known in waiting if known in ready]:
                rank = waiting.pop(connection)
                try:
                    found[rank] = connection.recv()
                except EOFError:
                    found[rank] = _died(self._workers[rank][0])
        for rank in waiting.values():
            found[rank] = RankOutcome(
                ok=False,
                error_type="Hang",
                error="did not return in time",
                is_spent=True,
            )
        if any(outcome.is_spent for outcome in found.values()):
            self._dump_stacks(waiting.values())
            self.close()
        return [found[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes. The pool starts new ones when it is used again."""
        atexit.unregister(self.close)
        for _, connection in self._workers:
            connection.close()
        end = time.monotonic() + CLOSE_SECONDS
        for process, _ in self._workers:
            process.join(timeout=max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()
        self._store = None

    def _dump_stacks(self, ranks: Any) -> None:
        """Let processes that hang print where they are, and end."""
        for rank in ranks:
            process = self._workers[rank][0]
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGABRT)
                # one after the other, so that the lines do not mix
                process.join(timeout=CLOSE_SECONDS)

    def _environment(self, rank: int, world_size: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._runs),
        }

    def _start(self, world_size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
            )
            # before multiprocessing waits for the processes, which wait for the pool
            atexit.register(self.close)
        new = range(len(self._workers), world_size)
        # Not the seed of the test in which the pool starts: each rank may be started in another
        # one.
        inherited = {
            name: value for name, value in os.environ.items() if not name.endswith("_GLOBAL_SEED")
        }
        here = (list(sys.path), inherited, multiprocessing.get_start_method())
        for _ in new:
            ours, theirs = self._context.Pipe()
            # No daemon: the loaders of ranks may have workers.
            process = self._context.Process(target=_serve, args=(theirs, *here))
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for rank in new:  # all of them import at the same time
            self._await_start(rank)

    def _await_start(self, rank: int) -> None:
        """Wait until a process has finished its imports."""
        process, connection = self._workers[rank]
        with contextlib.suppress(EOFError):  # it has ended
            if not connection.poll(START_SECONDS):
                process.kill()
            elif connection.recv() == READY:
                return
        outcome = _died(process, f"process {rank} of the pool did not start: ")
        self.close()
        raise RankPoolError([outcome])


def _died(process: BaseProcess, what: str = "") -> RankOutcome:
    process.join(timeout=START_SECONDS)  # its pipe closes a moment before it has ended
    error = f"{what}exit code {process.exitcode}"
    return RankOutcome(ok=False, error_type="Died", error=error, is_spent=True)


def _serve(
    connection: Connection,
    path: list[str],
    environment: dict[str, str],
    start_method: str,
) -> None:
    """Run functions until the pool closes the connection."""
    sys.path[:] = path
    os.environ.clear()  # the forked process may have an older environment
    os.environ.update(environment)
    np.random.seed()  # noqa: NPY002 -- the process that was forked has one state for all ranks
    multiprocessing.set_start_method(start_method, force=True)  # for the workers of loaders
    # The pool sees to its ranks itself: to watch each group would take a third of a short run.
    given_group._is_watchable = lambda _: False
    faulthandler.enable(all_threads=True)  # for SIGABRT, which a run leaves alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports much
    gc.collect()
    gc.freeze()  # what has been imported stays: no collection has to walk it
    connection.send(READY)
    while True:
        try:
            function, args, environment, init = connection.recv()
        except EOFError:
            return
        outcome = _outcome(function, args, environment, init=init)
        # DDP goes before its group: as the last to hold it, it would wait for gloo's thread and
        # keep the interpreter, which that thread may need to drop a gradient's context
        # (https://github.com/pytorch/pytorch/issues/56297).
        gc.collect()
        if not _destroy_group() or outcome.is_spent:
            connection.send(dataclasses.replace(outcome, is_spent=True))
            os._exit(1)
        # What else held a group: other ranks may wait at its connections; and a loader's worker
        # that is forked later must not be the one that collects it, without the threads that it
        # had.
        gc.collect()
        connection.send(outcome)


def _outcome(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    *,
    init: bool,
) -> RankOutcome:
    has_begun = False
    try:
        with _rank(environment, init=init):
            has_begun = True
            return RankOutcome(ok=True, value=function(*args))
    except Exception as error:  # noqa: BLE001 -- handed to the caller, who raises it
        trace = "".join(traceback.format_exception(error))
        # Without a process group torch has counted a group that the other ranks do not know: its
        # keys would differ.
        return RankOutcome(
            ok=False,
            error_type=type(error).__name__,
            error=str(error),
            trace=trace,
            is_spent=not has_begun,
        )


@contextlib.contextmanager
def _rank(environment: dict[str, str], *, init: bool) -> Iterator[None]:
    """Be one rank: environment, seed, warnings as errors, process group; all undone afterwards."""
    saved = dict(os.environ)
    hook = sys.excepthook
    os.environ.update(environment)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if init:
                _init_group()
            yield
    except Exception as error:
        if dist.is_initialized():
            report = get_runtime().report
            report.tell(Reason.of(report.rank, error, is_final=True))
        raise
    finally:
        if dist.is_initialized():
            get_runtime().report.depart()  # as a process that ends
        sys.excepthook = hook
        os.environ.clear()
        os.environ.update(saved)


def _destroy_group() -> bool:
    """Destroy the process group; say whether that came to an end, which another rank that is stuck
    can prevent.
    """
    if not dist.is_initialized():
        return True
    destroyer = threading.Thread(target=dist.destroy_process_group, daemon=True)
    destroyer.start()
    destroyer.join(timeout=CLOSE_SECONDS)
    return not destroyer.is_alive()


def _init_group() -> None:
    client = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
    )
    store = dist.PrefixStore(f"run{os.environ['TORCHELASTIC_RESTART_COUNT']}", client)
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timedelta(seconds=30),
    )
    # A rank that is done at once must not close its connections while another still makes its own.
    store.set(f"connected{rank}", "")
    store.wait([f"connected{other}" for other in range(world_size)], timedelta(seconds=30))
