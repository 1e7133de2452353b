"""Looks into DDP, recurrent layers, compiled modules and workers, and what happens where they are
not as expected.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.compat import (
    GradientOrder,
    forget_compiled,
    is_compiled,
    is_split_by_node,
    kill_when_terminated,
    show_order,
    waits_for_gradients,
    without_weak_references,
)


@pytest.fixture
def wrap():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = []

    def wrap(module, **options):
        made.append(DistributedDataParallel(module, **options))
        return made[-1]

    yield wrap
    made.clear()
    dist.destroy_process_group()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def forward(self, inputs, *, use_other=True):
        return self.other(self.one(inputs)) if use_other else self.one(inputs)


def backward(module, **options):
    module(torch.ones(1, 2), **options).sum().backward()


def test_the_order_of_gradients_is_noted_in_the_first_pass_that_averages_them(wrap):
    module = wrap(Two())
    noted = GradientOrder(module)
    with module.no_sync():
        backward(module)
    assert noted.order == []
    assert not noted.close()
    backward(module)
    assert sorted(noted.order) == [0, 1, 2, 3]
    assert noted.close()


@pytest.mark.parametrize("static_graph", [False, True])
def test_an_order_is_shown_to_ddp_which_trains_on(wrap, static_graph):
    module = wrap(Two(), static_graph=static_graph)
    assert show_order(module, [2, 3, 0, 1])
    assert all(one.grad is None for one in module.parameters())
    backward(module)
    assert all(one.grad is not None for one in module.parameters())


@pytest.mark.parametrize(
    "lacks",
    ["reducer", "static_graph", "_static_graph_delay_allreduce_enqueued"],
)
def test_a_ddp_without_the_inside_is_left_to_find_its_own_order(wrap, lacks):
    module = wrap(Two(), static_graph=True)
    inside = {
        "reducer": module.reducer,
        "static_graph": True,
        "_static_graph_delay_allreduce_enqueued": False,
    }
    known = SimpleNamespace(
        parameters=module.parameters,
        **{key: inside[key] for key in inside if key != lacks},
    )
    assert not show_order(known, [2, 3, 0, 1])


@pytest.mark.parametrize(
    "lacks",
    ["prepare_for_backward", "prepare_for_forward", "_delay_all_reduce"],
)
def test_a_reducer_without_the_inside_likewise(lacks):
    calls = {"prepare_for_backward", "prepare_for_forward", "_delay_all_reduce"} - {lacks}
    module = nn.Linear(1, 1)
    module.static_graph = True
    module._static_graph_delay_allreduce_enqueued = False
    module.reducer = SimpleNamespace(**dict.fromkeys(calls))
    assert not show_order(module, [0, 1])


def test_ddp_says_that_it_waits_for_a_gradient_or_is_not_asked(wrap):
    module = wrap(Two())
    backward(module)
    assert not waits_for_gradients(module)
    backward(module, use_other=False)
    assert waits_for_gradients(module)
    assert not waits_for_gradients(SimpleNamespace(reducer=SimpleNamespace()))


def swap(layer):
    with without_weak_references(layer):
        torch.utils.swap_tensors(layer.weight_ih_l0, nn.Parameter(torch.ones(3, 1)))


def test_a_weight_of_a_recurrent_layer_is_swapped_or_torch_says_why_not(monkeypatch):
    layer = nn.GRU(1, 1)
    swap(layer)
    assert layer(torch.ones(2, 1))[0].shape == (2, 1)
    monkeypatch.delattr(nn.RNNBase, "_init_flat_weights")
    with pytest.raises(RuntimeError, match="weakref"):
        swap(layer)


def test_a_compiled_module_is_known_or_counts_as_not_compiled(monkeypatch):
    layer = nn.Linear(1, 1)
    assert not is_compiled(layer)
    assert is_compiled(torch.compile(layer, backend="eager"))
    layer.compile(backend="eager")
    assert is_compiled(layer)
    forget_compiled(layer)
    assert not is_compiled(layer)
    forget_compiled(layer)  # of nothing
    layer.compile(backend="eager")
    monkeypatch.delattr(nn.Module, "_compiled_call_impl")
    del layer._compiled_call_impl
    assert not is_compiled(layer)


def test_a_split_stream_is_known_or_counts_as_whole():
    assert is_split_by_node(SimpleNamespace(_distributed=object()))
    assert not is_split_by_node(SimpleNamespace(_distributed=None))
    assert not is_split_by_node(SimpleNamespace())


def ignore_and_wait(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send("ready")
    time.sleep(600)


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_ended_all_the_same():
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=ignore_and_wait,
        args=(there,),
        daemon=True,
    )
    kill_when_terminated(worker)
    worker.start()
    assert here.recv() == "ready"
    worker.terminate()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    kill_when_terminated(SimpleNamespace())
