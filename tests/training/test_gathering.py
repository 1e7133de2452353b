"""What a rank has seen, and how results are put together; several ranks are only computed here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ddpkit.dataloader import LoopedLoader, Sharding, deal_batches, make_dataloader, shard
from ddpkit.errors import BatchError, ConfigError, DataError
from ddpkit.training.gathering import (
    StageBatches,
    gather_results,
    is_divided,
    on_cpu,
    row_count,
    rows_of,
)
from ddpkit.types import Stage
from tests.recipes import make, points


def seen_of(loader, batches, *, stage=Stage.TEST, first=0):
    seen = StageBatches(stage, loader, divided=False, first=first)
    seen.close(batches)
    return seen


def indices_of(seen):
    return [indices for _, indices, is_repeated in seen.batches() if not is_repeated]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_which_loaders_are_divided():
    data = list(range(5))
    ready = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    alone = DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    part = Sharding(1, 2)
    whole = Sharding()
    divided = [
        shard(data, part),
        shard(Stream(), part),
        ready,
        deal_batches([1], Sharding(0, 2)),
        LoopedLoader(shard(data, part), 2),
    ]
    not_divided = [
        shard(data, whole),
        shard(Stream(), whole),
        alone,
        deal_batches([1], Sharding()),
        make_dataloader(data),
    ]
    assert [is_divided(one) for one in divided] == [True] * 5
    assert [is_divided(one) for one in not_divided] == [False] * 5
    assert [is_divided([1], unknown=answer) for answer in (True, False)] == [True, False]


@pytest.mark.parametrize("keep_step", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_ranks_have_seen_every_sample_once(size, world, keep_step):
    for batch_size, shuffle in ((1, False), (2, True)):
        found = []
        for rank in range(world):
            loader = shard(
                list(range(size)),
                Sharding(rank, world, keep_step=keep_step),
                batch_size=batch_size,
                shuffle=shuffle,
            )
            loader.set_epoch(3)
            yielded = [batch.tolist() for batch in loader]
            seen = seen_of(loader, len(yielded))
            loader.set_epoch(4)  # what was seen stays what it was
            assert [indices for _, indices, _ in seen.batches()] == yielded
            found += indices_of(seen)
        assert sorted(index for batch in found for index in batch) == list(range(size))


def test_seen_costs_nothing_until_it_is_asked():
    loader = shard(range(10**9), Sharding(1, 4), batch_size=100, shuffle=True)
    seen = seen_of(loader, 2_500_000)
    assert next(seen.batches())[1] == next(iter(loader.batch_sampler))


def test_after_a_resume_only_what_came_since():
    seen = seen_of(shard(range(7), Sharding(), batch_size=2), 3, first=1)
    assert indices_of(seen) == [[2, 3], [4, 5]]
    assert gather_results(seen, list("cdef")) == list("cdef")


def test_nominal_epochs_do_not_tell_what_was_seen():
    loader = LoopedLoader(shard(list(range(5)), Sharding(), batch_size=2, shuffle=True), 4)
    assert not seen_of(loader, 4).is_known
    assert gather_results(seen_of(loader, 2), list("abc")) == list("abc"), "as it was given"
    seen = StageBatches(Stage.TRAIN, loader, divided=True)
    seen.close(4)
    with pytest.raises(
        ConfigError,
        match="the loader of TRAIN is cut into nominal epochs",
    ):
        gather_results(seen, list("abc"))


def test_a_loader_that_divides_itself_is_called_so():
    loader = [torch.zeros(2), torch.zeros(1)]
    seen = StageBatches(Stage.TRAIN, loader, divided=True)
    seen.close(2)
    with pytest.raises(ConfigError, match="the loader of TRAIN divides itself over the processes"):
        gather_results(seen, list("abc"))


def test_rows():
    assert [
        row_count(one)
        for one in (torch.zeros(3, 2), np.zeros(2), ["a"], (torch.zeros(2), ["a", "b"]))
    ] == [
        3,
        2,
        1,
        2,
    ]
    for wrong in (torch.tensor(1), "text", 3, None, (torch.zeros(2), ["a"]), {}, (), {"a": "text"}):
        assert row_count(wrong) is None
    assert rows_of((torch.tensor([1, 2]), ["a", "b"])) == [
        (torch.tensor(1), "a"),
        (torch.tensor(2), "b"),
    ]
    assert rows_of({"x": np.array([1, 2]), "y": {"z": [3, 4]}}) == [
        {"x": 1, "y": {"z": 3}},
        {"x": 2, "y": {"z": 4}},
    ]


def test_on_cpu_detaches_everything_and_keeps_the_rest():
    leaf = torch.ones(2, requires_grad=True)
    found = on_cpu({"a": [leaf * 2, ("text", leaf * 3)], "b": 5})
    assert not found["a"][0].requires_grad
    assert not found["a"][1][1].requires_grad
    assert (found["a"][1][0], found["b"]) == ("text", 5)


@pytest.fixture
def seen():
    """Five samples, in batches [4, 2], [0, 3], [1]."""
    return seen_of(shard(range(5), Sharding(), sampler=[4, 2, 0, 3, 1], batch_size=2), 3)


def test_forms(seen):
    order = torch.tensor([4, 2, 0, 3, 1])
    assert torch.equal(gather_results(seen, order), torch.arange(5))
    assert gather_results(seen, order.numpy()).tolist() == list(range(5))
    assert gather_results(seen, (order.tolist(), {"x": list("42031")})) == (
        list(range(5)),
        {"x": list("01234")},
    )
    batches = [
        torch.tensor([[4, 0], [2, 0]]),
        torch.tensor([[0, 0, 0], [3, 0, 0]]),
        torch.tensor([[1]]),
    ]
    assert [row[0].item() for row in gather_results(seen, batches)] == list(range(5))
    assert [len(row) for row in gather_results(seen, batches)] == [3, 1, 2, 3, 2]
    assert gather_results(seen, [["4", "2"], ["0", "3"], ["1"]]) == list("01234")
    wanted = [{"x": 0}, {"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}]
    assert gather_results(seen, [{"x": np.array(one)} for one in ([4, 2], [0, 3], [1])]) == wanted


def test_per_sample_wins():
    seen = seen_of(shard(range(2), Sharding(), sampler=[1, 0], batch_size=1), 2)
    assert gather_results(seen, [["b"], ["a"]]) == [["a"], ["b"]]


@pytest.mark.parametrize(
    "wrong",
    [list("1234"), list("123456"), [[1, 2], [3], [4, 5]], torch.zeros(3), []],
)
def test_a_wrong_number_of_entries(seen, wrong):
    with pytest.raises(
        DataError,
        match=rf"given rank 0: {len(wrong)} entries for 5 samples in "
        r"3 batches",
    ):
        gather_results(seen, wrong)


@pytest.mark.parametrize("wrong", [None, "text", torch.tensor(1.0), {"a": 3}, 5])
def test_no_entries_at_all(seen, wrong):
    with pytest.raises(ConfigError, match="has no entry per sample"):
        gather_results(seen, wrong)


def test_indices_that_are_names():
    class Named(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, name):
            return ord(name)

    loader = shard(Named(), Sharding(), sampler=["c", "a", "b"], batch_size=2)
    assert gather_results(seen_of(loader, 2), [3, 1, 2]) == [3, 1, 2]  # the order of the batches
    assert gather_results(
        seen_of(shard(Stream(), Sharding(), batch_size=2), 2),
        list("abcd"),
    ) == list("abcd")


def test_running_stages_and_loaders_out_of_order_are_refused():
    loader = shard(range(5), Sharding(), batch_size=2)
    with pytest.raises(ConfigError, match="while the stage VALID runs"):
        gather_results(StageBatches(Stage.VALID, loader, divided=False), [])
    loader = shard(range(5), Sharding(), batch_size=2, num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="in_order=False"):
        gather_results(seen_of(loader, 3), list("01234"))


def test_predict_under_debug_and_what_it_says_of_a_wrong_output():
    brain = make(debug=True, debug_batches=2)
    assert len(brain.predict(points(9), loader_kwargs={"batch_size": 2})) == 4
    brain.predict_batch = lambda batch: (torch.zeros(2, 1), torch.zeros(3))
    with pytest.raises(
        BatchError,
        match=r"returned a tuple, not one output for each of its 2 "
        r"sample",
    ):
        brain.predict(points(9), loader_kwargs={"batch_size": 2})
    assert brain.progress.stage_batches is None


def test_predict_leaves_the_step_and_the_callers_arguments_alone():
    brain = make()
    kwargs = {"batch_size": 2}
    brain.step = 7
    assert len(brain.predict(DataLoader(points(3), batch_size=2), loader_kwargs=kwargs)) == 3
    assert (brain.step, kwargs) == (7, {"batch_size": 2})
    assert len(brain.predict(points(3), loader_kwargs=kwargs)) == 3
    assert kwargs == {"batch_size": 2}
