"""An output that cannot be written is one sentence, before the first epoch: the option, the reason,
and what to do.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.train_logger import FileTrainLogger, ProgressSampleLogger, TrainLoggers
from ddpkit.types import Stage
from tests.disks import fill, mounted
from tests.launching import Run, python, torchrun
from tests.recipes import Regression, make, points

ANOTHER = "such as --output_folder=/path/to/results."
SCRIPT = """import torch
import ddpkit
from hyperpyyaml import load_hyperpyyaml

hparams_file, run_opts, overrides = ddpkit.parse_arguments()
ddpkit.ddp_init_group(run_opts)
with open(hparams_file) as file:
    hparams = load_hyperpyyaml(file, overrides)
ddpkit.distributed.ddp_barrier()
"""
YAML = """output_folder: results
net: !new:torch.nn.Linear [1, 1]
checkpointer: !new:ddpkit.checkpoints.Checkpointer
    checkpoints_dir: !ref <output_folder>/save
    recoverables: {net: !ref <net>}
"""


@pytest.fixture
def read_only(tmp_path):
    with mounted(tmp_path / "read_only", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs") as folder:
        yield folder


@pytest.fixture
def small(tmp_path):
    """A disk of 256 kB."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as folder:
        yield folder


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hparams.yaml").write_text(YAML)
    (tmp_path / "taken").write_text("a file")
    return tmp_path


def words_of(script, folder):
    return ["train.py", "hparams.yaml", "--device=cpu", f"--output_folder={folder}"]


def test_a_checkpointer_of_the_yaml_says_it_in_one_sentence(script):
    run = Run(python(*words_of(script, "taken/out")), script, warm=True).wait()
    assert run.code == 2
    (sentence,) = [line for line in run.lines if not line.startswith("Run options")]
    assert sentence.startswith(
        "train.py: error: checkpoints_dir='taken/out/save' cannot be written: Not a directory, "
    )
    assert (
        f"'{script / 'taken'}' is a file. Remove this file, or give another folder, {ANOTHER}"
        in sentence
    )
    assert sentence.endswith("(at train.py:8 in <module>)")


@pytest.mark.slow
def test_two_ranks_say_it_once(script, read_only):
    run = Run(torchrun(2, *words_of(script, read_only / "out")), script, warm=True).wait()
    assert run.code == 1
    root_cause = run.err.rpartition("Root Cause")[2]
    assert "exitcode  : 2" in root_cause
    assert (
        f"error: checkpoints_dir='{read_only}/out/save' cannot be written: Read-only file system"
        in root_cause
    )
    assert run.err.count("error: checkpoints_dir=") == 1
    assert 'train.py", line' not in run.err


# --------------------------------------------------------------------------------- loggers, profile


def refusal(folder, **hparams):
    brain = make(hparams={"output_folder": str(folder), **hparams})
    with pytest.raises(ConfigError) as caught:
        brain.fit([1], points(4))
    assert brain.optimizer_step == 0
    assert ANOTHER in str(caught.value)
    return str(caught.value)


def test_loggers_are_refused_before_the_first_epoch(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    log = FileTrainLogger(taken / "log.txt")
    samples = ProgressSampleLogger(taken / "samples")
    assert f"save_file='{taken}/log.txt' cannot be written: Not a directory" in refusal(
        tmp_path,
        train_logger=log,
    )
    assert "save_file=" in refusal(tmp_path, train_logger=[log])
    assert "save_file=" in refusal(tmp_path, own=TrainLoggers(log))
    assert f"output_path='{taken}/samples' cannot be written" in refusal(tmp_path, samples=samples)


def test_a_profile_is_refused_before_the_first_epoch(read_only):
    brain = make(hparams={"output_folder": str(read_only / "out")}, profile_training=True)
    with pytest.raises(
        ConfigError,
        match=r"the folder of the profile '.*out' cannot be written: Read-only",
    ):
        brain.fit([1], points(4))


# ----------------------------------------------------------------------------- room for checkpoints


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TRAIN:
            self.checkpointer.save_and_keep_only()


def start(folder, **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 2000),
        nn.Linear(2000, 1),
    ).double()  # 80 kB, and Adam keeps two more of it
    brain = make(
        Saving,
        net=net,
        opt=lambda own: torch.optim.Adam(own, lr=0.01),
        folder=folder,
        **options,
    )
    brain.fit([1], points(4), train_loader_kwargs={"batch_size": 2})
    return brain.optimizer_step


def test_a_disk_without_room_for_a_checkpoint_is_refused_with_numbers(small):
    fill(small, leave=16)
    with pytest.raises(ConfigError) as caught:
        start(small / "save")
    words = str(caught.value)
    assert re.search(
        r"has 6\d\.\dkB free, and a checkpoint of this run takes about 240\.0kB",
        words,
    ), words
    assert ANOTHER in words


def test_room_for_one_checkpoint_only_is_warned_of(tmp_path, caplog):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=400k", "tmpfs") as disk:
        assert start(disk / "save") == 2
    assert "which is room for one checkpoint of about 240.0kB" in caplog.text


def start_whole(folder, strategy):
    try:
        return start(folder, strategy=strategy)
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_every_rank_is_refused_with_the_size_of_the_whole(ranks, small, strategy):
    fill(small, leave=16)
    for words in ranks.run(start_whole, str(small / "save"), strategy):
        assert "a checkpoint of this run takes about 240.0kB" in words
