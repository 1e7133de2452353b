"""What ``ddpkit.speechbrain`` answers, hands down and refuses, on a package that stands in for
SpeechBrain.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import Run, python

ROOT = Path(__file__).resolve().parents[2]

# The modules of SpeechBrain that are needed here, with names of each kind that they really have.
PACKAGE = {
    "__init__.py": "",
    "core.py": "raise RuntimeError('it would turn TF32 on')\nclass Brain: ...\n",
    "utils/__init__.py": "",
    "utils/shell.py": "def run_shell(): return 'shell'\n",
    "utils/logger.py": (
        "from speechbrain.utils.shell import run_shell\nfrom .shell import "
        "run_shell as near\n"
        "ORDERS_ABBREV = {0: ''}\nSTATE: int = 0\ndef count():\n    global "
        "STATE\n    STATE += 1\n"
        "def get_logger(name): return 'its own'\n"
    ),
    "utils/checkpoints.py": (
        "from speechbrain.utils.distributed import if_main_process\n"
        "KEYS_MAPPING = {'.old': '.new'}\nDEFAULT_TRANSFER_HOOKS = {bytes: print}\nclass "
        "Checkpointer: ...\n"
    ),
    "utils/distributed.py": "MAIN_PROC_ONLY: int = 0\n",
    "nnet/__init__.py": "",
    "nnet/schedulers.py": (
        "from speechbrain.utils import checkpoints\n\n@checkpoints.register_checkpoint_hooks\n"
        "class Halving:\n    def __init__(self): self.lr = 1.0\n"
        "    @checkpoints.mark_as_saver\n    def save(self, path): open(path, "
        "'w').write(str(self.lr))\n"
        "    @checkpoints.mark_as_loader\n"
        "    def load(self, path, end_of_epoch): self.lr = float(open(path).read())\n"
    ),
}
TOLD = "ddpkit 0.1.0 answers speechbrain.core, .utils."


@pytest.fixture
def start(tmp_path):
    """Return what runs a script beside the package, as a user does, and returns its lines and what
    it told.
    """
    for name, source in PACKAGE.items():
        path = tmp_path / "speechbrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    def run(script, *words, name="train.py", code=0, warm=False, **variables):
        (tmp_path / name).write_text(script)
        environment = {"PYTHONPATH": str(ROOT), "DDPKIT_SPEECHBRAIN": "", **variables}
        command = python(*(words or [name]))
        run = Run(command, tmp_path, environment, warm=warm).wait()
        assert run.code == code, f"{run.out}\n{run.err}"
        return run

    return run


RUN = ("-m", "ddpkit.speechbrain", "train.py")


def test_importing_ddpkit_alone_answers_nothing(start):
    run = start("""
import ddpkit, ddpkit.logger, ddpkit.porting, os, sys
ddpkit.Stage, ddpkit.ConfigError, dir(ddpkit)
from speechbrain.utils.logger import get_logger
print(get_logger("a"), "ddpkit.speechbrain" in sys.modules, os.environ["PYTHONPATH"])
""")
    assert run.out.split() == ["its", "own", "False", str(ROOT)]
    assert run.lines == []


def test_the_first_line_of_a_script_answers_the_core_and_leaves_the_rest(start):
    run = start("""
import ddpkit.speechbrain
import ddpkit.logger, speechbrain.utils.shell
from speechbrain.utils.logger import ORDERS_ABBREV, get_logger, near, run_shell
import ddpkit.speechbrain  # once more
print(get_logger is ddpkit.logger.get_logger, ORDERS_ABBREV, run_shell is near is speechbrain.utils.shell.run_shell)
""")  # noqa: E501
    assert run.out.split() == ["True", "{0:", "''}", "True"]
    assert len(run.lines) == 1
    assert run.lines[0].startswith(TOLD)
    assert str(Path("speechbrain")) in run.lines[0].partition("all else is SpeechBrain's, from ")[2]


def test_a_name_of_the_core_that_ddpkit_lacks_is_refused_by_name(start):
    run = start("""
import ddpkit.speechbrain
import speechbrain.utils.logger as logger
print(hasattr(logger, "print"), hasattr(logger, "nothing"), hasattr(logger, "__path__"))
try:
    from speechbrain.utils.logger import STATE
except ImportError as error:
    print(error)
try:
    logger.count
except ImportError as error:
    print(error)
try:
    from speechbrain.utils.logger import nothing
except ImportError as error:
    print(error)
""")
    there, first, second, third = run.out.splitlines()
    assert there == "False False False"
    for name, line in (("STATE", first), ("count", second)):
        assert line.startswith(
            f"speechbrain.utils.logger.{name} is part of SpeechBrain's training core"
        )
        assert "ddpkit has no such name" in line
        assert "DDPKIT_SPEECHBRAIN=0" in line
    assert third.startswith("cannot import name 'nothing' from 'speechbrain.utils.logger'")


def test_coming_after_speechbrain_is_an_error_that_says_so(start):
    run = start("import speechbrain.utils.shell\nimport ddpkit.speechbrain\n", code=1)
    assert run.lines[-1].startswith(
        "ddpkit.errors.ConfigError: SpeechBrain was imported before ddpkit.speechbrain"
    )
    assert "the first line of the script" in run.lines[-1]


CHILDREN = """
import multiprocessing, subprocess, sys
from speechbrain.utils.logger import get_logger

