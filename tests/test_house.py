"""The house: lengths of functions, rooms and layers, the face of the package, and that importing it changes nothing.

Docstrings do not count in any size. Cyclomatic complexity (C901) and the number of arguments (PLR0913) are
ruff's to count, in ``make lint``, with the limits of pyproject.toml. Here ruff runs once more for the
complexity, without looking at any ``noqa``; a ``noqa`` for the arguments (the recipe contract has long
signatures) must give its reason.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ddpkit
from tests import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ddpkit"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})
FACE = sorted({path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"})
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in FILES
    if path.name != "__main__.py"
)

INSIDE = {path.stem for path in FILES if path.parent != PACKAGE}

MAX_FUNCTION_LINES = 50
MAX_INHERITED_LINES = 400  # code lines of a class and of those of the package that it inherits from
# 12,000 for the core; 2,500 for recipes that move over (porting, speechbrain, batch, schedulers, metric_stats,
# parameter_transfer, self.log, loggers); 3,000 for bigger models and the same bits on any number of processes.
MAX_CODE_LINES = 17_500
MAX_LAYERS = 8
MAX_FILES_AT_THE_TOP = 28
MAX_FILES_OF_A_PACKAGE = 12
MAX_CHAIN = 14  # of modules that import each other
MAX_REFERENCE_PAGES = 31
MOST_MODULES_OF_A_BRAIN = 107

# Modules whose classes are no place for `Ranks:`: the exception tree is drawn and
# explained in one docstring, and the types of `types.py` do nothing by themselves.
DECLARATIONS = {"errors", "types"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)


def named(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def sources():
    """The nodes of each file, the module first."""
    return [(path, house.nodes_of(path)) for path in FILES]


def docstring_lines(node):
    """How many lines the docstrings inside a node take."""
    total = 0
    for inner in ast.walk(node):
        if isinstance(inner, DOCUMENTED) and ast.get_docstring(inner, clean=False) is not None:
            total += inner.body[0].end_lineno - inner.body[0].lineno + 1
    return total


def lines_of(node):
    return node.end_lineno - node.lineno + 1 - docstring_lines(node)


# ---------------------------------------------------------------------------------------------- sizes


def test_functions_are_short(sources):
    too_long = [
        f"{named(path)}:{node.lineno}: {node.name}: {lines_of(node)} lines, at most {MAX_FUNCTION_LINES}"
        for path, nodes in sources
        for node in nodes
        if isinstance(node, FUNCTIONS) and lines_of(node) > MAX_FUNCTION_LINES
    ]
    assert not too_long, "\n".join(too_long)


def test_the_size_test_counts_code_and_not_docstrings():
    tree = ast.parse(
        textwrap.dedent('''
            """Two
            lines."""
            class A:
                """One."""
                def f(self):
                    """Three

                    lines."""
                    return 1
        ''')
    )
    class_node = tree.body[1]
    assert docstring_lines(tree) == 6
    assert lines_of(class_node) == 3
    assert lines_of(class_node.body[1]) == 2


def run_tool(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )


def test_complexity():
    only = ("--select=C901", "--ignore-noqa", "--output-format=concise")
    checked = run_tool("-m", "ruff", "check", *only, "ddpkit")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_more_arguments_only_with_a_reason():
    wrong = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "noqa" in line and "PLR0913" in line and " -- " not in line.partition("PLR0913")[2]
    ]
    assert not wrong, "give the reason after ` -- `:\n" + "\n".join(wrong)


# ----------------------------------------------------------------------------------- rooms and layers


@pytest.mark.parametrize("folder", [PACKAGE, *FOLDERS], ids=named)
def test_a_folder_is_small_enough_to_be_read(folder):
    most = MAX_FILES_AT_THE_TOP if folder == PACKAGE else MAX_FILES_OF_A_PACKAGE
    assert len(list(folder.glob("*.py"))) <= most


def test_the_brain_inherits_from_nothing_and_no_class_is_large_with_what_it_inherits():
    assert ddpkit.Brain.__mro__ == (ddpkit.Brain, object)
    sizes = {one.__name__: house.inherited_size(one) for one in house.classes()}
    assert {name: size for name, size in sizes.items() if size > MAX_INHERITED_LINES} == {}


def test_the_package_is_small_and_its_layers_are_few():
    assert sum(map(house.code_lines, FILES)) <= MAX_CODE_LINES
    assert len(house.longest_chain()) <= MAX_CHAIN
    assert house.private_reaches() == 0
    assert house.layers() <= MAX_LAYERS


def test_imports_go_downward_only():
    checked = run_tool("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_package_is_imported_through_its_init_and_not_past_it(sources):
    packages = {folder.name for folder in FOLDERS}
    wrong = [
        f"{named(path)}:{node.lineno}: from {node.module}"
        for path, nodes in sources
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddpkit.")
        for package, *inner in [node.module.split(".")[1:]]
        if package in packages and package != path.parent.name and (inner or {one.name for one in node.names} & INSIDE)
    ]
    assert not wrong, "take what the package's __init__.pyi lists:\n" + "\n".join(wrong)


def test_modules_import_from_modules_and_not_from_the_package(sources):
    nodes = [(path, node) for path, all_of_it in sources if path != PACKAGE / "__init__.py" for node in all_of_it]
    wrong = [
        f"{named(path)}:{node.lineno}: from ddpkit import {alias.name}"
        for path, node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "ddpkit"
        for alias in node.names
        if alias.name not in {"__version__", "_names_of_stub", *FACE}
    ]
    wrong += [
        f"{named(path)}:{node.lineno}: import ddpkit"
        for path, node in nodes
        if isinstance(node, ast.Import) and any(alias.name == "ddpkit" for alias in node.names)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_commands_print_or_exit(sources):
    wrong = [
        f"{named(path)}:{node.lineno}: {ast.unparse(node.func)}(...)"
        for path, nodes in sources
        if PACKAGE / "cli" not in path.parents and path.name != "__main__.py"
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.exit", "exit", "quit"}
    ]
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------- the face


def test_all_is_sorted_and_every_name_resolves():
    assert ddpkit.__all__ == sorted(set(ddpkit.__all__))
    for name in ddpkit.__all__:
        assert getattr(ddpkit, name).__name__ == name
    assert set(ddpkit.__all__) <= set(dir(ddpkit))


def test_every_error_is_a_public_name():
    errors = importlib.import_module("ddpkit.errors")
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(ddpkit.__all__)


def test_every_module_of_the_face_is_reached_from_the_package_and_named_for_type_checkers():
    face = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    for_type_checkers = next(
        [alias.name for alias in node.names]
        for node in ast.walk(face)
        if isinstance(node, ast.ImportFrom) and node.module == "ddpkit"
    )
    assert for_type_checkers == sorted([*FACE, "cli"])
    for module in [*FACE, *(folder.name for folder in FOLDERS)]:
        assert getattr(ddpkit, module) is importlib.import_module(f"ddpkit.{module}")


def test_every_module_is_in_the_reference_once_on_the_page_of_its_package():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    found = [(name, page) for page, text in pages.items() for name in re.findall(r"module:: (ddpkit\S*)", text)]
    page_of = dict(found)
    assert len(pages) <= MAX_REFERENCE_PAGES
    assert sorted(name for name, _ in found) == [name for name in MODULES if name != "ddpkit"]
    assert [name for name in page_of if page_of[name] != page_of[".".join(name.split(".")[:2])]] == []
    assert [page for page, text in pages.items() if not re.match(r"# .*\n\n\w|# .*\n\n`", text)] == []  # what it is for


@pytest.mark.parametrize("name", ["nothing_of_that_name", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'ddpkit' has no attribute '{name}'"):
        getattr(ddpkit, name)


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert version("ddpkit") == ddpkit.__version__


# ----------------------------------------------------------------------------------------- docstrings


def public_nodes(tree):
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def is_overload(node):
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def is_exception(node):
    return isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning"))


def test_docstrings_say_which_ranks(sources):
    missing = [
        f"{named(path)}:{node.lineno}: {node.name}: no `Ranks:`"
        for path, (tree, *_) in sources
        if path.stem not in DECLARATIONS and path.parent.name != "cli"  # a command runs in one process
        for node in public_nodes(tree)
        if not is_overload(node) and not is_exception(node) and "Ranks:" not in (ast.get_docstring(node) or "")
    ]
    assert not missing, "\n".join(missing)


# ----------------------------------------------------------------------------- importing changes nothing


def in_a_fresh_interpreter(script):
    """Run a script that prints one JSON object last; return the object."""
    done = run_tool("-W", "error", "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)


FORKS = """
import os, sys
import torch

