"""Every sample counts once in an evaluation and has an output in a prediction, whatever drop_last
says.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ddpkit import dataloader
from ddpkit.dataloader import NOTHING_DROPPED, LoopedLoader, make_dataloader
from tests.recipes import Regression, make, points, world_size

DATA = points(7)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def ready(**options):
    return lambda: (DataLoader(DATA, drop_last=True, **options), {})


FORMS = {
    "dataset": lambda: (DATA, {"batch_size": 4, "drop_last": True}),
    "large batch": lambda: (DATA, {"batch_size": 16, "drop_last": True}),
    "sampler": lambda: (DATA, {"batch_size": 4, "drop_last": True, "sampler": list(range(7))}),
    "stream": lambda: (Stream(), {"batch_size": 4, "drop_last": True}),
    "loader": ready(batch_size=4),
    "loader of a stream": lambda: (DataLoader(Stream(), batch_size=4, drop_last=True), {}),
    "loader of ddpkit": lambda: (make_dataloader(DATA, batch_size=4, drop_last=True), {}),
    "loader of batches": lambda: (
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=True)),
        {},
    ),
}


def evaluate(form):
    """Return the loss, and what is predicted, as one process and several must."""
    brain = make(Regression, shard_evaluation=True)
    data, kwargs = FORMS[form]()
    loss = brain.evaluate(data, test_loader_kwargs=dict(kwargs))
    outputs = brain.predict(data, loader_kwargs=dict(kwargs))
    return loss, [output.item() for output in outputs], world_size()


def expected():
    brain = make(Regression)
    inputs, targets = (torch.stack(part) for part in zip(*DATA, strict=True))
    with torch.no_grad():
        outputs = brain.modules.net(inputs)
    return torch.nn.functional.mse_loss(outputs, targets).item(), outputs.flatten().tolist()


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_and_a_prediction_drop_nothing(form):
    loss, outputs, _ = evaluate(form)
    assert (loss, outputs) == (pytest.approx(expected()[0]), pytest.approx(expected()[1]))


def test_it_is_said_once_and_training_still_drops(caplog, monkeypatch):
    monkeypatch.setattr(dataloader.logger, "_said", set())
    brain = make(Regression)
    kwargs = {"batch_size": 4, "drop_last": True}
    for _ in range(2):
        brain.fit([1], DATA, DATA, train_loader_kwargs=kwargs, valid_loader_kwargs=kwargs)
    assert brain.optimizer_step == 2
    assert sum(message == NOTHING_DROPPED for message in caplog.messages) == 1


def test_a_nominal_epoch_of_an_evaluation_drops_nothing_either():
    brain = make(Regression)
    loader = LoopedLoader(make_dataloader(DATA, batch_size=4, drop_last=True), 2)
    assert brain.evaluate(loader) == pytest.approx(expected()[0])
