"""What is done with the class of a recipe when it is defined: names that would hide the Brain's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError
from ddpkit.run.early_values import GIVEN, RUN
from ddpkit.run.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable

_FINAL = "ddpkit_final_gradients"  # attribute of an optimizers_step that is wrapped


def adapt_class(cls: type[Any], base: type[Any]) -> None:
    """Take placeholders out of a recipe's class; have its own ``optimizers_step`` find final
    gradients.

    Args:
        cls: of the recipe.
        base: the Brain.

    Raises:
        ConfigError: the class would replace something private.
    """
    for name in ("checkpointer", "optimizer", "optimizers_dict", "scaler", "ema", "profiler"):
        # "not made yet": it would hide what the parts of the run hold
        if vars(cls).get(name, "") is None:
            delattr(cls, name)
    for name in GIVEN:
        found = inspect.getattr_static(cls, name)
        if not inspect.isdatadescriptor(found):  # a value, which would hide the property
            setattr(cls, name, ValueOfClass(found, vars(base)[name]))
    if taken := sorted(
        name for name in vars(cls) if name.startswith("_Brain__") and name in vars(base)
    ):
        names = ", ".join(name.removeprefix("_Brain") for name in taken)
        raise ConfigError(
            f"{cls.__module__}: a class named Brain cannot define {names}: rename the class."
        )
    own: Any = inspect.getattr_static(cls, "optimizers_step")
    if (
        own is not vars(base)["optimizers_step"]
        and inspect.isfunction(own)
        and _FINAL not in vars(own)
    ):
        cls.optimizers_step = _with_final_gradients(own)


class ValueOfClass:
    """What a recipe's class has under the name of a property: it counts until the Brain is made,
    and after that where the Brain was given nothing (``opt_class``, ``scheduler_class``).

    Args:
        value: of the class.
        inner: the property of the Brain.
    """

    def __init__(self, value: Any, inner: property) -> None:
        self._value = value
        self._inner = inner

    def __get__(self, brain: Any, owner: type | None = None) -> Any:
        if brain is not None and RUN in vars(brain):
            with contextlib.suppress(AttributeError):  # something else was assigned
                return self._inner.__get__(brain, owner)
        bind = getattr(type(self._value), "__get__", None)
        return self._value if bind is None else bind(self._value, brain, owner)

    def __set__(self, brain: Any, value: Any) -> None:
        self._inner.__set__(brain, value)


def given_or_of_class(given: Any, cls: type, name: str) -> Any:
    """Return what a Brain was given under a name; where that is nothing, the value of its class."""
    found = inspect.getattr_static(cls, name)
    return found.__get__(None, cls) if given is None and isinstance(found, ValueOfClass) else given


def _with_final_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a recipe's ``optimizers_step``: it finds the final gradients of the step."""

    @functools.wraps(method)
    def optimizers_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = getattr(self, RUN)
        if not isinstance(run, Run):
            return method(self, *args, **kwargs)
        with run.train_step.final_gradients(self):
            return method(self, *args, **kwargs)

    vars(optimizers_step)[_FINAL] = True
    return optimizers_step
