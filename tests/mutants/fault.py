"""What a planted fault is: a name, a place in the package, the text there, and what replaces it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake that an engineer could make.

    Attributes:
        name: what is wrong, in words. Names are unique.
        where: qualified name of the function, method or class, or name of a module's constant.
            In which file it stands does not matter.
        text: the expression or the statements to be replaced, as Python source. Line breaks,
            spaces and comments do not matter. It has to occur once in ``where``.
        planted: what replaces it; ``pass`` to leave out statements.
        tests: arguments for pytest: files, tests, ``-k`` with words; ``-m slow`` for slow ones,
            too. Those of the room by default.
        hangs: whether tests that do not end in time have caught it.
        room: the part of the package that it belongs to.
    """

    name: str
    where: str
    text: str
    planted: str
    tests: str = ""
    hangs: bool = False
    room: str = ""


def in_room(room: str, tests: str, faults: Iterable[Fault]) -> list[Fault]:
    """Give faults their room and, where they name none, the tests of the room."""
    return [dataclasses.replace(fault, room=room, tests=fault.tests or tests) for fault in faults]
