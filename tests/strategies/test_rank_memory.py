"""What each strategy says of the memory of a rank, from a model that was rehearsed in one
process.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ddpkit.errors import ConfigError
from ddpkit.run_opts import RunOptions
from ddpkit.strategies import RehearsedRun, Strategy, divided_memory, new_strategy, whole_memory
from tests.strategies.test_own_strategy import install

SIZES = (300_000, 200_000, 100_000)  # numbers of each parameter, in rows of ten
WHOLE = 4.0 * sum(SIZES)


def rehearsed(processes=2, micro_batches=1, averages=(), **options):
    """Return a run with three parameters whose optimizer, Adam, has made a step."""
    layers = {
        str(number): nn.Linear(10, size // 10, bias=False) for number, size in enumerate(SIZES)
    }
    modules = nn.ModuleDict({"net": nn.ModuleDict(layers)})
    modules["net"].register_buffer("mask", torch.zeros(25))
    optimizer = torch.optim.Adam(modules.parameters())
    for parameter in modules.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return RehearsedRun(
        modules=modules,
        optimizers={"adam": optimizer},
        gradients={parameter: parameter.nbytes for parameter in modules.parameters()},
        averages=averages,
        options=RunOptions(device="cpu", **options),
        processes=processes,
        micro_batches=micro_batches,
    )


def said(name, **given):
    return new_strategy(name).rank_memory(rehearsed(**given))


def test_a_strategy_that_does_not_override_it_does_not_know():
    assert Strategy().rank_memory(rehearsed()) is None


def test_one_device_holds_all_of_it():
    found = said("single", processes=1, averages=[torch.zeros(50)])
    assert (found.weights, found.gradients) == (WHOLE, WHOLE)
    assert (found.buffers, found.averages) == (100, 200)
    assert found.optimizer == 2 * WHOLE + 3 * 4  # two moments, and a count of steps each
    assert not found.keeps_gradients
    assert said("single", processes=1, micro_batches=2).keeps_gradients
    with pytest.raises(ConfigError, match="it is for one process"):
        said("single")


@pytest.mark.parametrize(
    ("options", "exchange", "kept"),
    [
        ({}, 0.0, 0.0),
        ({"gradient_as_bucket_view": False}, WHOLE, WHOLE),
        ({"micro_batches": 2}, WHOLE, WHOLE),  # under no_sync gradients are no views
        ({"ddp_comm_hook": "bf16"}, WHOLE / 2, 0.0),
        ({"ddp_comm_hook": "powersgd"}, 2 * WHOLE, WHOLE),
        ({"ddp_comm_hook": "powersgd", "bucket_cap_mb": 1.0}, WHOLE + 2**20, WHOLE),
    ],
)
def test_ddp_has_buckets_and_what_its_hook_keeps(options, exchange, kept):
    found = said("ddp", **options)
    assert found.weights == found.gradients == WHOLE
    assert found.exchange == pytest.approx(exchange)
    assert found.in_step == pytest.approx(kept)


def test_zero1_says_what_the_rank_with_the_most_owns():
    found = said("zero1")
    # the first rank has 300,000, the other the rest
    assert found.optimizer == pytest.approx(WHOLE, rel=1e-4)
    assert found.step_share == pytest.approx(0.5)
    assert found.weights == WHOLE
    assert said("zero1", processes=4).optimizer == pytest.approx(2 * 4 * SIZES[0], rel=1e-4)
    # those below 1 MiB travel in buffers
    assert found.exchange == pytest.approx(4 * (SIZES[1] + SIZES[2]))


def test_fsdp_says_what_a_rank_holds_and_what_is_gathered():
    found = said("fsdp")
    for part in (found.weights, found.gradients, found.optimizer / 2):
        assert part == pytest.approx(WHOLE / 2, rel=1e-4)
    assert found.exchange == pytest.approx(2 * WHOLE)
    offloaded = said("fsdp", fsdp_cpu_offload=True)
    assert offloaded.weights == offloaded.optimizer == 0
    assert said("fsdp", fsdp_param_dtype="bf16").exchange == pytest.approx(WHOLE)
    assert said("fsdp", processes=7).weights == pytest.approx(WHOLE / 7, rel=1e-3)


def test_virtual_ranks_keep_the_gradients_of_earlier_shards():
    assert said("virtual_ranks", virtual_ranks=2).exchange == 100
    assert said("virtual_ranks", virtual_ranks=8).exchange == 100 + 2 * WHOLE
    assert said("virtual_ranks", virtual_ranks=8, micro_batches=2).exchange == 100 + 4 * WHOLE
    with pytest.raises(ConfigError, match="3 virtual ranks cannot be divided over them"):
        said("virtual_ranks", virtual_ranks=3)


def test_a_strategy_of_ones_own_adds_what_it_holds():
    class Own(Strategy):
        def rank_memory(self, run):
            return dataclasses.replace(divided_memory(run, lambda _: 0.25), exchange=7.0)

    found = Own().rank_memory(rehearsed(processes=4))
    assert (found.weights, found.exchange, found.step_share) == (WHOLE / 4, 7.0, 0.25)
    assert found.held == pytest.approx(3 * WHOLE / 4 + 100 + 12)


def test_the_strategy_of_the_page_says_what_it_holds(tmp_path, monkeypatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = new_strategy("my_package.with_memory:KeepsLastAverage").rank_memory(rehearsed())
    assert (found.weights, found.exchange, found.in_step) == (WHOLE, WHOLE, WHOLE)


def test_frozen_weights_have_no_gradients():
    run = rehearsed()
    first = next(run.modules.parameters())
    gradients = {one: size for one, size in run.gradients.items() if one is not first}
    found = whole_memory(dataclasses.replace(run, gradients=gradients))
    assert (found.weights, found.gradients) == (WHOLE, WHOLE - first.nbytes)
