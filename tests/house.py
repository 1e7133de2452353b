"""Figures of the house: sizes of classes with what they inherit, of folders, layers and imports
(``make house``).
"""

from __future__ import annotations

import ast
import functools
import importlib
import io
import os
import pkgutil
import subprocess
import sys
import tokenize
from pathlib import Path

import ddpkit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ddpkit"
FILES = sorted(PACKAGE.rglob("*.py"))
# a room may have folders of its own
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
PUBLIC_ROOMS = {"optim"}  # users import from them as from a module of the face
FACE = sorted(
    {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"} | PUBLIC_ROOMS
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return list(ast.walk(ast.parse(source_of(path))))


def code_lines(path: Path) -> int:
    """Count the lines that are not blank, comment or docstring."""
    return len(code_numbers(path))


@functools.cache
def code_numbers(path: Path) -> list[int]:
    """Number those lines."""
    others = set()
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            others.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source_of(path).splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source_of(path)).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            others.add(token.start[0])
    return [number for number, line in enumerate(lines, 1) if line.strip() and number not in others]


def classes() -> list[type]:
    """All classes of the package."""
    found = []
    for module in pkgutil.walk_packages([str(PACKAGE)], "ddpkit."):
        if not module.name.endswith("__main__"):
            members = vars(importlib.import_module(module.name)).values()
            found += [
                one for one in members if isinstance(one, type) and one.__module__ == module.name
            ]
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = sorted(module_name(path) for path in FILES if path.name != "__main__.py")


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@functools.cache
def class_sizes() -> dict[tuple[str, str], int]:
    """Code lines of each class of the package, by its module and its name."""
    sizes = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                start = min(one.lineno for one in (node, *node.decorator_list))
                own = sum(start <= number <= node.end_lineno for number in code_numbers(path))
                sizes[module_name(path), node.name] = own
    return sizes


def inherited_size(owner: type) -> int:
    """Code lines of a class and of those of the package that it inherits from."""
    own = [one for one in owner.__mro__ if one.__module__.startswith("ddpkit")]
    return sum(class_sizes()[one.__module__, one.__name__] for one in own)


def modules_per_folder() -> dict[str, int]:
    counts: dict[str, int] = {}
    for path in FILES:
        folder = str(path.parent.relative_to(ROOT))
        counts[folder] = counts.get(folder, 0) + 1
    return counts


def pulled_in(module: str) -> int:
    """How many other modules of the package are loaded with one."""
    script = (
        f"import sys, ddpkit.{module}; print(sum(name.startswith('ddpkit.') for name in "
        "sys.modules) - 1)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return int(found.stdout)


def homes() -> dict[tuple[str, str], str]:
    """Where the names live that the stubs of the packages list."""
    found = {}
    for stub in PACKAGE.glob("*/__init__.pyi"):
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                found.update(
                    {
                        (f"ddpkit.{stub.parent.name}", one.name): node.module or ""
                        for one in node.names
                    }
                )
    return found


def longest_chain() -> list[str]:
    """The longest chain of modules each of which imports the next when it is imported itself."""
    places = homes()
    chains = dict[str, list[str]]()
    files = {module_name(path): path for path in FILES}

    def chain(module: str) -> list[str]:
        if module not in chains:
            chains[module] = []
            body = nodes_of(files[module])[0].body
            names = [
                (node.module, one.name)
                for node in body
                if isinstance(node, ast.ImportFrom)
                for one in node.names
            ]
            nexts = {
                places.get(
                    pair,
                    f"{pair[0]}.{pair[1]}" if f"{pair[0]}.{pair[1]}" in files else pair[0],
                )
                for pair in names
            }
            tails = [chain(name) for name in sorted(nexts & set(files) - {module, "ddpkit"})]
            chains[module] = [module, *max(tails, key=len, default=[])]
        return chains[module]

    return max(map(chain, files), key=len)


def imports_of_files() -> dict[str, set[str]]:
    """Return by module the others that it imports, also in functions and for types."""
    places = homes()
    files = {module_name(path): path for path in FILES}
    graph = {}
    for module, path in files.items():
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module, alias.name) for node in nodes for alias in node.names]
        inner = {pair: ".".join(pair) for pair in pairs if pair[0] and ".".join(pair) in files}
        found = {places.get(pair, inner.get(pair, pair[0])) for pair in pairs}
        graph[module] = (found & set(files)) - {module, "ddpkit"}
    return graph


