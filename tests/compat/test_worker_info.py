"""What a stream is told of the loader worker that it is read in."""

from __future__ import annotations

import pytest
from torch.utils.data import get_worker_info

from ddpkit.compat import streams
from ddpkit.compat.streams import show_worker


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
        with pytest.raises(RuntimeError, match=r"cannot be dealt out to loader workers.*Set num_workers=0\."):
            show_worker(object())
    finally:
        monkeypatch.undo()
        show_worker(None)
