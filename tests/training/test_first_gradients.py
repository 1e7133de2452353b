"""A loss is followed back to its parameters once, and in bounded time."""

from __future__ import annotations

import torch
from torch import nn

from ddpkit.training import first_gradients
from ddpkit.training.first_gradients import FirstGradients, leaves_of
from tests.recipes import make, points


def test_only_the_first_batch_is_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(
        first_gradients,
        "leaves_of",
        lambda loss: looked.append(loss) or leaves_of(loss),
    )
    brain = make(grad_accumulation_factor=2)
    brain.fit([1, 2, 3], points(8), train_loader_kwargs={"batch_size": 2})
    assert len(looked) == 1


def test_a_graph_of_any_size_is_left_in_time(monkeypatch):
    monkeypatch.setattr(first_gradients, "MOST_NODES", 50)
    loss = nn.Linear(1, 1)(torch.ones(1)).sum()
    for _ in range(500):
        loss = loss + 1.0
    assert leaves_of(loss) == {}


def test_a_loss_that_is_no_tensor_is_left_to_the_backward_pass():
    first = FirstGradients("Line")
    first.note(3.0, 1)
    first.note(torch.zeros(()), 1)
    assert not first.is_done


def test_a_step_that_is_watched_is_left_alone_afterwards():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    calls = []
    first = FirstGradients("Line")
    first.watch({"sgd": optimizer, "own": object()}, lambda *_: calls.append(1))
    optimizer.step()
    first.stop()
    optimizer.step()
    assert calls == [1]
