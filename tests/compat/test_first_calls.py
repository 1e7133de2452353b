"""When a module is called is told without a change to what is compiled, copied or saved of it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from ddpkit.compat import CallNotice, arrivals, call_at_arrival


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return torch.tanh(self.layer(x))


@pytest.fixture
def graphs():
    """What torch has compiled, and a compiler that only counts."""
    found = []

    def compiler(graph, _):
        found.append(graph)
        return graph.forward

    yield found, compiler
    torch._dynamo.reset()


@pytest.mark.costly
def test_a_compiled_module_is_not_compiled_anew(graphs):
    found, compiler = graphs
    net = Small()
    calls = []
    net.compile(backend=compiler)
    net(torch.ones(3, 2))
    compiled = net._compiled_call_impl
    for _ in range(3):
        notice = CallNotice(net, lambda: calls.append(1))
        net(torch.ones(3, 2))
        notice.remove()
        net(torch.ones(3, 2))
    assert len(found) == 1
    assert len(calls) == 3
    assert net._compiled_call_impl is compiled


def test_compiled_parts_of_a_module_are_not_compiled_anew(graphs):
    found, compiler = graphs
    net = nn.Sequential(Small(), nn.Tanh())
    calls = []
    net[0].compile(backend=compiler)
    net(torch.ones(3, 2))
    notice = CallNotice(net, lambda: calls.append(1))
    net(torch.ones(3, 2))
    notice.remove()
    net(torch.ones(3, 2))
    assert (len(found), len(calls)) == (1, 1)
    assert not net._forward_pre_hooks


def test_a_copy_and_a_file_have_nothing_of_it():
    net = Small()
    calls = []
    notice = CallNotice(net, lambda: calls.append(1))
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        other(torch.ones(3, 2))
    assert not calls
    notice.remove()


def test_what_was_put_in_its_place_meanwhile_stays(graphs):
    _, compiler = graphs
    net = Small()
    net.compile(backend=compiler)
    notice = CallNotice(net, lambda: None)
    net.compile(backend=compiler)
    newest = net._compiled_call_impl
    notice.remove()
    assert net._compiled_call_impl is newest


def test_an_engine_without_such_calls_leaves_the_backward_pass_as_it_is(monkeypatch):
    monkeypatch.setattr(arrivals, "_queue", lambda: None)
    weight = torch.ones(1, requires_grad=True)
    seen = []
    loss = weight.sum()
    assert call_at_arrival(loss, lambda: seen.append(1)) is None
    loss.backward()
    assert weight.grad == 1
    assert not seen


def test_the_moment_of_arrival_is_after_the_last_gradient_and_before_what_others_have_queued():
    weight = torch.ones(1, requires_grad=True)
    seen = []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    loss = (weight * 2).sum()
    handle = call_at_arrival(loss, lambda: seen.append(("arrival", weight.grad.item())))
    weight.register_hook(lambda _: queue(lambda: seen.append(("theirs", weight.grad.item()))))
    loss.backward()
    handle.remove()
    assert seen == [("arrival", 2.0), ("theirs", 2.0)]
