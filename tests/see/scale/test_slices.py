"""``python -m ddpkit scale`` as it is typed, with real processes of a recipe; and what they leave
behind: nothing.
"""

from __future__ import annotations

import json
import signal
import textwrap

import pytest

from tests.launching import Run, free_port, python, torchrun, wait_until

RECIPE = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import ddpkit
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.train_logger import FileTrainLogger

    class Line(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            assert stage is ddpkit.Stage.TRAIN or MODE == "trains", "a slice evaluates nothing"
            if MODE == "fails on several" and ddpkit.distributed.get_world_size() > 1:
                raise RuntimeError("not on several")
            if MODE == "never ends":
                Path(TOLD).touch()
                time.sleep(600)
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.mse_loss(predictions, batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.hparams.train_logger.log_stats({"step": self.step}, {"loss": float(loss)})
            if self.step == 3:
                self.checkpointer.save_checkpoint()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            assert MODE == "trains", "a slice ends no stage"

    MODE, TOLD = sys.argv.pop(1), str(Path("told").absolute())
    if MODE == "waits alone":
        Path(TOLD).touch()
        time.sleep(600)
    param_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(param_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], param_file, overrides)
    if MODE == "leaves":
        sys.exit()
    ddpkit.run_on_main(Path(hparams["output_folder"], "data.txt").write_text, args=["prepared"])
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    inputs = torch.linspace(-1, 1, 96).reshape(24, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    hparams["train_logger"] = FileTrainLogger("logs/train_log.txt")
    checkpointer = Checkpointer("checkpoints/save", {"net": net})
    brain = Line({"net": net}, lambda p: torch.optim.SGD(p, lr=0.1), hparams, run_opts, checkpointer)
    brain.fit(range(1, 3), data, data, train_loader_kwargs={"batch_size": 4})
    print("after fit")
"""  # noqa: E501
QUICK = ("--rounds=1", "--seconds=0.1")


@pytest.fixture
def scale(tmp_path):
    """Run the command on the recipe in a mode, in a folder with nothing else in it."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    (folder / "train.py").write_text(textwrap.dedent(RECIPE))
    (folder / "hparams.yaml").write_text("output_folder: results\nlr: 0.1\n")

    def start(mode, *words, warm=True, **env):
        command = python("-m", "ddpkit", "scale", "train.py", mode, "hparams.yaml", *QUICK, *words)
        env = {"TMPDIR": str(tmp_path / "tmp"), **env}
        run = Run(command, folder, env, name="../run", warm=warm)
        run.folder = folder
        return run

    return start


def left(run):
    """What is in the recipe's folder and in that of temporary files."""
    found = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    temporary = {path.name for path in (run.folder.parent / "tmp").glob("ddpkit-*")}
    return found - {"train.py", "hparams.yaml"} | temporary


def test_a_recipe_is_measured_on_one_process_and_on_two_and_nothing_of_it_stays(scale):
    run = scale("plain", "--json=scale.json").wait(180)
    assert run.code == 0, run.err
    assert "Weak scaling: a step has 4 samples for each process" in run.out
    assert [line.split()[:3] for line in run.out.splitlines()[4:6]] == [
        ["single,", "1", "process"],
        ["ddp,", "2", "processes"],
    ]
    one, two = json.loads((run.folder / "scale.json").read_text())["slices"]
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["samples"] == [4.0]
    assert two["samples"] == [4.0, 4.0]
    assert two["exchanged_bytes"] == 20
    assert two["steps"] >= 10
    for found in (one, two):
        assert sum(found["phases"][0].values()) == pytest.approx(found["seconds"] / found["steps"])
        assert found["phases"][0]["forward"] > 0 < found["phases"][0]["backward"]
    assert left(run) == {"scale.json"}


@pytest.mark.slow
def test_strong_scaling_divides_the_batch_of_a_recipe_that_gives_it_per_process(scale):
    run = scale("plain", "--json=scale.json", "--strong", "--ways=ddp,zero1,fsdp").wait(180)
    assert run.code == 0, run.err
    found = json.loads((run.folder / "scale.json").read_text())["slices"]
    assert [(one["way"], sum(one["samples"])) for one in found] == [
        ("single", 4.0),
        ("ddp", 4.0),
        ("zero1", 4.0),
        ("fsdp", 4.0),
    ]
    assert "Strong scaling: a step has 4 samples on any number of processes." in run.out


@pytest.mark.slow
def test_weak_scaling_multiplies_a_global_batch(scale):
    run = scale("plain", "--json=scale.json", "--weak", "--global_batch_size=6").wait(180)
    assert run.code == 0, run.err
    found = json.loads((run.folder / "scale.json").read_text())["slices"]
    assert [one["samples"] for one in found] == [[6.0], [6.0, 6.0]]


@pytest.mark.slow
def test_a_run_that_is_there_is_neither_resumed_nor_touched(scale):
    first = Run(
        python("train.py", "trains", "hparams.yaml"),
        scale("leaves").wait().folder,
        warm=True,
    ).wait()
    assert "after fit" in first.out, first.err
    files = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.is_file()}
    assert any("CKPT" in str(path) for path in files)
    run = scale("plain", "--ckpt_interval_steps=1", "--resume=auto", "--time_limit=1").wait(180)
    assert run.code == 0, run.err
    after = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.is_file()}
    assert after == files


