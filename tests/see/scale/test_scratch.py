"""In a slice a recipe writes into a scratch folder, whatever folder it names itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.launch import SLICE, SlicePlan, without_launch
from ddpkit.run_opts import RunOptions


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Make this process a slice, in a folder of the user's with a recipe's YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hparams.yaml").write_text(
        "output_folder: results\nlr: 0.1\nsave: !ref <output_folder>/save\n"
    )
    (tmp_path / "other.yaml").write_text("lr: 0.1\n")
    (tmp_path / "scratch").mkdir()
    found = SlicePlan(
        str(tmp_path / "scratch"),
        str(tmp_path / "scratch" / "result.json"),
        options={"strategy": "zero1"},
    )
    monkeypatch.setenv(SLICE, found.text())
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        None,
        "",
        "lr: 0.1",
        "output_folder: mine",
        "lr: 0.1\noutput_folder: mine\n",
        "output_folder: !ref <lr>/mine\nlr: 0.1",
        "{output_folder: mine, lr: 0.1}",
        {"output_folder": "mine"},
        {"lr": 0.1},
    ],
)
def test_the_output_folder_of_the_yaml_is_in_the_scratch_folder(plan, overrides):
    hparams = ddpkit.load_hparams("hparams.yaml", overrides)
    assert hparams["output_folder"] == str(plan.output_folder)
    assert hparams["save"] == f"{plan.output_folder}/save"
    assert hparams["lr"] == 0.1


def test_a_yaml_without_an_output_folder_stays_as_it_is(plan):
    assert ddpkit.load_hparams("other.yaml", "lr: 0.2") == {"lr": 0.2}


def test_no_folder_of_the_user_is_made(plan, tmp_path):
    Checkpointer("results/save", {})
    ddpkit.create_experiment_directory("results")
    assert not Path("results").exists()
    ddpkit.create_experiment_directory(plan.output_folder)
    assert plan.output_folder.is_dir(), "the recipe prepares its data there"


def test_the_plan_wins_over_the_options_of_the_recipe(plan):
    options = RunOptions(
        strategy="fsdp",
        ckpt_interval_steps=3,
        time_limit="1s",
        debug=True,
        resume="never",
        device="cpu",
    )
    found = options.resolved({"test_only": True})
    assert (found.strategy, found.measure_steps, found.resume, found.time_limit) == (
        "zero1",
        "all",
        "auto",
        None,
    )
    assert (found.ckpt_interval_steps, found.debug, found.test_only, found.noprogressbar) == (
        0,
        False,
        False,
        True,
    )


def test_programs_that_a_rank_starts_are_no_slices():
    assert without_launch({SLICE: "{}", "HOME": "/root"}) == {"HOME": "/root"}
