"""The environment of a program that a rank starts."""

from __future__ import annotations

import os

import pytest

from ddpkit.distributed import environment_without_launch
from ddpkit.errors import LaunchError
from ddpkit.launch import find_launch, mark_rank_process, refuse_child_of_rank
from ddpkit.launch.launcher_variables import RANK_PROCESS

from .test_launchers import SRUN, TORCHRUN


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_no_variable_of_a_launcher_is_left(environ):
    left = environment_without_launch({**environ, "HOME": "/root"})
    assert not find_launch(left).is_distributed
    assert left["HOME"] == "/root"
    assert environment_without_launch()["PATH"] == os.environ["PATH"]


@pytest.fixture
def rank(monkeypatch):
    """A process that is a rank, as its environment and its mark say."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(RANK_PROCESS, "")
    mark_rank_process()
    return monkeypatch


def as_child(monkeypatch):
    """Be another process than the one that left the mark."""
    monkeypatch.setenv(RANK_PROCESS, "1" + os.environ[RANK_PROCESS])


def test_the_rank_itself_may_join_again(rank):
    refuse_child_of_rank(find_launch())


def test_a_child_with_the_same_variables_may_not(rank):
    as_child(rank)
    with pytest.raises(
        LaunchError,
        match=r"was started by rank 3 \(pid 1\d+\) "
        r".*MASTER_PORT=29500 RANK=3",
    ):
        refuse_child_of_rank(find_launch())


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
def test_a_launcher_inside_has_set_other_variables(rank, name):
    as_child(rank)
    rank.setenv(name, {"RANK": "2", "MASTER_PORT": "29501"}.get(name, "other"))
    if name == "RANK":
        rank.setenv("LOCAL_RANK", "0")
    refuse_child_of_rank(find_launch())


def test_a_rank_alone_leaves_no_mark(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    mark_rank_process()
    assert RANK_PROCESS not in os.environ


def test_where_nothing_is_marked_all_is_well(monkeypatch):
    monkeypatch.delenv(RANK_PROCESS, raising=False)
    refuse_child_of_rank(find_launch(TORCHRUN))