def reached_from(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that are loaded with one, if all of its imports are made."""
    reached = set[str]()
    new = graph[start]
    while new:
        reached |= new
        new = set().union(*(graph[module] for module in new)) - reached
    return reached


def circles_of_files() -> set[frozenset[str]]:
    """Return the sets of modules that import each other in a circle."""
    graph = imports_of_files()
    reached = {module: reached_from(module, graph) for module in graph}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def hidden_names() -> list[str]:
    """Names that a package gives to others and one of its modules has too: importing the module
    hides the name.
    """
    return [
        f"{stub.parent.name}.{alias.name}"
        for stub in sorted(PACKAGE.rglob("__init__.pyi"))
        if stub.parent != PACKAGE  # whose names are its modules
        for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (stub.parent / alias.name).with_suffix(".py").exists()
        or (stub.parent / alias.name).is_dir()
    ]


def private_reaches() -> int:
    """How many lines reach into something private, outside ``compat``."""
    return sum(
        source_of(path).count("noqa: SLF001") for path in FILES if path.parent.name != "compat"
    )


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement imports or imports from, ``from ddpkit import run`` as
    ``ddpkit.run``.
    """
    if isinstance(node, ast.Import) or node.module == "ddpkit":
        prefix = "ddpkit." if isinstance(node, ast.ImportFrom) else ""
        return [prefix + one.name for one in node.names]
    return [node.module or ""]


STATE_MAKERS = {
    "ContextVar",
    "ExitStack",
    "Lock",
    "RLock",
    "SimpleNamespace",
    "WeakKeyDictionary",
    "WeakSet",
    "deque",
}
CHANGES = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def process_state(path: Path) -> set[str]:
    """Names in a module whose values change while a process runs, or the classes whose attributes
    do.

    Found are: ``global``; attributes of a class of the module that are set by the class's name; in
    its body or that of a class, a container that the module changes, an object of a class of the
    module, and one of ``STATE_MAKERS``.
    """
    nodes = nodes_of(path)
    classes = {node.name: node for node in nodes[0].body if isinstance(node, ast.ClassDef)}
    targets = [
        one for node in nodes for one in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    calls = [
        node.func
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    changed = {ast.unparse(one.value) for one in targets if isinstance(one, ast.Subscript)}
    changed |= {ast.unparse(one.value) for one in calls if one.attr in CHANGES}
    found = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    found |= {ast.unparse(one.value) for one in targets if isinstance(one, ast.Attribute)} & set(
        classes
    )

    def lasts(name: str, value: ast.expr, owner: str) -> bool:
        names = {f"{one}.{name}" for one in (owner, "cls", "self")} if owner else {name}
        made = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        is_container = isinstance(value, (ast.Dict, ast.List, ast.Set))
        return made in STATE_MAKERS | set(classes) or (is_container and bool(names & changed))

    for owner, body in [("", nodes[0].body), *((name, one.body) for name, one in classes.items())]:
        given = [
            node
            for node in body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        ]
        names = {
            ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node
            for node in given
        }
        found |= {owner or name for name, node in names.items() if lasts(name, node.value, owner)}
    return {f"{module_name(path).removeprefix('ddpkit.')}.{name}" for name in found}


def layers() -> int:
    contract = (
        (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition("layers = [")[2]
        .partition("]")[0]
    )
    return sum(line.strip().startswith('"') for line in contract.splitlines())


def figures() -> dict[str, int]:
    folders = modules_per_folder()
    sizes = {inherited_size(one): one for one in classes() if one is not ddpkit.Brain}
    largest = max(sizes)
    faces = ("epoch_loop", "sampler", "metrics", "distributed")
    return {
        "classes that Brain inherits from": len(ddpkit.Brain.__mro__) - 2,
        "code lines of Brain": inherited_size(ddpkit.Brain),
        f"code lines of the next largest class ({sizes[largest].__name__})": largest,
        "public names of Brain": sum(not name.startswith("_") for name in dir(ddpkit.Brain)),
        "modules at the top": folders.pop("ddpkit"),
        "modules in the fullest package": max(folders.values()),
        "layers": layers(),
        **{f"modules that {name} loads": pulled_in(name) for name in faces},
        "modules in the longest chain of imports": len(longest_chain()),
        "private reaches outside compat": private_reaches(),
        "pages of the reference": len(list((ROOT / "docs/reference").glob("*.md"))),
        "code lines": sum(map(code_lines, FILES)),
    }


if __name__ == "__main__":
    # importing ddpkit.speechbrain, as `classes` does, then changes nothing
    os.environ["DDPKIT_SPEECHBRAIN"] = "0"
    for name, number in figures().items():
        print(f"{number:>7,}  {name}")
