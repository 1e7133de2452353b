"""The first meeting of the ranks of a group that somebody else has made: it has the limit that the
user gave, and not that of the group's store.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddpkit.comm.given_group import _own_store, _told_address, _told_starts
from ddpkit.comm.node_size import learn_node_size
from ddpkit.comm.rendezvous import Awaiting
from ddpkit.errors import LaunchError
from ddpkit.launch import LaunchInfo

SECONDS = 0.1


def info(rank, launcher="environment"):
    return LaunchInfo(launcher, rank=rank, local_rank=rank, world_size=2, local_world_size=2)


@pytest.mark.parametrize("meeting", [_told_starts, learn_node_size])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joins_and_comes_no_further_is_named(meeting, rank):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    began = time.monotonic()
    with pytest.raises(LaunchError, match=f"rank {1 - rank} joined the run and has not come furt"):
        meeting(store, info(rank), SECONDS)
    assert time.monotonic() - began < 30


def test_an_address_that_does_not_come_is_not_waited_for_longer():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    looked = []
    awaiting = Awaiting(looked.append)
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"rank 0 joined the run, and has not said where its stor"
    ):
        _told_address(store, began + SECONDS, awaiting)
    assert time.monotonic() - began < 30
    assert [0] in looked


def test_a_store_that_is_hosted_at_the_last_moment_has_the_whole_limit():
    """Whatever time the ranks took to come; its own limit is that of all that is asked of it."""
    given = dist.HashStore()
    late = time.monotonic() - 1.0
    store, hosted = _own_store(given, info(0), late, timedelta(minutes=3), Awaiting())
    assert store.timeout == timedelta(minutes=3)
    store.set("key", "value")
    again = _told_address(given, late, Awaiting())
    assert again[2] == hosted.port
