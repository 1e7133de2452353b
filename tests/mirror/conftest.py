"""A store in memory for each test, and machines that come and go."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.experiment import close_experiment
from ddpkit.mirror import forget_mirrors
from tests.recipes import QUIET, Regression, linear, points, sgd


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The URL of an empty folder of a store, and temporary folders of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    url = f"memory://{uuid.uuid4().hex}/run"
    yield url
    close_experiment()
    forget_mirrors()
    fsspec.filesystem("memory").store.clear()


def other_machine():
    """End this process's use of its mirrors, as the end of the process does: the next Checkpointer
    is on a machine with empty disks.
    """
    close_experiment()
    forget_mirrors()
    no_longer_copies()


def no_longer_copies():
    """Wait for the attempt to copy up that a run has left behind: on a dead machine it would not go
    on.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("ddpkit copies up"):
            thread.join(60)
            assert not thread.is_alive()


def names_in(url, *, within=""):
    """The names of all objects of a folder of the store."""
    filesystem, path = fsspec.core.url_to_fs(f"{url}/{within}" if within else url)
    return sorted(name.removeprefix(f"{path}/") for name in filesystem.find(path))


def checkpoints_in(url):
    """The names of the checkpoints of a folder of the store that are complete."""
    found = [name for name in names_in(url) if name.endswith("/manifest.json")]
    return sorted(name.removesuffix("/manifest.json") for name in found)


class Trained(Regression):
    """Saves at the end of each epoch, and keeps the newest ``keeps``."""

    keeps = 1
    dies_in = 0

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.progress.epoch == self.dies_in:
            raise Dead

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage.name == "TRAIN":
            self.checkpointer.save_and_keep_only(
                meta={"loss": float(stage_loss)}, num_to_keep=self.keeps
            )


class Dead(RuntimeError):
    """Stands for the end of a machine."""


def train(checkpointer, epochs, *, kind=Trained, hparams=None, **options):
    """Train a linear model; return its Brain."""
    net = linear()
    counter = EpochCounter(epochs)
    if not isinstance(checkpointer, Checkpointer):
        checkpointer = Checkpointer(checkpointer)
    checkpointer.add_recoverables({"net": net, "counter": counter})
    brain = kind(
        {"net": net},
        opt_class=sgd(),
        hparams=hparams,
        run_opts={**QUIET, **options},
        checkpointer=checkpointer,
    )
    brain.fit(counter, points(8), train_loader_kwargs={"batch_size": 2})
    return brain


def weights(brain):
    return torch.cat([tensor.flatten() for tensor in brain.modules.net.state_dict().values()])


def folders_of_machine():
    """What this process's temporary folder holds of mirrors."""
    place = Path(os.environ["TMPDIR"], f"ddpkit-mirrors-{os.getuid()}")
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []
