"""What a recipe assigns before ``super().__init__()``, until the parts of the run are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: Where a Brain holds its parts: ``self.__run``, which no subclass has by accident.
RUN = "_Brain__run"
#: Attributes that a recipe may assign before ``super().__init__()``, which is given them.
GIVEN = frozenset({"modules", "hparams", "run_opts", "opt_class", "scheduler_class", "progress"})


class NotMade:
    """Stands for the parts of a run until ``Brain.__init__`` makes them."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            "this is an attribute of the training: it is there once super().__init__() has run."
        )


class EarlyValues:
    """Stands for them once a recipe has assigned what ``Brain.__init__`` is going to be given.

    Attributes:
        context: has what was assigned.
    """

    def __init__(self) -> None:
        self.context = SimpleNamespace()


def are_parts_made(
    brain: Any,
    name: str,
    value: Any,
) -> bool:
    """Return whether the parts of a run are made, which then are told of what a recipe assigns.

    Before that, what ``__init__`` is given may be assigned, and counts until it has run. Of other
    attributes of the training None is ignored, and other values are an error.

    Args:
        brain: of the recipe.
        name: of the attribute.
        value: that it is to have.

    Raises:
        AttributeError: it is too early for that.
    """
    early = vars(brain).get(RUN)
    if not (early is None or isinstance(early, EarlyValues)):
        return True
    if name in GIVEN:
        early = vars(brain).setdefault(RUN, EarlyValues())
        setattr(early.context, name, value)
        return False
    if value is None:
        return False
    raise AttributeError(
        f"{type(brain).__name__}.__init__ sets an attribute of the training before "
        "super().__init__(): call that first."
    )
