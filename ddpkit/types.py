"""The few types that several floors share."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable


class Stage(Enum):
    """What the loop is doing: handed to every hook.

    Example:
        >>> Stage.TRAIN.name, Stage.VALID.value, Stage.TEST.value
        ('TRAIN', 2, 3)
    """

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``: it can be checkpointed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers, numbers, strings and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that :meth:`state_dict` returned."""
        ...
