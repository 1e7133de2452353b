"""Which line of the user's own code an exception is about."""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from typing import Any

from ddpkit.base.failure_reason import HOOK_LINE, frames_of
from ddpkit.base.user_frames import is_library, user_frame


def note_line_of(error: BaseException, function: Any) -> None:
    """Note in an exception the line of a function that returned something wrong.

    It is the line of its ``return``, where there is one only; else the line of its ``def``. A
    function of a library has none.

    Args:
        error: the function itself is not in its traceback.
        function: of the recipe; None: no function is known.

    Example:
        >>> error = TypeError("no loss")
        >>> note_line_of(error, is_library)  # a function of ddpkit's own
        >>> frames_of(error)
        []
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or is_library(code.co_filename):
        return
    found = {statement.lineno for statement in _returns(function)}
    line = found.pop() if len(found) == 1 else code.co_firstlineno
    vars(error)[HOOK_LINE] = traceback.FrameSummary(
        code.co_filename,
        line,
        code.co_name,
        lookup_line=False,
    )


def _returns(function: Any) -> list[ast.Return]:
    """Return the statements with which a function returns, with their lines in its file; none
    without its source.
    """
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    ast.increment_lineno(tree, first - 1)
    pending: list[ast.AST] = [*ast.iter_child_nodes(tree.body[0])]
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            found.append(node)
        elif not isinstance(
            node,
            (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
        ):
            pending += ast.iter_child_nodes(node)
    return found


def code_of(error: BaseException) -> str:
    """Return the text of the line of user code where an exception was raised; empty where it cannot
    be read.

    Example:
        >>> code_of(ValueError("boom"))
        ''
    """
    frames = frames_of(error)
    if not frames:
        return ""
    frame = user_frame(frames)
    return "" if is_library(frame.filename) else (frame.line or "").strip()
