"""What the tests with other libraries' data share: a recipe, and runs that are killed and go on.

Everything runs on ranks, so that these libraries are imported there, and only where the tests run.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from itertools import chain

import pytest
import torch
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import gather_objects
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage

SAMPLES = 26
EPOCHS = 3
LATE = (2, 6)  # of seven steps: what a shuffle buffer had held at the last save is long gone
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUIET = {"device": "cpu", "noprogressbar": True, "shard_evaluation": True, "ckpt_interval_steps": 2}
CLOSE = {"rtol": 0, "atol": 1e-10}


def needs(*packages):
    """Marks for a module whose tests import heavy packages, which a plain `make test` neither
    installs nor runs.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    reason = f"{', '.join(missing)}: in the extra `ecosystem`, pip install -e '.[ecosystem]'"
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]


class Killed(RuntimeError):
    """Stands for the end of all processes."""


class Learner(Brain):
    """Fits a line through rows with an id; remembers which were seen in which step."""

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN:
            if (self.epoch, self.step) == self.dies_at:
                raise Killed
            if self.progress.window.count:  # what is repeated to keep step counts nothing
                self.seen.append((self.epoch, self.optimizer_step, batch["id"].tolist()))
        return self.modules.net(batch["x"].double())

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch["y"].double())

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append((stage.name, epoch, stage_loss))
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def columns(number=SAMPLES):
    """Rows as a table of columns, as Hugging Face's datasets are made of."""
    inputs = torch.randn(number, 3, generator=torch.Generator().manual_seed(5))
    return {
        "id": list(range(number)),
        "x": inputs.tolist(),
        "y": inputs.sum(1, keepdim=True).tolist(),
    }


def rows(number=SAMPLES):
    table = columns(number)
    return [
        {name: torch.tensor(values[row]) for name, values in table.items()} for row in range(number)
    ]


def train(folder, data, arguments, dies_at, options):
    """Run as a script does; return weights, losses, and what all ranks have seen, by step."""
    torch.manual_seed(3)
    net = nn.Linear(3, 1).double()
    counter = EpochCounter(EPOCHS)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    checkpointer = Checkpointer(folder, {"net": net, "counter": counter})
    brain = Learner({"net": net}, sgd, None, {**QUIET, **options}, checkpointer)
    brain.dies_at = dies_at
    brain.seen = []
    brain.losses = []
    train_set, kwargs = data(*arguments)
    try:
        brain.fit(
            counter,
            train_set,
            rows(5),
            train_loader_kwargs=kwargs,
            valid_loader_kwargs={"batch_size": 2},
        )
    except Killed:
        return None
    steps = {}
    for epoch, step, numbers in chain.from_iterable(gather_objects(lambda: brain.seen)):
        steps.setdefault((epoch, step), []).extend(numbers)
    weights = {name: value.clone() for name, value in brain.raw_modules.state_dict().items()}
    return weights, brain.losses, {place: sorted(numbers) for place, numbers in steps.items()}


def run_through_and_killed(ranks, folder, world, data, *arguments, dies_at=LATE, **options):
    """Train once through; and once more, killed and started again with other Brains. Both are the
    same, bit for bit.

    Returns:
        What rank 0 tells of the run that nobody killed.
    """
    given = {"world_size": world, "env": OFFLINE}
    through = ranks.run(train, str(folder / "through"), data, arguments, None, options, **given)
    assert (
        ranks.run(train, str(folder / "killed"), data, arguments, dies_at, options, **given)
        == [None] * world
    )
    resumed = ranks.run(train, str(folder / "killed"), data, arguments, None, options, **given)
    for found, expected in zip(resumed, through, strict=True):
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
        assert found[1] == expected[1][-len(found[1]) :]
        assert found[2].items() <= expected[2].items(), (
            "the same samples in the steps that were left"
        )
        assert len(found[2]) < len(expected[2]), "it went on in the middle"
    return through[0]


def epochs(steps):
    """What was seen in each epoch, step by step."""
    return [
        [seen for (epoch, _), seen in sorted(steps.items()) if epoch == one]
        for one in range(1, EPOCHS + 1)
    ]


def each_once(steps, samples=SAMPLES):
    """Whether every epoch has had each sample once."""
    return all(
        Counter(chain.from_iterable(epoch)) == Counter(range(samples)) for epoch in epochs(steps)
    )


def assert_same_training(found, expected):
    """The same samples in every step, and the same weights up to rounding."""
    assert found[2] == expected[2]
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, **CLOSE)
