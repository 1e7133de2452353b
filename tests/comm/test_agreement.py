"""What the ranks compare before they start, and what they say when they differ; with simulated
ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpkit.comm import agreement
from ddpkit.comm.agreement import (
    data_facts,
    model_facts,
    on_every_rank,
    optimizer_facts,
    option_facts,
    require_agreement,
)
from ddpkit.dataloader import Sharding, shard
from ddpkit.errors import DataError, RankFailedError, RankMismatchError
from ddpkit.run_opts import RunOptions


class Ranks:
    """Threads that stand for ranks: ``exchange`` gives every one what all have brought."""

    def __init__(self, world_size, monkeypatch):
        self.world_size = world_size
        self.rank = threading.local()
        self.brought = [None] * world_size
        self.sites = [[] for _ in range(world_size)]
        self.barrier = threading.Barrier(world_size)
        monkeypatch.setattr(agreement, "exchange", self.exchange)
        monkeypatch.setattr(agreement, "get_world_size", lambda: world_size)

    def exchange(self, value, site=None):
        self.sites[self.rank.value].append(site)
        self.brought[self.rank.value] = value
        self.barrier.wait(60)
        values = list(self.brought)
        self.barrier.wait(60)
        return values

    def run(self, work):
        def one(rank):
            self.rank.value = rank
            try:
                return work(rank)
            except (ValueError, RuntimeError, OSError) as error:
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))


# -------------------------------------------------------------------------------------------- facts


def test_model_facts():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    net[0].bias.requires_grad_(requires_grad=False)
    facts = model_facts(nn.ModuleDict({"net": net}))
    assert list(facts.items())[:3] == [
        ("parameter net.0.weight", "(3, 2) torch.float64 trained"),
        ("parameter net.0.bias", "(3,) torch.float64 frozen"),
        ("parameter net.1.weight", "(3,) torch.float64 trained"),
    ]
    assert facts["buffer net.1.num_batches_tracked"] == "() torch.int64"


def test_option_facts_leave_out_what_is_a_ranks_own():
    options = RunOptions.from_dictionary({"device": "cpu", "precision": "bf16"}).resolved({})
    facts = option_facts(options)
    assert facts["option precision"] == "'bf16'"
    own = {
        "device",
        "local_rank",
        "param_file",
        "log_config",
        "noprogressbar",
        "tqdm_colored_bar",
        "tqdm_barcolor",
    }
    assert not {f"option {name}" for name in own} & set(facts)
    assert facts == option_facts({name: options[name] for name in options} | {"device": "cuda:1"})


def test_facts_hold_nothing_that_differs_from_process_to_process():
    """An address, the order of a set, the device of a tensor: none of them is a difference."""

    class Thing:
        pass

    assert option_facts({"mine": Thing(), "call": len}) == option_facts(
        {"mine": Thing(), "call": len}
    )
    assert option_facts({"mine": object()}) == {"option mine": "<object object>"}
    assert option_facts({"names": {"b", "a", 3}}) == {"option names": "['a', 'b', 3]"}
    weight = nn.Parameter(torch.ones(1))
    facts = optimizer_facts(
        {"adam": torch.optim.Adam([weight], lr=torch.tensor(0.5), capturable=True)}
    )
    assert facts["optimizer adam group 0 lr"] == "0.5"


def test_optimizer_facts():
    first = nn.Parameter(torch.ones(1))
    second = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(
        [{"params": [first]}, {"params": [second], "lr": 0.5, "owner": object()}],
        lr=0.1,
    )
    facts = optimizer_facts({"sgd": optimizer})
    assert facts["optimizer sgd"] == "SGD"
    assert facts["optimizer sgd group 0 params"] == "1"
    assert facts["optimizer sgd group 1 lr"] == "0.5"
    assert facts["optimizer sgd group 1 owner"] == "<object object>"
    assert optimizer_facts({}) == {}


def test_data_facts():
    loader = shard(range(10), Sharding(1, 2, seed=3), batch_size=2, shuffle=True)
    assert data_facts("train", loader, 3, sharded=True) == {
        "train batches": "3",
        "train batch size": "2",
        "train shuffling seed": "3",
        "train shuffling": "True",
        "train samples": "10",
    }
    assert "valid batches" not in data_facts("valid", loader, 3, sharded=False)
    assert data_facts("valid", None, None, sharded=False) == {}
    own = DataLoader(range(7), batch_size=2)
    assert data_facts("valid", own, 4, sharded=False) == {}, (
        "a set that a recipe may have divided itself"
    )
    dealt = data_facts(
        "train",
        shard(range(4), Sharding(), batch_sampler=[[0], [1]]),
        2,
        sharded=True,
    )
    assert set(dealt) == {"train batches", "train shuffling seed", "train samples"}


# ----------------------------------------------------------------------------------- over the ranks


def test_agreement_of_one_process_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(agreement, "exchange", None)
    assert require_agreement({"a": "1"}, about="own") == ["own"]


def test_all_ranks_agree(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    assert ranks.run(lambda rank: require_agreement({"a": "1", "b": "2"})) == [[None] * 3] * 3


def test_what_each_rank_tells_of_itself_may_differ(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    assert (
        ranks.run(lambda rank: require_agreement({"a": "1"}, about=rank * 10, site="here"))
        == [[0, 10, 20]] * 3
    )
    assert ranks.sites == [["here"]] * 3


def test_a_file_that_one_rank_alone_has_imported_is_no_difference(monkeypatch):
    """The digests differ then, and the ranks look closer; and go on."""
    ranks = Ranks(2, monkeypatch)
    facts = [{"a": "1"}, {"a": "1", "module plots": "code 0a"}]
    assert (
        ranks.run(lambda rank: require_agreement(facts[rank], about=rank, site="x")) == [[0, 1]] * 2
    )
    assert ranks.sites == [["x", "x, in detail"]] * 2


def test_all_ranks_raise_the_same(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    results = ranks.run(
        lambda rank: require_agreement({"model": "same", "train batches": str(rank // 2)})
    )
    assert {type(result) for result in results} == {RankMismatchError}
    assert len(set(map(str, results))) == 1
    assert "train batches: 0 on ranks 0-1; 1 on rank 2" in str(results[0])
    assert "model" not in str(results[0])
    assert isinstance(results[0], RuntimeError)


def test_together_everybody_works_or_everybody_fails(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    assert ranks.run(lambda rank: on_every_rank(lambda: rank * 10)) == [0, 10, 20]

    def work(rank):
        if rank:
            raise FileNotFoundError(f"data of {rank}")
        return rank

    results = ranks.run(lambda rank: on_every_rank(lambda: work(rank)))
    assert [type(result) for result in results] == [
        RankFailedError,
        FileNotFoundError,
        FileNotFoundError,
    ]
    assert str(results[0]) == (
        "the run cannot start, because it failed elsewhere: rank 1: FileNotFoundError: data of 1; "
        "rank 2: FileNotFoundError: data of 2"
    )
    assert str(results[1]) == "data of 1"


def test_a_failure_without_words_is_one(monkeypatch):
    ranks = Ranks(2, monkeypatch)

    def work(rank):
        if rank:
            raise DataError

    results = ranks.run(lambda rank: on_every_rank(lambda: work(rank)))
    assert [type(result) for result in results] == [RankFailedError, DataError]
    assert str(results[0]).endswith("rank 1: ddpkit.errors.DataError")


def test_an_interrupt_is_not_held_back(monkeypatch):
    """Only exceptions wait for the others: Ctrl-C ends this rank at once."""
    ranks = Ranks(2, monkeypatch)
    ranks.rank.value = 0

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_every_rank(interrupted)
