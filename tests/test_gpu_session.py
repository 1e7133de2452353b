"""The prepared command for a GPU, as far as a machine without one can show it."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import ROWS, Row, run_rows

HANGS = """
import subprocess, sys, time
child = "import time; print('begun', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print("pid", process.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(600)
"""


def quick(name, code, seconds=60.0):
    return Row(name, ("-c", code), seconds, "nothing")


def is_running(pid):
    """Whether a process runs; one that nobody has waited for has ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_row_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "SECONDS_TO_END", 0.2)
    rows = [
        quick("fails", "print('about to fail'); raise SystemExit(3)"),
        quick("hangs", HANGS, 1.5),
        quick("works", "print('seen')"),
    ]
    said = []
    ended = run_rows(rows, tmp_path / "out", 60, said.append)
    assert [(one.name, one.how, one.code) for one in ended] == [
        ("fails", "failed", 3),
        ("hangs", "too long", None),
        ("works", "done", 0),
    ]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log.index("about to fail") < log.index("pid ") < log.index("seen")
    # also what the row has started in a session of its own
    pid = int(log.partition("pid ")[2].split()[0])
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert not is_running(pid)
    lines = (tmp_path / "out" / "summary.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lines[1:]] == [
        ["fails", "failed"],
        ["hangs", "too long"],
        ["works", "done"],
    ]
    assert len(said) == 3


def test_results_are_written_as_they_come(tmp_path):
    look = f"print(open({str(tmp_path / 'summary.tsv')!r}).read())"
    run_rows([quick("first", "pass"), quick("second", look)], tmp_path, 60, str)
    assert "first\tdone" in (tmp_path / "log.txt").read_text()


def test_a_row_for_which_no_time_is_left_is_not_begun(tmp_path):
    ended = run_rows([quick("late", "print('never')")], tmp_path, 5.0, str)
    assert [one.how for one in ended] == ["not begun"]
    assert "never" not in (tmp_path / "log.txt").read_text()


def test_a_row_ends_with_the_session_though_its_own_limit_is_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session, "SHORTEST", 0.1)
    (ended,) = run_rows([quick("long", "import time; time.sleep(600)")], tmp_path, 1.0, str)
    assert ended.how == "too long"


def test_the_rows_that_decide_fit_and_all_gpu_tests_are_in_a_row(monkeypatch, capsys):
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    decided = names[: names.index("choice, CUDA graphs") + 1]
    assert sum(row.seconds for row in ROWS[: len(decided)]) < 60 * gpu_session.MINUTES
    for row in ROWS[1:]:
        paths = [word for word in row.words if word.startswith(("tests/", "benchmarks/"))]
        assert all((gpu_session.ROOT / path).exists() for path in paths)
    others = next(row for row in ROWS if row.name == "tests: others")
    left_out = {word.partition("=")[2] for word in others.words if word.startswith("--ignore")}
    assert left_out == {word for row in ROWS for word in row.words if word.startswith("tests/gpu/")}
    monkeypatch.setattr(sys, "argv", ["gpu_session", "--dry_run", "--rows", "tests"])
    gpu_session.main()
    said = capsys.readouterr().out.splitlines()
    assert [line[:24].strip() for line in said] == [name for name in names if "tests" in name]
    assert "tests/gpu/test_ddp.py" in said[1]


def test_each_row_of_the_table_is_measured_in_some_row():
    table = runpy.run_path(str(gpu_session.ROOT / "benchmarks/gpu.py"), run_name="loaded")["ROWS"]
    asked = [row.words[2:] for row in ROWS if row.words[0] == "benchmarks/gpu.py"]
    words = [word for row in asked for word in row]
    assert [row.name for row in table if not any(word in row.name for word in words)] == []


@pytest.mark.exhaustive
def test_the_question_of_compiled_bits_is_put_on_a_cpu_without_a_compiler(tmp_path):
    row = Row("bits", ("-m", "benchmarks.compiled_bits", "--device", "cpu"), 200, "does it run")
    (ended,) = run_rows([row], tmp_path, 300, str)
    log = (tmp_path / "log.txt").read_text()
    assert ended.how == "done", log
    assert log.count("same after 8 steps") == 2
