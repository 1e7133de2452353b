"""Which import a name in a Python file comes from."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from ddpkit.porting.names import PACKAGE

__all__ = ["Binding", "dotted", "read_bindings"]

Import = ast.Import | ast.ImportFrom


@dataclass
class Binding:
    """A name of a scope that an import of SpeechBrain binds.

    Attributes:
        name: as the file calls it.
        target: the name that it refers to, such as ``speechbrain`` or ``speechbrain.utils.checkpoints``.
        imports: the statements, each with its part for this name.
        uses: names, or dotted names that begin with it.
        is_ambiguous: something else binds the name, too.

    Ranks: local.
    """

    name: str
    target: str = ""
    imports: list[tuple[Import, ast.alias]] = field(default_factory=list)
    uses: list[ast.Name | ast.Attribute] = field(default_factory=list)
    is_ambiguous: bool = False


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


def read_bindings(tree: ast.Module) -> list[Binding]:
    r"""Find what a file imports of SpeechBrain, in each of its scopes, and where it is used.

    Args:
        tree: the file.

    Returns:
        The names, in the order of their imports.

    Ranks: local.

    Example:
        >>> [one] = read_bindings(ast.parse("import speechbrain as sb\ndef f(x): return sb.Stage"))
        >>> one.name, one.target, [dotted(use) for use in one.uses]
        ('sb', 'speechbrain', ['sb.Stage'])
    """
    found = _Reader(tree).bindings()
    return sorted(found, key=lambda one: (one.imports[0][0].lineno, one.imports[0][0].col_offset))


@dataclass
class _Scope:
    parent: _Scope | None
    is_class: bool = False
    names: dict[str, Binding] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)  # declared global or nonlocal

    def find(self, name: str) -> Binding | None:
        """The binding that a use in this scope means."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope.names[name]
            scope = scope.parent
        return None

    def bind(self, name: str) -> Binding:
        if name in self.elsewhere and self.parent is not None:
            self.parent.bind(name).is_ambiguous = True
        return self.names.setdefault(name, Binding(name))


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.scope = _Scope(None)
        self.scopes = [self.scope]
        self.uses: list[tuple[_Scope, ast.Name | ast.Attribute]] = []
        self.done: set[ast.AST] = set()
        self.visit(tree)

    def bindings(self) -> list[Binding]:
        for scope, node in self.uses:
            found = scope.find(dotted(node).split(".", maxsplit=1)[0])
            if found is not None:
                found.uses.append(node)
        return [one for scope in self.scopes for one in scope.names.values() if one.imports]

    def visit(self, node: ast.AST) -> None:
        if node in self.done:
            return
        handler = _HANDLERS.get(type(node))
        if handler is None or not handler(self, node):
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def read_import(self, node: Import) -> bool:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                target = "." if node.level else f"{node.module}.{alias.name}"
                name = alias.asname or alias.name
            else:
                target = alias.name if alias.asname else alias.name.split(".", maxsplit=1)[0]
                name = alias.asname or target
            binding = self.scope.bind(name)
            if target.split(".", maxsplit=1)[0] != PACKAGE:
                binding.is_ambiguous = True
            elif name != "*":
                binding.is_ambiguous |= binding.target not in {"", target}
                binding.target = target
                binding.imports.append((node, alias))
        return True

    def read_name(self, node: ast.Name) -> bool:
        if isinstance(node.ctx, ast.Load):
            self.uses.append((self.scope, node))
        else:
            self.scope.bind(node.id).is_ambiguous = True
        return True

    def read_attribute(self, node: ast.Attribute) -> bool:
        if not isinstance(node.ctx, ast.Load):
            return False  # what gets an attribute, or loses one, is used
        if dotted(node):
            self.uses.append((self.scope, node))
        return bool(dotted(node))

    def read_bound(self, node: Any) -> bool:
        """An argument, an exception, a pattern."""
        name = getattr(node, "name", None) or getattr(node, "arg", None)
        if name is not None:
            self.scope.bind(name).is_ambiguous = True
        return False

    def read_global(self, node: ast.Global | ast.Nonlocal) -> bool:
        self.scope.elsewhere.update(node.names)
        return True

    def read_scope(self, node: Any) -> bool:
        """A function, a class, a comprehension; what a decorator or a default names is looked for outside."""
        if hasattr(node, "name"):
            self.scope.bind(node.name).is_ambiguous = True
        for child in _outside(node):
            self.visit(child)
            self.done.add(child)
        outer, self.scope = self.scope, _Scope(self.scope, isinstance(node, ast.ClassDef))
        self.scopes.append(self.scope)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.scope = outer
        return True


def _outside(node: Any) -> list[ast.AST]:
    """What is evaluated before a scope is entered: decorators, defaults, annotations, bases, the first iterable."""
    found = [one for name in ("decorator_list", "bases", "keywords") for one in getattr(node, name, ())]
    found.append(getattr(node, "returns", None))
    if isinstance(args := getattr(node, "args", None), ast.arguments):
        found += [*args.defaults, *args.kw_defaults]
        found += [one.annotation for one in ast.walk(args) if isinstance(one, ast.arg)]
    found += [one.iter for one in getattr(node, "generators", ())[:1]]
    return [one for one in found if one is not None]


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_HANDLERS: dict[type, Any] = {  # each returns whether it has seen to the node's children
    ast.Name: _Reader.read_name,
    ast.Attribute: _Reader.read_attribute,
    **dict.fromkeys((ast.Import, ast.ImportFrom), _Reader.read_import),
    **dict.fromkeys((ast.Global, ast.Nonlocal), _Reader.read_global),
    **dict.fromkeys((ast.arg, ast.ExceptHandler, ast.MatchAs, ast.MatchStar), _Reader.read_bound),
    **dict.fromkeys(_SCOPES + _COMPREHENSIONS, _Reader.read_scope),
}
