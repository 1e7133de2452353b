"""The experiment's folder, in one process."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ddpkit.base import PROCESS
from ddpkit.errors import ConfigError, FolderInUseError, MissingFileError
from ddpkit.experiment import (
    LOCK_NAME,
    close_experiment,
    create_experiment_directory,
    get_environment_description,
)
from ddpkit.logger import get_logger
from ddpkit.run_opts import parse_arguments
from ddpkit.train_logger import FileTrainLogger
from tests.launching import Run, python, soon

YAML = """
seed: 3
folder: !ref results/<seed>
model: !new:torch.nn.Linear
    in_features: !ref <seed>
    out_features: 2
"""


@pytest.fixture(autouse=True)
def _close():
    yield
    close_experiment()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(YAML)
    return path


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_NAME)


def create(folder, *args, **kwargs):
    create_experiment_directory(folder, *args, **{"save_env_desc": False, **kwargs})


def test_a_folder_of_another_run_is_refused_and_nothing_is_written(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr("ddpkit.checkpointing.storage.GRACE_SECONDS", 0.0)
    folder = tmp_path / "results"
    folder.mkdir()
    with (folder / LOCK_NAME).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FolderInUseError, match="in use by another run"):
            create(folder, recipe)
    assert names_in(folder) == []


@pytest.mark.costly
def test_what_is_in_the_folder(tmp_path, recipe, capsys):
    folder = tmp_path / "results" / "3"
    create_experiment_directory(str(folder), hyperparams_to_save=str(recipe))
    get_logger("ddpkit.tests").debug("detail")
    get_logger("ddpkit.tests").info("news")
    FileTrainLogger(tmp_path / "train_log.txt").log_stats(
        {"epoch": 1},
        {"loss": 0.5},
        verbose=False,
    )
    names = ["env.log", "hyperparams.yaml", "log.txt", "metrics.jsonl", "test_experiment.py"]
    assert names_in(folder) == names
    assert (folder / "test_experiment.py").read_text() == Path(__file__).read_text()
    log = (folder / "log.txt").read_text()
    assert "detail" in log
    assert "news" in log
    assert capsys.readouterr().err == f"Experiment folder: {folder}\nnews\n"
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "stats"]
    assert events[0]["arguments"] == sys.argv


def test_hyperparams_are_resolved(tmp_path, recipe):
    create(tmp_path / "out", recipe)
    lines = (tmp_path / "out" / "hyperparams.yaml").read_text().splitlines()
    assert lines[0].startswith("# Generated 20")
    assert lines[1:3] == [f"# {recipe}", "# yamllint disable"]
    assert "folder: results/3" in lines
    assert "    in_features: 3" in lines or "  in_features: 3" in lines


@pytest.mark.parametrize(
    "overrides",
    [{"seed": 4, "model": {"out_features": 5}}, ("seed: 4\nmodel: {out_features: 5}")],
)
def test_overrides(tmp_path, recipe, overrides):
    before = repr(overrides)
    create(tmp_path / "out", recipe, overrides)
    text = (tmp_path / "out" / "hyperparams.yaml").read_text()
    assert "folder: results/4" in text
    assert "in_features: 4" in text
    assert "out_features: 5" in text
    assert repr(overrides) == before


def test_the_caller_s_overrides_are_not_changed(tmp_path, recipe):
    overrides = {"nested": {"a": "!ref <seed>"}, "path": tmp_path}
    nested = overrides["nested"]
    create(tmp_path / "out", recipe, overrides)
    assert overrides == {"nested": {"a": "!ref <seed>"}, "path": tmp_path}
    assert overrides["nested"] is nested
    assert f"path: {tmp_path}" in (tmp_path / "out" / "hyperparams.yaml").read_text()


def test_an_evaluation_alone_leaves_the_files_of_the_training(tmp_path, recipe, monkeypatch):
    folder = tmp_path / "out"
    create(folder, recipe)
    before = (folder / "hyperparams.yaml").read_text()
    monkeypatch.setattr("sys.argv", ["train.py", str(recipe), "--device=cpu", "--test_only"])
    parse_arguments()
    create(folder, recipe, {"seed": 4})
    assert (folder / "hyperparams.yaml").read_text() == before


def test_a_second_start_appends_to_the_log_and_overwrites_the_rest(tmp_path, recipe):
    folder = tmp_path / "out"
    create(folder, recipe)
    close_experiment()
    recipe.write_text(YAML.replace("seed: 3", "seed: 4"))
    create(folder, recipe)
    log = (folder / "log.txt").read_text()
    assert log.count("Experiment folder") == 2
    first, rule, second = log.partition("\n" + "=" * 80 + "\n")
    assert "Experiment folder" in first
    assert rule
    assert "Experiment folder" in second
    assert "seed: 4" in (folder / "hyperparams.yaml").read_text()
    assert (folder / "metrics.jsonl").read_text().count('"start"') == 2


@pytest.mark.costly
def test_the_script_s_own_folder_may_be_the_experiment_s(tmp_path):
    script = tmp_path / "train.py"
    text = f"from ddpkit.experiment import *\ncreate_experiment_directory({str(tmp_path)!r})\n"
    script.write_text(text)
    exec(compile(text, str(script), "exec"), {})
    assert script.read_text() == text


@pytest.mark.costly
def test_a_caller_without_a_file_is_fine(tmp_path):
    exec("create(folder)", {"create": create_experiment_directory, "folder": tmp_path / "out"})
    assert names_in(tmp_path / "out") == ["env.log", "log.txt", "metrics.jsonl"]


def test_closing_puts_everything_back(tmp_path):
    handlers = list(logging.getLogger().handlers)
    create(tmp_path / "a")
    create(tmp_path / "b")
    assert PROCESS.log is not None
    close_experiment()
    assert PROCESS.log is None
    assert logging.getLogger().handlers == handlers
    get_logger("ddpkit.tests").warning("not written")
    assert "not written" not in (tmp_path / "b" / "log.txt").read_text()


def test_an_own_logging_configuration(tmp_path):
    config = tmp_path / "log-config.yaml"
    config.write_text(
        "version: 1\ndisable_existing_loggers: false\n"
        "handlers: {file_handler: {class: logging.FileHandler, filename: nowhere.txt}}\n"
        "loggers: {ddpkit.experiment: {handlers: [file_handler], level: INFO}}\n"
    )
    try:
        create(tmp_path / "out", log_config=config)
        assert "Experiment folder" in (tmp_path / "out" / "log.txt").read_text()
    finally:
        for handler in list(logging.getLogger("ddpkit.experiment").handlers):
            logging.getLogger("ddpkit.experiment").removeHandler(handler)
            handler.close()


def test_log_config_on_the_command_line_is_used(tmp_path, recipe, monkeypatch, capsys):
    config = tmp_path / "log-config.yaml"
    config.write_text(
        "version: 1\ndisable_existing_loggers: false\nformatters: {own: {format: 'OWN "
        "%(message)s'}}\n"
        "handlers: {console: {class: logging.StreamHandler, formatter: own}}\n"
        "loggers: {ddpkit.experiment: {handlers: [console], level: INFO}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", str(recipe), f"--log_config={config}"])
    parse_arguments()
    try:
        create(tmp_path / "out")
        assert f"OWN Experiment folder: {tmp_path / 'out'}" in capsys.readouterr().err
    finally:
        logging.getLogger("ddpkit.experiment").handlers.clear()
    monkeypatch.setattr(sys, "argv", ["train.py", str(recipe)])
    create(tmp_path / "out")
    assert "OWN" not in capsys.readouterr().err  # another command line


def test_log_config_that_is_not_there(tmp_path, recipe):
    with pytest.raises(MissingFileError, match="log_config='nowhere.yaml': there is no such file"):
        parse_arguments([str(recipe), "--log_config=nowhere.yaml"])


# ---------------------------------------------------------------------------------------- bad input


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match="experiment_directory='.*file/out' cannot be written: Not a directory",
    ):
        create(tmp_path / "file" / "out")
    assert PROCESS.log is None


def test_a_read_only_folder(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(
        ConfigError,
        match="experiment_directory='.*out' cannot be written: Permission denied",
    ):
        create(folder)


def test_a_full_disk_leaves_no_half_written_file(tmp_path, recipe, monkeypatch):
    folder = tmp_path / "out"
    create(folder, recipe)
    before = (folder / "hyperparams.yaml").read_text()

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        ConfigError,
        match="experiment_directory='.*out' cannot be written: No space left",
    ):
        create(folder, recipe)
    assert (folder / "hyperparams.yaml").read_text() == before
    assert not list(folder.glob("*.unfinished*"))


def test_missing_hyperparams(tmp_path):
    with pytest.raises(
        MissingFileError,
        match="hyperparams_to_save='.*none.yaml': '.*none.yaml' does not exist",
    ):
        create(tmp_path / "out", tmp_path / "none.yaml")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("a: [", None),
        ("a: !ref <b>", None),
        ("a: 1", "a: ["),
        ("a: 1\nb: 2", "- list"),
        ("", {"a": 1}),
    ],
)
def test_hyperparams_that_cannot_be_resolved(tmp_path, recipe, text, overrides):
    recipe.write_text(text)
    with pytest.raises(
        ConfigError,
        match="hyperparams_to_save='.*train.yaml' with overrides=.* cannot be resolved",
    ):
        create(tmp_path / "out", recipe, overrides)


# ------------------------------------------------------------------------------ uncaught exceptions

SCRIPT = """
import os, sys
os.environ.update({environment!r})
from ddpkit.experiment import create_experiment_directory
create_experiment_directory({folder!r}, save_env_desc=False)
try:
    1 / 0
