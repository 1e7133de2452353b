"""The text of a test, and of all in its file that it uses."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign


def text_of(path: Path, function: str) -> str:
    """Return a test with the functions, classes and constants of its file that it needs.

    Decorators are left out: each set of parameters is looked at by itself.

    Args:
        path: of the file.
        function: the name of the test, in the file or in a class.
    """
    every = _definitions(path)
    wanted = [function]
    found: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        if name in found or name not in every:
            continue
        found[name], used = every[name]
        wanted += used
    return "\n".join(found.values())


@functools.cache
def _definitions(path: Path) -> dict[str, tuple[str, list[str]]]:
    """The definitions of a file by name: text, and the names in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {}
    for node in _nodes(tree):
        for name in _names(node):
            used = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
            found[name] = ast.unparse(node), used
    return found


def _nodes(tree: ast.Module) -> list[Definition]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list = []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    inner = [method for node in classes for method in node.body]
    return [node for node in (*inner, *tree.body) if isinstance(node, Definition)]


def _names(node: Definition) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name]
