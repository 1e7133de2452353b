"""Makes optimizers and schedules from what a recipe gives."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ddpkit.base import kind_of
from ddpkit.errors import ConfigError
from ddpkit.optim.fused import GPUS, UNASKED, WIDE
from ddpkit.optim.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def make_optimizer(
    opt_class: Callable[[Iterable[Any]], Optimizer],
    modules: torch.nn.Module,
    *,
    split_vectors: bool = False,
) -> Optimizer:
    """Call a recipe's ``opt_class`` with all parameters; one that is frozen may be unfrozen later.

    torch's Adam and AdamW are called with ``fused=True`` if all parameters are on a GPU.

    Args:
        opt_class: returns an optimizer.
        modules: whose parameters are optimized.
        split_vectors: make two groups of the trainable parameters; the group of vectors has no
            weight decay.

    Returns:
        The optimizer.

    Raises:
        ConfigError: nothing can be trained, or ``opt_class`` returned something that is not an
            optimizer.

    Ranks: local.

    Example:
        >>> type(make_optimizer(torch.optim.Adam, torch.nn.Linear(1, 1))).__name__
        'Adam'
    """
    _require_maker("opt_class", opt_class)
    parameters = list(modules.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            "opt_class was given, but no entry of modules has a trainable parameter. Pass the "
            "model in modules, or leave opt_class out."
        )
    groups: Any = rm_vector_weight_decay(modules) if split_vectors else parameters
    how: dict[str, Any] = {"fused": True} if _may_be_fused(opt_class, modules) else {}
    try:
        optimizer = opt_class(groups, **how)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"opt_class cannot make an optimizer: {type(error).__name__}: {error}"
        ) from error
    _require(optimizer, "opt_class must return an optimizer", "param_groups", "step", "zero_grad")
    return optimizer


def _require_maker(name: str, given: Any) -> None:
    """Refuse an object, or the name of a class, where a class or a function is called to make one.

    Args:
        name: of the argument.
        given: what was given for it.

    Raises:
        ConfigError: it cannot be called.
    """
    if callable(given):
        return
    kind = type(given).__name__
    if isinstance(given, str):
        what = f"{name}={given!r} is a text"
    else:
        what = f"{name} is an object of the class {kind}, which is made already"
    raise ConfigError(
        f"{what}: give a class or a function that makes it, in YAML with !name: instead of !new:, "
        "in Python functools.partial(TheClass, ...). An object of your own is set in "
        "init_optimizers."
    )


def _may_be_fused(opt_class: Any, modules: torch.nn.Module) -> bool:
    """Say whether torch's fused kernel does what its others do; not if the recipe has chosen one of
    them.

    SGD's takes no sparse gradients, and with momentum none that come later than another's (torch
    2.13).
    """
    kind = getattr(opt_class, "func", opt_class)
    given = getattr(opt_class, "keywords", {})
    if kind not in UNASKED or given.keys() & {"fused", "foreach", "capturable", "differentiable"}:
        return False
    return all(
        type(parameter) is torch.nn.Parameter
        and parameter.device.type in GPUS
        and parameter.dtype in WIDE
        for parameter in modules.parameters()
    )


def _require(made: Any, words: str, *names: str) -> None:
    missing = [name for name in names if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"{words}, got {kind_of(made)} (without {', '.join(missing)}).")


def make_schedule(
    scheduler_class: Callable[..., Any],
    optimizer: Optimizer,
    every: str,
    total_steps: int | None,
) -> Schedule:
    """Call a recipe's ``scheduler_class``.

    Args:
        scheduler_class: a function, called with ``(optimizer, total_steps)``; or a class (or a
            ``functools.partial`` of one), called with ``(optimizer)`` and, by name, with the number
            of steps if it has a parameter ``total_steps`` or ``T_max`` that is not given yet.
        optimizer: the scheduler's.
        every: ``"step"`` or ``"epoch"``.
        total_steps: how many steps the schedule will make; None where that is not known.

    Raises:
        ConfigError: the call failed, or returned something that is not a scheduler.

    Ranks: local; alike on every rank.
    """
    _require_maker("scheduler_class", scheduler_class)
    make = functools.partial(_make_scheduler, scheduler_class, optimizer)
    asks = _asks_for_length(scheduler_class)
    schedule = Schedule(
        make(total_steps),
        optimizer,
        every,
        total_steps,
        make if asks else None,
    )
    if schedule.follows_loss and every != "epoch":
        raise ConfigError(
            "ReduceLROnPlateau follows the valid loss: use it with --scheduler_every=epoch."
        )
    return schedule


def _make_scheduler(
    scheduler_class: Callable[..., Any],
    optimizer: Optimizer,
    total_steps: int | None,
) -> Any:
    """Call ``scheduler_class`` for a number of steps, and check what it returns."""
    arguments, keywords = _arguments_for(scheduler_class, total_steps)
    name = getattr(getattr(scheduler_class, "func", scheduler_class), "__name__", "")
    try:
        scheduler = scheduler_class(optimizer, *arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler_class ({name}) cannot make a scheduler for {total_steps} steps: {error}. "
            "A class is given total_steps or T_max if it has such a parameter; give its other "
            "arguments beforehand (!name: in YAML, functools.partial in Python), or pass a "
            "function (optimizer, total_steps) -> scheduler. For a stream, whose number of steps "
            "is None, give optimizer_step_limit."
        ) from error
    _require(
        scheduler,
        f"scheduler_class ({name}) must return a scheduler",
        "step",
        "state_dict",
        "load_state_dict",
    )
    return scheduler


def _arguments_for(
    scheduler_class: Any,
    total_steps: int | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Return how the number of steps is handed over: by position, by name, or not at all."""
    is_class, names = _parameters_for_length(scheduler_class)
    if not _asks_for_length(scheduler_class) or (is_class and total_steps is None):
        return [], {}
    return ([], {names[0]: total_steps}) if names else ([total_steps], {})


def _asks_for_length(scheduler_class: Any) -> bool:
    """Return whether ``scheduler_class`` is called with the number of steps, where that is
    known.
    """
    is_class, names = _parameters_for_length(scheduler_class)
    given = getattr(scheduler_class, "keywords", {})
    return bool(names or not is_class) and not any(name in given for name in names)


def _parameters_for_length(scheduler_class: Any) -> tuple[bool, list[str]]:
    """Return whether ``scheduler_class`` is a class, and its parameters for the number of steps."""
    parameters = inspect.signature(scheduler_class).parameters
    is_class = isinstance(getattr(scheduler_class, "func", scheduler_class), type)
    known = ("total_steps", "T_max") if is_class else ("total_steps",)
    return is_class, [name for name in known if name in parameters]


def rm_vector_weight_decay(modules: torch.nn.Module) -> list[dict[str, Any]]:
    """Make two parameter groups: vectors (biases, normalisation) without weight decay, then all the
    rest.

    Args:
        modules: whose trainable parameters are divided.

    Returns:
        Two groups for an optimizer's constructor.

    Ranks: local.

    Example:
        >>> [len(group["params"]) for group in rm_vector_weight_decay(torch.nn.Linear(2, 3))]
        [1, 1]
    """
    parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    return [
        {
            "params": [parameter for parameter in parameters if parameter.ndim == 1],
            "weight_decay": 0.0,
        },
        {"params": [parameter for parameter in parameters if parameter.ndim != 1]},
    ]
