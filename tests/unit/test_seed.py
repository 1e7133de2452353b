"""Seeds and random states, in one process."""

# ruff: noqa: NPY002 -- NumPy's global state is what is tested

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.seed import (
    global_seed,
    own_randomness,
    restore_rng_state,
    rng_state,
    seed_epoch_streams,
    seed_everything,
    seed_streams,
    stream_seed,
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "")  # so that the variable is put back afterwards
    monkeypatch.delenv("SB_GLOBAL_SEED", raising=False)


def draw():
    return (
        random.random(),
        np.random.rand(),
        float(torch.rand(())),
        np.random.randn(),
        random.gauss(0, 1),
    )


def test_the_same_seed_gives_the_same_numbers():
    assert seed_everything(5) == 5
    first = draw()
    assert seed_everything(6) == 6
    second = draw()
    seed_everything(5)
    assert draw() == first != second


def test_no_gpu_is_asked_for_as_a_script_begins(monkeypatch):
    """CUDA that was asked cannot be used in processes that are forked after that, as from a
    notebook.
    """

    def asked():
        raise AssertionError

    monkeypatch.setattr(torch.accelerator, "is_available", asked)
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert seed_everything(5, verbose=False) == 5


def test_the_seed_is_left_in_the_environment():
    assert global_seed() is None
    seed_everything(5)
    assert os.environ["DDPKIT_GLOBAL_SEED"] == "5"
    assert global_seed() == 5


def test_the_older_name_of_the_variable_is_read(monkeypatch):
    monkeypatch.setenv("SB_GLOBAL_SEED", "8")
    assert global_seed() == 8
    seed_everything(5)
    assert global_seed() == 5


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_replaced_by_0_with_a_warning(seed, caplog):
    assert seed_everything(seed, verbose=False) == 0
    assert f"seed={seed} is outside [0, 4294967295]; 0 is used instead." in caplog.messages


def test_the_largest_seed():
    assert seed_everything(2**32 - 1) == 2**32 - 1


@pytest.mark.parametrize("seed", ["abc", 1.5, None, float("nan"), float("inf")])
def test_a_seed_that_is_no_number(seed):
    with pytest.raises(ConfigError, match="seed=.* is not a whole number"):
        seed_everything(seed)


def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("DDPKIT_GLOBAL_SEED", "abc")
    with pytest.raises(ConfigError, match="DDPKIT_GLOBAL_SEED='abc' is not a whole number"):
        global_seed()


def test_verbose(caplog):
    caplog.set_level("INFO")
    seed_everything(1, verbose=False)
    assert not caplog.messages
    seed_everything(1)
    assert caplog.messages == ["Seed: 1"]


def test_deterministic(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        seed_everything(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_the_streams_of_an_epoch_follow_from_seed_epoch_and_steps():
    draws = {}
    for place in [(5, 1, 0), (6, 1, 0), (5, 2, 0), (5, 1, 9)]:
        seed_epoch_streams(*place)
        draws[place] = draw()
    assert len(set(draws.values())) == 4
    seed_everything(8)
    assert seed_epoch_streams(5, 1, 0) == stream_seed(5, 0, 1, 0)
    assert draw() == draws[5, 1, 0], "whatever was drawn before"


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_streams_of_accelerators_in_use_are_seeded_too(kind, monkeypatch):
    seeds = []
    monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: True)
    monkeypatch.setattr(getattr(torch, kind), "manual_seed_all", seeds.append)
    assert [seed_epoch_streams(5, 1, 0), seed_streams(5, 2)] == seeds
    assert len(set(seeds)) == 2


def test_2_5_streams_are_hashed_and_not_summed():
    seeds = [
        stream_seed(seed, rank, epoch)
        for seed in range(20)
        for rank in range(8)
        for epoch in range(20)
    ]
    assert len(set(seeds)) == len(seeds)
    assert stream_seed(10, 2) != stream_seed(11, 1)
    assert stream_seed(1, 23) != stream_seed(12, 3)
    # the same in every version: runs are repeated years later
    assert stream_seed(3, 1) == 2443941090653319517


def test_rng_state_brings_every_generator_back():
    np.random.randn()  # leaves a second Gaussian in store
    random.gauss(0, 1)  # likewise
    state = rng_state()
    first = draw(), draw()
    assert (draw(), draw()) != first
    restore_rng_state(state)
    assert (draw(), draw()) == first


def test_rng_state_loads_with_weights_only(tmp_path):
    state = rng_state()
    first = draw()
    torch.save(state, tmp_path / "rng.pt")
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True)
    restore_rng_state(loaded)
    assert draw() == first


