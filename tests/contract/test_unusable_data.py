"""What is no dataset is refused before the first batch, in words that say what to give instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpkit.errors import ConfigError, DataError
from tests.recipes import Squares

ROWS = [torch.ones(1) for _ in range(4)]


def make():
    run_opts = {"device": "cpu", "noprogressbar": True}
    return Squares(
        {"net": nn.Linear(1, 1)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        None,
        run_opts,
    )


def loader():
    return DataLoader(ROWS, batch_size=2)


GIVEN = {
    "a path": (
        lambda: "train.csv",
        r"the data is the str 'train\.csv', and no file is read here: read it",
    ),
    "a pathlib path": (
        lambda: Path("train.csv"),
        "the data is the PosixPath .*, and no file is read here",
    ),
    "a class": (
        lambda: TensorDataset,
        r"the data is the class TensorDataset: give an instance of it",
    ),
    "splits by name": (
        lambda: {"train": ROWS, "valid": ROWS},
        "the data is a dict with the keys 'train', 'valid', .* give one of its values",
    ),
    "loaders by name": (
        lambda: {"one": loader(), "other": loader()},
        (
            "the data is a dict of loaders with the keys 'one', 'other': give one loader.*"
            "MixedSets or JointSets"
        ),
    ),
    "loaders": (lambda: [loader(), loader()], "the data is a list of 2 loaders: give one loader"),
    "datasets": (
        lambda: (TensorDataset(torch.ones(2)),),
        "the data is a tuple of 1 datasets: give one dataset, such as .*MixedSets.*JointSets",
    ),
    "a set": (lambda: {1.0, 2.0}, "the data is a set, which has no order: give a list"),
    "a generator": (
        lambda: (row for row in ROWS),
        "the data is a generator, which can be read once only: give a list",
    ),
    "a zip": (
        lambda: zip(ROWS, ROWS, strict=True),
        "the data is a zip, which can be read once only",
    ),
    "a table": (
        lambda: SimpleNamespace(iloc=[], columns=[]),
        r"the data is a SimpleNamespace, whose indices are columns: give its rows",
    ),
}


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"batch_size": 2}],
    ids=["without arguments", "with batch_size"],
)
@pytest.mark.parametrize("kind", GIVEN)
def test_each_kind_is_refused_by_name(kind, kwargs):
    given, words = GIVEN[kind]
    with pytest.raises(DataError, match=f"^TRAIN: {words}"):
        make().fit([1, 2], given(), train_loader_kwargs=kwargs)
    are_sets = kind in {"splits by name", "loaders by name"}  # which can be evaluated
    if not are_sets:
        with pytest.raises(DataError, match=f"^VALID: {words}"):
            make().fit([1, 2], ROWS, given(), valid_loader_kwargs=kwargs)
    if kwargs or kind not in {"a generator", "a zip"}:
        if not are_sets:
            with pytest.raises(DataError, match=f"^TEST: {words}"):
                make().evaluate(given(), test_loader_kwargs=kwargs)
        with pytest.raises(DataError, match=f"^TEST: {words}"):
            make().predict(given(), loader_kwargs=kwargs)


def test_what_can_be_used_is_not_refused():
    brain = make()
    brain.fit([1], dict(enumerate(ROWS)), train_loader_kwargs={"batch_size": 2})
    assert brain.optimizer_step == 2
    brain.fit(
        [1],
        dict(zip("abcd", ROWS, strict=True)),
        train_loader_kwargs={"sampler": ["d", "a"]},
    )
    assert brain.optimizer_step == 4
    assert brain.evaluate(torch.ones(2, 1) for _ in range(2)) > 0.0


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_an_argument_that_no_loader_takes_is_named_with_a_close_one(call):
    brain = make()
    data = ROWS
    give = {
        "fit": lambda: brain.fit([1], data, train_loader_kwargs={"batch_size": 2, "shuffel": True}),
        "evaluate": lambda: brain.evaluate(data, test_loader_kwargs={"batchsize": 2}),
    }
    with pytest.raises(
        ConfigError,
        match=r"(shuffel=True|batchsize=2)\. Did you mean "
        r"'(shuffle|batch_size)'\?",
    ):
        give[call]()
