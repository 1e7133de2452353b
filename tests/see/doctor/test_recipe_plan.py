"""What `--recipe` says of a run before anything of it is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpkit.cli import main
from ddpkit.errors import ConfigError
from ddpkit.see.doctor.recipe_plan import plan_of

YAML = """
seed: 7
data: !PLACEHOLDER
output_folder: !ref results/<seed>
net: !new:no_such_package.Network
    num_layers: 3
train_loader_kwargs:
    num_workers: 3
valid_loader_kwargs: {num_workers: 1}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hparams.yaml").write_text(YAML)
    return str(tmp_path / "train.py"), str(tmp_path / "hparams.yaml")


def test_folder_and_workers_come_from_the_file_and_its_overrides(recipe):
    plan = plan_of((*recipe, "--data=/data", "--precision=bf16", "--noprogressbar"))
    assert (plan.output_folder, plan.workers) == ("results/7", 3)
    plan = plan_of((*recipe, "--data", "/data", "--seed", "8", "--output_folder=other"))
    assert plan.output_folder == "other"


def test_a_recipe_without_a_file_says_nothing():
    assert plan_of(("train.py", "--seed=1")) == plan_of(())


def test_where_checkpoints_are_saved_first_comes_from_there_too(recipe):
    assert plan_of((*recipe, "--data=/data", "--ckpt_local=/scratch")).ckpt_local == "/scratch"
    with Path(recipe[1]).open("a") as file:
        file.write("ckpt_local: /nvme\n")
    assert plan_of((*recipe, "--data=/data")).ckpt_local == "/nvme"


def test_a_file_that_says_neither_leaves_both_open(tmp_path):
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    plan = plan_of(("train.py", str(tmp_path / "hparams.yaml")))
    assert (plan.output_folder, plan.workers, plan.ckpt_local) == ("", None, "")


def test_a_file_that_cannot_be_read_is_an_error_with_the_reason(recipe, capsys):
    with pytest.raises(ConfigError, match="'data' is a !PLACEHOLDER"):
        plan_of(recipe)
    assert main(["doctor", "--recipe", *recipe]) == 1
    assert "!PLACEHOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [("lr: [1\n", ()), ("lr: 1\nlr: 2\n", ()), ("lr: 1\n", ("--lr=[",)), ("lr: !ref <no>\n", ())],
)
def test_a_file_that_is_no_yaml_is_told_in_a_sentence(recipe, text, words, capsys):
    Path(recipe[1]).write_text(text)
    assert main(["doctor", "--device=cpu", "--recipe", *recipe, "--", *words]) == 1
    assert "hparams.yaml' cannot be read: " in capsys.readouterr().err
