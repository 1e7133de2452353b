"""A backward pass goes straight into torch's engine, or through ``loss.backward`` where that may be
another.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpkit.compat import back_propagate, torch_inside


@pytest.fixture(autouse=True)
def untried():
    torch_inside._engine.cache_clear()
    yield
    torch_inside._engine.cache_clear()


@pytest.fixture
def number():
    return torch.ones(3, requires_grad=True)


def is_direct():
    return torch_inside._engine() is not None


def gradients(step):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    step(net(torch.randn(11, 5)).square().mean())
    return [one.grad for one in net.parameters()]


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.0])
@pytest.mark.parametrize("inside", ["as it is", "another signature", "does nothing", "none"])
def test_the_gradients_have_the_bits_of_loss_backward(scale, inside, monkeypatch):
    expected = gradients(lambda loss: loss.backward(torch.full_like(loss, scale)))
    others = {
        "another signature": lambda _tensors: (),
        "does nothing": lambda *_, **__: (),
        "none": None,
    }
    if inside != "as it is":
        monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", others[inside])
    found = gradients(lambda loss: back_propagate(loss, torch.full_like(loss, scale)))
    assert is_direct() == (inside == "as it is")
    assert all(map(torch.equal, found, expected))


def test_the_graph_is_kept_if_it_is_asked_for(number):
    loss = (number * number).sum()
    back_propagate(loss, torch.tensor(1.0), retain_graph=True)
    back_propagate(loss, torch.tensor(0.5))
    assert number.grad.tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="second time"):
        back_propagate(loss, torch.tensor(1.0))


def test_hooks_of_the_loss_see_its_weight(number):
    loss = number.sum()
    seen = []
    loss.register_hook(seen.append)
    back_propagate(loss, torch.tensor(0.25))
    assert is_direct()
    assert seen == [torch.tensor(0.25)]


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")],
)
def test_the_engine_is_tried_in_any_context(context, number):
    loss = number.sum()
    weight = torch.tensor(0.5)
    with context():
        assert is_direct()
        back_propagate(loss, weight)
    assert number.grad.tolist() == [0.5] * 3


# ------------------------------------------------------ where somebody has put another in its place


def counting(public):
    """A function that does what another does, and how often it was called."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return public(*args, **kwargs)

    return counted, calls


@pytest.mark.parametrize("before", [True, False], ids=["before the import", "after it"])
@pytest.mark.parametrize(
    ("owner", "place"),
    [(torch.Tensor, 0), (torch.autograd, 1)],
    ids=["Tensor", "autograd"],
)
def test_a_backward_in_the_place_of_torchs_is_called(owner, place, before, number, monkeypatch):
    counted, calls = counting(owner.backward)
    monkeypatch.setattr(owner, "backward", counted)
    if before:
        monkeypatch.setattr(
            torch_inside,
            "_PUBLIC",
            (torch.Tensor.backward, torch.autograd.backward),
        )
        assert torch_inside._PUBLIC[place] is counted
    back_propagate(number.sum(), torch.tensor(0.5))
    assert len(calls) == 1
    assert number.grad.tolist() == [0.5] * 3


def test_a_backward_of_the_tensors_own_is_called(number):
    loss = number.sum()
    loss.backward, calls = counting(loss.backward)
    back_propagate(loss, torch.tensor(0.5))
    assert len(calls) == 1
    assert number.grad.tolist() == [0.5] * 3


class Loss(torch.Tensor):
    calls = 0

    def backward(self, *args, **kwargs):
        type(self).calls += 1
        super().backward(*args, **kwargs)


def test_a_backward_of_a_subclass_is_called(number):
    back_propagate(number.sum().as_subclass(Loss), torch.tensor(0.5))
    assert Loss.calls == 1
    assert number.grad.tolist() == [0.5] * 3


def test_a_mode_of_torch_functions_sees_the_backward_pass(number):
    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    seen = []
    loss = number.sum()
    weight = torch.tensor(0.5)
    with Noting():
        back_propagate(loss, weight)
    assert "backward" in seen
    assert number.grad.tolist() == [0.5] * 3


def test_inside_a_functional_transform_there_is_torchs_own_error(number):
    def function(factor):
        loss = (number * factor).sum()
        back_propagate(loss, torch.ones_like(loss))
        return loss

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(function)(torch.ones(3))


def test_the_default_of_torchs_backward_keeps_no_graph(number):
    loss = (number * number).sum()
    back_propagate(loss, torch.tensor(1.0), retain_graph=None)
    assert number.grad.tolist() == [2.0] * 3


# torch's own look at it
@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_may_call_it(number):
    @torch.compile(backend="eager")
    def step():
        loss = (number * 3.0).sum()
        back_propagate(loss, torch.full_like(loss, 0.5))
        return loss.detach()

    assert step().item() == 9.0
    assert number.grad.tolist() == [1.5] * 3


def test_the_public_way_is_taken_where_the_trial_fails(number, monkeypatch):
    def fails(*_args, **_options):
        raise ValueError("another torch")

    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", fails)
    back_propagate(number.sum(), torch.tensor(0.5))
    assert not is_direct()
    assert number.grad.tolist() == [0.5] * 3
