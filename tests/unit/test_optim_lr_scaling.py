"""Learning rates that follow the batch: the effective batch, the factor, scaled steps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.dataloader import LoopedLoader, Sharding, make_dataloader, shard
from ddpkit.errors import ConfigError
from ddpkit.optim import LrScaling
from ddpkit.run_opts import RunOptions
from ddpkit.sampler import ConcatDatasetBatchSampler, DynamicBatchSampler
from ddpkit.training.step_sizes import batch_sizes


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Host:
    """As much of a Brain as is looked at."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def parameters(number=1):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(number)]


def sgd(*rates, **options):
    groups = [
        {"params": [one], "lr": rate}
        for one, rate in zip(parameters(len(rates)), rates, strict=True)
    ]
    return torch.optim.SGD(groups, **options)


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


# ------------------------------------------------------------------------------ the effective batch

LOADERS = {
    "planned": (lambda world: shard(range(50), Sharding(0, world), batch_size=4), 4),
    "a short set": (lambda world: shard(range(3), Sharding(0, world), batch_size=4), 4),
    "looped": (
        lambda world: LoopedLoader(shard(range(50), Sharding(0, world), batch_size=4), 5),
        4,
    ),
    "made for one": (
        lambda world: (
            make_dataloader(range(50), batch_size=4) if world == 1 else LOADERS["planned"][0](world)
        ),
        4,
    ),
    "stream": (lambda world: shard(Stream(), Sharding(0, world), batch_size=4), 4),
    "divided by the user": (
        lambda world: DataLoader(range(50), 4, sampler=DistributedSampler(range(50), world, 0)),
        4,
    ),
    "divided batches": (
        lambda world: DataLoader(
            range(50),
            batch_sampler=BatchSampler(DistributedSampler(range(50), world, 0), 4, drop_last=False),
        ),
        4,
    ),
    "batch sampler of a size": (
        lambda world: shard(
            range(50),
            Sharding(0, world),
            batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, drop_last=False),
        ),
        4,
    ),
    "concat": (
        lambda world: shard(
            range(50),
            Sharding(0, world),
            batch_sampler=ConcatDatasetBatchSampler([range(9), range(9)], [1, 3]),
        ),
        4,
    ),
    "dynamic": (
        lambda world: shard(
            range(4),
            Sharding(0, world),
            batch_sampler=DynamicBatchSampler(range(4), 9.0, 2, lengths_list=[1, 2, 3, 4]),
        ),
        None,
    ),
    "opaque batches": (
        lambda world: shard(range(9), Sharding(0, world), batch_sampler=[[0, 1], [2]]),
        None,
    ),
    "whole batches": (lambda world: shard(range(9), Sharding(0, world), batch_size=None), None),
    "stream of batches": (lambda world: shard(Stream(), Sharding(0, world), batch_size=None), None),
    "no loader": (lambda world: [[1, 2], [3]], None),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("factor", "world"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_the_effective_batch(kind, factor, world):
    make, size = LOADERS[kind]
    assert batch_sizes(make(world), None, factor, Sharding(0, world).division).per_step == (
        None if size is None else size * factor * world
    )


@pytest.mark.parametrize(("pieces", "world"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_the_effective_batch_is_the_global_one_where_that_is_given(pieces, world):
    loader = shard(range(100), Sharding(0, world, global_batch_size=22, micro_batches=pieces))
    assert batch_sizes(loader, None, pieces, Sharding(0, world).division).per_step == 22


def options(rule="linear", reference=8, **more):
    return RunOptions(lr_scaling=rule, reference_batch_size=reference, **more)


def sizes_of(batch_size, world=1, factor=1):
    return batch_sizes(
        shard(range(50), Sharding(0, world), batch_size=batch_size),
        None,
        factor,
        Sharding(0, world).division,
    )


def scaling_of(rule="linear", *, batch_size=4, world=1, **more):
    scaling = LrScaling()
    scaling.choose(
        options(rule, **more),
        sizes_of(batch_size, world, more.get("grad_accumulation_factor", 1)),
    )
    return scaling


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)])
def test_the_factor_and_its_reason(rule, factor):
    scaling = scaling_of(rule, world=2, grad_accumulation_factor=3)
    assert scaling.factor == pytest.approx(factor)
    if rule == "linear":
        assert scaling.reason == (
            "lr_scaling=linear, 24 samples per step (2 processes, accumulation 3), "
            "reference_batch_size=8: x 3"
        )


