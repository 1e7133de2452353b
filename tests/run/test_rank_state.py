"""What a checkpoint holds of every rank by itself, seen from one process."""

from __future__ import annotations

import logging

import pytest
import torch

from ddpkit.checkpointing.file_loading import safe_load
from ddpkit.checkpointing.hooks import torch_save
from ddpkit.errors import CheckpointError
from ddpkit.run import rank_state
from ddpkit.run.rank_state import RankStates


def states(value=1):
    return RankStates(lambda: {"drawn": value})


def test_what_was_gathered_is_saved_until_it_is_forgotten():
    value = 1
    one = RankStates(lambda: {"drawn": value})
    one.gather()
    value = 2
    assert one.state_dict()["ranks"] == [{"drawn": 1}]
    one.gathered = None
    assert one.state_dict()["ranks"] == [{"drawn": 2}]


def test_it_comes_back_from_a_file(tmp_path):
    torch_save(states(7), tmp_path / "ranks.ckpt")
    one = states()
    one.load_state_dict(safe_load(tmp_path / "ranks.ckpt"), end_of_epoch=False)
    assert (one.loaded, one.is_of_as_many, one.is_complete) == ({"drawn": 7}, True, True)


def test_of_another_number_of_ranks_only_what_all_share(monkeypatch):
    place = {"loader": {"at": torch.arange(3), "n": [1, (2, 3)]}, "random": 1}
    same = {"loader": {"at": torch.arange(3), "n": [1, (2, 3)]}, "random": 2}
    one = states()
    one.load_state_dict({"format": 1, "ranks": [place, same]})
    assert one.loaded == {"loader": place["loader"]}
    assert not one.is_of_as_many
    for other in (
        {"loader": {"at": torch.arange(4), "n": [1, (2, 3)]}},
        {"loader": {"at": torch.arange(3), "n": [1, (2, 4)]}},
        {"loader": {"at": 3, "n": [1, (2, 3)]}},
        {"loader": None},
    ):
        one.load_state_dict({"format": 1, "ranks": [place, other]})
        assert one.loaded == {}
    one.load_state_dict({"format": 1, "ranks": [place, None]})
    assert one.loaded == {}
    one.load_state_dict({"format": 1, "ranks": []})
    assert one.loaded == {}


def test_a_rank_that_is_not_known(monkeypatch, caplog):
    monkeypatch.setattr(rank_state, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_state, "get_rank", lambda: 1)
    one = states()
    with caplog.at_level(logging.WARNING):
        one.load_state_dict({"format": 1, "ranks": [{"drawn": 1}, None]}, end_of_epoch=True)
        assert not caplog.text, "at an epoch's end nothing is missing"
    assert (one.loaded, one.is_of_as_many, one.is_complete) == (None, True, False)


def test_a_later_format_is_refused():
    with pytest.raises(CheckpointError, match="states of ranks have format 2"):
        states().load_state_dict({"format": 2, "ranks": []})
