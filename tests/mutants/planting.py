"""Finds where a fault belongs, by the syntax tree, and writes the text of the file that has it."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .fault import Fault

BLOCKS = ("body", "orelse", "finalbody")  # fields of a statement with statements inside
DEFINITION = re.compile(r"^[ \t]*(?:(?:async )?def|class) (\w+)|^(\w+) *[:=]", re.MULTILINE)


class DoesNotApply(Exception):
    """The text of a fault is not found once: the code has changed, and the fault is to be
    rewritten.
    """


@dataclass(frozen=True)
class Planted:
    """The file that a fault belongs to, and its text with the fault in it."""

    path: Path
    text: str


@dataclass(frozen=True)
class Span:
    """A piece of a file, from one position to another: lines from 1, columns in bytes."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]


def plant(fault: Fault, package: Path) -> Planted:
    """Return the file of the package that the fault is in, and its text with it.

    Raises:
        DoesNotApply: as of :func:`find`; or what is planted is no Python there.
    """
    span = find(fault, package)
    text = _replaced(span, fault)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise DoesNotApply(
            f"{fault.name!r}: what is planted is no Python there: {error}"
        ) from error
    return Planted(span.path, text)


def find(fault: Fault, package: Path) -> Span:
    """Find the text of a fault.

    Raises:
        DoesNotApply: it is not found, or more than once.
    """
    spans = list(_spans(fault, package))
    if len(spans) == 1:
        return spans[0]
    places = "".join(f"\n    {span.path}:{span.start[0]}" for span in spans)
    found = f"is found {len(spans)} times:{places}" if spans else "is not found"
    raise DoesNotApply(
        f"{fault.name!r} ({fault.room}) cannot be planted: its text {found}\n"
        f"  in {fault.where}: {textwrap.shorten(fault.text, 200)}\n"
        "  The code has changed, or has this text in another place. Rewrite the fault."
    )


def _spans(fault: Fault, package: Path) -> Iterator[Span]:
    wanted = _parsed(fault.text)
    for path in _files_that_define(package).get(fault.where.rpartition(".")[2], []):
        for scope in _scopes(path).get(fault.where, []):
            for first, last in _matches(wanted, scope):
                start = (first.lineno, first.col_offset)
                yield Span(path, start, (last.end_lineno, last.end_col_offset))


@functools.cache
def _files_that_define(package: Path) -> dict[str, list[Path]]:
    """Find out which files are worth parsing: those that define a name, by names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        for name in {"".join(match) for match in DEFINITION.findall(_source(path))}:
            found.setdefault(name, []).append(path)
    return found


@functools.cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _scopes(path: Path) -> dict[str, list[ast.AST]]:
    """Find functions and classes, by qualified names, and the assignments of the module."""
    found: dict[str, list[ast.AST]] = {}
    tree = ast.parse(_source(path))
    _note_definitions(tree.body, "", found)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found.setdefault(ast.unparse(target), []).append(node)
    return found


def _note_definitions(
    statements: list[ast.stmt],
    prefix: str,
    found: dict[str, list[ast.AST]],
) -> None:
    for node in statements:
        inner = prefix
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(prefix + node.name, []).append(node)
            inner = f"{prefix}{node.name}."
        for field in BLOCKS:
            _note_definitions(getattr(node, field, []), inner, found)


def _parsed(text: str) -> list[ast.AST]:
    """Parse an expression, or else statements."""
    text = textwrap.dedent(text).strip()
    try:
        return [ast.parse(text, mode="eval").body]
    except SyntaxError:
        return list(ast.parse(text).body)


def _matches(wanted: list[ast.AST], scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Find the first and the last node of each run of nodes that is equal to those wanted."""
    dumps = [ast.dump(node) for node in wanted]
    if isinstance(wanted[0], ast.expr):
        runs = ([node] for node in ast.walk(scope) if type(node) is type(wanted[0]))
    else:
        runs = _runs_of_statements(scope, len(wanted))
    for nodes in runs:
        if [ast.dump(node) for node in nodes] == dumps:
            yield nodes[0], nodes[-1]


def _runs_of_statements(scope: ast.AST, length: int) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(scope):
        for field in BLOCKS:
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield from (block[at : at + length] for at in range(len(block) - length + 1))


def _replaced(span: Span, fault: Fault) -> str:
    lines = _source(span.path).encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole = b"".join(lines)
    first = starts[span.start[0] - 1] + span.start[1]
    last = starts[span.end[0] - 1] + span.end[1]
    planted = textwrap.dedent(fault.planted).strip()
    if _is_expression(fault.text) and _is_expression(planted):
        planted = f"({planted})"
    planted = planted.replace("\n", "\n" + " " * span.start[1])
    return (whole[:first] + planted.encode() + whole[last:]).decode()


def _is_expression(text: str) -> bool:
    return isinstance(_parsed(text)[0], ast.expr)