class Devices:
    """Some GPUs: each has a random state, which is the number of its draws and who has drawn."""

    def __init__(self, monkeypatch, count, current, kind="cuda"):
        self.states = [torch.tensor([100 + number], dtype=torch.uint8) for number in range(count)]
        module = getattr(torch, kind)
        for name, function in {
            "is_available": lambda: count > 0,
            "is_initialized": lambda: count > 0,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_rng_state": lambda number: self.states[number].clone(),
            "get_rng_state_all": lambda: [state.clone() for state in self.states],
            "set_rng_state": self.restore,
        }.items():
            monkeypatch.setattr(module, name, function)

    def restore(self, state, number):
        self.states[number] = state

    @property
    def numbers(self):
        return [int(state) for state in self.states]


@pytest.fixture
def _in_a_group(monkeypatch):
    # torch puts its own in the place, to stay
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_in_a_group")
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("before", "after"),
    [((8, 3), (1, 0)), ((1, 0), (8, 3)), ((8, 3), (8, 5)), ((8, 3), (8, 3))],
)
def test_a_rank_goes_on_with_the_random_numbers_of_its_own_gpu_by_whatever_number_it_sees_it(
    before,
    after,
    kind,
    monkeypatch,
    tmp_path,
    caplog,
):
    """Under torchrun a rank sees all GPUs of its node; under ``srun --gpus-per-task=1`` its own
    alone, as number 0.
    """
    Devices(monkeypatch, *before, kind).states[before[1]][0] = 7
    torch.save(rng_state(), tmp_path / "rng.pt")
    now = Devices(monkeypatch, *after, kind)
    expected = now.numbers
    expected[after[1]] = 7
    restore_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert now.numbers == expected, "its own has the state; those of other ranks are left alone"
    assert not caplog.records


def test_without_a_group_the_other_gpus_follow_for_data_parallel(monkeypatch, caplog):
    Devices(monkeypatch, 3, 1).states[1][0] = 7
    state = rng_state()
    again = Devices(monkeypatch, 3, 1)
    again.states = [torch.tensor([0], dtype=torch.uint8)] * 3
    restore_rng_state(state)
    assert again.numbers == [100, 7, 102]
    fewer = Devices(monkeypatch, 2, 0)
    restore_rng_state(state)
    assert fewer.numbers == [7, 100]
    assert "covers 3 CUDA devices, here are 2; the rest is left out" in caplog.text


def test_a_run_that_goes_on_without_gpus_says_so(monkeypatch, caplog):
    Devices(monkeypatch, 1, 0)
    state = rng_state()
    Devices(monkeypatch, 0, 0)
    restore_rng_state(state)
    assert "covers 1 CUDA devices, here are 0" in caplog.text


def test_a_state_that_does_not_fit():
    state = rng_state()
    with pytest.raises(CheckpointError, match="does not fit this process"):
        restore_rng_state({"python": state["python"]})
    with pytest.raises(CheckpointError, match="does not fit this process"):
        restore_rng_state(state | {"torch_cpu": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="does not fit this process"):
        restore_rng_state(state | {"python": [9, [1, 2], None]})


def test_randomness_of_ones_own_leaves_the_global_streams_where_they_were():
    seed_everything(3, verbose=False)
    expected = draw()
    seed_everything(3, verbose=False)
    with own_randomness(5):
        own = draw()
    assert draw() == expected
    with own_randomness(5):
        assert draw() == own
