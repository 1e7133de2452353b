"""A storage that is larger than its record is refused, also by a torch that does not look."""

from __future__ import annotations

import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ddpkit.checkpointing import file_loading, record_sizes, safe_load
from ddpkit.checkpointing.record_sizes import check_record_sizes
from ddpkit.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture
def shorten(tmp_path):
    """Save a state, and take bytes of its storages away."""

    def save(state, taken):
        whole = tmp_path / "whole.ckpt"
        torch.save(state, whole)
        path = tmp_path / "short.ckpt"
        with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(path, "w") as short:
            for name in archive.namelist():
                content = archive.read(name)
                keep = len(content) - taken if "/data/" in name else len(content)
                short.writestr(name, content[:keep])
        return path

    return save


def states():
    net = nn.Linear(3, 3)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    adam.step()
    return {
        "optimizer": adam.state_dict(),
        "module": net.state_dict(),
        "containers": OrderedDict(a=[{1, 2}, (torch.ones(3),)], b={torch.ones(2): 1}),
        "parameter": nn.Parameter(torch.ones(2)),
        "view": torch.ones(100)[3:5],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_storage_that_lacks_a_byte_is_found(shorten, dtype):
    state = {"a": torch.zeros(7, dtype=dtype)}
    check_record_sizes(shorten(state, 0))
    # of kinds of storages without a name of their own the pickle has the bytes
    with pytest.raises(ValueError, match="storage 0 has .* bytes, and its record size is"):
        check_record_sizes(shorten(state, 1))


@pytest.mark.parametrize("name", list(states()))
def test_states_are_read_whatever_is_in_them(shorten, name):
    state = states()[name]
    check_record_sizes(shorten(state, 0))
    with pytest.raises(ValueError, match="its record size is"):
        check_record_sizes(shorten(state, 1))


def test_no_code_of_a_file_runs(tmp_path):
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return (ran.write_text, ("it ran",))

    torch.save({"a": torch.ones(3), "b": Runs()}, tmp_path / "a.ckpt")
    check_record_sizes(tmp_path / "a.ckpt")
    assert not ran.exists()


def test_what_is_no_archive_is_left_to_torch(tmp_path):
    old = tmp_path / "old.ckpt"
    torch.save(torch.ones(3), old, _use_new_zipfile_serialization=False)
    (tmp_path / "text.ckpt").write_text("hello")
    for path in (old, tmp_path / "text.ckpt", tmp_path / "missing.ckpt"):
        check_record_sizes(path)


def test_a_load_looks_first_where_torch_does_not(shorten, monkeypatch):
    monkeypatch.setattr(file_loading, "torch_compares_itself", lambda: False)
    path = shorten({"a": torch.ones(5000)}, 4000)
    with pytest.raises(
        CheckpointError,
        match=r"cannot load .*short\.ckpt: storage 0 has 20000 bytes, and its record size is 16000",
    ):
        safe_load(path)
    assert safe_load(shorten({"a": torch.ones(5000)}, 0))["a"].eq(1).all()


@pytest.mark.parametrize(
    ("version", "compares"),
    [("2.8.0", False), ("2.9.1+cu128", False), ("2.10.0a0+git", True), ("3.0", True)],
)
def test_which_torch_looks_itself(monkeypatch, version, compares):
    monkeypatch.setattr(torch, "__version__", version)
    assert record_sizes.torch_compares_itself() is compares
