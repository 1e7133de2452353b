from __future__ import annotations

import io
import threading
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from ddpkit.checkpointing import async_save
from ddpkit.checkpointing.async_save import SnapshotMemory, available_bytes, state_bytes
from ddpkit.checkpointing.hooks import saved_state

GIB = 1 << 30


def file_of(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def a_trained_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model.state_dict()


def views():
    whole = torch.arange(24.0)
    raw = torch.ones(3).untyped_storage()
    return {"whole": whole, "slice": whole[3:9], "transposed": whole.view(4, 6).t(), "raw": raw}


def sparse():
    indices = torch.tensor([[0, 1], [1, 2]])
    values = torch.tensor([1.0, 2.0])
    coo = torch.sparse_coo_tensor(indices, values, (3, 3), check_invariants=True)
    return {"coo": coo, "csr": coo.to_sparse_csr()}


def plain():
    return {
        "n": 3,
        "text": "größer",
        "none": None,
        "list": [1, (2.5, {"a"})],
        "ordered": OrderedDict(a=torch.ones(1), b=torch.ones(0)),
        "array": np.arange(3),
        "bits": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
    }


def of_a_model():
    return a_trained_model()[0].state_dict()


@pytest.mark.parametrize("make", [tied, views, of_a_model])
def test_the_file_is_that_which_torch_save_would_have_made_of_the_state_itself(make):
    state = make()
    copy = SnapshotMemory().take({"state": state})["state"]
    assert file_of(copy) == file_of(state)


def test_values_of_all_kinds_come_back_as_they_were():
    state = plain()
    copy = SnapshotMemory().take({"state": state})["state"]
    assert list(copy) == list(state)
    for name, value in state.items():
        assert type(copy[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert torch.equal(copy[name], value), name
            kinds = (value.dtype, value.shape, value.requires_grad)
            assert (copy[name].dtype, copy[name].shape, copy[name].requires_grad) == kinds, name
        elif name == "array":
            assert np.array_equal(copy[name], value)
        elif name == "ordered":
            assert torch.equal(copy[name]["a"], value["a"])
        else:
            assert copy[name] == value


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:TypedStorage")
def test_tensors_of_one_storage_share_its_copy():
    shared = torch.arange(6.0)
    grown = torch.zeros(2, requires_grad=True)
    state = {
        "a": shared, "turned": shared.view(2, 3).t(), "tail": shared[4:], "grown": grown,
        "derived": (grown * 2).detach(),
        "negative": torch.view_as_real(torch.ones(1) * 1j)[..., 1:],
        "integers": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    }  # fmt: skip
    copy = SnapshotMemory().take({"state": state})["state"]
    assert copy["turned"].stride() == (1, 3)
    assert copy["grown"].requires_grad
    assert copy["grown"].is_leaf
    copy["a"][5] = 9.0
    assert copy["tail"].tolist() == [4.0, 9.0]
    assert copy["turned"][2, 1] == 9.0
    assert shared[5] == 5.0
    assert torch.equal(copy["negative"], state["negative"])
    assert torch.equal(copy["integers"].dequantize(), torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_several_storages_come_back():
    copy = SnapshotMemory().take({"state": sparse()})["state"]
    for name, value in sparse().items():
        assert torch.equal(copy[name].to_dense(), value.to_dense())
        assert copy[name].layout == value.layout


def test_the_state_of_an_optimizer_comes_back_with_all_its_values():
    _, optimizer = a_trained_model()
    state = saved_state(optimizer)
    expected = torch.load(io.BytesIO(file_of(state)), weights_only=True)
    copy = SnapshotMemory().take({"optimizer": state})["optimizer"]
    assert copy["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(copy["state"][number][name], value)


def test_the_state_may_change_at_once():
    model, _ = a_trained_model()
    before = file_of(model.state_dict())
    taken = SnapshotMemory().take({"model": model.state_dict()})
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    assert file_of(model.state_dict()) != before
    assert file_of(taken["model"]) == before


def test_shared_storages_are_copied_once_whole_and_over_all_states():
    whole = torch.arange(100.0)
    memory = SnapshotMemory()
    taken = memory.take({"a": {"w": whole[:10]}, "b": {"w": whole[50:]}})
    a = taken["a"]["w"]
    b = taken["b"]["w"]
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != whole.data_ptr()
    assert torch.equal(a, whole[:10])
    assert torch.equal(b, whole[50:])
    assert state_bytes({"a": {"w": whole[:10]}, "b": {"w": whole[50:]}}) == 800  # two files


def test_the_memory_is_used_again_until_the_sizes_change():
    memory = SnapshotMemory()

    def place(size):
        return memory.take({"a": torch.zeros(size)})["a"].untyped_storage().data_ptr()

    first = place(1 << 20)
    assert place(1 << 20) == first
    place(1000)
    assert [storage.nbytes() for storage in memory._kept] == [4000], "a smaller state takes less"
    memory.take({"a": torch.zeros(1000), "b": torch.zeros(10)})
    assert [storage.nbytes() for storage in memory._kept] == [4000, 40]
    memory.clear()
    assert memory._kept == []


@pytest.mark.costly
def test_no_room_is_a_memory_error_that_says_how_much_there_is(monkeypatch):
    monkeypatch.setattr(async_save, "available_bytes", lambda: 300 << 20)
    memory = SnapshotMemory()
    memory.take({"a": torch.zeros(10 << 20)})
    with pytest.raises(MemoryError, match=f"a copy takes {80 << 20} bytes .* of {300 << 20}"):
        memory.take({"a": torch.zeros(20 << 20)})
    monkeypatch.setattr(async_save, "available_bytes", lambda: None)
    memory.take({"a": torch.zeros(20 << 20)})


def test_room_that_is_there_already_is_not_asked_for_again(monkeypatch):
    memory = SnapshotMemory()
    memory.take({"a": torch.zeros(1000)})
    monkeypatch.setattr(async_save, "available_bytes", lambda: 0)
    memory.take({"a": torch.zeros(1000)})


def test_a_state_that_cannot_be_copied_raises_what_copying_raises():
    with pytest.raises(TypeError, match="cannot pickle"):
        SnapshotMemory().take({"a": {"f": threading.Lock()}})


# --------------------------------------------------------------------------------- available memory


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  33554432 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 8 * GIB),
        # version 2; in a container the group is the root of what is mounted
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        # a limit on a group above this one, as Slurm sets it
        (
            {
                "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
                "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_1/step_0/memory.current": "5\n",
                "sys/fs/cgroup/slurm/job_1/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/slurm/job_1/memory.current": f"{GIB // 2}\n",
            },
            GIB // 2,
        ),
        # version 1, whose path leads nowhere in a container
        (
            MEMINFO
            | {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n9:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            GIB,
        ),
        # version 1 without a limit
        (
            MEMINFO
            | {
                "proc/self/cgroup": "9:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            8 * GIB,
        ),
        # more used than allowed
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "5\n",
                "sys/fs/cgroup/memory.current": "7\n",
            },
            0,
        ),
    ],
)
def test_the_memory_that_may_still_be_taken(tmp_path, files, expected):
    write(tmp_path, files)
    assert available_bytes(tmp_path) == expected


def test_what_has_no_plain_storage_is_saved_all_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        copy = SnapshotMemory().take({"a": {"nested": nested, "empty": torch.empty(0, 3)}})["a"]
    assert [part.tolist() for part in copy["nested"].unbind()] == [[1, 1], [1, 1, 1]]
    assert copy["empty"].shape == (0, 3)
