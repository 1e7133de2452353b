"""The number of the last epoch, where it is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpkit.run import last_epoch
from ddpkit.training import RunLength


@pytest.mark.parametrize(
    ("counter", "epochs", "last"),
    [
        (range(1, 10**15), 10**15 - 1, 10**15 - 1),
        (range(0, 10, 2), 5, None),
        ([4, 5, 6], 3, 6),
        ([4, 5, 6], 2, 5),
        ([4, 6, 5], 3, None),
        (["first", "second"], 2, None),
        ([], 0, None),
        (SimpleNamespace(limit=7), 7, 7),
        (SimpleNamespace(limit=7), 3, 3),
        (iter([1, 2]), None, None),
    ],
)
def test_the_last_epoch_of_a_counter(counter, epochs, last):
    assert last_epoch(counter, RunLength(epochs=epochs)) == last
