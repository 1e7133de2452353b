"""Small recipes and data for the contract tests, written as a user of a Brain writes them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer

QUIET = {"device": "cpu", "noprogressbar": True}


class Killed(RuntimeError):
    """Stands for the end of the process."""


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Value:
    """The smallest thing that can be saved: a number with a state_dict."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def points(number, *, width=3, seed=5):
    """Return ``number`` pairs (input, target) in float64, different from each other."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, width, generator=generator, dtype=torch.float64)
    targets = torch.randn(number, 1, generator=generator, dtype=torch.float64)
    return list(zip(inputs, targets, strict=True))


def linear(*, width=3, seed=7):
    torch.manual_seed(seed)
    return nn.Linear(width, 1).double()


def sgd(lr=0.1, **options):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


class Regression(Brain):
    """Mean squared error; remembers the inputs it was trained on, and what on_stage_end was
    told.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained_on = []
        self.losses = []

    def compute_forward(self, batch, stage):
        if stage.name == "TRAIN":
            self.trained_on.append(batch[0].clone())
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append((stage.name, epoch, stage_loss))


def make(
    cls=Regression,
    *,
    net=None,
    opt=None,
    hparams=None,
    folder=None,
    recoverables=(),
    **run_opts,
):
    """Make a Brain around one linear layer; with ``folder``, checkpoints hold the layer and
    ``recoverables``.
    """
    net = linear() if net is None else net
    checkpointer = None
    if folder is not None:
        checkpointer = Checkpointer(folder, {"net": net, **dict(recoverables)})
    return cls({"net": net}, opt or sgd(), hparams, {**QUIET, **run_opts}, checkpointer)


def weights(brain):
    """Return copies of all parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in brain.raw_modules.state_dict().items()}


def assert_same(found, expected):
    """The same names and the same bits."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), (
            f"{name}: {found[name]} != {expected[name]}"
        )


def seen_in(data, trained_on):
    """Return, for each batch, the positions in ``data`` of its samples."""
    return [
        [next(k for k, (known, _) in enumerate(data) if torch.equal(row, known)) for row in inputs]
        for inputs in trained_on
    ]
