"""A recipe whose loader is slow, and one whose loader is fast: measured on real processes, and what
is said of it.
"""

from __future__ import annotations

import json
import textwrap

import pytest

from ddpkit.see.doctor.checks import recipe_loader
from ddpkit.see.doctor.checks.recipe_loader import LoaderSpeed, finding
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM
from tests.launching import Run, python
from tests.see.scale.results import result

from .sites import site_of

RECIPE = """
    import sys, time
    from pathlib import Path
    import torch
    import ddpkit

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 2000

        def __getitem__(self, index):
            time.sleep(hparams["seconds_of_a_sample"])
            return torch.ones(4)

    class Brain(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            time.sleep(hparams["seconds_of_a_step"])
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            Path("trained").touch()

    run_opts = {}
    hparams = {"workers": 0, "seconds_of_a_sample": 0.0, "seconds_of_a_step": 0.02}
    if len(sys.argv) > 1:
        file, run_opts, overrides = ddpkit.parse_arguments()
        hparams = ddpkit.load_hparams(file, overrides)
        ddpkit.create_experiment_directory(hparams["output_folder"], file, overrides)
    brain = Brain({"net": torch.nn.Linear(4, 1)}, lambda p: torch.optim.SGD(p, lr=0.1), hparams, run_opts)
    brain.fit(range(1, 3), Data(), train_loader_kwargs={"batch_size": 4, "num_workers": hparams["workers"]})
"""  # noqa: E501
YAML = """\
    output_folder: results
    workers: 0
    seconds_of_a_sample: 0.0
    seconds_of_a_step: 0.02
"""


@pytest.fixture
def doctor(tmp_path):
    """Run the command on the recipe with other values, and return what it says of the loader."""
    (tmp_path / "train.py").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "hparams.yaml").write_text(textwrap.dedent(YAML))

    def run(*words, files=("train.py", "hparams.yaml"), values=()):
        command = python("-m", "ddpkit", "doctor", "--device=cpu", "--json", *words)
        command += ["--recipe", *files, "--", *values]
        done = Run(command, tmp_path, {"OMP_NUM_THREADS": "1"}, name="../run", warm=True).wait(180)
        assert {path.name for path in tmp_path.iterdir()} == {"train.py", "hparams.yaml"}, (
            "nothing is written"
        )
        found = json.loads(done.out)["findings"]
        [of_loader] = [one for one in found if one["name"] == recipe_loader.NAME]
        return of_loader, done.code

    return run


def test_a_slow_loader_is_found(doctor):
    """Without workers 100 samples a second, of which a step takes 200."""
    found, code = doctor("--workers=0", values=["--seconds_of_a_sample=0.01"])
    assert (found["verdict"], code) == ("problem", 1)
    details = found["details"]
    assert details["samples_per_second"]["0"] < 105
    assert 120 < details["needed_samples_per_second"] < 205


@pytest.mark.slow
def test_how_many_workers_would_do(doctor):
    found, code = doctor("--workers=4", values=["--seconds_of_a_sample=0.01"])
    assert (found["verdict"], code) == ("problem", 1)
    details = found["details"]
    assert details["samples_per_second"]["0"] < 105
    assert 120 < details["needed_samples_per_second"] < 205
    assert details["enough_workers"] in {2, 3, 4}
    assert found["advice"].startswith(f"num_workers: {details['enough_workers']} would do")


@pytest.mark.slow
@pytest.mark.parametrize("files", [("train.py", "hparams.yaml"), ("train.py",)])
def test_a_fast_loader_is_well(doctor, files):
    """The second recipe has no YAML."""
    found, _ = doctor(files=files)
    assert found["verdict"] in {"ok", "look"}, (
        "on busy cores a step waits, whatever the loader does"
    )
    assert (
        found["details"]["samples_per_second"]["0"]
        > 2 * found["details"]["needed_samples_per_second"]
    )


@pytest.mark.slow
@pytest.mark.launch
def test_the_loaders_of_two_ranks_are_measured_together_however_long_that_takes(doctor):
    found, _ = doctor("--nproc=2", "--timeout=8", values=["--seconds_of_a_sample=0.01"])
    assert found["verdict"] == "problem"
    assert 100 < found["details"]["samples_per_second"]["0"] < 205


@pytest.mark.slow
def test_a_recipe_that_fails_is_a_problem_with_its_words(doctor):
    found, code = doctor(values=["--seconds_of_a_step=-1"])
    assert (found["verdict"], code) == ("problem", 1)
    assert "sleep length must be non-negative" in found["measured"]


# ------------------------------------------------------------------------------- what is said of it


def test_without_a_recipe_nothing_is_said():
    assert list(recipe_loader.look(site_of())) == []


def speed(waits, *, needed=1000.0, own=0, **rates):
    return LoaderSpeed(
        {int(name[1:]): rate for name, rate in rates.items()},
        own,
        needed,
        waits,
        len(rates) > 1,
    )


def said(of):
    return finding(of, sorted(of.rates))


def test_a_number_of_workers_that_would_do_is_named():
    slow = said(speed(0.6, w0=400.0, w1=700.0, w2=1300.0, w4=2000.0))
    assert (slow.verdict, slow.measured) == (
        PROBLEM,
        "400 samples/s with 0 workers; 60 % of a step waits for data",
    )
    assert slow.advice == "num_workers: 2 would do, in the arguments of the loader."
    assert slow.cost == "steps take 2.5 times as long as they could"
    assert slow.lines[1].split() == ["0", "400", "the", "recipe's"]


def test_a_loader_that_is_a_little_slow_is_worth_a_look():
    assert said(speed(0.15, own=1, w0=500.0, w1=850.0)).verdict == LOOK


def test_a_loader_that_is_fast_is_well_also_where_it_is_hardly_faster_than_the_steps():
    assert said(speed(0.02, own=2, w0=400.0, w2=1050.0)).verdict == OK
    assert said(speed(0.2, own=2, w0=400.0, w2=5000.0)).verdict == OK


def test_a_loader_without_workers_that_is_twice_as_fast_as_the_steps_takes_a_third_of_each():
    slow = said(speed(0.33, w0=2000.0, w1=1900.0))
    assert slow.verdict == PROBLEM
    assert slow.advice.startswith("num_workers: 1 would do")


def test_where_only_the_training_waits_the_loader_is_not_to_blame():
    busy = said(speed(0.4, w0=50000.0, w1=60000.0))
    assert busy.verdict == LOOK
    assert busy.advice.startswith("The loader alone is fast enough")


def test_where_workers_wait_for_files_more_of_them_are_advised():
    slow = said(speed(0.8, w0=100.0, w1=100.0, w2=200.0))
    assert "num_workers: 2 is 2.0 times as fast, and still too slow" in slow.advice
    assert "try more than cores, up to 11" in slow.advice


def test_where_no_number_of_workers_is_faster_the_work_is_to_blame():
    slow = said(speed(0.8, own=2, w0=90.0, w2=100.0))
    assert slow.advice.startswith("Of 0, 2 workers none is faster. Do less for each sample")


def test_batches_that_the_recipe_makes_have_workers_of_their_own():
    assert said(speed(0.8, w0=100.0)).advice.startswith("The recipe makes its batches itself")


def test_an_epoch_of_one_batch_is_told_to_be_too_short():
    assert recipe_loader._too_short().verdict == LOOK
    assert recipe_loader.speed_of(result(loader_workers=0, loader_rates={})) is None
    measured = recipe_loader.speed_of(result(2, loader_workers=1, loader_rates={"1": [80.0, 90.0]}))
    assert (measured.rates, measured.own) == ({1: 170.0}, 1)
