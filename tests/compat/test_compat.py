"""Looks into torch's process groups, and the public way that is taken where there is nothing to
look at.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing import forkserver, get_context

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpkit.checkpointing import safe_load
from ddpkit.compat.forkservers import own_forkserver
from ddpkit.compat.torch_inside import (
    add_all,
    all_groups,
    default_store,
    forget_unchecked_sparse_tensors,
    is_hooked_backward,
    multiply_all,
    norm_of_all,
    timeout_of,
)
from ddpkit.errors import CheckpointError
from tests.needs import needs_torch


@pytest.fixture
def group():
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=77),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@needs_torch("2.13", "a group does not tell its store; torch's own function is there")
def test_the_store_of_the_default_group_is_one_object_however_it_is_asked_for(group, monkeypatch):
    store = default_store()
    store.set("key", "value")
    with monkeypatch.context() as without:
        without.delattr(distributed_c10d, "_get_default_store")
        assert default_store() is store
        assert default_store().get("key") == b"value"


def test_without_a_group_there_is_torchs_own_error_both_ways(monkeypatch):
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        default_store()
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        default_store()


def test_all_groups_or_the_default_one(group, monkeypatch):
    other = dist.new_group([0])
    assert set(all_groups()) == {group, other}
    with monkeypatch.context() as without:
        without.delattr(type(distributed_c10d._world), "pg_map")
        assert all_groups() == [group]


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


@pytest.mark.slow
def test_a_forkserver_of_its_own_or_the_scripts(monkeypatch):
    scripts = parent_of_a_process()
    connect = forkserver.connect_to_new_process
    with own_forkserver():
        assert parent_of_a_process() != scripts
    assert forkserver.connect_to_new_process == connect
    monkeypatch.delattr(forkserver, "ForkServer")
    with own_forkserver():
        assert parent_of_a_process() == scripts


def hooked_layer(kind):
    layer = torch.nn.Linear(1, 1)
    if kind == "parameter":
        layer.weight.register_post_accumulate_grad_hook(lambda *_: None)
    elif kind != "none":
        getattr(layer, kind)(lambda *_: None)
    return torch.nn.Sequential(layer)


@pytest.mark.parametrize(
    "kind", ["none", "parameter", "register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_whether_functions_are_called_when_gradients_are_written(kind):
    assert is_hooked_backward(hooked_layer(kind)) == (kind != "none")


def test_functions_of_all_modules_count_where_torch_has_them(monkeypatch):
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    assert is_hooked_backward(hooked_layer("none"))
    handle.remove()
    handle = torch.nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None)
    assert is_hooked_backward(hooked_layer("none"))
    handle.remove()
    monkeypatch.delattr(torch.nn.modules.module, "_global_backward_hooks")
    assert not is_hooked_backward(hooked_layer("none"))


@pytest.mark.parametrize("at_once", [True, False])
def test_tensors_are_added_at_once_or_one_by_one(at_once, monkeypatch):
    if not at_once:
        monkeypatch.delattr(torch, "_foreach_add_")
    tensors = [torch.ones(2), torch.full((1,), 3.0, dtype=torch.bfloat16)]
    add_all(tensors, [torch.ones(2), torch.ones(1, dtype=torch.bfloat16)])
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [4.0]]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=str)
def test_tensors_are_multiplied_at_once_or_one_by_one(at_once, factor, monkeypatch):
    if not at_once:
        monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.ones(2), torch.full((1,), 3.0, dtype=torch.bfloat16)]
    multiply_all(tensors, factor)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.5]]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bfloat16]


def test_a_count_on_the_cpu_multiplies_gradients_elsewhere_as_a_number(monkeypatch):
    """Copied there from memory that is not pinned it would make the host wait: "meta" stands for a
    GPU here.
    """
    factors = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda ones, factor: factors.append(factor))
    multiply_all(
        [torch.ones(1), torch.ones(1, device="meta")],
        torch.tensor(0.1, dtype=torch.float64),
    )
    assert sorted(factors, key=lambda one: isinstance(one, torch.Tensor)) == [
        pytest.approx(0.1),
        torch.tensor(0.1),
    ]
    assert isinstance(factors[0], float) != isinstance(factors[1], float)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float64]],
    ids=str,
)
def test_the_norm_of_all_has_the_bits_of_torchs(at_once, dtypes, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    shapes = ((300, 70), (11,), ())
    tensors = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    expected = torch.nn.utils.get_total_norm(tensors)
    if not at_once:
        monkeypatch.delattr(torch, "_foreach_norm")
        monkeypatch.setattr(torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_: False)
    assert norm_of_all(tensors).equal(expected)
    assert norm_of_all([]).item() == 0.0


def test_a_sparse_tensor_is_refused_without_its_name_where_torch_does_not_tell_it(
    tmp_path, monkeypatch
):
    def refuse(**_named):
        raise RuntimeError("found negative index -7")

    torch.save({"table": torch.eye(3).to_sparse()}, tmp_path / "model.ckpt")
    monkeypatch.setattr(torch._utils, "_validate_loaded_sparse_tensors", refuse)
    with pytest.raises(CheckpointError, match=r"model\.ckpt: found negative index -7\.$"):
        safe_load(tmp_path / "model.ckpt")


def test_nothing_is_forgotten_where_torch_keeps_no_list(monkeypatch):
    kept = [torch.eye(3).to_sparse()]
    monkeypatch.setattr(torch._utils, "_sparse_tensors_to_validate", kept)
    forget_unchecked_sparse_tensors()
    assert kept == []
    monkeypatch.delattr(torch._utils, "_sparse_tensors_to_validate")
    forget_unchecked_sparse_tensors()
