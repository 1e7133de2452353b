"""Collects the texts of errors, warnings and announcements from the source, by its syntax tree.

What counts is a piece of prose: a string of three words at least that is no docstring. An f-string
keeps its placeholders, and what is added up is one text. Each has the name of what it is given to:
an error, a method of a logger, or another function; or of the constant that it is.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("messages.txt")
WIDTH = 110
LEAST_WORDS = 3
WORD = re.compile(r"(?<![\w.])[A-Za-z][A-Za-z'-]*(?=[,:;!?)]|\.?(?:\s|$))")
END_OF_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z`{-])")
LEVELS = {
    "debug",
    "info",
    "warning",
    "warning_once",
    "error",
    "exception",
    "critical",
    "announce",
}
OTHERS = "other texts"


def snapshot() -> str:
    """Return the text of the file: kinds of messages, and under each its messages in order."""
    messages: dict[str, set[str]] = {}
    for path in sorted((ROOT / "ddpkit").rglob("*.py")):
        for kind, text in messages_of(path.read_text(encoding="utf-8")):
            messages.setdefault(kind, set()).add(text)
    kinds = sorted(messages.items(), key=lambda pair: (pair[0] == OTHERS, pair[0]))
    return "\n".join(f"{underlined(kind)}\n{paragraphs(texts)}" for kind, texts in kinds)


def underlined(kind: str) -> str:
    return f"{kind}\n{'=' * len(kind)}\n"


def paragraphs(texts: Iterable[str]) -> str:
    """Return messages as paragraphs, with a line for each sentence, which may go on below."""
    return "".join(f"{shown(text)}\n\n" for text in sorted(texts))


def shown(text: str) -> str:
    lines = []
    for line in text.strip("\n").split("\n"):
        for sentence in END_OF_SENTENCE.split(line):
            lines += textwrap.wrap(
                sentence,
                WIDTH,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def messages_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the messages of a module: what each is given to, and its text."""
    tree = ast.parse(source)
    kinds = _kinds_of_names(tree)
    for node in _children(tree):
        names = [ast.unparse(one) for one in getattr(node, "targets", [])]
        yield from _inside(node, next((kinds[one] for one in names if one in kinds), OTHERS))


def _kinds_of_names(tree: ast.Module) -> dict[str, str]:
    """Return what each name is given to: of a constant with a text."""
    kinds: dict[str, str] = {}
    for call in ast.walk(tree):
        if kind := _kind_of(call):
            for one in ast.walk(call):
                if isinstance(one, ast.Name):
                    kinds.setdefault(one.id, kind)
    return kinds


def _inside(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    for child in _children(node):
        text = _text(child)
        if text is None:
            yield from _inside(child, _kind_of(child) or kind)
        elif is_prose(text):
            yield kind, text.strip()


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a node, without docstrings and annotations."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_docstring:
                yield child


def _kind_of(node: ast.AST) -> str | None:
    """Return what the texts in a call are: an error by its class, or a line of the log."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name.endswith(("Error", "Warning")):
        return name
    return f"logger.{name}" if name in LEVELS else None


def _text(node: ast.AST) -> str | None:
    """Return a string with its placeholders; None of what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(one) for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(one) for one in (node.left, node.right)]
        if any(parts):
            sides = zip(parts, (node.left, node.right), strict=True)
            shown_parts = (text or f"{{{ast.unparse(one)}}}" for text, one in sides)
            return "".join(shown_parts)
    return None


def _piece(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return ast.unparse(ast.JoinedStr([node]))[2:-1]  # without f and its quotes


def is_prose(text: str) -> bool:
    """Say whether somebody is meant to read a string as words."""
    without_values = re.sub(r"\{[^{}]*\}", " ", text)
    words = WORD.findall(without_values)
    return len(words) >= LEAST_WORDS and sum(word.islower() for word in words) > 1
