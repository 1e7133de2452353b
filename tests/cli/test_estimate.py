"""``python -m ddpkit estimate`` as it is typed, where nothing needs to be rehearsed."""

from __future__ import annotations

import sys

import pytest

from ddpkit import parse_arguments
from ddpkit.cli import main
from ddpkit.errors import ConfigError


@pytest.fixture(autouse=True)
def _recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")


def test_the_help_says_what_goes_to_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--help"])
    assert ended.value.code == 0
    assert "All other words go to the recipe" in capsys.readouterr().out


def test_a_recipe_is_needed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--memory=24GB"])
    assert ended.value.code == 2
    assert "give the recipe, such as train.py hparams.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other.py"], "there is no script 'other.py'"),
        (["train.py", "--nproc", "two"], "--nproc='two': give numbers of processes"),
        (["train.py", "--nproc=0"], "--nproc='0': give numbers of processes"),
        (["train.py", "--memory", "lots"], "--memory='lots': give an amount with its unit"),
        (["train.py", "--memory=0GB"], "--memory='0GB': give an amount with its unit"),
        (["train.py", "--json", "."], "it is a folder"),
        (["train.py"], "it was started"),
    ],
)
def test_what_cannot_work_is_one_sentence(capsys, words, said):
    assert main(["estimate", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_launcher_is_refused(capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["estimate", "train.py"]) == 1
    assert "an estimate is made in one process" in capsys.readouterr().err


def test_the_option_starts_this_script_again_and_no_other(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "hparams.yaml"])
    with pytest.raises(ConfigError, match="use `python -m ddpkit estimate`"):
        parse_arguments(["hparams.yaml", "--estimate"])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--estimate"], ["--nproc=1,2,4,8", "--", "train.py", "hparams.yaml"]),
        (
            ["--estimate=2,24GB", "--lr=3"],
            ["--nproc=2", "--memory=24GB", "--", "train.py", "hparams.yaml", "--lr=3"],
        ),
        (
            ["--nproc", "4", "--estimate=24GB"],
            ["--nproc=4", "--memory=24GB", "--", "train.py", "hparams.yaml"],
        ),
    ],
)
def test_the_option_becomes_the_command(monkeypatch, words, command):
    monkeypatch.setattr(sys, "argv", ["train.py", "hparams.yaml", *words])
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-X", "dev", "train.py", "hparams.yaml", *words]
    )

    class StartedError(Exception):
        pass

    def execv(program, given):
        assert program == sys.executable
        raise StartedError(given[1:])

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(StartedError) as started:
        parse_arguments()
    assert started.value.args[0] == ["-m", "ddpkit", "estimate", *command]
