"""What is done to blocks, named by their classes: activation checkpointing, compilation."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.errors import ConfigError
from ddpkit.run_opts import RunOptions
from ddpkit.training import checkpoint_blocks, compile_modules
from tests.recipes import QUIET

WIDTH = 8


class Counted(nn.Linear):
    """Counts its forward passes, but those that are compiled."""

    passes = 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.passes += 1
        return super().forward(x)


class Block(nn.Module):
    """A block with noise, batch statistics, and an argument that has a name."""

    def __init__(self, norm=True):
        super().__init__()
        self.inner = Counted(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, factor=1.0):
        return x + self.drop(torch.tanh(self.norm(self.inner(x)))) * factor


class Net(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, factor=0.5)
        return self.head(x)


class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[:, :WIDTH])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[:, WIDTH:])


def samples(number=44):
    return list(torch.randn(number, WIDTH + 1, generator=torch.Generator().manual_seed(2)))


def make(folder=None, norm=True, **options):
    torch.manual_seed(4)
    modules = {"net": Net(norm)}
    checkpointer = None if folder is None else Checkpointer(folder, modules)
    return Regression(
        modules,
        lambda of: torch.optim.AdamW(of, lr=0.01),
        run_opts={**QUIET, **options},
        checkpointer=checkpointer,
    )


def digest(brain):
    state = brain.raw_modules.state_dict()
    data = b"".join(
        name.encode() + one.contiguous().view(-1).numpy().tobytes() for name, one in state.items()
    )
    return hashlib.sha256(data).hexdigest()


def train(folder=None, epochs=2, **options):
    """Return all that must not depend on how the gradients were computed; and the forward passes of
    a block.
    """
    brain = make(folder, **options)
    data = samples()
    brain.fit(
        range(1, epochs + 1),
        data,
        data[:10],
        train_loader_kwargs={"batch_size": 8, "shuffle": True},
    )
    steps = {
        name: int(one)
        for name, one in brain.raw_modules.state_dict().items()
        if name.endswith("tracked")
    }
    told = brain.progress.train_loss, brain.progress.valid_loss
    return (digest(brain), told, steps, torch.rand(1).item()), brain.raw_modules.net.blocks[
        0
    ].inner.passes


CASES = {
    "accumulation": {"grad_accumulation_factor": 2},
    "bf16": {"precision": "bf16"},
    "unused parameters": {"find_unused_parameters": True},
    "virtual ranks": {"virtual_ranks": 2},
}


def trained_twice(name):
    options = CASES[name]
    return train(**options), train(activation_checkpointing=["Block"], **options)


@pytest.mark.slow
@pytest.mark.corner
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 1])
def test_checkpointed_blocks_give_the_same_bits_and_compute_twice(ranks, name, world_size):
    run = [trained_twice(name)] if world_size == 1 else ranks.run(trained_twice, name, world_size=2)
    evaluated = 2 * 10  # passes of the validations, which are not done twice
    for (plain, passes), (recomputed, more) in run:
        assert recomputed == plain
        assert more - evaluated == 2 * (passes - evaluated) > 0


def test_batch_statistics_move_once_per_batch():
    (_, _, steps, _), _ = train(activation_checkpointing=["Block"])
    assert steps == {f"net.blocks.{number}.norm.num_batches_tracked": 12 for number in range(2)}


@pytest.mark.parametrize(("first", "then"), [(["Block"], None), (None, ["Block"])])
def test_a_checkpoint_is_the_same_with_and_without(tmp_path, first, then):
    whole, _ = train(tmp_path / "whole", epochs=2)
    train(tmp_path / "parts", epochs=1, activation_checkpointing=first)
    assert train(tmp_path / "parts", epochs=2, activation_checkpointing=then)[0][0] == whole[0]


def refused(blocks, net=None, **options):
    def start():
        brain = make(activation_checkpointing=blocks, **options)
        brain.modules.net = net or brain.modules.net
        brain.fit([1], samples(), train_loader_kwargs={"batch_size": 8})

    with pytest.raises(ConfigError) as error:
        start()
    return str(error.value)


def test_what_cannot_work_is_refused():
    assert refused(["Block", "Attention"]) == (
        "activation_checkpointing=['Block', 'Attention'] names 'Attention', and the classes in "
        "the modules are: BatchNorm1d, Block, Counted, Dropout, Linear, ModuleList, Net."
    )
    assert "a BatchNorm keeps its input only" in refused(["BatchNorm1d"])
    with pytest.raises(
        ConfigError,
        match="does not work with data_parallel_backend=True: each GPU would",
    ):
        checkpoint_blocks(
            torch.nn.ModuleDict(),
            RunOptions(activation_checkpointing=["Block"], data_parallel_backend=True),
        )


def test_a_buffer_that_moves_is_refused():
    net = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
    parametrizations.spectral_norm(net[0].inner)
    assert "a Block changes its buffer 'inner.parametrizations.weight.0._u'" in refused(
        ["Block"],
        net,
    )


# ---------------------------------------------------------------------------------- compiled blocks


def train_compiled(norm, **options):
    """Train with and without compiled blocks; return both, and how many graphs were made."""
    graphs = []
    compiled = torch.compile

    def count(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    strategies = {name: options[name] for name in ("strategy", "virtual_ranks") if name in options}
    plain, _ = train(norm=norm, grad_accumulation_factor=2, **strategies)
    torch.compile = functools.partial(compiled, backend=count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, inside its compiler
            found, _ = train(
                norm=norm,
                grad_accumulation_factor=2,
                compile_blocks=["Block"],
                **options,
            )
    finally:
        torch.compile = compiled
        torch.compiler.reset()
    return plain, found, len(graphs)


def kinds_of_blocks():
    """Return each pair of strategy, norm and checkpointing, and before a release each three."""
    strategies = [{"strategy": "ddp"}, {"strategy": "zero1"}, {"virtual_ranks": 2}]
    norms = ["layer", "batch"]
    checkpointed = [None, ["Block"]]
    return [
        pytest.param(
            strategies[one],
            norms[two],
            checkpointed[three],
            marks=() if (one + two + three) % 2 == 0 else pytest.mark.exhaustive,
        )
        for one, two, three in itertools.product(range(3), range(2), range(2))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "norm", "checkpointed"), kinds_of_blocks(), ids=str)
def test_compiled_blocks_are_compiled_under_each_strategy_and_give_the_same_bits(
    ranks,
    strategy,
    norm,
    checkpointed,
):
    """FSDP: tests/ranks/test_fsdp.py."""
    options = {"norm": norm == "batch", "activation_checkpointing": checkpointed, **strategy}
    for plain, found, graphs in ranks.run(
        functools.partial(train_compiled, **options),
        world_size=2,
    ):
        assert found == plain
        assert graphs >= 3  # two sizes of batches, and the evaluation


@pytest.mark.exhaustive
def test_compiled_blocks_that_are_checkpointed_give_the_same_bits_on_one_process():
    plain, found, graphs = train_compiled(norm=True, activation_checkpointing=["Block"])
    assert found == plain
    assert graphs >= 3


@pytest.mark.slow
def test_a_copy_of_a_compiled_block_that_is_checkpointed_computes_with_its_own_weights():
    modules = nn.ModuleDict({"net": Net(norm=False).eval()})
    options = RunOptions(activation_checkpointing=["Block"], compile_blocks=["Block"])
    checkpoint_blocks(modules, options)
    compile_modules(modules, options)
    x = torch.randn(2, WIDTH)
    twin = copy.deepcopy(modules)
    with torch.no_grad():
        twin.net.blocks[0].inner.weight.zero_()
    for number, block in enumerate(modules.net.blocks):
        assert torch.equal(block.forward.forward(x), twin.net.blocks[number](x)) is (number == 1)


def test_what_cannot_be_compiled_is_refused():
    assert "compile_blocks=['Blocks'] names 'Blocks'" in refused(None, compile_blocks=["Blocks"])
    assert "leave it out, or --compile and" in refused(None, compile_blocks=["Block"], compile=True)
    assert "'net.blocks.0'" not in (said := refused(["Block"], compile=True))
    assert (
        "'net' cannot be compiled as a whole, as activation_checkpointing=['Block'] names blocks "
        "of it"
    ) in said