def test_the_reason_names_virtual_ranks():
    scaling = LrScaling()
    sharding = Sharding(0, 2, virtual_ranks=4)
    loader = shard(range(50), sharding, batch_size=2)
    scaling.choose(options(), batch_sizes(loader, None, 1, sharding.division))
    assert "8 samples per step (4 virtual ranks on 2 processes, accumulation 1)" in scaling.reason


@pytest.mark.parametrize("kind", [kind for kind, (_, size) in LOADERS.items() if size is None])
def test_a_step_of_unknown_size_cannot_be_scaled_by(kind):
    with pytest.raises(
        ConfigError,
        match=r"^lr_scaling=linear needs a step of known size.*Use "
        r"--lr_scaling=none",
    ):
        LrScaling().choose(
            options(), batch_sizes(LOADERS[kind][0](1), None, 1, Sharding().division)
        )


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_rule_without_a_reference_is_refused(rule):
    with pytest.raises(
        ConfigError,
        match=f"^lr_scaling={rule} needs reference_batch_size: .*Give --reference_batch_",
    ):
        LrScaling().choose(options(rule, None), sizes_of(1))


# -------------------------------------------------------------------------------------------- steps


def steps_of(optimizer):
    """Make the gradients 1, step, and return how far each group's parameter went: its learning
    rate, of SGD.
    """
    before = [group["params"][0].detach().clone() for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2)
    optimizer.step()
    return [
        float((old - group["params"][0].detach())[0])
        for old, group in zip(before, optimizer.param_groups, strict=True)
    ]


def test_steps_are_scaled_and_rates_stay(caplog):
    caplog.set_level("INFO", logger="ddpkit")
    optimizer = sgd(0.1, 0.01)
    scaling = scaling_of(batch_size=16)
    for _ in range(2):  # the second time changes nothing
        scaling.follow({"sgd": optimizer})
    assert steps_of(optimizer) == pytest.approx([0.2, 0.02])
    assert rates_of(optimizer) == [0.1, 0.01]
    assert (
        caplog.messages == [f"Learning rates ({scaling.reason}): sgd 0.1, 0.01 -> 0.2, 0.02."] * 2
    )
    scaling.choose(options(), sizes_of(32))
    assert steps_of(optimizer) == pytest.approx([0.4, 0.04]), "a second fit with another batch"


def test_without_a_rule_nothing_is_touched(caplog):
    caplog.set_level("INFO", logger="ddpkit")
    optimizer = sgd(0.1)
    LrScaling().follow({"sgd": optimizer, "no optimizer of torch": Host(param_groups=[])})
    assert steps_of(optimizer) == pytest.approx([0.1])
    assert caplog.messages == []


def test_a_tensor_rate_is_the_same_tensor_afterwards():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([{"params": [one]} for one in parameters(3)], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    scaling_of(batch_size=16).follow({"adam": optimizer})
    steps_of(optimizer)
    assert optimizer.param_groups[0]["lr"] is held
    assert rates_of(optimizer) == [0.5] * 3


def test_a_step_that_fails_is_not_scaled_twice():
    optimizer = sgd(0.1)
    scaling_of(batch_size=16).follow({"sgd": optimizer})
    momentum = optimizer.param_groups[0].pop("momentum")
    with pytest.raises(KeyError):
        steps_of(optimizer)
    optimizer.param_groups[0]["momentum"] = momentum
    assert steps_of(optimizer) == pytest.approx([0.2])
    assert rates_of(optimizer) == [0.1]


def test_a_step_that_calls_that_of_its_class_is_scaled_once():
    """torch then calls the hooks of a step twice, if the class has been hooked, too."""

    class Counted(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)

    sgd(0.1)
    optimizer = Counted(parameters(), lr=0.1)
    scaling_of(batch_size=16).follow({"counted": optimizer})
    for _ in range(2):
        assert steps_of(optimizer) == pytest.approx([0.2])
        assert rates_of(optimizer) == [0.1]


def test_an_optimizer_of_two_brains_is_scaled_by_the_one_that_trains():
    optimizer = sgd(0.1)
    for scaling, expected in (
        (scaling_of(batch_size=16), 0.2),
        (scaling_of(batch_size=32), 0.4),
        (LrScaling(), 0.1),
    ):
        scaling.follow({"sgd": optimizer})
        assert steps_of(optimizer) == pytest.approx([expected])
        assert rates_of(optimizer) == [0.1]


def test_an_optimizer_without_hooks_is_refused():
    own = Host(param_groups=[{"lr": 0.1}])
    with pytest.raises(
        ConfigError,
        match=r"^lr_scaling cannot scale mine, a Host: it is not a "
        r"torch.optim.Optimizer",
    ):
        scaling_of(batch_size=16).follow({"mine": own})
