"""Changes source texts in places: names in Python and in the tags of YAML. All else stays, byte for
byte.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from ddpkit.porting.names import PACKAGE, ddpkit_module, ddpkit_name

__all__ = ["Note", "dotted", "parse_python", "port_python", "port_yaml"]

_OURS = "ddpkit"
_BINDING = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)
# HyperPyYAML's tags and PyYAML's: `!new:a.b`, `!!python/name:a.b`,
# `!<tag:yaml.org,2002:python/name:a.b>`.
_TAG = re.compile(
    r"(?:!(?:new|name|apply|applyref|module):|python/[\w/]+:)(?P<name>speechbrain[\w.]*)"
)

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Note:
    """What a reader is to be told about some lines of a file.

    Attributes:
        lines: numbers, from 1 on.
        text: one sentence.
        link: a page of the documentation; empty if there is nothing more to say.
    """

    lines: tuple[int, ...]
    text: str
    link: str = ""


@dataclass
class Source:
    """A text, and what is to be replaced in it.

    Attributes:
        text: with its own ends of lines.

    Example:
        >>> source = Source("a = b")
        >>> source.replace(4, 5, "c")
        >>> source.result()
        'a = c'
    """

    text: str
    _edits: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # str.splitlines would know more ends than Python
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(
        self,
        node: ast.expr | ast.stmt | ast.alias,
    ) -> tuple[int, int]:
        """Where a node of the syntax tree stands, in characters; the tree counts the bytes of
        UTF-8.
        """
        end_line = node.end_lineno or node.lineno
        end_column = node.end_col_offset or node.col_offset
        return self._offset(node.lineno, node.col_offset), self._offset(end_line, end_column)

    def _offset(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()  # ast counts bytes
        return self._starts[line - 1] + len(before)

    def before(self, offset: int) -> str:
        """What stands before a place on its line."""
        return re.split(r"[\r\n]", self.text[:offset])[-1]

    def replace(
        self,
        start: int,
        end: int,
        text: str,
    ) -> None:
        """Note that a part of the text, which no other edit touches, becomes another."""
        self._edits.append((start, end, text))

    def separator(self, offset: int) -> str:
        """What to put between two statements where one stands: a new line if it has a line of its
        own.
        """
        indent = self.before(offset)
        return "; " if indent.strip() else ("\r\n" if "\r\n" in self.text else "\n") + indent

    def result(self) -> str:
        """The text with all replacements made."""
        pieces = []
        done = 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            pieces += [self.text[done:start], text]
            done = end
        return "".join([*pieces, self.text[done:]])


def parse_python(text: str) -> ast.Module:
    """Parse a file; what Python warns of in it is not ours to tell.

    Args:
        text: the file.

    Returns:
        The syntax tree.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has null bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def dotted(node: ast.AST | None) -> str:
    """Return the dotted name that a node is, such as ``sb.Stage.TRAIN``, or nothing.

    Args:
        node: of a syntax tree.

    Returns:
        The name.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def port_python(text: str) -> tuple[str, list[Note]]:
    r"""Rename SpeechBrain's names in a Python file where ddpkit has them; all others stay.

    Args:
        text: the file.

    Returns:
        The new text, and what was left and why.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has null bytes.

    Example:
        >>> print(port_python("import speechbrain as sb\nsb.Stage.TRAIN, sb.nnet.linear.Linear")[0])
        import ddpkit
        import speechbrain as sb
        ddpkit.Stage.TRAIN, sb.nnet.linear.Linear
        >>> port_python("import speechbrain as sb\nsb.utils.distributed.run_on_main")
        ('import ddpkit\nddpkit.distributed.run_on_main', [])
    """
    return _Port(text).result()


class _Port:
    """One file while it is rewritten."""

    def __init__(self, text: str) -> None:
        self.source = Source(text)
        self.text = text
        self.tree = parse_python(text)
        self.nodes = list(ast.walk(self.tree))
        self.notes: list[Note] = []
        imports = [node for node in self.nodes if isinstance(node, Import)]
        own = [
            alias for node in self.tree.body if isinstance(node, ast.Import) for alias in node.names
        ]
        self.imports_ddpkit = any(alias.name == _OURS and not alias.asname for alias in own)
        modules: dict[tuple[str, str], list[tuple[Import, ast.alias]]] = {}
        for node in imports:
            for alias in node.names:
                modules.setdefault(_imported(node, alias), []).append((node, alias))
        bound = Counter(name for name, _ in {*modules, *_bound(self.nodes)})
        for (name, target), found in modules.items():
            if target.split(".")[0] == PACKAGE and not ddpkit_name(target):
                self.port_uses(name, target, found, is_ambiguous=bound[name] > 1)
        for node in imports:
            if isinstance(node, ast.ImportFrom) and not node.level:
                self.port_from(node)

    def result(self) -> tuple[str, list[Note]]:
        text = self.source.result()
        parse_python(text)
        return text, self.notes

    def tell(self, node: ast.expr | ast.stmt, text: str) -> None:
        note = Note((node.lineno,), text)
        if note not in self.notes:
            self.notes.append(note)

    # ------------------------------------------------------------------- uses of an imported module

    def port_uses(
        self,
        name: str,
        target: str,
        imports: list[tuple[Import, ast.alias]],
        *,
        is_ambiguous: bool,
    ) -> None:
        """Rename what ddpkit answers of a module of SpeechBrain, and import ddpkit beside the
        module or instead.
        """
        parts = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        ours = [(node, new) for node in parts if (new := _answer(node, name, target))]
        if not ours:
            return
        if is_ambiguous:
            self.tell(
                ours[0][0],
                f"`{name}` is bound more than once: `{dotted(ours[0][0])}` is left",
            )
            return
        renamed = sum(self.rename(node, new) for node, new in ours)
        if not renamed:
            return
        has_others = renamed < sum(
            isinstance(node, ast.Name) and node.id == name for node in self.nodes
        )
        for statement, alias in imports:
            module = ddpkit_module(alias.name)
            if has_others or module is None or isinstance(statement, ast.ImportFrom):
                self.import_ddpkit(statement)
            else:
                self.source.replace(*self.source.span(alias), module)
                self.imports_ddpkit |= statement in self.tree.body

    def rename(self, node: ast.expr, new: str) -> bool:
        """Replace a dotted name by another, unless brackets or a comment are inside."""
        start, end = self.source.span(node)
        if re.sub(r"[\s\\]", "", self.text[start:end]) != dotted(node):
            self.tell(node, f"`{dotted(node)}` is left: write it in one piece")
            return False
        self.source.replace(start, end, new)
        return True

    def import_ddpkit(self, statement: ast.stmt) -> None:
        if not self.imports_ddpkit:
            # else it is imported in a function or a branch alone
            self.imports_ddpkit = statement in self.tree.body
            start = self.source.span(statement)[0]
            self.source.replace(start, start, f"import {_OURS}{self.source.separator(start)}")

    # ------------------------------------------------------------------------------ from ... import

    def port_from(self, statement: ast.ImportFrom) -> None:
        """Divide the names of one statement between the modules that have them; what is
        SpeechBrain's comes last.
        """
        own = statement.module or ""
        homes: dict[str, list[ast.alias]] = {}
        for alias in statement.names:
            home, _, _ = (ddpkit_name(f"{own}.{alias.name}") or f"{own}.").rpartition(".")
            homes.setdefault(home, []).append(alias)
        if statement.names[0].name == "*" and ddpkit_module(own):
            self.tell(statement, f"`{ast.unparse(statement)}` is left: name what is used of it")
        if set(homes) == {own}:
            return
        start, end = self.source.span(statement)
        text = self.text[start:end]
        if len(homes) == 1 and (head := re.match(rf"from\s+{re.escape(own)}\b", text)):
            self.source.replace(start, start + head.end(), f"from {min(homes)}")
        elif "#" in text:
            self.tell(
                statement,
                "a list of imports with comments, for several modules, is left: write it by hand",
            )
            return
        else:
            lines = [
                ast.unparse(ast.ImportFrom(home, homes[home], 0))
                for home in sorted(homes, key=lambda name: name == own)
            ]
            self.source.replace(
                start,
                end,
                self.source.separator(start).join(lines),
            )


def _imported(node: Import, alias: ast.alias) -> tuple[str, str]:
    """The name that an import binds, and what it stands for in full."""
    if isinstance(node, ast.ImportFrom):
        return alias.asname or alias.name, "." if node.level else f"{node.module}.{alias.name}"
    first = alias.name.split(".")[0]
    return (alias.asname, alias.name) if alias.asname else (first, first)


def _answer(node: ast.Attribute, name: str, target: str) -> str | None:
    """What ddpkit calls a dotted name of an imported module, if no shorter part of it has an
    answer.
    """
    first, _, rest = dotted(node).partition(".")
    outer = ".".join([target, *rest.split(".")[:-1]])
    return ddpkit_name(f"{target}.{rest}") if first == name and not ddpkit_name(outer) else None


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that is bound by something else than an import, anywhere in a file; what it stands
    for is not known.
    """
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, ""
        elif isinstance(node, ast.arg):
            yield node.arg, ""
        elif isinstance(node, _BINDING) and node.name:
            yield node.name, ""


def port_yaml(text: str) -> str:
    """Rename what the tags of a YAML file name and ddpkit has; comments, strings and all else stay.

    Args:
        text: the file.

    Returns:
        The new text.

    Raises:
        yaml.YAMLError: the text is not YAML.

    Example:
        >>> port_yaml("a: !new:speechbrain.utils.epoch_loop.EpochCounter {limit: 2} # speechbrain")
        'a: !new:ddpkit.epoch_loop.EpochCounter {limit: 2} # speechbrain'
    """
    source = Source(text)
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.TagToken):
            start = token.start_mark.index
            found = _TAG.search(text[start : token.end_mark.index])
            new = ddpkit_name(found["name"]) if found else None
            if found and new:
                source.replace(
                    start + found.start("name"),
                    start + found.end("name"),
                    new,
                )
    return source.result()
