"""Texts that are changed in places: what is not replaced stays as it is, byte for byte."""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
from dataclasses import dataclass, field

__all__ = ["Change", "Note", "Source", "decode"]


@dataclass(frozen=True)
class Note:
    """What a reader is to be told about some lines of a file.

    Attributes:
        lines: numbers, from 1 on.
        text: one sentence.
        link: a page of the documentation; empty if there is nothing more to say.

    Ranks: local.
    """

    lines: tuple[int, ...]
    text: str
    link: str = ""


@dataclass(frozen=True)
class Change:
    """A file as it was and as it would be.

    Attributes:
        text: the new text.
        names: how often a name has become ddpkit's.
        notes: what was left, and why.

    Ranks: local.
    """

    text: str
    names: int = 0
    notes: tuple[Note, ...] = ()


def decode(raw: bytes, *, is_python: bool) -> tuple[str, str]:
    """Decode a file so that encoding gives back the same bytes.

    Args:
        raw: the file.
        is_python: it may say its encoding in its first lines (PEP 263); other files are UTF-8.

    Returns:
        The text and the encoding: ``utf-8-sig`` where a byte order mark stands first.

    Raises:
        SyntaxError: the encoding that the file says is unknown, or not its own.
        UnicodeError: the bytes cannot be decoded with this encoding.

    Ranks: local.

    Example:
        >>> decode(b"a: 1", is_python=False)
        ('a: 1', 'utf-8')
    """
    encoding = "utf-8-sig" if raw.startswith(codecs.BOM_UTF8) else "utf-8"
    if is_python:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
    text = raw.decode(encoding)
    if text.encode(encoding) != raw:
        raise UnicodeError(f"as {encoding} it cannot be written back byte for byte")
    return text, encoding


@dataclass
class Source:
    """A text, and what is to be replaced in it.

    Attributes:
        text: with its own ends of lines.

    Ranks: local.

    Example:
        >>> source = Source("a = b")
        >>> source.replace(4, 5, "c")
        >>> source.result()
        'a = c'
    """

    text: str
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.text)  # str.splitlines would know more ends than Python
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @property
    def newline(self) -> str:
        """The end of the first line."""
        found = re.search(r"\r\n|\r|\n", self.text)
        return found.group() if found else "\n"

    def span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        """Where a node of the syntax tree stands, in characters; the tree counts the bytes of UTF-8."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self._offset(node.lineno, node.col_offset), self._offset(end_line, end_column)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def before(self, offset: int) -> str:
        """What stands before a place on its line."""
        return re.split(r"[\r\n]", self.text[:offset])[-1]

    def replace(self, start: int, end: int, text: str) -> None:
        """Note that a part of the text, which no other edit touches, becomes another."""
        self._edits.append((start, end, text))

    def separator(self, offset: int) -> str:
        """What to put between two statements where one stands: a new line if it has a line of its own."""
        indent = self.before(offset)
        return "; " if indent.strip() else f"{self.newline}{indent}"

    def result(self) -> str:
        """The text with all replacements made."""
        pieces, done = [], 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            pieces += [self.text[done:start], text]
            done = end
        return "".join([*pieces, self.text[done:]])
