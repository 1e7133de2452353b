"""The same bits on any number of processes where each has a part of every parameter:
``--virtual_ranks`` with ``--strategy=fsdp``.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import ConfigError
from tests.cells import some_of
from tests.needs import needs_own_reduce_scatter
from tests.ranks.test_virtual_ranks import (
    CASES,
    CLASSES,
    LOADING,
    Classifier,
    ClipsByItself,
    PastTheBrain,
    Precise,
    compiled,
    given_of,
    make,
    points,
    train,
)
from tests.ranks.test_virtual_zero1 import OWN_CASES, ZERO1, Several, Tied, Together, go_on

pytestmark = needs_own_reduce_scatter
FSDP = {"strategy": "fsdp"}


class Odd(nn.Sequential):
    """Has blocks, and rows that do not divide evenly."""

    def __init__(self):
        super().__init__(
            *(nn.Sequential(nn.Linear(CLASSES, 37), nn.Linear(37, CLASSES)) for _ in "ab")
        )


# What only the bits of one process with whole parameters could be, cannot be had here: "noise in
# the optimizer" and "precise gradients" are refused, see below.
SHARED_CASES = [
    name for name in CASES if name not in {"noise in the optimizer", "precise gradients"}
]
EVERY = {
    **OWN_CASES,
    "blocks": {"head": Odd, "fsdp_min_parameters": 300, "ema_decay": 0.9},
    "blocks that stay whole": {
        "head": Odd,
        "fsdp_min_parameters": 300,
        "fsdp_reshard_after_forward": False,
    },
    "activation checkpointing": {"head": Odd, "activation_checkpointing": ["Odd"]},
    **{name: CASES[name] for name in SHARED_CASES},
}


def case(name, virtual_ranks, options):
    given = given_of(EVERY[name])
    if options.get("strategy") != "fsdp":
        given = {key: value for key, value in given.items() if not key.startswith("fsdp_")}
    return train(**given, virtual_ranks=virtual_ranks, **options)


SHOWN = [
    *OWN_CASES,
    "blocks",
    "uneven shards in micro-batches",
    "own fit_batch",
    "what moves and is frozen changes",
    "batch norm, bf16",
]


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("name", some_of(EVERY, SHOWN))
def test_the_bits_are_those_of_one_process_that_has_everything(ranks, name):
    assert ranks.run(case, name, 4, FSDP, world_size=2) == [case(name, 4, {})] * 2


class Block(nn.Sequential):
    """Has dropout, which a forward pass that is computed again must draw as before."""


class Noisy(nn.Module):
    """Computes a block again in the backward pass, as a recipe writes that itself."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.first = Block(nn.Linear(CLASSES, 37), nn.Dropout(0.3), nn.Linear(37, CLASSES))
        self.second = Block(nn.Linear(CLASSES, 37), nn.Dropout(0.3), nn.Linear(37, CLASSES))

    def forward(self, inputs):
        inside = self.first(inputs).tanh()
        if self.recomputes:
            return checkpoint(self.second, inside, use_reentrant=False)
        return self.second(inside)


