"""The same bits on any number of processes where each has a part of the optimizers' state:
``--virtual_ranks`` with ``--strategy=zero1``.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ddpkit.checkpoints import Checkpointer, safe_load
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import ConfigError
from ddpkit.types import Stage
from tests.cells import some_of
from tests.ranks.test_virtual_ranks import (
    CASES,
    CLASSES,
    LOADING,
    Classifier,
    NoisySteps,
    digest,
    make,
    points,
    train,
)
from tests.recipes import Killed

ZERO1 = {"strategy": "zero1"}


class Tied(nn.Module):
    """Has one weight under two names, a frozen one, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(CLASSES, CLASSES)
        self.second = nn.Linear(CLASSES, CLASSES)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
        self.unused = nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs):
        return self.second(self.frozen(self.first(inputs).tanh()))


class Several(Classifier):
    """Two optimizers, one with two groups and another rate; both are saved."""

    def init_optimizers(self):
        inner = self.modules.net
        head = self.modules.head
        self.first = torch.optim.AdamW(
            [{"params": [inner[0].weight]}, {"params": head.parameters(), "lr": 0.05}],
            lr=0.01,
        )
        self.second = torch.optim.SGD(
            [inner[0].bias, *inner[1].parameters(), *inner[4].parameters()],
            lr=0.1,
            momentum=0.9,
        )
        self.optimizers_dict = {"first": self.first, "second": self.second}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverables(self.optimizers_dict)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage is Stage.VALID and self.checkpointer is not None:
            self.checkpointer.save_checkpoint()


OWN_CASES = {
    "tied, frozen, unused; averages, accumulation, clipping": {
        "kind": Several,
        "head": Tied,
        "ema_decay": 0.9,
        "grad_accumulation_factor": 2,
    },
    "bf16": {"kind": Several, "head": Tied, "precision": "bf16"},
}
SHARED_CASES = (
    "what moves and is frozen changes",
    "in several messages",
    "own fit_batch",
    "uneven shards in micro-batches",
)
EVERY = {**OWN_CASES, **{name: CASES[name] for name in SHARED_CASES}}


def case(name, virtual_ranks, options):
    given = dict(EVERY[name])
    if "global_batch_size" in given:
        given["loading"] = {"batch_size": 1}
    return train(**given, virtual_ranks=virtual_ranks, **options)


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "world_size",
    [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))],
)
@pytest.mark.parametrize("name", some_of(EVERY, [*OWN_CASES]))
def test_the_bits_are_those_of_one_process_that_has_the_whole_state(ranks, name, world_size):
    expected = case(name, 4, {})
    for options in ({}, ZERO1):
        assert ranks.run(case, name, 4, options, world_size=world_size) == [expected] * world_size


def parts_of_state():
    brain = make(Several, head=Tied, virtual_ranks=4, **ZERO1)
    brain.fit([1], points(), train_loader_kwargs=LOADING)
    return [
        sum(
            value.numel()
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim()
        )
        for optimizer in brain.optimizers_dict.values()
    ]


@pytest.mark.costly
def test_each_process_has_a_part_of_the_state(ranks):
    whole = parts_of_state()
    first, second = ranks.run(parts_of_state)
    assert [sum(pair) for pair in zip(first, second, strict=True)] == whole
    assert max(sum(first), sum(second)) < 0.75 * sum(whole)


# Muon takes matrices alone.
OPTIMIZERS = {
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
}
if hasattr(torch.optim, "Muon"):  # torch 2.8 has none
    OPTIMIZERS["Muon"] = functools.partial(torch.optim.Muon, lr=0.01)
KEPT = [name for name in ("AdamW fused", "Adafactor", "Muon") if name in OPTIMIZERS]


def with_optimizer(name, options):
    class Matrices(Classifier):
        def init_optimizers(self):
            given = [one for one in self.modules.parameters() if one.dim() == 2 or name != "Muon"]
            self.optimizer = OPTIMIZERS[name](given)
            self.optimizers_dict = {"only": self.optimizer}

    return train(Matrices, virtual_ranks=4, valid=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(OPTIMIZERS, KEPT))
def test_optimizers_that_look_at_each_parameter_by_itself_have_the_same_bits(ranks, name):
    """Also those that look at a whole matrix: a parameter is not divided."""
    assert ranks.run(with_optimizer, name, ZERO1) == [with_optimizer(name, {})] * 2


# ------------------------------------------------------------------------- killed, and gone on with


def go_on(folder, options, dies_at=None):
    """Train three epochs, with checkpoints inside of them; die where it is told to."""
    brain = make(
        Several,
        folder,
        head=Tied,
        virtual_ranks=4,
        ema_decay=0.9,
        ckpt_interval_steps=2,
        **options,
    )
    brain.dies_at = dies_at
    counter = EpochCounter(3)
    brain.checkpointer.add_recoverables({"counter": counter, **brain.modules})
    try:
        result = brain.fit(counter, points(), points(11), train_loader_kwargs=LOADING)
    except Killed:
        return None
    return digest(brain), result.train_loss, result.valid_loss


def saved(folder):
    checkpoint = Checkpointer(folder).find_checkpoint()
    return [safe_load(checkpoint.paramfiles[name]) for name in ("first", "second")]


WAYS = [
    ((ZERO1, 2), (ZERO1, 2)),
    (({}, 1), (ZERO1, 2), ({}, 4)),
    ((ZERO1, 4), (ZERO1, 1), ({}, 2)),
    (({}, 2), (ZERO1, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_run_that_goes_on_with_another_strategy_and_number_of_processes(ranks, tmp_path, ways):
    expected = go_on(tmp_path / "whole", {})
    for (options, size), dies_at in zip(ways[:-1], [(1, 3), (2, 7)], strict=False):
        folder = tmp_path / "cut"
        for found in ranks.outcomes(go_on, folder, options, dies_at, world_size=size):
            assert "Killed" in str(found.error) or found.value is None
    options, size = ways[-1]
    assert ranks.run(go_on, tmp_path / "cut", options, world_size=size) == [expected] * size
    # what is saved is a plain optimizer's state, whole
    for mine, same in zip(saved(tmp_path / "cut"), saved(tmp_path / "whole"), strict=True):
        assert mine["param_groups"] == same["param_groups"]
        assert mine["state"].keys() == same["state"].keys()
        torch.testing.assert_close(mine["state"], same["state"], rtol=0, atol=0)


# --------------------------------------------------------------------------------- what cannot work


class Together(Classifier):
    def init_optimizers(self):
        self.optimizer = torch.optim.LBFGS(self.modules.parameters())
        self.optimizers_dict = {"together": self.optimizer}


def refused(kind):
    with pytest.raises(ConfigError) as caught:
        train(kind, virtual_ranks=4, **ZERO1)
    return str(caught.value)


@pytest.mark.corner
@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (Together, "LBFGS", "works on all parameters together"),
        (NoisySteps, "NoisySGD", "draws random numbers in its step"),
    ],
)
def test_optimizers_whose_bits_would_depend_on_the_processes_are_refused(ranks, kind, name, reason):
    for message in [refused(kind), *ranks.run(refused, kind)]:
        assert "strategy='zero1' cannot divide the optimizer" in message
        assert name in message
        assert reason in message
