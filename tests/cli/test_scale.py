"""``python -m ddpkit scale`` as it is typed, where nothing needs to be measured."""

from __future__ import annotations

import importlib.util

import pytest

from ddpkit.cli import main
from ddpkit.cli.recipe_words import split_words

SWITCHES = ("--strong",)
WITH_VALUE = ("--nproc", "--plot")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    (tmp_path / "hparams.yaml").write_text("device: cpu\n")
    return tmp_path


def test_what_is_no_option_of_the_command_goes_to_the_recipe_in_its_order():
    recipe = ["train.py", "hparams.yaml", "--lr", "0.1", "--nproc_of_mine", "3", "--rounds", "9"]
    words = [
        "train.py",
        "--nproc",
        "1,2",
        "hparams.yaml",
        "--lr",
        "0.1",
        "--strong",
        "--plot=a.svg",
    ]
    words += ["--nproc_of_mine", "3", "--", "--rounds", "9"]
    own = ["--nproc", "1,2", "--strong", "--plot=a.svg"]
    assert split_words(words, SWITCHES, WITH_VALUE) == (own, recipe)


def test_join_takes_the_files_that_follow():
    words = ["--join", "a.json", "b.json", "--plot", "c.svg"]
    assert split_words(words, SWITCHES, WITH_VALUE, ("--join",)) == (
        ["--join", "a.json", "b.json", "--plot", "c.svg"],
        [],
    )


def test_the_help_says_what_goes_to_the_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["scale", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "All other words go to the recipe" in text
    assert max(map(len, text.splitlines())) <= 105


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the recipe, such as train.py hparams.yaml"),
        (["--nproc", "1"], "give the recipe, such as train.py hparams.yaml"),
        (["train.py", "--strong", "--weak"], "not allowed with argument --strong"),
        (["train.py", "--rounds", "0"], "'0' is not a whole number from 1 on"),
        (["train.py", "--seconds=-1"], "'-1' is no number above 0"),
        (["train.py", "--nproc"], "expected one argument"),
        (
            ["train.py", "--join", "a.json"],
            "--join measures nothing, and takes no recipe: train.py",
        ),
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(recipe, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(["scale", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other.py", "hparams.yaml"], "there is no script 'other.py'."),
        (
            ["train.py", "hparams.yaml", "--nproc", "one"],
            "--nproc='one': give numbers of processes",
        ),
        (["train.py", "hparams.yaml", "--ways", "mpi"], "'mpi' is no way to run."),
        (
            ["train.py", "hparams.yaml", "--ways", "dp"],
            "--ways=dp with --nproc=2 is one process with 2 GPUs, and 0",
        ),
        (["train.py", "--plot", "scale.gif"], "a plot is a file that ends in .svg, .png, .pdf."),
        (
            ["train.py", "--json", "train.py/scale.json"],
            "--json='train.py/scale.json' cannot be written",
        ),
        (["train.py", "--json", "."], "--json='.' cannot be written: it is a folder."),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(recipe, capsys, words, said):
    assert main(["scale", *words]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert "it was started" not in captured.err
    assert "Traceback" not in captured.err


def test_a_plot_without_matplotlib_says_what_to_install(recipe, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    assert main(["scale", "train.py", "--plot", "scale.svg"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
