"""One optimizer step: the clipping of torch, bit for bit; skipping; loss scaling; several
optimizers.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpkit.checkpointing import torch_recovery, torch_save
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.optim import (
    StepResult,
    drop_nonfinite,
    gradients,
    make_optimizer,
    make_schedule,
    making,
    rm_vector_weight_decay,
    take_step,
    zero_gradients,
)
from ddpkit.types import Stage
from tests.host_reads import HostReads

FAST = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def parameters(seed, shapes=((3,), (2, 4), (), (5, 1, 2)), dtype=torch.float32, size=1.0):
    """Parameters with gradients drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for one in made:
        one.grad = (size * torch.randn(one.shape, generator=generator)).to(dtype)
    return made


def sgd(those, **options):
    return torch.optim.SGD(those, lr=1.0, **options)


class Recorder(torch.optim.SGD):
    """Remembers the gradients it was given."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.given = []

    def step(self, closure=None):
        self.given.append(
            [
                p.grad.clone()
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
        )
        super().step(closure)


# ----------------------------------------------------------------------------------------- clipping


@pytest.mark.costly
@FAST
@given(
    seed=st.integers(0, 10_000),
    max_norm=st.floats(1e-3, 20),
    size=st.sampled_from([1e-8, 1e-3, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    groups=st.integers(1, 3),
)
def test_clipping_is_that_of_torch_bit_for_bit(seed, max_norm, size, dtype, groups):
    """Over all groups of all optimizers together; not only over the first group, as others do
    it.
    """
    mine = parameters(seed, dtype=dtype, size=size)
    theirs = parameters(seed, dtype=dtype, size=size)
    expected_norm = nn.utils.clip_grad_norm_(theirs, max_norm)
    recorders = (
        [Recorder([{"params": mine[:1]}, {"params": mine[1:3]}])]
        if groups > 1
        else [Recorder(mine[:3])]
    )
    recorders.append(Recorder(mine[3:]))
    result = take_step(recorders, max_norm)
    norm = expected_norm.item()
    assert result == StepResult(stepped=True, norm=norm, clipped=norm > max_norm)
    given_gradients = [gradient for recorder in recorders for gradient in recorder.given[0]]
    for gradient, other in zip(given_gradients, theirs, strict=True):
        assert torch.equal(gradient, other.grad)


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + 1e-6, 1.005])
def test_clipping_close_to_the_norm(factor):
    for seed in range(30):
        mine, theirs = parameters(seed), parameters(seed)
        max_norm = nn.utils.get_total_norm([one.grad for one in mine]).item() * factor
        nn.utils.clip_grad_norm_(theirs, max_norm)
        recorder = Recorder(mine)
        take_step([recorder], max_norm)
        assert all(
            torch.equal(one, other.grad)
            for one, other in zip(recorder.given[0], theirs, strict=True)
        )


@pytest.mark.parametrize("max_norm", [None, 0.0, -1.0, 0, -5, 1e9])
def test_no_clipping(max_norm):
    """In particular a negative norm does not turn the gradient round, and 0 does not erase it."""
    mine = parameters(1)
    before = [one.grad.clone() for one in mine]
    recorder = Recorder(mine)
    result = take_step([recorder], max_norm)
    assert (result.stepped, result.clipped) == (True, False)
    assert all(
        torch.equal(one, other) for one, other in zip(recorder.given[0], before, strict=True)
    )


def test_a_step_moves_the_weights_and_drops_the_gradients():
    mine = parameters(2)
    expected = [one.detach() - one.grad for one in mine]
    result = take_step([sgd(mine)], None)
    assert all(torch.equal(one.detach(), other) for one, other in zip(mine, expected, strict=True))
    assert all(one.grad is None for one in mine)
    assert result.norm == pytest.approx(
        math.hypot(*(g for one in parameters(2) for g in one.grad.flatten().tolist()))
    )


def test_no_gradient_at_all():
    weight = nn.Parameter(torch.ones(2))
    assert take_step([sgd([weight])], 1.0) == StepResult(stepped=True, norm=0.0)
    assert take_step([], 1.0) == StepResult(stepped=True, norm=0.0)
    assert weight.tolist() == [1.0, 1.0]


def test_the_multiplier_comes_before_clipping():
    mine = parameters(3)
    expected = [one.grad * 2.5 for one in mine]
    recorder = Recorder(mine)
    norm = take_step([recorder], None, multiplier=2.5).norm
    assert all(
        torch.equal(one, other) for one, other in zip(recorder.given[0], expected, strict=True)
    )
    recorder = Recorder(parameters(3))
    assert take_step([recorder], norm / 2, multiplier=2.5).norm == norm
    assert nn.utils.get_total_norm(recorder.given[0]).item() == pytest.approx(norm / 2)


@pytest.mark.parametrize("max_norm", [None, 0.01, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tensor_multiplies_like_a_number_and_the_host_reads_once(max_norm, dtype):
    by_number = Recorder(parameters(3))
    by_tensor = Recorder(parameters(3))
    norm = take_step([by_number], max_norm, multiplier=0.125).norm
    with HostReads() as reads:
        assert take_step(
            [by_tensor],
            max_norm,
            multiplier=torch.tensor(0.125, dtype=dtype),
        ).norm == pytest.approx(norm)
    assert reads.count == 1
    for one, other in zip(by_tensor.given[0], by_number.given[0], strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_a_multiplier_that_is_not_finite_skips():
    recorder = Recorder(parameters(3))
    assert not take_step([recorder], 1.0, multiplier=torch.tensor(math.inf)).stepped
    assert recorder.given == []


# ----------------------------------------------------------------------------------------- skipping


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_is_not_finite_changes_nothing(bad, kind):
    mine = parameters(4)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizers = [
        kind(mine[:2], lr=0.1, **options),
        kind(mine[2:], lr=0.1, weight_decay=0.1, **options),
    ]
    take_step(optimizers, 1.0)
    weights = copy.deepcopy([one.detach() for one in mine])
    states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    for one in mine:
        one.grad = torch.ones_like(one)
    mine[3].grad[0] = bad  # of the second optimizer: the first one is skipped as well
    result = take_step(optimizers, 1.0)
    assert not result.stepped
    assert not math.isfinite(result.norm)
    assert all(torch.equal(one.detach(), other) for one, other in zip(mine, weights, strict=True))
    torch.testing.assert_close(
        [optimizer.state_dict() for optimizer in optimizers],
        states,
        rtol=0,
        atol=0,
    )
    assert all(one.grad is None for one in mine), "the gradients are dropped"


# ------------------------------------------------------------------------------------- loss scaling


def scaler(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, **options)


def backward(those, grad_scaler, factor=1.0):
    loss = sum((factor * (number + 1) * one).sum() for number, one in enumerate(those))
    grad_scaler.scale(loss).backward()


def fresh(count=2):
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_the_scaler_steps_and_grows():
    mine = fresh()
    grad_scaler = scaler()
    optimizers = [sgd(mine[:1]), sgd(mine[1:])]
    for expected in (1024.0, 2048.0):
        backward(mine, grad_scaler)
        result = take_step(optimizers, None, grad_scaler)
        assert result.stepped
        assert result.norm == pytest.approx(math.sqrt(2 * 1 + 2 * 4)), "of the unscaled gradients"
        assert grad_scaler.get_scale() == expected
    assert mine[1].tolist() == [-4.0, -4.0]


def test_the_scaler_clips_unscaled_gradients_and_takes_the_multiplier():
    mine = fresh(1)
    grad_scaler = scaler()
    backward(mine, grad_scaler)
    take_step([sgd(mine)], 1.0, grad_scaler, multiplier=3.0)
    assert mine[0].detach().norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_scaler_skips_all_optimizers_and_backs_off(bad):
    """One overflow skips every optimizer: what is reported as skipped has been skipped, on all
    ranks alike.
    """
    mine = fresh()
    grad_scaler = scaler()
    optimizers = [Recorder(mine[:1]), Recorder(mine[1:])]
    backward(mine, grad_scaler)
    mine[0].grad[0] = bad
    result = take_step(optimizers, 1.0, grad_scaler)
    assert not result.stepped
    assert [recorder.given for recorder in optimizers] == [[], []]
    assert all(one.tolist() == [0.0, 0.0] for one in mine)
    assert all(one.grad is None for one in mine)
    assert grad_scaler.get_scale() == 512.0
    backward(mine, grad_scaler)
    assert take_step(optimizers, None, grad_scaler).stepped, "and is ready for the next step"


def test_the_scaler_and_optimizers_without_gradients():
    mine = fresh()
    grad_scaler = scaler()
    idle = sgd(fresh(1))
    backward(mine, grad_scaler)
    assert take_step([idle, sgd(mine)], None, grad_scaler).stepped
    assert take_step([idle], None, grad_scaler) == StepResult(stepped=True, norm=0.0)
    assert grad_scaler.get_scale() == 1024.0


# ------------------------------------------------------------------------------- several optimizers


def test_a_shared_parameter_counts_once():
    shared, own = parameters(5, shapes=((3,), (4,)))
    norm = nn.utils.get_total_norm([shared.grad, own.grad]).item()
    optimizers = [sgd([shared]), sgd([shared, own])]
    assert len(gradients(optimizers)) == 2
    expected = shared.detach() - 2 * shared.grad * 3
    assert take_step(optimizers, None, multiplier=3.0).norm == pytest.approx(3 * norm)
    assert torch.allclose(shared.detach(), expected), (
        "both optimizers step on it, but it is multiplied once"
    )


def test_only_those_that_step_are_touched():
    mine = parameters(6)
    before = mine[2].grad.clone()
    norm = nn.utils.get_total_norm([mine[0].grad]).item()
    assert take_step([sgd(mine[:1])], None).norm == norm
    assert torch.equal(mine[2].grad, before)


def test_gradients_in_order_without_those_that_are_missing():
    mine = parameters(7)
    mine[1].grad = None
    found = gradients([sgd([{"params": mine[:2]}, {"params": mine[2:]}])])
    assert [id(one) for one in found] == [id(mine[number].grad) for number in (0, 2, 3)]


# -------------------------------------------------------------------------------- making optimizers


def test_make_optimizer_takes_all_or_two_groups_of_what_is_trained():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    made = make_optimizer(lambda those: torch.optim.Adam(those, lr=0.1), net)
    assert len(made.param_groups[0]["params"]) == 6  # the frozen ones may be unfrozen later
    split = make_optimizer(
        lambda those: torch.optim.AdamW(those, lr=0.1, weight_decay=0.5),
        net,
        split_vectors=True,
    )
    vectors, others = split.param_groups
    assert (vectors["weight_decay"], others["weight_decay"]) == (0.0, 0.5)
    assert [one.ndim for one in vectors["params"]] == [1, 1, 1]
    assert [one.ndim for one in others["params"]] == [2]


@pytest.mark.parametrize(
    ("kind", "given", "fused"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.AdamW, {"weight_decay": 0.1}, True),
        (torch.optim.SGD, {"lr": 0.1}, None),
        (torch.optim.Adam, {"fused": False}, False),
        (torch.optim.Adam, {"foreach": True}, None),
        (torch.optim.AdamW, {"capturable": True}, None),
        (torch.optim.RAdam, {}, None),
        (Recorder, {}, None),
    ],
)
def test_torchs_own_optimizers_are_fused_on_a_gpu(monkeypatch, kind, given, fused):
    net = nn.Linear(2, 2)
    opt_class = functools.partial(kind, **given) if given else kind
    assert not make_optimizer(opt_class, net).defaults.get("fused"), "on a CPU nothing changes"
    monkeypatch.setattr(making, "GPUS", ("cpu",))
    made = make_optimizer(opt_class, net, split_vectors=True)
    assert made.defaults.get("fused") is fused
    assert {group.get("fused") for group in made.param_groups} == {fused}


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(2, 2).bfloat16(),
        nn.Linear(2, 2, device="meta"),
        nn.ParameterList([nn.Parameter(torch.ones(1, dtype=torch.complex64))]),
    ],
)
def test_other_parameters_are_not_fused(monkeypatch, net):
    monkeypatch.setattr(making, "GPUS", ("cpu",))
    both = nn.ModuleList([net, nn.Linear(1, 1)])
    assert make_optimizer(torch.optim.Adam, both).defaults["fused"] is None


@pytest.mark.parametrize(("before", "now"), [(True, None), (None, True)])
def test_which_kernel_steps_is_not_read_from_a_checkpoint(tmp_path, before, now):
    """Saved on a GPU, resumed on a CPU, and the other way round."""
    saved = torch.optim.Adam(parameters(0), fused=before)
    saved.step()
    torch_save(saved, tmp_path / "optimizer.ckpt")
    loaded = torch.optim.Adam(parameters(0), fused=now, lr=0.5)
    torch_recovery(loaded, tmp_path / "optimizer.ckpt", end_of_epoch=True)
    [group] = loaded.param_groups
    assert (group["fused"], group["lr"]) == (now, 1e-3)
    assert [one["step"].item() for one in loaded.state.values()] == [1.0] * 4
    loaded.step()
    two = [{"params": one} for one in parameters(0)]
    with pytest.raises(CheckpointError, match="different number of parameter groups"):
        torch_recovery(torch.optim.Adam(two), tmp_path / "optimizer.ckpt", end_of_epoch=True)


def test_vectors_first_then_the_rest():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scalar = nn.Parameter(torch.ones(()))
            self.vector = nn.Parameter(torch.ones(2))
            self.matrix = nn.Parameter(torch.ones(2, 2))

    odd = Odd()
    vectors, others = rm_vector_weight_decay(odd)
    assert vectors["params"] == [odd.vector]
    assert len(others["params"]) == 2
    assert "weight_decay" not in others


def test_optimizers_that_cannot_be_made():
    with pytest.raises(
        ConfigError,
        match=r"^opt_class was given, but no entry of modules has a "
        r"trainable parameter",
    ):
        make_optimizer(sgd, nn.Linear(1, 1).requires_grad_(requires_grad=False))
    with pytest.raises(
        ConfigError,
        match=r"^opt_class must return an optimizer, got a list "
        r"\(without param_groups",
    ):
        make_optimizer(list, nn.Linear(1, 1))


def test_zero_and_drop():
    mine = parameters(8)
    optimizer = sgd(mine)
    zero_gradients([optimizer], set_to_none=False)
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in mine)
    zero_gradients([optimizer], set_to_none=True)
    assert all(one.grad is None for one in mine)
    net = nn.Linear(2, 1)
    net(torch.tensor([[1.0, float("inf")]])).sum().backward()
    assert drop_nonfinite(net) == ["weight"]
    assert net.weight.grad is None
    assert net.bias.grad.tolist() == [1.0]


def test_a_parameter_shared_by_two_scaled_optimizers_is_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)]
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ConfigError, match="share a parameter"):
        take_step(optimizers, max_norm=None, scaler=scaler)


def test_an_opt_class_that_cannot_be_called_is_named():
    opt_class = functools.partial(torch.optim.SGD, lr="fast")
    with pytest.raises(ConfigError, match=r"opt_class cannot make an optimizer: TypeError"):
        make_optimizer(opt_class, nn.Linear(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_minor_1_the_count_multiplies_gradients_in_their_own_dtype_which_is_one_kernel_on_a_gpu(
    monkeypatch,
    dtype,
):
    """``_foreach_mul_`` falls back to a kernel per parameter where the factor is of another
    dtype.
    """
    factors = []
    real = torch._foreach_mul_
    monkeypatch.setattr(
        torch,
        "_foreach_mul_",
        lambda ones, factor: factors.append(factor.dtype) or real(ones, factor),
    )
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    for max_norm in (None, 0.01):
        weight.grad = torch.full((3,), 8.0, dtype=dtype)
        take_step(
            [torch.optim.SGD([weight], lr=0.0)],
            max_norm,
            multiplier=torch.tensor(0.25, dtype=torch.float64),
        )
    # a small factor would be nothing in half precision
    own = torch.float64 if dtype is torch.float16 else dtype
    assert factors == [own, own]


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e3])
def test_sparse_gradients_are_clipped_as_dense_ones_are(max_norm):
    """A row that is looked up twice in a batch counts once, with the sum of both."""
    results = []
    for sparse in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1)).double()
        net(torch.tensor([0, 2, 2, 4])).square().sum().backward()
        step = take_step([torch.optim.SGD(net.parameters(), lr=0.5)], max_norm, multiplier=0.25)
        results.append((step, [one.detach() for one in net.parameters()]))
    (dense, expected), (step, weights) = results
    assert (step.stepped, step.clipped) == (True, dense.clipped)
    assert step.norm == pytest.approx(dense.norm, rel=1e-12)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_sparse_gradient_that_is_not_finite_is_skipped():
    table = nn.Embedding(3, 1, sparse=True)
    before = table.weight.detach().clone()
    for skips in (
        lambda: not take_step([torch.optim.SparseAdam(table.parameters())], 1.0).stepped,
        lambda: drop_nonfinite(table) == ["weight"],
    ):
        (table(torch.tensor([1, 2])) * torch.tensor([[1.0], [math.nan]])).sum().backward()
        assert skips()
    assert torch.equal(table.weight, before)


def plateau_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0)
    return make_schedule(plateau, optimizer, "epoch", None), optimizer.param_groups[0]


def test_a_schedule_that_follows_the_loss_hears_that_of_the_validation_alone():
    schedule, group = plateau_schedule()
    for epoch, (trained, validated) in enumerate([(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)], 1):
        schedule.after_stage(Stage.TRAIN, trained, epoch)
        schedule.after_stage(Stage.VALID, validated, epoch)
    assert group["lr"] == 0.25


def test_an_epoch_counts_once_in_a_schedule_also_after_a_resume_and_only_with_a_step():
    schedule, group = plateau_schedule()
    for loss, steps in ((1.0, 4), (2.0, 8), (3.0, 8)):
        schedule.after_stage(Stage.VALID, loss, steps)
    assert group["lr"] == 0.5
    other, group = plateau_schedule()
    other.load_state_dict(schedule.state_dict())
    other.after_stage(Stage.VALID, 3.0, 8)
    assert group["lr"] == 1.0, "the optimizer has a state of its own"
    other.after_stage(Stage.VALID, 3.0, 9)
    assert group["lr"] == 0.5
