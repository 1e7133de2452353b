"""A run's log is read as it is: being written, torn, or not a log at all."""

from __future__ import annotations

import math

import pytest

from ddpkit.errors import ConfigError
from ddpkit.see.report.history import RunHistory
from ddpkit.see.report.records import Unread, number_of, read_records


def read(path):
    unread = Unread()
    return [record["event"] for record in read_records(path, unread)], unread


def written(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    return path


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    events, unread = read(written(tmp_path, b'{"event": "start"}\n{"event": "st'))
    assert (events, unread) == (["start"], Unread(lines=0, is_cut=True))


def test_torn_lines_in_the_middle_are_counted(tmp_path):
    content = b'{"event": "start"}\n{"event": "spe\n\xff\xfe\n[1]\n\n{"event": "stats"}\n'
    events, unread = read(written(tmp_path, content))
    assert (events, unread) == (["start", "stats"], Unread(lines=3))


def test_an_empty_log_is_a_run_that_has_just_begun(tmp_path):
    assert read(written(tmp_path, b"")) == ([], Unread())


@pytest.mark.parametrize("content", [b"loss 0.5\n", b"\x89PNG\r\n\x1a\n\x00" * 500, b"{}\n[]\n"])
def test_what_is_no_log_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="is no log of a run"):
        read(written(tmp_path, content))


def test_numbers_that_json_does_not_have():
    assert math.isnan(number_of("NaN"))
    assert number_of("-Infinity") == -math.inf
    assert [number_of(value) for value in (True, None, "1", [1], {})] == [None] * 5
    assert number_of(10**400) == math.inf


def test_odd_records_do_no_harm():
    odd = [
        {"event": "speed"},
        {"event": "speed", "optimizer_step": 1, "phases": [1], "memory": {"rss": 3}},
        {"event": "speed", "optimizer_step": 2, "phases": {"data": 1}, "world_size": 2},
        {"event": "stage", "stage": 5, "epoch": "one", "loss": [1, 2], "logged": "none"},
        {"event": "stats", "meta": None, "train": {"loss": "low"}},
        {"event": "step", "optimizer_step": "many", "values": {"loss": 1}},
        {"event": "checkpoint", "path": 3, "best": [], "deleted": "all", "kept": None},
        {"event": "start", "arguments": None, "world_size": "two", "options": []},
        {"event": "exception"},
        {"event": "stopped", "optimizer_step": "NaN"},
        {"event": "logged", "values": {"a": 1}},
        {"event": "skipped_steps"},
        {"event": "of a later version"},
    ]
    history = RunHistory()
    for record in odd:
        history.add({"time": "NaN", **record})
    assert len(history.attempts) == 2
    assert history.now.words == "exception"
