"""What a slice that is still running has said last, in one line."""

from __future__ import annotations

import pytest

from ddpkit.see.scale.slice_process import last_sentence

START = (
    "  epochs     10\n  start      from scratch: there is no checkpoint in\n             /tmp/run"
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (START, "start from scratch: there is no checkpoint in /tmp/run"),
        (f"{START}\nGoing into epoch 1", "Going into epoch 1"),
        ("        indented from the first line on", "indented from the first line on"),
        ("", ""),
    ],
)
def test_a_line_that_is_broken_is_told_whole(said, expected):
    assert last_sentence(said) == expected