for number, script in enumerate(sys.argv[1:]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        exec(compile(script, f"<script {number}>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read().strip() or "null")
    if os.wait()[1]:
        sys.exit(f"script {number} has failed")
"""


@pytest.fixture(scope="module")
def with_torch():
    """What a script prints in a process that has imported torch and nothing of ours; torch is imported once for all."""
    scripts = {
        "first use": FIRST_USE_OF_THE_BRAIN,
        "pulled in": PULLED_IN.format(modules=list(MOST_OTHERS)),
        "everything": WATCH_THE_IMPORT_OF_EVERYTHING.format(modules=NOT_SPEECHBRAIN),
    }
    done = run_tool("-W", "error", "-c", FORKS, *map(textwrap.dedent, scripts.values()))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return dict(zip(scripts, map(json.loads, done.stdout.splitlines()), strict=True))


def test_importing_the_package_imports_nothing_else():
    new = in_a_fresh_interpreter("""
        import json, sys
        import __future__, typing
        before = set(sys.modules)
        import ddpkit
        print(json.dumps(sorted(set(sys.modules) - before)))
    """)
    assert new == ["ddpkit"]


def test_a_light_name_does_not_load_torch():
    assert (
        in_a_fresh_interpreter("""
        import json, sys
        import ddpkit
        ddpkit.Stage.TRAIN, ddpkit.ConfigError, ddpkit.cli.main
        print(json.dumps(sorted({"torch", "numpy", "tqdm", "hyperpyyaml"} & set(sys.modules))))
    """)
        == []
    )


FIRST_USE_OF_THE_BRAIN = """
    import json, sys
    before = set(sys.modules)
    import ddpkit
    ddpkit.Brain
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_first_use_of_the_brain_loads_few_modules_beside_torch(with_torch):
    """No YAML, no strategy of several processes: 42 ms and 5 MB."""
    new = with_torch["first use"]
    others = {name for name in new if name.partition(".")[0] != "ddpkit"}
    assert others <= {"_decimal", "decimal", "faulthandler", "fractions", "multiprocessing.forkserver"}
    assert len(new) - len(others) <= MOST_MODULES_OF_A_BRAIN
    assert not {"ddpkit.strategies.ddp", "ddpkit.strategies.virtual_ranks", "ddpkit.syncbn"} & set(new)


MOST_OTHERS = {"errors": 0, "logger": 3, "epoch_loop": 5, "metrics": 5, "sampler": 8, "distributed": 8}


PULLED_IN = """
    import importlib, json, os, sys
    import torch.distributed

    found = {{}}
    for module in {modules}:
        reading, writing = os.pipe()
        if os.fork() == 0:
            importlib.import_module(f"ddpkit.{{module}}")
            others = [one for one in sys.modules if one.startswith("ddpkit.") and one != f"ddpkit.{{module}}"]
            os.write(writing, json.dumps(others).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            found[module] = json.load(pipe)
        os.wait()
    print(json.dumps(found))
"""


def test_a_module_of_the_face_pulls_in_few_others(with_torch):
    """Each in a process that has imported torch and nothing of ours."""
    pulled = with_torch["pulled in"]
    assert set(pulled) == set(MOST_OTHERS)
    assert {module: others for module, others in pulled.items() if len(others) > MOST_OTHERS[module]} == {}


NOT_SPEECHBRAIN = [name for name in MODULES if name.split(".")[1:2] != ["speechbrain"]]  # whose import is the switch
WATCH_THE_IMPORT_OF_EVERYTHING = """
    import atexit, json, logging, os, random, signal, sys, threading, warnings
    import torch, torch.distributed, torch.utils.data, numpy, tqdm, hyperpyyaml

    MODULES = {modules!r}
    done_by_us = []

    def caller():
        frame = sys._getframe(2)
        while frame and frame.f_globals.get("__name__") in ("os", "_collections_abc", "__main__"):
            frame = frame.f_back
        return frame.f_globals.get("__name__", "?") if frame else "?"

    class Watched(type(os.environ)):
        def __getitem__(self, key):
            if caller().startswith("ddpkit") or key.startswith(("DDPKIT_", "SB_")):
                done_by_us.append(f"{{caller()}} reads the variable {{key}}")
            return super().__getitem__(key)

        def __setitem__(self, key, value):
            done_by_us.append(f"{{caller()}} sets the variable {{key}}")
            super().__setitem__(key, value)

    os.environ.__class__ = Watched

    def watch(owner, name):
        real = getattr(owner, name)
        def watched(*args, **kwargs):
            if caller().startswith("ddpkit"):
                done_by_us.append(f"{{caller()}} calls {{owner.__name__}}.{{name}}")
            return real(*args, **kwargs)
        setattr(owner, name, watched)

    for owner, name in [
        (atexit, "register"), (signal, "signal"), (warnings, "filterwarnings"), (warnings, "simplefilter"),
        (logging, "basicConfig"), (torch, "manual_seed"), (random, "seed"), (numpy.random, "seed"),
        (torch, "set_num_threads"),
    ]:
        watch(owner, name)

    def picture():
        return {{
            "root handlers": [repr(h) for h in logging.getLogger().handlers],
            "root level": logging.getLogger().level,
            "handlers of ddpkit": [repr(h) for h in logging.getLogger("ddpkit").handlers],
            "excepthook": repr(sys.excepthook),
            "threads": sorted(t.name for t in threading.enumerate()),
            "warning filters": len(warnings.filters),
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
            "matmul precision": torch.get_float32_matmul_precision(),
            "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
            "dtype": str(torch.get_default_dtype()),
            "torch generator": torch.random.get_rng_state().tolist(),
            "numpy generator": repr(numpy.random.get_state()),
            "python generator": repr(random.getstate()),
            "group": torch.distributed.is_initialized(),
            "cuda": torch.cuda.is_initialized(),
            "loader iterator": repr(torch.utils.data.DataLoader.__iter__),
            "variables": dict(os.environ.items()),
        }}

    before = picture()
    done_by_us.clear()
    for module in MODULES:
        __import__(module)
    done = list(done_by_us)
    after = picture()
    print(json.dumps({{"done": done, "changed": [key for key in before if before[key] != after[key]]}}))
"""


def test_importing_every_module_changes_nothing(with_torch):
    assert with_torch["everything"] == {"done": [], "changed": []}


# --------------------------------------------------------------------------------------- command line


def test_the_package_says_its_version_and_its_help():
    def run(*arguments):
        return run_tool("-m", "ddpkit", *arguments)

    assert run("--version").stdout == f"ddpkit {ddpkit.__version__}\n"
    assert "torchrun --standalone" in run("--help").stdout
    assert run().stdout == run("--help").stdout
    wrong = run("--no-such-option")
    assert wrong.returncode == 2
    assert "unrecognized arguments: --no-such-option" in wrong.stderr


@pytest.mark.parametrize("path", ["core.Stage", "core.Brain", "utils.distributed.run_on_main", "dataio.dataloader"])
def test_names_of_ported_recipes_lead_here(path):
    found = ddpkit
    for name in path.split("."):
        found = getattr(found, name)
    assert found is not None
    assert not hasattr(ddpkit.core, "no_such_name")
