"""Sparse tensors with indices outside of their shape are refused by each version of torch."""

from __future__ import annotations

import threading
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.sparse import check_sparse_tensor_invariants

from ddpkit.checkpointing import is_in_shards, safe_load
from ddpkit.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning"),
]
LAYOUTS = ["coo", "csr", "csc", "bsr", "bsc"]
FAR = 500_000
ONES = torch.ones(2)


def coo(*indices):
    return torch.sparse_coo_tensor([indices], ONES, (3,), check_invariants=False)


def compressed(layout, last, values=ONES):
    return torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 2]),
        torch.tensor([0, last]),
        values,
        (2, 2),
        layout=layout,
        check_invariants=False,
    )


def of_each_layout(last):
    blocks = torch.ones(2, 1, 1)
    return {
        "coo": coo(0, last),
        "csr": compressed(torch.sparse_csr, last),
        "csc": compressed(torch.sparse_csc, last),
        "bsr": compressed(torch.sparse_bsr, last, blocks),
        "bsc": compressed(torch.sparse_bsc, last, blocks),
    }


class Unknown:
    """Of no type that is loaded."""


@pytest.fixture
def saved(tmp_path):
    def save(state, name="model.ckpt", **named):
        torch.save(state, tmp_path / name, **named)
        return tmp_path / name

    return save


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["zip", "mapped", "legacy"])
def test_an_index_outside_of_the_shape_is_refused_with_the_name(saved, layout, form):
    bad = of_each_layout(FAR)[layout]
    state = {"fine": of_each_layout(1)[layout], "nets": [{"table": bad}]}
    path = saved(state, _use_new_zipfile_serialization=form != "legacy")
    shape = r"\(3,\)" if layout == "coo" else r"\(2, 2\)"
    with pytest.raises(
        CheckpointError,
        match=rf"model\.ckpt: its sparse tensor 'nets/0/table' of shape {shape} is not valid: ",
    ):
        safe_load(path, mmap=form == "mapped")


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((0, FAR), "size is 3 but found index 500000"),
        ((-7, 0), "found negative index -7"),
    ],
)
def test_the_index_is_told(saved, indices, words):
    with pytest.raises(CheckpointError, match=words):
        safe_load(saved({"table": coo(*indices)}))


def test_what_has_no_name_is_refused_with_the_shape(saved):
    bad = nn.Parameter(coo(0, FAR))
    endless = []
    endless += [endless, coo(0, FAR)]
    for state in (bad, endless):
        with pytest.raises(CheckpointError, match=r"its sparse tensor of shape \(3,\) is not"):
            safe_load(saved(state))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_valid_one_is_loaded(saved, layout, place):
    table = of_each_layout(1)[layout]
    path = saved({"table": table})
    loaded = safe_load(path, place)["table"]
    assert (loaded.layout, loaded.shape) == (table.layout, table.shape)
    if place == "cpu":
        assert torch.equal(loaded.to_dense(), table.to_dense())
    assert not is_in_shards(path)


def test_a_refused_file_leaves_nothing_for_the_next_load(saved):
    """torch keeps the sparse tensors of a load that failed, and checks them with the next file."""
    bad = saved({"table": coo(0, FAR), "then": Unknown()}, "bad.ckpt")
    good = saved({"table": coo(0, 1)}, "good.ckpt")
    with pytest.raises(CheckpointError, match="Unknown"):
        safe_load(bad)
    with check_sparse_tensor_invariants():
        torch.load(good, weights_only=True)
    with pytest.raises(Exception, match="Unknown"):
        torch.load(bad, weights_only=True)
    assert safe_load(good)["table"].is_sparse


@pytest.mark.parametrize("enabled", [False, True])
def test_the_setting_of_the_process_is_what_it_was(saved, enabled):
    with check_sparse_tensor_invariants(enable=enabled):
        safe_load(saved({"table": coo(0, 1)}))
        assert check_sparse_tensor_invariants.is_enabled() is enabled
        with pytest.raises(CheckpointError):
            safe_load(saved({"table": coo(0, FAR)}))
        assert check_sparse_tensor_invariants.is_enabled() is enabled


class SlowLoad:
    """A load in a thread of its own, that stops in the middle."""

    def __init__(self, path):
        self.begun = threading.Event()
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=safe_load, args=(path, self._wait))
        self._thread.start()

    def _wait(self, storage, _place):
        self.begun.set()
        self._may_end.wait()
        return storage

    def end(self):
        self._may_end.set()
        self._thread.join()


@pytest.fixture
def slow_load(saved):
    loads = []

    def begin():
        loads.append(SlowLoad(saved({"dense": torch.ones(2)}, "slow.ckpt")))
        return loads[-1]

    yield begin
    for load in loads:
        load.end()


def test_loads_in_two_threads_leave_the_setting_alone(slow_load):
    first = slow_load()
    assert first.begun.wait(60)
    second = slow_load()
    second.begun.wait(0.1)  # it waits for the first one; otherwise it would restore its setting
    first.end()
    second.end()
    assert not check_sparse_tensor_invariants.is_enabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_during_a_load_can_load(saved, slow_load):
    assert slow_load().begun.wait(60)
    child = get_context("fork").Process(target=safe_load, args=(saved({"table": coo(0, 1)}),))
    child.start()
    child.join(30)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0
