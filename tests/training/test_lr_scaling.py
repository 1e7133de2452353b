"""Learning rates that follow the batch: the factor, the effective batch, groups, schedulers, marks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddpkit.dataloader import LoopedLoader, Sharding, make_dataloader, shard
from ddpkit.errors import ConfigError
from ddpkit.run_opts import RunOptions
from ddpkit.sampler import ConcatDatasetBatchSampler, DynamicBatchSampler
from ddpkit.training.batch_sizes import batch_sizes
from ddpkit.training.lr_scaling import MARK, LrScaling, scale_learning_rates, scaling_factor


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
    groups = [{"params": [one], "lr": rate} for one, rate in zip(parameters(len(rates)), rates, strict=True)]
    return torch.optim.SGD(groups, **options)


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


# ---------------------------------------------------------------------------------------- the effective batch

LOADERS = {
    "planned": (lambda world: shard(range(50), Sharding(0, world), batch_size=4), 4),
    "a short set": (lambda world: shard(range(3), Sharding(0, world), batch_size=4), 4),
    "looped": (lambda world: LoopedLoader(shard(range(50), Sharding(0, world), batch_size=4), 5), 4),
    "made for one": (
        lambda world: make_dataloader(range(50), batch_size=4) if world == 1 else LOADERS["planned"][0](world),
        4,
    ),
    "stream": (lambda world: shard(Stream(), Sharding(0, world), batch_size=4), 4),
    "divided by the user": (
        lambda world: DataLoader(range(50), 4, sampler=DistributedSampler(range(50), world, 0)),
        4,
    ),
    "divided batches": (
        lambda world: DataLoader(
            range(50), batch_sampler=BatchSampler(DistributedSampler(range(50), world, 0), 4, drop_last=False)
        ),
        4,
    ),
    "batch sampler of a size": (
        lambda world: shard(
            range(50), Sharding(0, world), batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, drop_last=False)
        ),
        4,
    ),
    "concat": (
        lambda world: shard(
            range(50), Sharding(0, world), batch_sampler=ConcatDatasetBatchSampler([range(9), range(9)], [1, 3])
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
    "opaque batches": (lambda world: shard(range(9), Sharding(0, world), batch_sampler=[[0, 1], [2]]), None),
    "whole batches": (lambda world: shard(range(9), Sharding(0, world), batch_size=None), None),
    "stream of batches": (lambda world: shard(Stream(), Sharding(0, world), batch_size=None), None),
    "no loader": (lambda world: [[1, 2], [3]], None),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("factor", "world"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_the_effective_batch(kind, factor, world):
    make, size = LOADERS[kind]
    assert batch_sizes(make(world), None, factor, world).per_step == (None if size is None else size * factor * world)


@pytest.mark.parametrize(("pieces", "world"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_the_effective_batch_is_the_global_one_where_that_is_given(pieces, world):
    loader = shard(range(100), Sharding(0, world, global_batch_size=22, micro_batches=pieces))
    assert batch_sizes(loader, None, pieces, world).per_step == 22


def options(rule="linear", reference=8, **more):
    return RunOptions(lr_scaling=rule, reference_batch_size=reference, **more)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)])
def test_the_factor_and_its_reason(rule, factor):
    loader = shard(range(50), Sharding(0, 2), batch_size=4)
    scaling = LrScaling.of(options(rule, grad_accumulation_factor=3), loader, 2)
    assert scaling.factor == pytest.approx(factor)
    assert scaling.factor == scaling_factor(rule, 24, 8)
    if rule == "linear":
        assert scaling.reason == (
            "lr_scaling=linear, 24 samples per step (2 process(es), accumulation 3), reference_batch_size=8: x 3"
        )


def test_a_reference_without_a_rule_is_fine():
    assert LrScaling.of(RunOptions(reference_batch_size=8), [], 1).factor == 1.0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dynamic", "DynamicBatchSampler makes batches whose size nobody can vouch for"),
        ("opaque batches", "list makes batches whose size nobody can vouch for"),
        ("whole batches", r"range gives whole batches \(batch_size=None\)"),
        ("stream of batches", "has no batch_size"),
        ("no loader", "list has no batch_size"),
    ],
)
def test_a_step_of_unknown_size_cannot_be_scaled_by(kind, reason):
    with pytest.raises(ConfigError, match=f"^lr_scaling=linear cannot be done: .*{reason}.*Use --lr_scaling=none"):
        LrScaling.of(options(), LOADERS[kind][0](1), 1)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_rule_without_a_reference_is_refused(rule):
    with pytest.raises(ConfigError, match=f"^lr_scaling={rule} needs reference_batch_size: .*Give --reference_batch_"):
        LrScaling.of(options(rule, None), shard(range(5), Sharding(), batch_size=1), 1)


# ------------------------------------------------------------------------------------------------- optimizers


def test_every_group_of_every_optimizer_is_scaled_once():
    first, second = sgd(0.1, 0.01), torch.optim.Adam(parameters(), lr=1.0)
    scaling = LrScaling(2.0)
    assert scaling.apply({"d": first, "g": second}) == ["d 0.1, 0.01 -> 0.2, 0.02", "g 1 -> 2"]
    assert scaling.apply({"d": first, "g": second}) == []
    assert rates_of(first) == [0.2, 0.02]
    assert rates_of(second) == [2.0]


def test_no_scaling_leaves_no_mark():
    optimizer = sgd(0.1)
    assert LrScaling().apply({"sgd": optimizer}, [{"s": lr_scheduler.StepLR(optimizer, 3)}]) == []
    assert MARK not in optimizer.param_groups[0]


@pytest.mark.parametrize(("before", "now"), [(2.0, 2.0), (2.0, 4.0), (4.0, 1.0), (1.0, 3.0)])
def test_a_restored_optimizer_is_scaled_by_what_is_missing(before, now):
    saved = sgd(0.1)
    LrScaling(before).apply({"sgd": saved})
    fresh = sgd(0.1)
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    lines = LrScaling(now).apply({"sgd": fresh})
    assert rates_of(fresh) == [pytest.approx(0.1 * now)]
    assert bool(lines) == (before != now)
    if before not in {1.0, now}:
        assert f"(x {before:.6g} in the checkpoint)" in lines[0]


def test_a_tensor_rate_is_scaled_where_it_is_and_once():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([{"params": [one]} for one in parameters(3)], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    LrScaling(4.0).apply({"adam": optimizer}, [{"s": lr_scheduler.StepLR(optimizer, 3)}])
    assert rates_of(optimizer) == [2.0, 2.0, 2.0]
    assert optimizer.param_groups[0]["lr"] is held
    assert [float(group["initial_lr"]) for group in optimizer.param_groups] == [2.0, 2.0, 2.0]


def scale(host):
    """As the Brain does, with its attributes and what it holds."""
    own = vars(host)
    holders = [vars(own.get("hparams", Host())), getattr(own.get("checkpointer"), "recoverables", {})]
    scale_learning_rates(LrScaling(2.0, "why", asked=True), own.get("optimizers_dict", {}), own, holders)


def test_optimizers_and_schedulers_are_found_where_recipes_keep_them(caplog):
    caplog.set_level("INFO", logger="ddpkit")
    named, attribute = sgd(0.1), sgd(0.3)
    found = [lr_scheduler.StepLR(named, 5) for _ in range(5)]
    foreign = lr_scheduler.StepLR(sgd(0.1), 5)
    host = Host(
        optimizers_dict={"named": named},
        other=attribute,
        optimizer=named,
        scheduler=found[0],
        several=[found[1], foreign],
        by_name={"x": found[2]},
        hparams=Host(annealing=found[3]),
        checkpointer=Host(recoverables={"scheduler": found[4], "again": found[4]}),
    )
    scale(host)
    assert [one.base_lrs for one in found] == [[0.2]] * 5
    assert foreign.base_lrs == [0.1]
    assert caplog.messages == ["Learning rates (why): named 0.1 -> 0.2; other 0.3 -> 0.6."]
    caplog.clear()
    scale(host)
    assert caplog.messages == ["Learning rates (why): named 0.2; other 0.6, at this scale already."]
    caplog.clear()
    scale(Host())
    assert "no optimizer found" in caplog.text


# ------------------------------------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, eta_min=0.01),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.02, 0.4, 3, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=13, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, min_lr=0.02, eps=3e-3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01)],
        [3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
STEPS = 12


def step(optimizer, scheduler):
    optimizer.step()
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()
    return [*rates_of(optimizer), *map(float, scheduler.get_last_lr())]


def trace(kind, scaling=None, *, steps=STEPS, first=lambda: sgd(0.2, 0.1)):
    optimizer = first()
    scheduler = SCHEDULERS[kind](optimizer)
    if scaling is not None:
        scaling.apply({"sgd": optimizer}, [{"scheduler": scheduler}])
    return [rates_of(optimizer), *(step(optimizer, scheduler) for _ in range(steps))], optimizer, scheduler


def assert_times(found, expected, factor):
    assert found == [pytest.approx([factor * rate for rate in rates], rel=1e-9) for rates in expected]


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_a_schedule_made_before_the_scaling_is_the_unscaled_one_times_the_factor(kind, factor):
    expected, _, _ = trace(kind)
    assert len({tuple(rates) for rates in expected}) > 2
    found, _, _ = trace(kind, LrScaling(factor))
    assert_times(found, expected, factor)


RELATIVE = sorted(set(SCHEDULERS) - {"cosine", "restarts", "cyclic", "one cycle", "plateau", "sequential"})


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_schedule_made_after_the_scaling_is_so_too(kind):
    """Those left out hold rates of their own, which a recipe multiplies by ``lr_scale``."""
    expected, _, _ = trace(kind)
    scaling = LrScaling(3.0)

    def scaled():
        optimizer = sgd(0.2, 0.1)
        scaling.apply({"sgd": optimizer})
        return optimizer

    found, optimizer, scheduler = trace(kind, first=scaled)
    assert_times(found, expected, 3.0)
    assert scaling.apply({"sgd": optimizer}, [{"s": scheduler}]) == []
    assert_times([step(optimizer, scheduler)], [trace(kind, steps=STEPS + 1)[0][-1]], 3.0)


def saved(optimizer, scheduler):
    return copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(("before", "now"), [(3.0, 3.0), (3.0, 6.0), (None, 3.0), (3.0, 1.0)])
def test_a_schedule_restored_from_a_checkpoint_goes_on_at_the_new_scale(kind, before, now):
    expected, _, _ = trace(kind)
    _, optimizer, scheduler = trace(kind, LrScaling(before) if before else None, steps=5)
    of_optimizer, of_scheduler = saved(optimizer, scheduler)
    optimizer = sgd(0.2, 0.1)
    scheduler = SCHEDULERS[kind](optimizer)
    optimizer.load_state_dict(of_optimizer)
    scheduler.load_state_dict(of_scheduler)
    for _ in range(2):  # the second time changes nothing
        LrScaling(now).apply({"sgd": optimizer}, [{"scheduler": scheduler}])
    assert_times([step(optimizer, scheduler) for _ in range(STEPS - 5)], expected[6:], now)


@pytest.mark.parametrize("now", [3.0, 6.0])
def test_a_schedule_that_was_not_saved_is_scaled_from_the_start(now):
    """The optimizer comes from the checkpoint, at its scale; the scheduler was made anew, from unscaled rates."""
    saved_one = sgd(0.2)
    LrScaling(3.0).apply({"sgd": saved_one}, [{"s": lr_scheduler.StepLR(saved_one, 2)}])
    optimizer = sgd(0.2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    optimizer.load_state_dict(saved_one.state_dict())
    LrScaling(now).apply({"sgd": optimizer}, [{"s": scheduler}])
    assert scheduler.base_lrs == [pytest.approx(0.2 * now)]
    assert step(optimizer, scheduler)[0] == pytest.approx(0.1 * now)


def test_marks_survive_a_checkpoint_file(tmp_path):
    _, optimizer, scheduler = trace("cosine", LrScaling(2.0), steps=2)
    torch.save(saved(optimizer, scheduler), tmp_path / "both.ckpt")
    of_optimizer, of_scheduler = torch.load(tmp_path / "both.ckpt", weights_only=True)
    assert of_optimizer["param_groups"][0][MARK] == of_scheduler[MARK] == 2.0