def recomputing(options):
    """Train with checkpoints by an option, by the recipe's own hand, and without any."""
    blocks = {"fsdp_blocks": ["Block"]} if options == FSDP else {}
    ways = (
        {"head": functools.partial(Noisy, recomputes=True)},
        {"head": Noisy, "activation_checkpointing": ["Block"]},
        {"head": Noisy},
    )
    return [train(**way, valid=2, virtual_ranks=4, **options, **blocks) for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize("options", [FSDP, ZERO1, {}], ids=str)
def test_blocks_that_are_computed_again_have_the_same_bits(ranks, options):
    expected = train(head=Noisy, valid=2, virtual_ranks=4)
    for found in ranks.run(recomputing, options):
        assert found == [expected] * 3


def case_with_8(options):
    return case("blocks", 8, options)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", some_of([1, 2, 4, 8], [1, 2, 4]))
def test_one_digest_of_all_strategies_on_any_number_of_processes(ranks, world_size):
    """Of 8 processes a parameter with fewer rows has no part on some."""
    expected = case_with_8({})
    for options in ({}, ZERO1, FSDP):
        assert ranks.run(case_with_8, options, world_size=world_size) == [expected] * world_size


def case_with_6():
    return case("blocks", 6, FSDP)


@pytest.mark.slow
def test_processes_that_are_no_power_of_two(ranks):
    assert ranks.run(case_with_6, world_size=3) == [case("blocks", 6, {})] * 3


def numbers_held():
    brain = make(Several, head=Tied, virtual_ranks=4, **FSDP)
    brain.fit([1], points(), train_loader_kwargs=LOADING)
    held = [getattr(one, "to_local", lambda one=one: one)() for one in brain.modules.parameters()]
    return sum(one.numel() for one in held)


@pytest.mark.costly
def test_each_process_has_a_part_of_the_weights(ranks):
    whole = numbers_held()
    assert sum(ranks.run(numbers_held)) == whole
    assert max(ranks.run(numbers_held)) < 0.6 * whole


OPTIMIZERS = {
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "SGD nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.1),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01),
}


def with_optimizer(name, options):
    class Stepped(Classifier):
        def init_optimizers(self):
            self.optimizer = OPTIMIZERS[name](list(self.modules.parameters()))
            self.optimizers_dict = {"only": self.optimizer}

    return train(Stepped, virtual_ranks=4, valid=1, head=Odd, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(OPTIMIZERS, ["AdamW foreach", "SGD nesterov", "NAdam"]))
def test_optimizers_that_look_at_each_element_by_itself_have_the_same_bits(ranks, name):
    assert ranks.run(with_optimizer, name, FSDP, world_size=4) == [with_optimizer(name, {})] * 4


# ------------------------------------------------------------------------- killed, and gone on with


WAYS = [
    ((FSDP, 2), (FSDP, 2)),
    (({}, 1), (FSDP, 2), (ZERO1, 4)),
    ((FSDP, 4), ({}, 1)),
    ((ZERO1, 2), (FSDP, 4), ({"ckpt_layout": "shards", **FSDP}, 2), ({}, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_run_that_goes_on_with_another_strategy_and_number_of_processes(ranks, tmp_path, ways):
    expected = go_on(tmp_path / "whole", {})
    for (options, size), dies_at in zip(ways[:-1], [(1, 3), (2, 7), (3, 16)], strict=False):
        folder = tmp_path / "cut"
        for found in ranks.outcomes(go_on, folder, options, dies_at, world_size=size):
            assert "Killed" in str(found.error) or found.value is None
        assert Checkpointer(folder).find_checkpoint() is not None
    options, size = ways[-1]
    assert ranks.run(go_on, tmp_path / "cut", options, world_size=size) == [expected] * size


# --------------------------------------------------------------------------------- what cannot work


class Fused(Classifier):
    def init_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=0.01, fused=True)
        self.optimizers_dict = {"fused": self.optimizer}


class DrawingSGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        torch.rand(())


class Draws(Classifier):
    def init_optimizers(self):
        self.optimizer = DrawingSGD(self.modules.parameters(), lr=0.1)
        self.optimizers_dict = {"draws": self.optimizer}


class Whole(Classifier):
    def init_optimizers(self):
        self.optimizer = torch.optim.Adafactor(self.modules.parameters(), lr=0.01)
        self.optimizers_dict = {"whole": self.optimizer}


REFUSED = {
    "fsdp_param_dtype=bf16": ({"fsdp_param_dtype": "bf16"}, "use --precision=bf16"),
    "fsdp_cpu_offload=True": ({"fsdp_cpu_offload": True}, "other bits on a CPU than on a GPU"),
    "fsdp_whole_gradients=True": ({"fsdp_whole_gradients": True}, "divided by themselves"),
    "find_unused_parameters=True": ({"find_unused_parameters": True}, "each must use it"),
    "skip_nonfinite_grads=True": ({"skip_nonfinite_grads": True}, "a part of a gradient only"),
    "compile=True": ({"compile": True}, "in other pieces than a whole one"),
    "compile_blocks=['Odd']": ({"head": Odd, "compile_blocks": ["Odd"]}, "in other pieces than"),
    "modules['head'], of which a part is compiled": ({"head": compiled}, "in other pieces than"),
    "check_parity": ({"check_parity": 2}, "compares with a batch that is not divided"),
    "AdamW, has fused=True": ({"kind": Fused}, "round the last numbers of a part otherwise"),
    "DrawingSGD": ({"kind": Draws}, "draws random numbers in its step"),
    "LBFGS": ({"kind": Together}, "each rank would step its part of a parameter"),
    "Adafactor": ({"kind": Whole}, "each rank would step its part of a parameter"),
    "torch.float64": ({"head": Precise}, "have several dtypes"),
    "fit_batch changed gradients": ({"kind": ClipsByItself}, "Clip with --max_grad_norm"),
    "fit_batch called": ({"kind": PastTheBrain}, "optimizers_step() in the middle of a step"),
}


def refused(name):
    with pytest.raises(ConfigError) as caught:
        train(virtual_ranks=4, **REFUSED[name][0], **FSDP)
    return str(caught.value)


@pytest.mark.corner
@pytest.mark.in_each_check(99)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_other_bits_is_refused_by_name(ranks, name):
    """On one process, too, so that a run that begins there does not end on two."""
    several = [] if name == "fit_batch called" else ranks.run(refused, name)
    for message in [refused(name), *several]:
        assert name in message
        assert REFUSED[name][1] in message


@pytest.mark.costly
def test_a_backward_pass_past_the_brain_is_refused_before_its_gradients_are_added(ranks):
    for message in ranks.run(refused, "fit_batch called"):
        assert "a backward pass was made past the Brain" in message
        assert "call self.backward(loss) for each batch" in message
