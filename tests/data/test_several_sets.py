"""Several sets as one: the samples of an epoch, how short sets come again, what is refused."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from ddpkit.brain import Brain
from ddpkit.data.set_counts import apportion
from ddpkit.data.set_order import BLOCK, SetOrder
from ddpkit.dataloader import JointSets, MixedSets, Sharding, reshard, shard
from ddpkit.errors import ConfigError, DataError
from ddpkit.run.data_order import order_of
from ddpkit.run.step_plan import StepPlan
from tests.recipes import QUIET

EPOCHS = (1, 2, 3, 4)
ROOT = Path(__file__).parents[2]


def sets(**sizes):
    """Sets of numbers that say of which set they are: 1000 and so on, 2000 and so on."""
    return {
        name: list(range(1000 * number, 1000 * number + size))
        for number, (name, size) in enumerate(sizes.items(), 1)
    }


def epoch_of(data, epoch):
    data.set_epoch(epoch)
    return [data[position] for position in range(len(data))]


def assert_passes(drawn, samples):
    """Each stretch as long as a set has all of its samples; the orders differ."""
    passes = [drawn[start : start + len(samples)] for start in range(0, len(drawn), len(samples))]
    for one in passes[:-1]:
        assert sorted(one) == samples
    assert len(set(passes[-1])) == len(passes[-1])
    return passes


# ------------------------------------------------------------------------------------ mixed: epochs


def test_without_weights_an_epoch_has_every_sample_once_in_another_order_each_time():
    data = MixedSets(sets(a=5, b=90), seed=1)
    epochs = [epoch_of(data, epoch) for epoch in EPOCHS]
    assert all(sorted(one) == [*range(1000, 1005), *range(2000, 2090)] for one in epochs)
    assert len({tuple(one) for one in epochs}) == len(EPOCHS)
    assert epoch_of(data, 2) == epochs[1], "an epoch can be had again"
    assert epoch_of(MixedSets(sets(a=5, b=90), seed=2), 1) != epochs[0]


@pytest.mark.parametrize(
    ("until", "counts"),
    [
        ("longest", {"a": 20, "b": 60, "c": 20}),
        ("shortest", {"a": 5, "b": 15, "c": 5}),
        (10, {"a": 2, "b": 6, "c": 2}),
        (1001, {"a": 200, "b": 601, "c": 200}),
    ],
)
def test_what_ends_an_epoch_decides_how_many_samples_each_set_gives(until, counts):
    data = MixedSets(sets(a=5, b=31, c=20), {"b": 3, "a": 1.0, "c": 1}, until, seed=3)
    assert data.counts == counts
    for epoch in EPOCHS[:2]:
        found = Counter("abc"[sample // 1000 - 1] for sample in epoch_of(data, epoch))
        assert found == counts


def test_no_sample_comes_again_before_all_others_of_its_set_have_come_also_over_epochs():
    given = sets(few=7, many=40, one=1)
    data = MixedSets(given, {"few": 2, "many": 1, "one": 1}, until=50, seed=5)
    drawn = list(itertools.chain.from_iterable(epoch_of(data, epoch) for epoch in EPOCHS))
    for name, samples in given.items():
        own = [sample for sample in drawn if sample in samples]
        assert len(own) == 4 * data.counts[name]
        passes = assert_passes(own, samples)
        if name == "few":
            assert len({tuple(one) for one in passes}) == len(passes)


def test_unshuffled_each_set_keeps_its_order():
    data = MixedSets(sets(a=4, b=9), {"a": 1, "b": 1}, shuffle=False, seed=5)
    drawn = epoch_of(data, 1) + epoch_of(data, 2)
    assert [sample for sample in drawn if sample < 2000] == [1000, 1001, 1002, 1003] * 4 + [
        1000,
        1001,
    ]
    assert [sample for sample in drawn if sample >= 2000] == [*range(2000, 2009)] * 2


@pytest.mark.parametrize("counts", [[1, 5000], [3, 700, 41, 2000], [BLOCK, BLOCK], [BLOCK + 1]])
def test_every_stretch_of_an_epoch_has_the_sets_in_their_proportion(counts):
    order = SetOrder(counts, key=9)
    size = sum(counts)
    found = [order.at(position) for position in range(size)]
    for number, count in enumerate(counts):
        assert [drawn for own, drawn in found if own == number] == list(range(count))
        for start in range(0, size - BLOCK, BLOCK):
            block = [own for own, _ in found[start : start + BLOCK]]
            assert abs(block.count(number) - BLOCK * count / size) <= 2
    assert SetOrder(counts, key=9).at(size - 1) == found[-1], "asked alone it is the same"


def test_where_a_rare_set_comes_in_an_epoch_is_drawn_anew():
    places = set()
    for key in range(40):
        order = SetOrder([1, 4 * BLOCK - 1], key)
        places.add(next(place for place in range(4 * BLOCK) if order.at(place)[0] == 0) // BLOCK)
    assert places == {0, 1, 2, 3}


def test_a_billion_samples_begin_as_fast_as_ten():
    data = MixedSets({"a": range(10**9), "b": range(10**8)}, {"a": 1, "b": 1}, seed=1)
    assert len(data) == 2 * 10**9
    assert len({data[position] for position in (0, 10**9, 2 * 10**9 - 1, -1)}) == 3


@pytest.mark.parametrize("kind", [int, float, Fraction, np.int64, np.float32, np.float64])
def test_weights_are_numbers_of_any_kind(kind):
    data = MixedSets(sets(a=5, b=31), {"a": kind(2), "b": kind(6)}, 12)
    assert data.counts == {"a": 3, "b": 9}


@pytest.mark.parametrize("first", [0, 1])
def test_epochs_are_counted_from_any_number(first):
    data = MixedSets(sets(a=7), until=5, seed=5)
    drawn = [*itertools.chain.from_iterable(epoch_of(data, first + one) for one in range(5))]
    start = 0 if first else 5  # epoch 0 lies before the first pass
    assert_passes(drawn[start:], list(range(1000, 1007)))


def test_sets_of_sets_keep_their_weights():
    inner = MixedSets(sets(a=5, b=31), {"a": 1, "b": 1}, until=20, seed=5)
    data = JointSets({"mixed": inner, "plain": [0] * 20}, seed=4)
    for epoch in EPOCHS:
        found = [item["mixed"][0] for item in epoch_of(data, epoch)]
        assert Counter(sample // 1000 for sample in found) == {1: 10, 2: 10}


def test_apportioned_numbers_add_up():
    for total in range(1, 40):
        parts = [Fraction(1, 3), Fraction(1, 7), Fraction(11, 21)]
        found = apportion(total, parts)
        assert sum(found) == total
        assert all(abs(count - total * part) < 1 for count, part in zip(found, parts, strict=True))


# ------------------------------------------------------------------------ mixed: whose a sample is


def test_a_sample_says_of_which_set_it_is():
    given = {
        "dicts": [{"x": torch.tensor(1.0)}],
        "pairs": [(torch.tensor(2.0), torch.tensor(3.0))],
        "plain": [torch.tensor(4.0)],
    }
    found = sorted(
        epoch_of(MixedSets(given, set_key="set", seed=1), 1),
        key=lambda sample: str(type(sample)) + str(sample),
    )
    assert found == [
        {"x": 1.0, "set": "dicts"},
        (2.0, 3.0, "pairs"),
        (4.0, "plain"),
    ]
    rows = MixedSets({"a": [{"x": 1}] * 3, "b": [{"x": 2}] * 2}, set_key="set", seed=1)
    [batch] = shard(rows, Sharding(), batch_size=5)
    assert Counter(zip(batch["set"], batch["x"].tolist(), strict=True)) == {
        ("a", 1): 3,
        ("b", 2): 2,
    }


def test_a_key_that_a_sample_has_already_is_refused():
    data = MixedSets({"a": [{"set": 1}]}, set_key="set")
    with pytest.raises(DataError, match="set_key='set' is a key of the samples of 'a' already"):
        data[0]


# -------------------------------------------------------------------------------------------- joint


@pytest.mark.parametrize(("until", "length"), [("longest", 15), ("shortest", 5), (9, 9)])
def test_each_item_has_samples_of_every_set(until, length):
    given = sets(a=5, b=29)
    data = JointSets(given, {"a": 1, "b": 2}, until, seed=2)
    assert len(data) == length
    items = list(itertools.chain.from_iterable(epoch_of(data, epoch) for epoch in EPOCHS))
    assert all((len(item["a"]), len(item["b"])) == (1, 2) for item in items)
    for name, samples in given.items():
        drawn = list(itertools.chain.from_iterable(item[name] for item in items))
        assert_passes(drawn, samples)


def test_a_batch_is_a_dict_with_a_batch_of_each_set():
    data = JointSets(
        {"a": [{"x": 1.0}] * 4, "b": [{"name": "n"}] * 9},
        {"a": 1, "b": 3},
        until="longest",
        collate_fn={"a": torch.utils.data.default_collate, "b": list},
    )
    ready = DataLoader(data, batch_size=3, shuffle=True)
    for loader in (shard(data, Sharding(), batch_size=3), reshard(ready, Sharding())):
        first, last = loader
        assert first["a"]["x"].tolist() == [1.0] * 3
        assert first["b"] == [{"name": "n"}] * 9
        assert len(last["a"]["x"]) == 1
    own = shard(data, Sharding(), batch_size=3, collate_fn=len)
    assert list(own) == [3, 1], "a collate_fn of the loader gets the items"


def test_the_last_step_of_uneven_ranks_weighs_every_sample_the_same():
    """The mean over each set's samples is the mean over items, of which the loop counts."""
    data = JointSets(sets(a=5, b=14), {"a": 1, "b": 2}, seed=2)
    loaders = [shard(data, Sharding(rank, 3), batch_size=1) for rank in range(3)]
    counts = [[loader.batch_sampler.count(batch) for batch in range(3)] for loader in loaders]
    assert counts == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]


