"""The names of the strategies. The options are checked with them, and no strategy is loaded."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpkit.errors import ConfigError

AUTO = "auto"  # one device or DDP, as the launch says
SINGLE = "single"
DDP = "ddp"

_SWITCHES = ("gradient_as_bucket_view", "broadcast_buffers")  # also set where they are off

#: Options that DDP alone reads, and why they do not go with another strategy.
OF_DDP = dict.fromkeys(
    (
        "ddp_comm_hook",
        "static_graph",
        "bucket_cap_mb",
        *_SWITCHES,
        *(f"{name}=False" for name in _SWITCHES),
    ),
    "it is DDP's, and no other strategy reads it",
)

#: Why an audit of ranks does not go with a strategy, where a shard is what one process has.
OF_ONE_PROCESS = (
    "whose processes have random numbers and losses of their own, so that none can compute what "
    "another one has: give --virtual_ranks"
)

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[A-Za-z_]\w*")

# by the name that a strategy of one's own may still have: what is asked now in its place
FORMER_NAMES = {
    "whole_states": "divided_states",
    "shards": "division",
    "virtual_ranks": "division",
}


@dataclass(frozen=True)
class Registered:
    """A strategy that is known by a name.

    Args:
        where: its class, or ``"module:Class"``, which is loaded when it is chosen.
        chosen_by: an option of its own that chooses it; empty: the option ``strategy`` does.
        beside: values of ``strategy`` that may be given together with ``chosen_by``.
        together: other such values, each with what is chosen then, as in ``where``.
        alone: why no further value of ``strategy`` may be given together with ``chosen_by``.
        checks: options that have it look at the options, whichever strategy is chosen.
    """

    where: str | type[Any]
    chosen_by: str = ""
    beside: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    together: Mapping[str, str] = field(default_factory=dict)
    alone: str = ""


#: By name. Of several that options of their own have chosen, the first is asked first.
_REGISTERED: dict[str, Registered] = {
    "local_sgd": Registered(
        "ddpkit.strategies.local_sgd:LocalSGD",
        "ddp_comm_hook=post_local_sgd",
        (SINGLE, DDP),
        alone="it is DDP, in which weights are averaged in the place of gradients",
    ),
    "virtual_ranks": Registered(
        "ddpkit.strategies.virtual_ranks:VirtualRanks",
        "virtual_ranks",
        (SINGLE,),
        together={
            "zero1": "ddpkit.strategies.virtual_zero1:VirtualZero1",
            "fsdp": "ddpkit.strategies.virtual_fsdp:VirtualFSDP",
        },
        alone=(
            "for the same bits on any number of processes gradients are added up in one order, and "
            "another strategy adds them up in its own"
        ),
    ),
    "data_parallel": Registered(
        "ddpkit.strategies.data_parallel:DataParallel",
        "data_parallel_backend",
        alone="it is a strategy itself, which divides each batch over the GPUs of one process",
    ),
    "fsdp": Registered("ddpkit.strategies.fsdp:FSDP"),
    "zero1": Registered("ddpkit.strategies.zero1:Zero1"),
    DDP: Registered("ddpkit.strategies.ddp:DDP", checks=tuple(OF_DDP)),
    SINGLE: Registered("ddpkit.strategies.single:SingleDevice"),
}
_OWN = frozenset(_REGISTERED)


def register(name: str, where: str | type[Any]) -> None:
    """Give a strategy a name, by which ``--strategy=NAME`` chooses it.

    Call it before the command line is read, such as at the top of the script. Without a name a
    strategy can be chosen, too: ``--strategy=my_package.averaging:AverageEvery``.

    Args:
        name: letters, digits and underscores.
        where: its class, or ``"module:Class"``: then the module is loaded when it is chosen.

    Raises:
        ConfigError: the name cannot be used, or another strategy has it; ``where`` is no strategy.

    Ranks: local; every rank registers the same.

    State: the names of this process.

    Example:
        >>> register("average", "my_package.averaging:AverageEvery")
        >>> "average" in registered_names()
        True
        >>> register("fsdp", "my_package.averaging:AverageEvery")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: register('fsdp', ...): a strategy of ddpkit has this name. ...
        >>> unregister("average")
    """
    if not _NAME.fullmatch(name) or name == AUTO:
        raise ConfigError(
            f"register({name!r}, ...): a name has letters, digits and underscores, and is not "
            f"{AUTO!r}. Give one such as 'average_every'."
        )
    if name in _OWN:
        raise ConfigError(
            f"register({name!r}, ...): a strategy of ddpkit has this name. Give another."
        )
    if isinstance(where, str) and not _PATH.fullmatch(where):
        raise ConfigError(
            f"register({name!r}, {where!r}): write the module, a colon and the class, such as "
            "'my_package.averaging:AverageEvery'."
        )
    if not isinstance(where, str) and problem_with(where):
        raise ConfigError(
            f"register({name!r}, {where!r}): this is no subclass of ddpkit.strategies.Strategy."
        )
    before = _REGISTERED.get(name)
    if before is not None and before.where != where:
        raise ConfigError(
            f"register({name!r}, {where!r}): the name stands for {before.where!r} already. Give "
            "another."
        )
    _REGISTERED[name] = Registered(where)


def unregister(name: str) -> None:
    """Take a name away that :func:`register` has given.

    Args:
        name: as given there.

    Raises:
        ConfigError: no such name was given.

    Ranks: local.

    State: the names of this process.

    Example:
        >>> unregister("ddp")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: unregister('ddp'): no strategy was registered under this name.
    """
    if name in _OWN or _REGISTERED.pop(name, None) is None:
        raise ConfigError(f"unregister({name!r}): no strategy was registered under this name.")


def registered_names() -> list[str]:
    """Return the names that ``--strategy`` takes, besides ``auto``.

    Ranks: local.

    Example:
        >>> registered_names()[:3]
        ['data_parallel', 'ddp', 'fsdp']
    """
    return sorted(_REGISTERED)


def registered() -> dict[str, Registered]:
    """Return what is known of each strategy that has a name."""
    return dict(_REGISTERED)


def problem_with(value: Any) -> str:
    """Say why a value of the option ``strategy`` stands for no strategy; empty if it can be one.

    Nothing is loaded.

    Args:
        value: a name, ``"module:Class"``, a class, or an object.

    Example:
        >>> problem_with("fdsp")
        "one of auto, data_parallel, ... zero1, or module:Class (did you mean 'fsdp'?)"
    """
    if isinstance(value, str):
        if value == AUTO or value in _REGISTERED or _PATH.fullmatch(value):
            return ""
        names = [AUTO, *registered_names()]
        close = difflib.get_close_matches(value, names, n=1)
        module, dot, name = value.rpartition(".")
        meant = f"{module}:{name}" if dot and _PATH.fullmatch(f"{module}:{name}") else ""
        meant = meant or "".join(close)
        question = f" (did you mean {meant!r}?)" if meant else ""
        return f"one of {', '.join(names)}, or module:Class{question}"
    kind = value.func if isinstance(value, functools.partial) else value
    if callable(getattr(kind, "finish_gradients", None)):  # what is no strategy is told when made
        return ""
    return "a name, or an object of a subclass of ddpkit.strategies.Strategy"
