"""Python: imports, and the dotted names that begin with what they bind."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from ddpkit.porting.names import PACKAGE, PATHS, PRETRAINER, STAYS, ddpkit_module, ddpkit_name
from ddpkit.porting.scopes import Binding, dotted, read_bindings
from ddpkit.porting.text import Change, Note, Source

__all__ = ["has_files", "parse_python", "port_python"]

_OURS = "ddpkit"
_NAME = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")


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


def has_files(tree: ast.Module) -> bool:
    """Say whether each Pretrainer that a script makes is seen to take its weights from files on disk.

    Args:
        tree: the script.

    Returns:
        Whether one is made, and the sources of all are texts that begin as a path does.

    Ranks: local.

    Example:
        >>> has_files(ast.parse("Pretrainer(paths={'lm': 'speechbrain/lm/lm.ckpt'})"))
        False
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [one for one in calls if ast.unparse(one.func).rpartition(".")[2] == "Pretrainer"]
    paths = [next((word.value for word in one.keywords if word.arg == "paths"), None) for one in made]
    sources = [one.values if isinstance(one, ast.Dict) else [] for one in paths]
    return bool(made) and all(each and all(map(_is_path, each)) for each in sources)


def _is_path(node: ast.expr) -> bool:
    return ast.unparse(node).removeprefix("f")[1:].startswith(PATHS)


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
        'import ddpkit as sb\nsb.distributed.run_on_main'
    """
    return _Port(text).result()


class _Port:
    """One file while it is rewritten."""

    def __init__(self, text: str) -> None:
        tree = parse_python(text)
        self.source, self.text = Source(text), text
        self.names = 0
        self.notes: list[Note] = []
        self.stays = "" if has_files(tree) else PRETRAINER
        self.imported: set[int] = set()  # blocks of statements that import ddpkit
        self.blocks = {id(inner): id(block) for block in _blocks(tree) for inner in block}
        self.moved: dict[ast.ImportFrom, dict[ast.alias, tuple[str, str]]] = {}  # where each name is imported from now
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(one.name == _OURS and not one.asname for one in node.names):
                self.imported.add(self.blocks[id(node)])
        bindings = read_bindings(tree)
        for binding in bindings:
            self.port_binding(binding)
        for statement, moved in self.moved.items():
            self.port_from(statement, moved)
        self.tell_left(tree)
        self.tell_annotations(tree, {binding.name for binding in bindings})

    def result(self) -> Change:
        text = self.source.result()
        parse_python(text)
        return Change(text, self.names, tuple(self.notes))

    def tell(self, node: ast.expr | ast.stmt, text: str) -> None:
        note = Note((node.lineno,), text)
        if note not in self.notes:
            self.notes.append(note)

    def tell_left(self, tree: ast.Module) -> None:
        """Tell of imports with a star, and of names in strings, which may be anything."""
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and ddpkit_module(node.module or ""):
                self.tell(node, f"`{ast.unparse(node)}` is left: name what is used of it")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for name in _NAME.findall(node.value):
                    if ddpkit_name(name) or ddpkit_module(name):
                        self.tell(node, f"{name} in a string is left")

    def tell_annotations(self, tree: ast.Module, names: set[str]) -> None:
        """Tell of annotations in strings that begin with an imported name."""
        found = (getattr(node, field, None) for node in ast.walk(tree) for field in ("annotation", "returns"))
        for node in (one for annotation in found if isinstance(annotation, ast.expr) for one in ast.walk(annotation)):
            if isinstance(node, ast.Constant) and names & {*re.findall(r"\w+", str(node.value))}:
                self.tell(node, f"`{node.value!s}` in an annotation is left: write it by hand")

    # ------------------------------------------------------------------------------------ one imported name

    def answer(self, target: str) -> str | None:
        return ddpkit_name(target) if target != self.stays else None

    def is_left(self, statement: ast.Import | ast.ImportFrom) -> bool:
        """Say whether a list of imports would have to be divided that has comments in it."""
        start, end = self.source.span(statement)
        if not isinstance(statement, ast.ImportFrom) or "#" not in self.text[start:end]:
            return False
        targets = [f"{statement.module}.{alias.name}" for alias in statement.names]
        return len({(self.answer(one) or ddpkit_module(one) or "").rpartition(".")[0] for one in targets}) > 1

    def port_binding(self, binding: Binding) -> None:
        left = next((statement for statement, _ in binding.imports if self.is_left(statement)), None)
        if left is not None:
            self.tell(left, "a list of imports with comments, for several modules, is left: write it by hand")
            return
        answer = self.answer(binding.target)
        if answer is not None:  # an object: its uses stay as they are
            for statement, alias in binding.imports:
                if isinstance(statement, ast.ImportFrom):
                    home, _, name = answer.rpartition(".")
                    self.moved.setdefault(statement, {})[alias] = (home, _as(name, binding.name))
                    self.names += 1
            return
        ours, theirs = self.divide(binding)
        if not ours:
            return
        if binding.is_ambiguous:
            first = ours[0][0]
            self.tell(first, f"`{binding.name}` is bound more than once: `{dotted(first)}` is left")
            return
        base, new_base = self.new_base(binding, [new for _, _, new in ours], keep=theirs)
        for node, end, new in ours:
            self.source.replace(self.source.span(node)[0], end, base + new.removeprefix(new_base))
        self.names += len(ours)

    def divide(self, binding: Binding) -> tuple[list[tuple[ast.Name | ast.Attribute, int, str]], bool]:
        """Find the uses that ddpkit answers: each with the end of what is replaced, and its new name; any others?"""
        ours, theirs = [], False
        for use in binding.uses:
            found = self.answered(use, binding)
            if found is None:
                theirs = True
            else:
                ours.append((use, *found))
        return ours, theirs

    def answered(self, use: ast.Name | ast.Attribute, binding: Binding) -> tuple[int, str] | None:
        """Find the end of the shortest answered part of a dotted name, and its name in ddpkit; None if it stays."""
        full = binding.target + dotted(use).removeprefix(binding.name)
        if self.stays and f"{full}.".startswith(f"{self.stays}."):
            self.tell(use, STAYS)
            return None
        if ddpkit_name(full) is None:
            if ddpkit_module(full) is not None and full != PACKAGE:
                self.tell(use, f"the module `{dotted(use)}` is used as a value: it stays SpeechBrain's")
            return None
        node: ast.expr = use
        while isinstance(node, ast.Attribute) and ddpkit_name(full.rpartition(".")[0]) is not None:
            node, full = node.value, full.rpartition(".")[0]
        start, end = self.source.span(node)
        if re.sub(r"[\s\\]", "", self.text[start:end]) != dotted(node):  # brackets or a comment are inside
            self.tell(use, f"`{dotted(use)}` is left: write it in one piece")
            return None
        return end, ddpkit_name(full) or full

    def new_base(self, binding: Binding, new: list[str], *, keep: bool) -> tuple[str, str]:
        """Import ddpkit for the uses of a binding; return what the uses begin with, and what that stands for."""
        if keep:
            for statement, _ in binding.imports:
                self.import_ddpkit(statement)
            return _OURS, _OURS
        module = ddpkit_module(binding.target)
        is_named = all(alias.asname or isinstance(statement, ast.ImportFrom) for statement, alias in binding.imports)
        if is_named and module and all(name.startswith(f"{module}.") for name in new):
            for statement, alias in binding.imports:
                self.port_alias(statement, alias, module, binding.name)
            return binding.name, module
        for statement, alias in sorted(binding.imports, key=lambda one: ddpkit_module(one[1].name) is None):
            self.port_alias(statement, alias, _OURS if is_named else ddpkit_module(alias.name), "")
        return _OURS, _OURS

    def import_ddpkit(self, statement: ast.stmt) -> None:
        block = self.blocks[id(statement)]
        if block not in self.imported:
            self.imported.add(block)
            start = self.source.span(statement)[0]
            self.source.replace(start, start, f"import {_OURS}{self.source.separator(start)}")

    def port_alias(
        self, statement: ast.Import | ast.ImportFrom, alias: ast.alias, module: str | None, name: str
    ) -> None:
        """Import a module of ddpkit where one of SpeechBrain was imported."""
        if module is None:
            self.import_ddpkit(statement)
        elif isinstance(statement, ast.ImportFrom):
            home, _, last = module.rpartition(".")
            self.moved.setdefault(statement, {})[alias] = (home, _as(last, name or last))
        else:
            self.source.replace(*self.source.span(alias), _as(module, name or module))
            self.imported.update({self.blocks[id(statement)]} if module == _OURS and not name else ())

    # ------------------------------------------------------------------------------------ from ... import

    def port_from(self, statement: ast.ImportFrom, moved: dict[ast.alias, tuple[str, str]]) -> None:
        """Divide the names of one statement between the modules that have them."""
        start, end = self.source.span(statement)
        homes = list(dict.fromkeys(home for home, _ in moved.values()))
        head = re.match(r"from[\s\\]+(?P<module>\w+(?:[\s\\]*\.[\s\\]*\w+)*)", self.text[start:end])
        if head and len(moved) == len(statement.names) and len(homes) == 1 and homes[0]:
            self.source.replace(start + head.start("module"), start + head.end("module"), homes[0])
            for alias, (_, text) in moved.items():
                if text != ast.unparse(alias):
                    self.source.replace(*self.source.span(alias), text)
            return
        lines = []
        for home in homes:
            names = ", ".join(text for other, text in moved.values() if other == home)
            lines.append(f"from {home} import {names}" if home else f"import {names}")
        rest = [alias for alias in statement.names if alias not in moved]
        if rest:
            lines.append(ast.unparse(ast.ImportFrom(statement.module, rest, statement.level)))
        self.source.replace(start, end, self.source.separator(start).join(lines))


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _as(name: str, local: str) -> str:
    return name if name == local else f"{name} as {local}"