# ------------------------------------------------------------------------------- orders of a loader


@pytest.mark.parametrize("kind", [MixedSets, JointSets])
@pytest.mark.parametrize("world", [2, 3])
def test_the_loaders_of_all_ranks_have_what_one_has(kind, world):
    data = kind(sets(a=5, b=14), seed=4)
    [whole] = [[*shard(data, Sharding(), batch_size=6, collate_fn=list)]]
    parts = [
        [
            *shard(
                data, Sharding(rank, world, keep_step=False), batch_size=6 // world, collate_fn=list
            )
        ]
        for rank in range(world)
    ]
    joined = [
        list(itertools.chain.from_iterable(filter(None, step)))
        for step in itertools.zip_longest(*parts)
    ]
    assert joined == whole


def test_shuffle_of_the_loader_changes_nothing_and_a_sampler_is_refused():
    data = MixedSets(sets(a=5, b=14), seed=4)
    plain, shuffled = (
        [batch.tolist() for batch in shard(data, Sharding(), batch_size=4, shuffle=shuffle)]
        for shuffle in (False, True)
    )
    assert plain == shuffled
    with pytest.raises(ConfigError, match="sampler=.*cannot order MixedSets.*Leave it out"):
        shard(data, Sharding(), sampler=SequentialSampler(data))
    with pytest.raises(ConfigError, match="batch_sampler=.*cannot order MixedSets"):
        shard(data, Sharding(), batch_sampler=[[0, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_live_on_follow_the_epochs(start):
    data = MixedSets(sets(a=3, b=8), {"a": 1, "b": 1}, seed=4)
    loader = shard(
        data,
        Sharding(),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    from ddpkit.dataloader import set_epoch

    for epoch in (1, 2, 3):
        set_epoch(loader, epoch)
        found = [sample for batch in loader for sample in batch.tolist()]
        assert found == epoch_of(MixedSets(sets(a=3, b=8), {"a": 1, "b": 1}, seed=4), epoch)


def test_sets_hear_of_the_epoch():
    heard = []

    class Told(list):
        def set_epoch(self, epoch):
            heard.append(epoch)

    epoch_of(MixedSets({"a": Told([1]), "b": [2]}), 3)
    assert heard == [3]


def test_a_checkpoint_knows_what_an_epoch_is_made_of():
    data = MixedSets(sets(a=5, b=14), {"a": 1, "b": 1}, 20)
    assert order_of(shard(data, Sharding(), batch_size=4))["sets"] == "10 of a (5), 10 of b (14)"
    joint = JointSets(sets(a=5, b=14), {"a": 1, "b": 2})
    assert order_of(shard(joint, Sharding()))["sets"] == "7 times 1 of a (5), 2 of b (14)"


def test_other_weights_inside_an_epoch_are_told():
    before, now = (
        StepPlan(1, 1, data=order_of(shard(MixedSets(sets(a=5, b=14), weights, 20), Sharding())))
        for weights in ({"a": 1, "b": 1}, {"a": 3, "b": 1})
    )
    assert "sets 15 of a (5), 5 of b (14), before 10 of a (5), 10 of b (14)" in now.other_data(
        before
    )


# ----------------------------------------------------------------------------------------- the page


def test_the_scripts_of_the_page_run(capsys):
    text = (ROOT / "docs/how-to/several-training-sets.md").read_text(encoding="utf-8")
    mixed, joint = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for script in (mixed, joint):
        exec(compile(script, "page", "exec"), {"__name__": "page"})
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert printed == ["{'clean': 100, 'noisy': 300} 60", "100 30"]
    sets = {"clean": range(40), "noisy": range(1000)}
    for until in ("longest", "shortest"):
        counts = MixedSets(sets, {"clean": 1, "noisy": 3}, until).counts
        assert f"| {counts['clean']} clean, {counts['noisy']} noisy |" in text


# ---------------------------------------------------------------------------------- what is refused


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("kind", [MixedSets, JointSets])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([[1], [2]], ConfigError, "must be a mapping with at least one dataset"),
        ({}, ConfigError, "must be a mapping with at least one dataset"),
        ({"a": [1], "b": []}, DataError, "the set 'b' is empty"),
        ({"": [1]}, ConfigError, "'' cannot name a set"),
        ({3: [1]}, ConfigError, "3 cannot name a set"),
        ({"a": Endless()}, ConfigError, "'a' is .*Endless, a stream without a length"),
        ({"a": DataLoader([1])}, ConfigError, "'a' is .*DataLoader. Give its dataset"),
        ({"a": "train.csv"}, ConfigError, "'a' is .*str, which has no samples 0, 1, 2"),
        ({"a": {"x": 1}}, ConfigError, "'a' is .*dict, which has no samples"),
    ],
)
def test_what_are_no_sets_is_refused(kind, given, error, words):
    with pytest.raises(error, match=words):
        kind(given)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, True, "much", None])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match="'b' has the weight"):
        MixedSets(sets(a=3, b=3), {"a": 1, "b": weight})


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, [1, 2], 3])
def test_weights_without_the_names_of_the_sets_are_refused(weights):
    with pytest.raises(ConfigError, match="weights=.* must be a mapping with the names.*'a', 'b'"):
        MixedSets(sets(a=3, b=3), weights)
    with pytest.raises(ConfigError, match="per_item=.* must be a mapping with the names"):
        JointSets(sets(a=3, b=3), weights)


