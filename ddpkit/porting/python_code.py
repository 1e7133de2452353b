"""Python: imports, and the dotted names that begin with what they bind."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator

from ddpkit.porting.names import PACKAGE, ddpkit_module, ddpkit_name
from ddpkit.porting.text import Change, Note, Source

__all__ = ["dotted", "parse_python", "port_python"]

_OURS = "ddpkit"
_NAME = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")
_BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)

Import = ast.Import | ast.ImportFrom


def parse_python(text: str) -> ast.Module:
    """Parse a file; what Python warns of in it is not ours to tell.

    Args:
        text: the file.

    Returns:
        The syntax tree.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has null bytes.

    Ranks: local.
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

    Ranks: local.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def port_python(text: str) -> Change:
    r"""Rename SpeechBrain's names in a Python file where ddpkit has them; all others stay.

    Args:
        text: the file.

    Returns:
        The new text.

    Raises:
        SyntaxError: it is not Python.
        ValueError: it has null bytes.

    Ranks: local.

    Example:
        >>> print(port_python("import speechbrain as sb\nsb.Stage.TRAIN, sb.nnet.linear.Linear").text)
        import ddpkit
        import speechbrain as sb
        ddpkit.Stage.TRAIN, sb.nnet.linear.Linear
        >>> port_python("import speechbrain as sb\nsb.utils.distributed.run_on_main").text
        'import ddpkit\nddpkit.distributed.run_on_main'
    """
    return _Port(text).result()


class _Port:
    """One file while it is rewritten."""

    def __init__(self, text: str) -> None:
        self.source, self.text, self.tree = Source(text), text, parse_python(text)
        self.nodes = list(ast.walk(self.tree))
        self.names = 0
        self.notes: list[Note] = []
        imports = [node for node in self.nodes if isinstance(node, Import)]
        own = [alias for node in self.tree.body if isinstance(node, ast.Import) for alias in node.names]
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
        self.tell_left()

    def result(self) -> Change:
        text = self.source.result()
        parse_python(text)
        return Change(text, self.names, tuple(self.notes))

    def tell(self, node: ast.expr | ast.stmt, text: str) -> None:
        note = Note((node.lineno,), text)
        if note not in self.notes:
            self.notes.append(note)

    def tell_left(self) -> None:
        """Tell of imports with a star, and of names in strings, which may be anything."""
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and ddpkit_module(node.module or ""):
                self.tell(node, f"`{ast.unparse(node)}` is left: name what is used of it")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for name in _NAME.findall(node.value):
                    if ddpkit_name(name) or ddpkit_module(name):
                        self.tell(node, f"{name} in a string is left")

    # ------------------------------------------------------------------------------------ uses of an imported module

    def port_uses(self, name: str, target: str, imports: list[tuple[Import, ast.alias]], *, is_ambiguous: bool) -> None:
        """Rename what ddpkit answers of a module of SpeechBrain, and import ddpkit beside the module or instead."""
        parts = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        ours = [(node, new) for node in parts if (new := _answer(node, name, target))]
        if not ours:
            return
        if is_ambiguous:
            self.tell(ours[0][0], f"`{name}` is bound more than once: `{dotted(ours[0][0])}` is left")
            return
        renamed = sum(self.rename(node, new) for node, new in ours)
        if not renamed:
            return
        self.names += renamed
        has_others = renamed < sum(isinstance(node, ast.Name) and node.id == name for node in self.nodes)
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
            self.imports_ddpkit = statement in self.tree.body  # else it is imported in a function or a branch alone
            start = self.source.span(statement)[0]
            self.source.replace(start, start, f"import {_OURS}{self.source.separator(start)}")

    # ------------------------------------------------------------------------------------ from ... import

    def port_from(self, statement: ast.ImportFrom) -> None:
        """Divide the names of one statement between the modules that have them; what is SpeechBrain's comes last."""
        own = statement.module or ""
        homes: dict[str, list[ast.alias]] = {}
        for alias in statement.names:
            home, _, _ = (ddpkit_name(f"{own}.{alias.name}") or f"{own}.").rpartition(".")
            homes.setdefault(home, []).append(alias)
        moved = sum(len(aliases) for home, aliases in homes.items() if home != own)
        if not moved:
            return
        start, end = self.source.span(statement)
        text = self.text[start:end]
        if len(homes) == 1 and (head := re.match(rf"from\s+{re.escape(own)}\b", text)):
            self.source.replace(start, start + head.end(), f"from {min(homes)}")
        elif "#" in text:
            self.tell(statement, "a list of imports with comments, for several modules, is left: write it by hand")
            return
        else:
            lines = [
                ast.unparse(ast.ImportFrom(home, homes[home], 0)) for home in sorted(homes, key=lambda one: one == own)
            ]
            self.source.replace(start, end, self.source.separator(start).join(lines))
        self.names += moved


def _imported(node: Import, alias: ast.alias) -> tuple[str, str]:
    """The name that an import binds, and what it stands for in full."""
    if isinstance(node, ast.ImportFrom):
        return alias.asname or alias.name, "." if node.level else f"{node.module}.{alias.name}"
    first = alias.name.split(".")[0]
    return (alias.asname, alias.name) if alias.asname else (first, first)


def _answer(node: ast.Attribute, name: str, target: str) -> str | None:
    """What ddpkit calls a dotted name of an imported module, if no shorter part of it has an answer."""
    first, _, rest = dotted(node).partition(".")
    outer = ".".join([target, *rest.split(".")[:-1]])
    return ddpkit_name(f"{target}.{rest}") if first == name and not ddpkit_name(outer) else None


def _bound(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that is bound by something else than an import, anywhere in a file; what it stands for is not known."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, ""
        elif isinstance(node, ast.arg):
            yield node.arg, ""
        elif isinstance(node, _BINDING) and node.name:
            yield node.name, ""
