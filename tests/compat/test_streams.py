"""Shuffling inside streams of Hugging Face's datasets, as far as it shows, and the loader worker
shown to a stream.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import get_worker_info

from ddpkit.compat import loses_items, shuffle_digest, streams
from ddpkit.compat.streams import show_worker
from ddpkit.data import is_stateful
from ddpkit.dataloader import Sharding, shard
from ddpkit.run.data_order import order_of
from tests.data.test_streams import Files


class Stage:
    def __init__(self, *inside, generator=None):
        self.generator = generator
        if len(inside) == 1:
            self.ex_iterable = inside[0]
        else:
            self.ex_iterables = inside


class BufferShuffledExamplesIterable(Stage):
    pass


def buffer(seed, *inside):
    return BufferShuffledExamplesIterable(*inside, generator=np.random.default_rng(seed))


class Stream(Files):
    """Has all that is asked of a stream, and is made of what it is given."""

    def __init__(self, *stages):
        super().__init__(range(4))
        if stages:
            (self._ex_iterable,) = stages

    def state_dict(self):
        return {"place": 0}

    def load_state_dict(self, state):
        raise NotImplementedError


Stream.__module__ = "datasets.iterable_dataset"


class Loader:
    """Has a state, as a StatefulDataLoader, which holds that of its dataset."""

    def __init__(self, dataset):
        self.dataset = dataset

    state_dict = Stream.state_dict
    load_state_dict = Stream.load_state_dict


@pytest.mark.parametrize(
    ("stream", "keeps_all"),
    [
        (Stream(Stage()), True),
        (Stream(Stage(Stage(generator=np.random.default_rng(1)))), True),
        (Stream(buffer(1, Stage())), False),
        (Stream(Stage(Stage(), Stage(buffer(1, Stage())))), False),
        (Stream(), False),
    ],
    ids=["no shuffle", "no buffer", "buffer", "buffer of a part", "kept elsewhere"],
)
def test_a_state_without_the_items_of_a_buffer_is_none(stream, keeps_all):
    assert loses_items(stream) is not keeps_all
    assert is_stateful(stream) is keeps_all
    assert is_stateful(Loader(stream)) is keeps_all


def test_shuffles_are_told_apart_by_their_seeds():
    one, same, other = (Stream(Stage(buffer(seed, Stage()))) for seed in (1, 1, 2))
    assert (
        shuffle_digest(one)
        == shuffle_digest(same)
        == shuffle_digest(Loader(one))
        != shuffle_digest(other)
    )
    assert shuffle_digest(Stream(Stage())) == shuffle_digest(Stream()) == shuffle_digest([1]) == ""


def test_a_checkpoint_knows_the_shuffle_of_a_stream():
    name = "shuffle (give it a seed)"
    orders = [
        order_of(shard(Stream(buffer(seed, Stage())), Sharding(1, 2), batch_size=2))
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1]
    assert orders[0][name] != orders[2][name]
    assert name not in order_of(shard(Stream(Stage()), Sharding(1, 2), batch_size=2))


def test_ranks_compare_the_shuffle_of_a_stream_that_is_divided_and_of_no_other():
    def words(rank_of, **own):
        stream = Stream(buffer(1, Stage()))
        for attribute, value in own.items():
            setattr(stream, attribute, value)
        return shard(stream, rank_of, batch_size=2).drawn_words()

    ((name, digest),) = words(Sharding(1, 2)).items()
    assert name.startswith("shuffle of Stream (without a seed")
    assert digest == shuffle_digest(Stream(buffer(1, Stage())))
    assert words(Sharding()) == words(Sharding(1, 2), is_sharded=True) == {}
    assert shard(Stream(Stage()), Sharding(1, 2), batch_size=2).drawn_words() == {}


def test_a_worker_is_shown_and_hidden():
    info = object()
    show_worker(info)
    try:
        assert get_worker_info() is info
    finally:
        show_worker(None)
    assert get_worker_info() is None


def test_a_torch_that_keeps_it_elsewhere_is_told_of(monkeypatch):
    monkeypatch.setattr(streams, "get_worker_info", lambda: None)
    try:
        with pytest.raises(
            RuntimeError,
            match=r"cannot be dealt out to loader workers.*Set "
            r"num_workers=0\.",
        ):
            show_worker(object())
    finally:
        monkeypatch.undo()
        show_worker(None)