except ZeroDivisionError as error:
    raise ValueError("the reason") from error
"""


def start(tmp_path, **environment):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT).format(folder=str(tmp_path / "out"), environment=environment)
    )
    return Run(python(str(script)), tmp_path, warm=True).wait()


def test_the_exception_that_ends_the_run_is_logged_and_shown_once(tmp_path):
    done = start(tmp_path)
    assert done.code == 1
    assert done.out == ""
    assert done.err.count("Traceback") == 2  # the cause's and its own, as Python prints them
    assert "ERROR: Uncaught ValueError:\nTraceback" in done.err
    assert done.err.endswith("ValueError: the reason\n")
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "ERROR   ddpkit.experiment: Uncaught ValueError:" in log
    assert "ZeroDivisionError: division by zero" in log
    event = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["type"], event["message"]) == (
        "exception",
        "ValueError",
        ("the reason"),
    )


def test_2_5_the_exception_of_another_rank_is_logged_and_left_for_torchrun(tmp_path):
    report = tmp_path / "error.json"
    (tmp_path / "out").mkdir()
    done = start(
        tmp_path,
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="2",
        TORCHELASTIC_ERROR_FILE=str(report),
    )
    assert done.code == 1
    assert "ERROR: [rank: 1] Uncaught ValueError:" in done.err
    assert "ValueError: the reason" in (tmp_path / "out" / "log.rank1.txt").read_text()
    message = json.loads(report.read_text())["message"]
    assert message["message"] == "ValueError: the reason"
    assert "ZeroDivisionError" in message["extraInfo"]["traceback"]
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: the reason")
    assert names_in(tmp_path / "out") == ["log.rank1.txt"]


def test_the_failure_that_ends_the_run_replaces_an_earlier_report(tmp_path):
    report = tmp_path / "error.json"
    report.write_text("first")
    assert start(tmp_path, TORCHELASTIC_ERROR_FILE=str(report)).code == 1
    assert json.loads(report.read_text())["message"]["message"] == "ValueError: the reason"


def test_the_previous_hook_is_called(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(PROCESS, "failed", None)
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments))
    create(tmp_path / "out")
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    assert seen == [(ValueError, error, None)]
    assert "Uncaught ValueError" in capsys.readouterr().err
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count('"exception"') == 1


# -------------------------------------------------------------------------------------- environment


@pytest.mark.costly
def test_the_environment_description_is_quick_and_complete():
    started = time.perf_counter()
    text = get_environment_description(Path(__file__).parent)
    assert soon(started, 5)
    for part in (
        "Python 3.",
        "torch==",
        "numpy==",
        "Git revision of",
        "CUDA devices",
        "\nprocesses: 1\n",
    ):
        assert part in text


@pytest.mark.costly
def test_the_git_revision(tmp_path):
    assert f"Git revision of {tmp_path}: none" in get_environment_description(tmp_path)

    def git(*command):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)

    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--allow-empty", "-m", "first")
    found = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"Git revision of {tmp_path}: {found.stdout.strip()}" in get_environment_description(
        tmp_path
    )


# ----------------------------------------------------------------------- what the recipe is made of

OWN_MODULES = {
    "models.py": "class Net:\n    pass\n",
    "parts/__init__.py": "",
    "parts/blocks.py": "class Block:\n    pass\n",
    "more.yaml": "inner: !name:extra.made\n",
    "extra.py": "def made():\n    pass\n",
    "unnamed.py": "",
    "train.yaml": (
        "net: !new:models.Net\nblock: !name:parts.blocks.Block\nmore: !include:more.yaml\n"
        "linear: !name:torch.nn.Linear\nswapped: null\n"
    ),
    "train.py": (
        "import ddpkit\n"
        "overrides = 'swapped: !name:swapped.make'\n"
        "ddpkit.load_hparams('train.yaml', overrides)\n"
        "ddpkit.create_experiment_directory('out', 'train.yaml', overrides)\n"
    ),
    "swapped.py": "def make():\n    pass\n",
}


def test_the_folder_keeps_the_modules_beside_the_script_that_the_yaml_names(tmp_path):
    for name, text in OWN_MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = Run(python("train.py"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    kept = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.py")}
    assert kept == {
        "train.py",
        "models.py",
        "parts/__init__.py",
        "parts/blocks.py",
        "extra.py",
        "swapped.py",
    }
    assert {name: (tmp_path / "out" / name).read_text() for name in kept} == {
        name: OWN_MODULES[name] for name in kept
    }


@pytest.mark.parametrize("text", ["", "- 1\n"])
def test_hyperparams_without_keys_are_kept_as_they_are(tmp_path, recipe, text):
    recipe.write_text(text)
    create(tmp_path / "out", recipe)
    assert (tmp_path / "out" / "hyperparams.yaml").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: !ref <c>\n", "train.yaml:2, key 'b': !ref <c> names nothing: 'c' is no key of"),
        ("a: 1\na: 2\n", "train.yaml:2, key 'a': the key is there twice, first in line 1"),
        (
            "a: !ref <b>/x\nb: !ref <a>/y\n",
            ("train.yaml:1, key 'a': the references go round in a circle: a -> b -> a"),
        ),
    ],
)
def test_a_mistake_in_hyperparams_is_told_with_its_line(tmp_path, recipe, text, said):
    recipe.write_text(text)
    with pytest.raises(ConfigError, match="cannot be resolved") as caught:
        create(tmp_path / "out", recipe)
    assert said in str(caught.value)
