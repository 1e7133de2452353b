"""The default process group, as recipes start it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.comm import init_group
from ddpkit.distributed.main_only_code import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping


def ddp_init_group(run_opts: Mapping[str, Any]) -> None:
    """Start the default process group if a launcher started this process; otherwise do nothing.

    The device is bound to the local rank first, and given to the group. A group that somebody else
    has started already is accepted and will not be destroyed; one that is started here is destroyed
    at exit. From then on the ranks watch each other, and the exception that ends one is told to the
    others, and to torchrun's summary. In main-only code nothing happens.

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
    rank starts see that it is taken. ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` there, where ``RANK``
    and ``LOCAL_RANK`` were set without them.

    Example:
        >>> ddp_init_group({"distributed_backend": "gloo"})  # no launcher: nothing happens
    """
    if ALONE.get():
        return  # the other ranks do not come: the group is watched once they do
    init_group(run_opts)
