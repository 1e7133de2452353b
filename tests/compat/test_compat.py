"""Looks into torch's process groups, a forkserver of its own, and operations over many tensors."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing import forkserver, get_context

import pytest
import torch
import torch.distributed as dist

from ddpkit.compat.forkservers import own_forkserver
from ddpkit.compat.torch_inside import add_all, all_groups, default_store, multiply_all, norm_of_all, timeout_of


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_store_and_all_groups(group):
    default_store().set("key", "value")
    assert default_store().get("key") == b"value"
    other = dist.new_group([0])
    assert set(all_groups()) == {group, other}


def test_the_timeout_of_a_group_or_none_where_it_is_not_told(group):
    assert timeout_of(group) == timedelta(seconds=77)
    assert timeout_of(object()) is None


def parent_of_a_process():
    reader, writer = get_context("forkserver").Pipe(duplex=False)
    told = "import os; pipe.send(os.getppid())"  # in a process that imports nothing
    process = get_context("forkserver").Process(target=exec, args=(told, {"pipe": writer}))
    process.start()
    process.join()
    return reader.recv()


def test_a_forkserver_of_its_own_or_the_scripts(monkeypatch):
    scripts, connect = parent_of_a_process(), forkserver.connect_to_new_process
    with own_forkserver():
        assert parent_of_a_process() != scripts
    assert forkserver.connect_to_new_process is connect
    monkeypatch.delattr(forkserver, "ForkServer")
    with own_forkserver():
        assert parent_of_a_process() == scripts


def test_tensors_are_added_at_once():
    tensors = [torch.ones(2), torch.full((1,), 3.0, dtype=torch.bfloat16)]
    add_all(tensors, [torch.ones(2), torch.ones(1, dtype=torch.bfloat16)])
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [4.0]]


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=str)
def test_tensors_are_multiplied_at_once(factor):
    tensors = [torch.ones(2), torch.full((1,), 3.0, dtype=torch.bfloat16)]
    multiply_all(tensors, factor)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.5]]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float64]], ids=str)
def test_the_norm_of_all_has_the_bits_of_torchs(dtypes):
    generator = torch.Generator().manual_seed(3)
    shapes = ((300, 70), (11,), ())
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert norm_of_all(tensors).equal(torch.nn.utils.get_total_norm(tensors))
    assert norm_of_all([]).item() == 0.0
