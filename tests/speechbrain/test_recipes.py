"""Untouched recipes on SpeechBrain's own core, and with ddpkit's in its place: on one process and
on two.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.cells import some_of
from tests.launching import Run, python, torchrun
from tests.speechbrain.trained import Trained

RECIPES = Path(__file__).parent / "recipes"
RUN = ("-m", "ddpkit.speechbrain", "train.py", "hparams.yaml", "--device=cpu", "--noprogressbar")

# What each rank gets on two processes, or what one process adds up, so that a step has the same
# samples.
HALVES = {
    "keywords": "--batch_size=4",
    "denoise": "--batch_size=2",
    "phones": "--grad_accumulation_factor=1",
}
WHOLE = {"keywords": (), "denoise": (), "phones": ("--grad_accumulation_factor=2",)}
# The mean over samples, and not over batches: they differ where batches do.
MEANS = {"phones": r"train loss: [^,]*, "}


class Recipe:
    """Copies of one recipe, each in a folder of its own with what it has trained."""

    def __init__(self, name, parent, path):
        self.name = name
        self.parent = parent
        self.path = path

    def run(self, folder, command, *, answered, again=False, warm=True):
        place = self.parent / folder
        if not again:
            shutil.copytree(RECIPES / self.name, place)
        environment = {"PYTHONPATH": self.path, "DDPKIT_SPEECHBRAIN": "1" if answered else "0"}
        run = Run(command, place, environment, warm=warm).wait(240)
        assert run.code == 0, f"{run.out}\n{run.err}"
        return run, Trained(place / "results", MEANS.get(self.name))


@pytest.fixture(params=some_of(["keywords", "phones", "denoise"], ["keywords"]))
def recipe(request, tmp_path, speechbrain):
    return Recipe(request.param, tmp_path, speechbrain)


@pytest.mark.launch
def test_one_process_equals_speechbrains_core_and_two_processes_equal_one(recipe):
    """One is started as a user does, from nothing; of several ranks the next test starts some."""
    _, own = recipe.run("own", python(*RUN), answered=False)
    run, one = recipe.run("one", python(*RUN), answered=True, warm=recipe.name != "keywords")
    assert [line for line in run.lines if "answers speechbrain.core" in line] == run.lines[:1]
    one.assert_same(own)
    if WHOLE[recipe.name]:
        _, one = recipe.run("whole", python(*RUN, *WHOLE[recipe.name]), answered=True)
    run, two = recipe.run("two", torchrun(2, *RUN, HALVES[recipe.name]), answered=True)
    assert sum("answers speechbrain.core" in line for line in run.lines) == 1
    two.assert_same(one)


@pytest.mark.exhaustive
@pytest.mark.launch
def test_ranks_and_workers_that_ddpkit_starts_itself_are_answered_too(tmp_path, speechbrain):
    recipe = Recipe("keywords", tmp_path, speechbrain)
    _, one = recipe.run("one", python(*RUN), answered=True)
    run, two = recipe.run(
        "two",
        python(*RUN, "--batch_size=4", "--num_workers=1", "--nproc=2"),
        answered=True,
        warm=False,
    )
    assert sum("answers speechbrain.core" in line for line in run.lines) == 1
    two.assert_same(one)


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False], ids=["there", "back"])
def test_a_run_goes_over_in_the_middle_and_back(tmp_path, speechbrain, there):
    recipe = Recipe("keywords", tmp_path, speechbrain)
    recipe.run("whole", python(*RUN, "--number_of_epochs=2"), answered=not there)
    _, continued = recipe.run("whole", python(*RUN), answered=there, again=True)
    _, alone = recipe.run("alone", python(*RUN), answered=not there)
    without_test = [line for line in continued.log.splitlines() if line.startswith("epoch")]
    assert without_test == [line for line in alone.log.splitlines() if line.startswith("epoch")]
    for name, value in continued.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-4, atol=1e-6)


EVERYTHING = """
import importlib, logging, os, pkgutil, warnings
import ddpkit.speechbrain
import speechbrain
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
for found in pkgutil.walk_packages(speechbrain.__path__, "speechbrain.", onerror=lambda name: None):
    try:
        importlib.import_module(found.name)
        print(found.name)
    except Exception as error:
        print(found.name, type(error).__name__)
"""


@pytest.mark.slow
def test_every_module_of_speechbrain_can_be_imported_as_without_ddpkit(tmp_path, speechbrain):
    script = tmp_path / "everything.py"
    script.write_text(EVERYTHING)
    found = {}
    for answered in ("0", "1"):
        environment = {"PYTHONPATH": speechbrain, "DDPKIT_SPEECHBRAIN": answered}
        run = Run(python(str(script)), tmp_path, environment, answered, warm=True).wait(120)
        assert run.code == 0, run.err
        found[answered] = run.out.splitlines()
    assert found["1"] == found["0"]
    assert sum(" " not in line for line in found["1"]) > 100
