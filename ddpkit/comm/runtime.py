"""The runtime of one process group, made by ddpkit or by other code: created on first use, ended with the group.

Its watchdog comes from the control plane, which is above; asking for a rank does not import that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpkit.base import POSITION, PROCESS, FailureReport, is_distributed_initialized
from ddpkit.comm.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpkit.control import Watchdog

CONNECTION_TAG = 0x64647000  # of sends that nobody receives


class Runtime:
    """What belongs to one process group.

    Made for the default process group.

    Args:
        report: of its ranks; None: they have none yet, and get one in the group's own store.

    Attributes:
        group: gives that group, if it is still there.
        store: its store.
        report: which rank failed first; which ranks have departed.
        mailbox: values and errors of main-only work.
        watchdog: sees to it that nothing hangs; None: there is none.
        timeout: how long the group's collectives wait at its start; None: it does not say.
        control_group: gives the gloo group for small CPU tensors, if it is still there.
        machine: number of this process's machine, and the ranks on it; None unless they had to tell each other, for
            want of a launcher.
        is_attended: whether the group's end and its failures are told to the other ranks.
        hosts_store: whether this process keeps the store.
        is_over: whether another group has taken its place.
        has_left: whether this process has departed at its end.

    Ranks: local.
    """

    def __init__(self, report: FailureReport | None = None) -> None:
        from ddpkit.compat import default_store, timeout_of  # reaches into torch: not for those who ask for a rank

        self.report = report or FailureReport(default_store(), dist.get_rank(), dist.get_world_size())
        self.store: dist.Store = self.report.store
        self.mailbox = Mailbox(self.report, self.check_connection)
        # A weak reference: torch owns the groups. A strong one would keep a destroyed group's threads running, and the
        # process would abort at exit.
        self.group: Callable[[], dist.ProcessGroup | None] = weakref.ref(dist.group.WORLD)
        self.control_group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.timeout = timeout_of(dist.group.WORLD)
        self.machine: tuple[int, tuple[int, ...]] | None = None
        self.is_attended = self.hosts_store = self.is_over = self.has_left = False
        self.watchdog: Watchdog | None = None

    def check_connection(self, rank: int) -> None:
        """Raise if the control group's connection to a rank is lost, as it is once the process has ended; never wait.

        A byte is offered that the rank never asks for: gloo refuses at once where the connection has broken, and sends
        only the offer otherwise.

        Args:
            rank: another one than this.

        Raises:
            RuntimeError: it is lost.
        """
        group = self.control_group()
        if group is not None:
            dist.isend(torch.zeros(1, dtype=torch.uint8), rank, group=group, tag=CONNECTION_TAG)

    def end(self) -> None:
        """End all that belongs to the group, because another one takes its place.

        The store is left alone: slower ranks may still be talking to it.
        """
        self.is_over = True
        if self.watchdog is not None and not self.report.is_forked:
            self.watchdog.stop()
            if self.watchdog.heartbeat.store_lost is None:
                self.report.depart()
        if PROCESS.report is self.report:
            PROCESS.report = None


_runtime: Runtime | None = None


def get_runtime(report: FailureReport | None = None) -> Runtime:
    """Return the runtime of the current default process group.

    Args:
        report: of its ranks, where the group has just been made and they have one already.

    Raises:
        ValueError: no process group is initialized (torch's own error).

    Ranks: local.

    State: ends the runtime of the group before, and its watchdog, if the group has changed.

    Example:
        >>> get_runtime()
        Traceback (most recent call last):
        ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """
    global _runtime  # noqa: PLW0603 -- shadows torch's own global, the default process group
    if _runtime is None or dist.group.WORLD is None or _runtime.group() is not dist.group.WORLD:
        begun = Runtime(report)
        if _runtime is not None:
            _runtime.end()
        _runtime = begun
        POSITION.join_group()
    return _runtime


def control_group() -> dist.ProcessGroup | None:
    """Return the gloo group for small CPU tensors, separate from the group for gradients.

    Its timeout is the initial timeout of the default group: ``distributed_timeout_minutes``, or the value given by
    the code that started the group. Shortening the default group's timeout later does not change it.

    Returns:
        The group, or None where no process group is initialised.

    Ranks: collective on the first call, local afterwards.

    Example:
        >>> control_group() is None
        True
    """
    if not is_distributed_initialized():
        return None
    runtime = get_runtime()
    group = runtime.control_group()
    if group is None:
        group = dist.new_group(backend="gloo", timeout=runtime.timeout)
        runtime.control_group = weakref.ref(group)
    return group
