"""Padded batches: what they hold, how they move, and which datasets get them."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ddpkit.batch import BatchsizeGuesser, PaddedBatch, PaddedData, batch_pad_right
from ddpkit.dataloader import LoopedLoader, make_dataloader
from ddpkit.errors import DataError
from ddpkit.types import Stage
from tests.recipes import Regression, make


def samples(lengths=(2, 4, 1)):
    return [
        {
            "id": f"s{k}",
            "sig": torch.arange(1.0, n + 1),
            "label": k,
            "score": k / 2,
            "words": ["w"] * n,
        }
        for k, n in enumerate(lengths)
    ]


class Offering:
    """A dataset that is known as SpeechBrain's ``DynamicItemDataset`` is: by what it offers."""

    pipeline = None

    def __init__(self, lengths=(2, 4, 1)):
        self.samples = samples(lengths)

    def set_output_keys(self, keys):
        raise AssertionError("a loader changes no dataset")

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def test_a_batch_holds_every_key_as_attribute_item_and_position():
    batch = PaddedBatch(samples())
    assert batch.sig.data.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert batch.sig.lengths.tolist() == [0.5, 1.0, 0.25]
    assert batch.id == batch["id"] == batch.at_position(0) == ["s0", "s1", "s2"]
    assert torch.equal(batch.label, torch.tensor([0, 1, 2]))
    assert torch.equal(batch.score, torch.tensor([0, 0.5, 1.0], dtype=torch.float64))
    assert batch.words == [["w"] * 2, ["w"] * 4, ["w"]]
    assert (len(batch), batch.batchsize, BatchsizeGuesser()(batch)) == (3, 3, 3)
    ids, (data, lengths), *_ = batch
    assert ids is batch.id
    assert data is batch.sig.data
    assert lengths is batch.sig.lengths


def test_a_value_that_a_recipe_has_set_is_the_batchs():
    batch = PaddedBatch(samples())
    batch.sig = "another"
    assert batch["sig"] == list(batch)[1] == "another"


def test_an_unknown_key_is_told_with_those_there_are():
    batch = PaddedBatch(samples())
    with pytest.raises(AttributeError, match="no 'sgi': its keys are .*'sig'"):
        _ = batch.sgi
    with pytest.raises(KeyError, match="'sgi' is not among the batch's keys"):
        _ = batch["sgi"]
    assert not hasattr(batch, "shape")


@pytest.mark.parametrize("number", [1, 2])
def test_every_number_of_samples_has_the_same_dimensions(number):
    batch = PaddedBatch(
        [
            {"x": torch.ones(3, 2), "none": torch.ones(0), "dot": np.float32(2)}
            for _ in range(number)
        ]
    )
    assert batch.x.data.shape == (number, 3, 2)
    assert batch.none.data.shape == (number, 0)
    assert batch.dot.data.tolist() == [2.0] * number
    assert all(field.lengths.tolist() == [1.0] * number for field in batch)


def test_padding_can_be_chosen_by_key():
    pair = [
        {"a": np.array([1, 2]), "b": torch.tensor([5])},
        {"a": np.array([3]), "b": torch.tensor([6])},
    ]
    batch = PaddedBatch(pair, padded_keys=["a"], per_key_padding_kwargs={"a": {"value": -100}})
    assert batch.a.data.tolist() == [[1, 2], [3, -100]]
    assert batch.b.tolist() == [[5], [6]]
    batch = PaddedBatch(
        pair,
        padding_kwargs={"value": 9},
        per_key_padding_kwargs={"b": {"value": 0}},
    )
    assert batch.a.data.tolist() == [[1, 2], [3, 9]]
    flipped = PaddedBatch(
        pair,
        padding_func=lambda values: (torch.stack([v[:1] for v in values]), torch.zeros(2)),
    )
    assert flipped.a.data.tolist() == [[1], [3]]


def test_what_is_not_padded_is_stacked_where_it_can_be():
    ragged = [{"x": torch.ones(1), "n": 1, "o": None}, {"x": torch.ones(2), "n": 2.5, "o": 3}]
    batch = PaddedBatch(ragged, padded_keys=[])
    assert [len(one) for one in batch.x] == [1, 2]
    assert batch.n.dtype == torch.float64
    assert batch.o == [None, 3]
    plain = PaddedBatch(samples(), nonpadded_stack=False, apply_default_convert=False)
    assert plain.label == [0, 1, 2]