@pytest.mark.parametrize("until", [0, -3, 2.5, True, "both", None])
@pytest.mark.parametrize("kind", [MixedSets, JointSets])
def test_what_does_not_end_an_epoch_is_refused(kind, until):
    with pytest.raises(ConfigError, match="until=.*must be 'longest'"):
        kind(sets(a=3), until=until)


def test_an_epoch_without_samples_of_a_set_is_refused():
    with pytest.raises(ConfigError, match=r"an epoch of 10 sample\(s\) has none of the set 'b'"):
        MixedSets(sets(a=30, b=30), {"a": 100, "b": 1}, 10)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_items_need_a_whole_number_of_samples_of_each_set(number):
    with pytest.raises(ConfigError, match=r"per_item\['b'\]=.*is not a positive whole number"):
        JointSets(sets(a=3, b=3), {"a": 1, "b": number})


def test_the_shortest_set_must_have_the_samples_of_one_item():
    with pytest.raises(ConfigError, match=r"'b' has 3 sample\(s\), fewer than the 4 of one item"):
        JointSets(sets(a=30, b=3), {"a": 1, "b": 4}, "shortest")
    assert len(JointSets(sets(a=30, b=3), {"a": 1, "b": 4})) == 30


def test_one_set_alone_and_positions_that_are_none():
    data = MixedSets(sets(a=3), until=7)
    assert len(epoch_of(data, 1)) == 7
    assert data[-1] == data[6]
    for position in (7, -8):
        with pytest.raises(IndexError, match="MixedSets has 7 positions"):
            data[position]


def test_several_datasets_in_a_list_are_answered_with_these_names():
    class Any(Brain):
        pass

    brain = Any({"net": torch.nn.Linear(1, 1)}, run_opts=QUIET)
    given = [TensorDataset(torch.ones(2))] * 2
    with pytest.raises(DataError, match=r"MixedSets\(\{'a'.*or JointSets"):
        brain.fit([1], given)
