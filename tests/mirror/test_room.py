"""A mirror on a disk that is too small for a checkpoint."""

from __future__ import annotations

import pytest
import torch

from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from tests.disks import fill, mounted
from tests.mirror.conftest import Checkpointer, Trained, points, sgd
from tests.recipes import QUIET


def test_it_is_refused_with_what_helps(store, tmp_path, monkeypatch):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        monkeypatch.setattr("tempfile.tempdir", None)
        fill(disk, leave=16)
        net = torch.nn.Linear(3, 8000).double()
        counter = EpochCounter(1)
        checkpointer = Checkpointer(store, {"net": net, "counter": counter})
        brain = Trained({"net": net}, sgd(), None, QUIET, checkpointer)
        with pytest.raises(ConfigError) as caught:
            brain.fit(counter, points(4), train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step == 0
    words = str(caught.value)
    assert f"the folder of checkpoints '{disk}/ddpkit-mirrors-" in words
    assert f"set TMPDIR to a folder on another disk: it mirrors {store}" in words
    assert "--ckpt_local" in words
