"""``--resume_with_new`` where states are divided over the ranks: as on one process."""

from __future__ import annotations

import functools

import pytest
import torch

from ddpkit.checkpoints import whole_state_dict
from ddpkit.epoch_loop import EpochCounter
from tests.recipes import Regression, linear, make, points

DATA = points(8)


class Saving(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.checkpointer.save_and_keep_only()


def run(folder, epochs, batch_size, opt, new=None, **options):
    counter = EpochCounter(epochs)
    brain = make(
        Saving,
        net=linear(),
        opt=opt,
        folder=folder,
        recoverables={"counter": counter},
        **({"resume_with_new": new} if new else {}),
        **options,
    )
    brain.fit(counter, DATA, train_loader_kwargs={"batch_size": batch_size})
    return whole_state_dict(brain.modules.net)


def begin_and_go_on(folder, new, batch_size, options):
    """Return the weights after an epoch with one optimizer and two with another, killed between."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    lr = functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9)
    adam = functools.partial(torch.optim.AdamW, lr=0.01)
    other = adam if new == "optimizer" else lr
    run(folder, 1, batch_size, sgd, **options)
    run(folder, 2, batch_size, other, new, **options)
    return run(folder, 3, batch_size, other, new, **options)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("new", "options"),
    [
        ("optimizer", {"strategy": "zero1"}),
        *(
            pytest.param(new, options, marks=pytest.mark.slow)
            for new, options in [
                ("lr", {"strategy": "zero1"}),
                ("optimizer", {"strategy": "fsdp"}),
                ("lr", {"strategy": "fsdp", "ema_decay": 0.5}),
                ("lr", {"ckpt_load": "broadcast"}),
            ]
        ),
    ],
)
def test_two_ranks_go_on_as_one_does(ranks, tmp_path, new, options):
    found, _ = ranks.run(begin_and_go_on, tmp_path / "two", new, 1, options, world_size=2)
    expected = begin_and_go_on(tmp_path / "one", new, 2, {})
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
