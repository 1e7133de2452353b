"""``python -m ddpkit lr-find`` as it is typed, where nothing needs to be trained."""

from __future__ import annotations

import pytest

from ddpkit.cli import main


@pytest.fixture(autouse=True)
def _recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")


def test_the_help_says_what_goes_to_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lr-find", "--help"])
    assert ended.value.code == 0
    assert "All other words go to the recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the recipe, such as train.py hparams.yaml"),
        (["--steps", "30"], "give the recipe, such as train.py hparams.yaml"),
        (["train.py", "--steps", "none"], "'none' is not a whole number from 1 on"),
        (["train.py", "--from", "0"], "'0' is no number above 0"),
        (["train.py", "--to=nan"], "'nan' is no number above 0"),
    ],
)
def test_wrong_usage(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(["lr-find", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other.py"], "there is no script 'other.py'"),
        (["train.py", "--from", "1", "--to", "1"], "rise from the first to the last"),
        (["train.py", "--steps", "19"], "a curve of fewer than 20 steps"),
        (["train.py", "--plot", "lr.txt"], "a plot is a file that ends in"),
        (["train.py", "--json", "."], "it is a folder"),
        (["train.py"], "it was started"),
    ],
)
def test_what_cannot_work_is_one_sentence(capsys, words, said):
    assert main(["lr-find", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_launcher_is_refused(capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["lr-find", "train.py"]) == 1
    assert "lr-find starts the processes of this machine itself" in capsys.readouterr().err