@pytest.mark.slow
def test_a_size_that_fails_is_told_and_the_others_are_measured(scale):
    run = scale("fails on several", "--rounds=2").wait(180)
    assert run.code == 1
    assert "RuntimeError: not on several" in run.err
    assert "2 processes: failed." in run.out
    assert "single, 1 process" in run.out
    assert run.err.count("not on several") < 10, "it is measured once more"
    assert left(run) == set()


def test_a_mistake_in_the_options_of_the_recipe_is_one_sentence(scale):
    run = scale("plain", "--lrr=3").wait()
    assert run.code == 1
    assert run.lines == [
        (
            "python -m ddpkit: error: 1 process: --lrr is neither a run option nor a key of "
            "'hparams.yaml'; did you mean --lr? Correct the name, or add the key to the file; "
            "--help shows the options."
        )
    ]
    assert left(run) == set()


def test_a_script_that_never_calls_fit_is_told(scale):
    run = scale("leaves", "--nproc=1").wait()
    assert run.code == 1
    assert run.lines == [
        (
            "python -m ddpkit: error: 1 process: the script ended without a call of Brain.fit, "
            "which is what is measured. It said nothing."
        )
    ]


@pytest.mark.slow
def test_epochs_of_one_step_cannot_be_measured_and_say_so(scale):
    run = scale("plain", "--nproc=1", "--global_batch_size=24").wait()
    assert run.code == 1
    assert (
        "1 process: no step can be measured on 1 process(es): an epoch has one optimizer step"
        in run.err
    )


@pytest.mark.slow
def test_no_process_and_no_file_stays_after_a_signal(scale):
    run = scale("never ends", "--nproc=2")
    assert wait_until((run.folder / "told").exists, 60)
    run.signal(signal.SIGTERM)
    run.wait(20)
    assert run.code == 143
    assert left(run) == {"told"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_as_a_rank_of_a_launch_it_ends_the_recipe_with_itself(scale, number):
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = scale("waits alone", "--device=cpu", warm=False, **one, **address)
    assert wait_until((run.folder / "told").exists, 60)
    run.signal(number)
    run.wait(20)
    assert number == signal.SIGKILL or left(run) == {"told"}


@pytest.mark.slow
def test_no_process_stays_when_the_command_is_killed(scale):
    run = scale("never ends", "--nproc=2", warm=False)
    assert wait_until((run.folder / "told").exists, 60)
    run.signal(signal.SIGKILL)
    run.wait(20)


OWN_ARGUMENTS = """
    import argparse, torch, ddpkit
    from torch import nn

    class Line(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    size = parser.parse_args().size
    torch.manual_seed(1)
    brain = Line({"net": nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.1), run_opts={"device": "cpu"})
    brain.fit(range(1, 3), [torch.ones(1)] * 24, train_loader_kwargs={"batch_size": size})
"""  # noqa: E501


@pytest.mark.slow
def test_a_recipe_without_yaml_and_with_arguments_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN_ARGUMENTS))
    command = python("-m", "ddpkit", "scale", "own.py", "--size", "6", *QUICK, "--nproc=1")
    run = Run(command, tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert "a step has 6 samples" in run.out


@pytest.mark.launch
def test_the_ranks_of_a_launcher_measure_its_size_and_write_a_result_file(scale):
    folder = scale("leaves").wait().folder
    words = (
        "-m",
        "ddpkit",
        "scale",
        "train.py",
        "plain",
        "hparams.yaml",
        *QUICK,
        "--json=two.json",
    )
    run = Run(torchrun(2, *words), folder, name="../launch", warm=True).wait(180)
    assert run.code == 0, run.err
    assert run.out.count("ddp, 2 processes") == 1
    [found] = json.loads((folder / "two.json").read_text())["slices"]
    assert (found["world_size"], found["samples"]) == (2, [4.0, 4.0])
    assert not (folder / "two.scratch").exists()
    joined = Run(
        python("-m", "ddpkit", "scale", "--join", "two.json"),
        folder,
        name="../join",
        warm=True,
    ).wait()
    assert joined.code == 0, joined.err
