"""Makes a strategy from the value of the option ``strategy``. Only its own module is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.names import FORMER_NAMES, registered

if TYPE_CHECKING:
    from collections.abc import Callable


def new_strategy(value: Any) -> Strategy:
    """Return the strategy that a value of the option ``strategy`` stands for; it knows no run yet.

    Args:
        value: a name, ``"module:Class"``, or a class: an object of it is made. An object is
            returned as it is.

    Raises:
        ConfigError: it cannot be loaded or made, or is no strategy.

    Ranks: local; alike on all ranks.

    State: loads the module of the strategy.

    Example:
        >>> new_strategy("single").name
        'one device'
        >>> new_strategy("no_such_package.averaging:AverageEvery")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: strategy='no_such_package.averaging:AverageEvery': there is no
        module 'no_such_package' to import. ...
    """
    given = f"strategy={value!r}"
    if isinstance(value, str):
        known = registered().get(value)
        where = value if known is None else known.where
        kind: Any = _loaded(where, given) if isinstance(where, str) else where
    elif isinstance(value, (type, functools.partial)):
        kind = value
    elif isinstance(value, Strategy):
        _require_new_names(value, given)
        return value
    else:
        kind = value
    _require_strategy(
        getattr(
            kind,
            "func",
            kind,
        ),
        given,
    )
    strategy = _made(kind, given)
    _require_new_names(strategy, given)
    return strategy


def _loaded(where: str, given: str) -> Any:
    module_name, _, name = where.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module_name))
    except Exception as error:
        from ddpkit.recipe_yaml import UnusableNameError, find_object  # says what comes close

        try:
            find_object(f"{module_name}.{name}")
        except UnusableNameError as problem:
            raise ConfigError(f"{given}: {problem}") from error
        raise


def _require_strategy(kind: Any, given: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise ConfigError(
            f"{given}: {kind!r} is no strategy. Give a subclass of ddpkit.strategies.Strategy."
        )


def _require_new_names(strategy: Strategy, given: str) -> None:
    """Refuse a strategy that answers under a former name alone, where nobody asks any more."""
    for former, name in FORMER_NAMES.items():
        if former in vars(strategy):
            is_passed_over = getattr(type(strategy), name) is getattr(Strategy, name)
        else:  # the nearest class that has one of the two answers
            nearest: set[str] = next(
                filter(
                    None, (vars(kind).keys() & {former, name} for kind in type(strategy).__mro__)
                ),
                set(),
            )
            is_passed_over = former in nearest and name not in nearest
        if is_passed_over:
            raise ConfigError(
                f"{given}: {type(strategy).__name__}.{former} is not read any more. Override "
                f"{name}() instead: see ddpkit.strategies.Strategy.{name}."
            )


def _made(kind: Callable[[], Strategy], given: str) -> Strategy:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(
            f"{given}: it cannot be made without arguments: {error}. Give each argument a default, "
            "or make an object of it: strategy: !new:module.Class in the YAML, or "
            "run_opts={'strategy': Class(...)}."
        ) from error
    return kind()