def test_only_tensors_move_and_in_place():
    batch = PaddedBatch(samples())
    assert batch.to("meta") is batch
    assert batch.sig.data.is_meta
    assert batch.sig.lengths.is_meta
    assert batch.label.is_meta
    assert batch.words[0] == ["w", "w"]
    kept = PaddedBatch(samples(), device_prep_keys=["label"]).to(torch.float16)
    assert (kept.label.dtype, kept.sig.data.dtype) == (torch.float16, torch.float32)


def test_what_is_nested_moves_too():
    nested = [{"x": {"a": torch.ones(2), "b": [PaddedData(torch.ones(1), torch.ones(1)), "text"]}}]
    moved = PaddedBatch(nested, device_prep_keys=["x"]).to("meta").x[0]
    assert moved["a"].is_meta
    assert moved["b"][0].data.is_meta
    assert moved["b"][1] == "text"


class Pinnable:
    """Stands in for a tensor where nothing can be pinned."""

    pinned = False

    def pin_memory(self):
        self.pinned = True
        return self


def test_memory_is_pinned_where_it_would_move():
    batch = PaddedBatch([{"x": Pinnable(), "y": Pinnable()}], device_prep_keys=["x"])
    assert batch.pin_memory() is batch
    assert (batch.x[0].pinned, batch.y[0].pinned) == (True, False)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_batch_can_be_copied_and_sent(again):
    batch = again(PaddedBatch(samples()))
    assert batch.sig.data.shape == (3, 4)
    assert isinstance(batch.sig, PaddedData)
    assert len(batch.to("meta")) == 3


def test_it_comes_out_of_workers():
    loader = DataLoader(
        samples(),
        2,
        collate_fn=functools.partial(PaddedBatch, padded_keys=["sig"]),
        num_workers=1,
    )
    assert [(batch.id, batch.sig.data.shape[1]) for batch in loader] == [
        (["s0", "s1"], 4),
        (["s2"], 1),
    ]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], r"a list of dicts, one per sample, and not \[\]"),
        ([(1, 2)], r"a list of dicts, one per sample, and not \[\(1, 2\)\]"),
        ([{"to": 1}], "PaddedBatch has an attribute 'to' of its own"),
        (
            [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}],
            r"'x' .* can be padded: shapes \[\(2, 3\), \(2, 4\)\]",
        ),
        (
            [{"x": torch.ones(2)}, {"x": "text"}],
            ("'x' of a batch must hold tensors that can be padded"),
        ),
    ],
)
def test_what_makes_no_batch_is_told(examples, message):
    with pytest.raises(DataError, match=message):
        PaddedBatch(examples)


def test_no_tensors_cannot_be_padded():
    with pytest.raises(DataError, match="cannot be padded"):
        batch_pad_right([])


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 2}, {"batch_sampler": [[0, 1], [2]], "batch_size": None}],
)
def test_a_dataset_that_offers_keys_gets_padded_batches(options):
    assert [batch.id for batch in make_dataloader(Offering(), **options)] == [["s0", "s1"], ["s2"]]
    looped = make_dataloader(Offering(), looped_nominal_epoch=2, **options)
    assert isinstance(looped, LoopedLoader)
    assert [len(batch) for batch in looped] == [2, 1]
    assert looped.total_samples == 3


def test_a_brain_gives_such_a_dataset_padded_batches():
    loader = make(Regression).make_dataloader(Offering(), Stage.VALID, batch_size=3)
    assert [type(batch) for batch in loader] == [PaddedBatch]


def test_a_collate_function_that_is_given_wins_and_other_datasets_get_torchs():
    assert list(make_dataloader(Offering(), batch_size=3, collate_fn=len)) == [3]
    assert [one["id"] for one in make_dataloader(Offering(), batch_size=None)] == ["s0", "s1", "s2"]
    assert next(iter(make_dataloader([{"x": 1}, {"x": 2}], batch_size=2)))["x"].tolist() == [1, 2]
