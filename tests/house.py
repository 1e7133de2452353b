"""The package as its tests see it: files, names, imports, and measures (``make house``)."""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import ddpkit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ddpkit"
FILES = sorted(PACKAGE.rglob("*.py"))
# a room may have folders of its own
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
PUBLIC_ROOMS = {
    "distributed",
    "optim",
    "parts",
    "train_logger",
}  # users import from them as from a module of the face
FACE = sorted(
    {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"} | PUBLIC_ROOMS
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def nodes_in(source: str) -> list[ast.AST]:
    """All nodes of a text, the module first."""
    return list(ast.walk(ast.parse(source)))


def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return nodes_in(source_of(path))


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


PULLED_IN = """
import os, sys
import torch  # once: the processes that are forked have it
for statement in sys.argv[1:]:
    if not os.fork():
        exec(statement)
        print(sum(name.startswith("ddpkit.") for name in sys.modules) - 1, flush=True)
        os._exit(0)
    os.wait()
"""


def pulled_in(*statements: str) -> list[int]:
    """How many modules of the package are loaded beside the one that a statement imports from."""
    found = subprocess.run(
        [sys.executable, "-c", PULLED_IN, *statements],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [int(line) for line in found.stdout.splitlines()]


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


def homes_of_face() -> set[tuple[str, str]]:
    """Return module and name of what modules of the face list but packages define."""
    places = homes()
    found = set()
    for path in PACKAGE.glob("*.py"):
        listed = set[str]()
        for node in nodes_of(path):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed.update(ast.literal_eval(node.value))
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                pairs = {(node.module or "", one.name) for one in node.names if one.name in listed}
                found |= {(places.get(pair, pair[0]), pair[1]) for pair in pairs}
    return found


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


# ---------------------------------------------------------------------------------------- measures

LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
DENSE = 30  # tokens of a line, from which it is counted as dense

# Words in the code of the modules that know a feature.
FEATURES = {
    "averaged weights": r"\bema\b|WeightAverage",
    "local SGD": r"local_?sgd",
    "comm hooks": r"comm_hook",
    "virtual ranks": r"virtual_?ranks",
    "auto_micro_batch": r"auto_?micro_?batch",
    "prefetch": r"prefetch_to_device|move_ahead",
    "profiler": r"profil",
    "lr_scaling": r"lr_?scal",
    "late steps": r"late_step|PendingStep|resolve_pending|resolve_at_sync",
    "gc_interval": r"gc_interval",
    "zero1": r"zero1",
    "schedule": r"scheduler_class|scheduler_every",
    "looped": r"looped",
    "compile": r"compile_m|compile_b|compile_modules",
    "checkpointing of blocks": r"activation_checkpointing|checkpoint_blocks",
}


@functools.cache
def tokens_in(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


@functools.cache
def docstring_numbers(source: str) -> set[int]:
    """Number the lines of docstrings."""
    numbers: set[int] = set()
    for node in nodes_in(source):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            numbers.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return numbers


def tokens_by_line(source: str) -> list[int]:
    """Count the tokens of each code line; a change of the layout leaves their sum as it is."""
    documented = docstring_numbers(source)
    counts = Counter(
        token.start[0]
        for token in tokens_in(source)
        if token.type not in LAYOUT and token.start[0] not in documented
    )
    return list(counts.values())


def comment_count(source: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokens_in(source))


def pack_count(source: str) -> int:
    """Count assignments of several values to several targets at once."""
    return sum(
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for node in nodes_in(source)
    )


def writes_progress(source: str) -> bool:
    """Return whether an attribute is set of something that is called ``progress``."""
    for node in nodes_in(source):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and ast.unparse(node.value).rpartition(".")[2] == "progress":
            return True
    return False


def without_docstrings(source: str) -> str:
    documented = docstring_numbers(source)
    lines = enumerate(source.splitlines(), 1)
    return "\n".join(line for number, line in lines if number not in documented)


def names_feature(code: str, pattern: str) -> bool:
    """Return whether code has a word of a feature."""
    return re.search(pattern, code, re.IGNORECASE) is not None


def modules_by_feature() -> dict[str, int]:
    """Count the modules whose code or comments name a feature; docstrings may name it."""
    codes = [without_docstrings(source_of(path)) for path in FILES]
    return {
        feature: sum(names_feature(code, pattern) for code in codes)
        for feature, pattern in FEATURES.items()
    }


# What is imported where a measure counts the modules that are loaded with it.
LOADING = {
    **{
        name: f"import ddpkit.{name}"
        for name in ("epoch_loop", "sampler", "metrics", "distributed")
    },
    "if_main_process": "from ddpkit.distributed import if_main_process",
    "run_on_main": "from ddpkit.distributed import run_on_main",
}


def measures() -> dict[str, float]:
    """Return what the ratchets of ``tests/test_house.py`` hold; the smaller each is, the better."""
    sources = [source_of(path) for path in FILES]
    lines = [count for source in sources for count in tokens_by_line(source)]
    features = modules_by_feature().values()
    return {
        "public names of Brain": sum(not name.startswith("_") for name in dir(ddpkit.Brain)),
        "tokens per code line": round(sum(lines) / len(lines), 2),
        f"lines of {DENSE} tokens or more": sum(count >= DENSE for count in lines),
        "assignments that pack several": sum(map(pack_count, sources)),
        "files that write a Progress": sum(map(writes_progress, sources)),
        "circles of files": len(circles_of_files()),
        "modules that name a feature, median": statistics.median_high(features),
        "modules that name a feature, most": max(features),
        "lines of the longest file": max(len(source.splitlines()) for source in sources),
        "code lines per comment": round(len(lines) / sum(map(comment_count, sources)), 1),
        **{
            f"modules that {name} loads": number
            for name, number in zip(LOADING, pulled_in(*LOADING.values()), strict=True)
        },
    }


if __name__ == "__main__":
    for measure, number in measures().items():
        print(f"{number:>8,}  {measure}")
