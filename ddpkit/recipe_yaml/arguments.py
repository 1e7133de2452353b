"""Whether a callable takes the arguments that a YAML file has for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ddpkit.recipe_yaml.static_checks import meant

_SHOWN = 12  # names of arguments in a message


def argument_problem(
    function: Callable[..., Any],
    name: str,
    positional: int,
    keywords: Sequence[str],
    *,
    is_whole: bool,
) -> tuple[str, str] | None:
    """Say which argument a callable does not take, or lacks.

    Args:
        function: nothing is called.
        name: as the file has it.
        positional: the number of arguments without a name.
        keywords: the names of the others.
        is_whole: these are all arguments; else more are given later, as with `!name:`. What a
            decorated function takes is then not judged by the function inside.

    Returns:
        A sentence, and the argument that it is about (empty for none); None if the arguments can
        be right.

    Example:
        >>> argument_problem(divmod, "divmod", 3, [], is_whole=True)[0]
        'divmod takes at most 2 arguments without a name, and gets 3. It takes: x, y.'
    """
    try:
        signature = inspect.signature(function, follow_wrapped=is_whole)
    except (TypeError, ValueError):  # of some that are written in C
        return None
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    by_place = [parameter for parameter in parameters if parameter.kind in _BY_PLACE]
    by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    takes = f" It takes: {_shown(parameters)}."
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unknown = next((name for name in keywords if name not in by_name), None)
        if unknown is not None:
            return f"{name} takes no argument {unknown!r}.{meant(unknown, by_name)}{takes}", unknown
    if inspect.Parameter.VAR_POSITIONAL not in kinds and positional > len(by_place):
        number = len(by_place)
        words = f"{name} takes at most {number} arguments without a name, and gets {positional}."
        return words + takes, ""
    given = {*(parameter.name for parameter in by_place[:positional]), *keywords}
    lacking = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in given
    ]
    lacking = [name for name in lacking if signature.parameters[name].kind not in _ANY]
    if is_whole and lacking:
        return f"{name} needs {' and '.join(map(repr, lacking))}.{_later(lacking)}{takes}", ""
    return None


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _later(lacking: Sequence[str]) -> str:
    """Say how what the Brain makes is written: an optimizer, or a schedule."""
    by_brain = {"params", "optimizer"}.intersection(lacking)
    return " The Brain makes it, and gives that: write !name: instead of !new:." if by_brain else ""


def _shown(parameters: Sequence[inspect.Parameter]) -> str:
    names = [parameter.name for parameter in parameters if parameter.kind not in _ANY]
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "none"