class Mine:
    pass

def look(_):
    return get_logger.__module__, Mine.__module__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(look, [Mine()])[0])
    code = "import sys; from speechbrain.utils.logger import get_logger; print(get_logger.__module__, sys.path)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True))
"""  # noqa: E501


@pytest.mark.costly
def test_processes_that_a_script_starts_are_answered_and_one_line_is_told_in_all(start, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import os\nos.environ['SEEN'] = os.environ.get('SEEN', '') + 'x'\n"
    )
    script = CHILDREN + "    import os; print(os.environ['SEEN'])\n"
    run = start(script, *RUN, PYTHONPATH=f"{ROOT}{os.pathsep}{hidden}")
    spawned, child, seen = run.out.splitlines()
    assert spawned == "ddpkit.logger __mp_main__"
    assert "stdout=\"ddpkit.logger ['', " in child
    assert "stderr=''" in child
    # its own folder is not among those that are imported from
    assert str(ROOT / "ddpkit" / "speechbrain") not in child
    assert len(run.lines) == 1
    assert seen == "x"  # by the parent; the environment of the children is theirs


def test_the_environment_alone_answers_scripts_that_know_nothing(start):
    exported = start("", "-m", "ddpkit.speechbrain", "--environment").out
    variables = dict(line.removeprefix("export ").split("=", 1) for line in exported.splitlines())
    script = (
        "from speechbrain.utils.logger import get_logger\nprint(get_logger.__module__, __name__)\n"
    )
    run = start(script, **variables)
    assert run.out.split() == ["ddpkit.logger", "__main__"]
    assert run.lines[0].startswith(TOLD)
    assert (
        start(script, **{**variables, "DDPKIT_SPEECHBRAIN": ""}).out.split()[0]
        == "speechbrain.utils.logger"
    )


@pytest.mark.parametrize("first_line", ["", "import ddpkit.speechbrain\n"])
def test_zero_switches_it_off(start, first_line):
    script = "from speechbrain.utils.logger import get_logger\nprint(get_logger('a'))\n"
    run = start(first_line + script, *RUN, DDPKIT_SPEECHBRAIN="0")
    assert (run.out, run.err) == ("its own\n", "")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_main_process_tells_and_no_other(start, rank, lines):
    run = start(
        "import speechbrain.utils.logger\n",
        *RUN,
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE="2",
    )
    assert len(run.lines) == lines


def test_the_command_runs_a_script_as_python_does(start, tmp_path):
    script = """
import pickle, sys
import beside
class Mine: pass
print([sys.argv, __name__, sys.path[0], __file__, type(pickle.loads(pickle.dumps(Mine()))) is Mine])
sys.exit(3)
"""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    file = "recipe/train.py"
    paths = f"{ROOT}{os.pathsep}{tmp_path}"
    words = ("-m", "ddpkit.speechbrain", file, "a.yaml", "--lr=1")
    run = start(script, *words, name=file, code=3, PYTHONPATH=paths)
    assert run.out.strip() == repr(
        [[file, "a.yaml", "--lr=1"], "__main__", str(folder), file, True]
    )


@pytest.mark.corner
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 2, "usage: python -m ddpkit.speechbrain train.py"),
        (["nothing.py"], 2, "error: the script comes first, and it is not there"),
        (["speechbrain"], 2, "error: the script comes first, and it is not there"),
        (["--lr=1", "train.py"], 2, "error: the script comes first, and it is not there"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(start, words, code, told):
    assert told in start("", "-m", "ddpkit.speechbrain", *words, code=code).err


def test_help(start):
    run = start("", "-m", "ddpkit.speechbrain", "--help")
    assert "torchrun --standalone" in run.out
    assert run.err == ""


CORE = """
import ddpkit.speechbrain
import ddpkit.checkpoints
from pathlib import Path
from hyperpyyaml import load_hyperpyyaml
from speechbrain.core import Brain
from speechbrain.nnet.schedulers import Halving
from speechbrain.utils import checkpoints
import speechbrain.utils.run_opts as run_opts  # which SpeechBrain 1.0 does not have

hparams = load_hyperpyyaml('''
halving: !new:speechbrain.nnet.schedulers.Halving
counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: 3
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: save
    recoverables:
        halving: !ref <halving>
        counter: !ref <counter>
''')
halving, saver = hparams["halving"], hparams["checkpointer"]
halving.lr = 0.5
saver.save_checkpoint()
halving.lr = 7.0
saver.recover_if_possible()
print(halving.lr, type(saver) is ddpkit.checkpoints.Checkpointer, Brain.__module__, type(hparams["counter"]).__module__)
print(checkpoints.DEFAULT_TRANSFER_HOOKS is ddpkit.checkpoints.DEFAULT_TRANSFER_HOOKS)
print(checkpoints.DEFAULT_TRANSFER_HOOKS[bytes] is print, checkpoints.KEYS_MAPPING)
print(run_opts.RunOptions.__module__, hasattr(run_opts, "HELP_TEXTS"))
"""  # noqa: E501


def test_modules_of_speechbrain_are_saved_by_ddpkit_in_python_and_in_yaml(start):
    lines = start(CORE, warm=True).out.splitlines()
    assert lines[0] == "0.5 True ddpkit.brain ddpkit.epoch_loop"
    assert lines[1:] == ["True", "True {'.old': '.new'}", "ddpkit.run_opts False"]
