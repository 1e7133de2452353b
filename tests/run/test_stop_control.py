"""Lengths of time, exit codes, and the word that a stopped run leaves."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ddpkit.control import CAUSES, SignalListener
from ddpkit.errors import ConfigError
from ddpkit.run.stop_control import exit_code
from ddpkit.run.stop_note import MARKER, remove_marker, write_marker
from ddpkit.run_opts import parse_duration
from tests.launching import Run, python


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00:01", 1),
        ("11:50:00", 42600),
        ("2-00:00:00", 172800),
        ("1.5h", 5400),
        ("30 m", 1800),
        ("10", 10),
        (3, 3),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "11:50", "1:60:00", "soon", "1w", "00:00:00", "nan"],
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="time_limit expects a length of time > 0, got"):
        parse_duration(text)


def test_exit_codes_are_those_of_a_shell():
    assert {cause: exit_code(cause) for cause in CAUSES} == {
        "SIGTERM": 143,
        "SIGINT": 130,
        "SIGUSR1": 138,
        "SIGUSR2": 140,
        "SIGHUP": 129,
        "time limit": 75,
    }


def test_only_signals_that_ranks_can_tell_each_other_stop_a_run():
    SignalListener(["SIGHUP", "usr2"], [])
    with pytest.raises(ConfigError, match=r"stop_signals names \['SIGPIPE'\]"):
        SignalListener(["SIGPIPE"], [])


def test_the_marker(tmp_path):
    folder = tmp_path / "deep" / "run"
    write_marker(folder, {"reason": "SIGTERM", "step": 3})
    write_marker(folder, {"reason": "SIGINT", "step": 4})
    assert json.loads((folder / MARKER).read_text()) == {"reason": "SIGINT", "step": 4}
    assert [path.name for path in folder.iterdir()] == [MARKER]
    remove_marker(folder)
    remove_marker(folder)
    assert list(folder.iterdir()) == []


def test_without_a_note_nothing_is_deleted_which_a_read_only_file_system_refuses(
    tmp_path,
    monkeypatch,
):
    def refuse(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    remove_marker(tmp_path)
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(OSError, match="Read-only file system"):
        remove_marker(tmp_path)


def test_time_counts_from_the_start_of_the_process(tmp_path):
    script = (
        "import sys, time; sys.modules.pop('ddpkit.run.process_age', None); time.sleep(0.5)\n"
        "from ddpkit.run.process_age import seconds_since_start as s; print(s())"
    )
    run = Run(python("-c", script), tmp_path, warm=True).wait()
    assert 0.5 <= float(run.out) < 60, run.err
