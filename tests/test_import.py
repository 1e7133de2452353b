"""The face of the package: its names, where they live, and that importing it changes nothing."""

from __future__ import annotations

import ast
import importlib
import json
import textwrap

import pytest

import ddpkit
from tests.house import FACE, FOLDERS, MODULES, PACKAGE, run_tool

# ----------------------------------------------------------------------------------------- the face


def test_all_is_sorted_and_every_name_resolves():
    assert ddpkit.__all__ == sorted(set(ddpkit.__all__))
    for name in ddpkit.__all__:
        assert getattr(ddpkit, name).__name__ == name
    assert set(ddpkit.__all__) <= set(dir(ddpkit))


@pytest.mark.parametrize("module", FACE)
def test_a_module_of_the_face_says_which_of_its_names_are_for_users(module):
    imported = importlib.import_module(f"ddpkit.{module}")
    # constants, classes, functions: as ruff sorts them
    assert imported.__all__ == sorted(
        set(imported.__all__),
        key=lambda name: (not name.isupper(), name),
    )
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


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


@pytest.mark.parametrize("name", ["nothing_of_that_name", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'ddpkit' has no attribute '{name}'"):
        getattr(ddpkit, name)


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert version("ddpkit") == ddpkit.__version__


@pytest.mark.parametrize(
    "path",
    ["core.Stage", "core.Brain", "utils.distributed.run_on_main", "dataio.dataloader"],
)
def test_names_of_ported_recipes_lead_here(path):
    found = ddpkit
    for name in path.split("."):
        found = getattr(found, name)
    assert found is not None
    assert not hasattr(ddpkit.core, "no_such_name")


# ------------------------------------------------------------------------ importing changes nothing


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
    """What a script prints in a process that has imported torch and nothing of ours; torch is
    imported once for all.
    """
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


@pytest.mark.slow
def test_a_checkpointer_of_a_plain_folder_loads_no_package_of_object_stores(tmp_path):
    loaded = in_a_fresh_interpreter(f"""
        import json, sys, torch
        import ddpkit
        before = "fsspec" in sys.modules
        net = torch.nn.Linear(2, 1)
        checkpointer = ddpkit.checkpoints.Checkpointer({str(tmp_path)!r}, {{"net": net}})
        ddpkit.Brain({{"net": net}}, checkpointer=checkpointer)
        checkpointer.save_checkpoint()
        assert checkpointer.recover_if_possible() is not None
        others = [name for name in ("fsspec", "s3fs", "botocore") if name in sys.modules]
        print(json.dumps([before, others]))
    """)
    assert loaded == [False, []]


FIRST_USE_OF_THE_BRAIN = """
    import json, sys
    before = set(sys.modules)
    import ddpkit
    ddpkit.Brain
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.slow
def test_the_first_use_of_the_brain_loads_few_modules_of_others_beside_torch(with_torch):
    """No YAML, no strategy of several processes: 39 ms and 5 MB."""
    new = with_torch["first use"]
    others = {name for name in new if name.partition(".")[0] != "ddpkit"}
    assert others <= {
        "_decimal",
        "decimal",
        "faulthandler",
        "fractions",
        "multiprocessing.forkserver",
    }
    assert not {"ddpkit.strategies.ddp", "ddpkit.strategies.virtual_ranks", "ddpkit.syncbn"} & set(
        new
    )


# Rooms and modules of the face: a room counts once, so that a file in it may be divided, and none
# need be merged.
MOST_OTHERS = {
    "errors": 0,
    "logger": 2,
    "epoch_loop": 3,
    "metrics": 5,
    "sampler": 6,
    "distributed": 0,
}


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
"""  # noqa: E501


@pytest.mark.slow
def test_a_module_of_the_face_pulls_in_few_others(with_torch):
    """Each in a process that has imported torch and nothing of ours."""
    pulled = with_torch["pulled in"]
    assert set(pulled) == set(MOST_OTHERS)
    rooms = {
        module: sorted({one.split(".")[1] for one in others}) for module, others in pulled.items()
    }
    assert {
        module: others for module, others in rooms.items() if len(others) > MOST_OTHERS[module]
    } == {}


# whose import is the switch
NOT_SPEECHBRAIN = [name for name in MODULES if name.split(".")[1:2] != ["speechbrain"]]
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
"""  # noqa: E501


@pytest.mark.slow
def test_importing_every_module_changes_nothing(with_torch):
    assert with_torch["everything"] == {"done": [], "changed": []}
