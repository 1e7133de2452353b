"""What a name such as `torch.nn.Linear` in a recipe's YAML stands for, or why for nothing.

HyperPyYAML finds names with :func:`pydoc.locate`, which hides that a module is there and cannot be
imported. Here each module is imported once, before HyperPyYAML asks for it, so that the reason is
still known.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from ddpkit.base import is_library, line_of
from ddpkit.recipe_yaml.static_checks import meant


class UnusableNameError(Exception):
    """A name stands for nothing that can be used as the file does. The message is a sentence."""


def find_object(name: str) -> Any:
    """Return what a name stands for, as :func:`pydoc.locate` does.

    Args:
        name: modules and names in them, with dots.

    Raises:
        UnusableNameError: there is no such thing, or a module of it cannot be imported.

    State: imports modules.

    Example:
        >>> find_object("math.sqrt")(9.0)
        3.0
    """
    parts = [part for part in name.split(".") if part]
    found: Any = builtins
    rest = parts
    for number in range(1, len(parts) + 1):
        module = _imported(".".join(parts[:number]))
        if module is None:
            break
        found = module
        rest = parts[number:]
    for number, part in enumerate(rest, len(parts) - len(rest)):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise UnusableNameError(_nothing(parts, number, found)) from error
    return found


def _imported(name: str) -> Any:
    """Import a module; return what its package has under its name, None if there is none."""
    try:
        importlib.import_module(name)
        found: Any = importlib.import_module(name.partition(".")[0])
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        return found
    except AttributeError:
        return None
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        reason = f"{type(error).__name__}: {error}{own_line(error)}"
        raise UnusableNameError(f"the module {name!r} cannot be imported: {reason}.") from error


def own_line(error: BaseException) -> str:
    """Return the innermost line of the user's code that an exception has passed, or nothing.

    Example:
        >>> own_line(ValueError("not raised"))
        ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" (at {PurePath(error.filename).name}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_library(frame.filename)
    ]
    return f" (at {line_of(frames)})" if frames else ""


def _nothing(parts: list[str], number: int, found: Any) -> str:
    """Say what of a name is not there, and what comes close."""
    part = parts[number]
    before = ".".join(parts[:number])
    if not before:
        if len(parts) > 1:
            close = meant(part, _top_modules()) or " Install it, or correct the name."
            return f"there is no module {part!r} to import.{close}"
        here = (
            " The script's own names are found as __main__.NAME."
            if hasattr(_script(), part)
            else ""
        )
        close = meant(part, [*dir(builtins), *_top_modules()])
        words = f"there is no module and no built-in {part!r}. A name starts with its module."
        return words + here + close
    kind = (
        "the module"
        if inspect.ismodule(found)
        else "the class"
        if inspect.isclass(found)
        else "the object"
    )
    known = [name for name in [*dir(found), *_submodules(found)] if not name.startswith("_")]
    return f"{kind} {before!r} has no {part!r}.{meant(part, known, before + '.{}')}"


def _script() -> Any:
    return sys.modules.get("__main__")


def _top_modules() -> Iterator[str]:
    """Yield the modules that a user may have meant: those beside the script, and what is loaded."""
    folders = [sys.path[0] or str(Path.cwd())] if sys.path else []
    yield from (module.name for module in pkgutil.iter_modules(folders))
    yield from (name for name in list(sys.modules) if "." not in name and not name.startswith("_"))


def _submodules(found: Any) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
