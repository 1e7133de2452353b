"""The bar on a terminal, the line without one, and nothing where nothing is wanted."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import re
import select
import struct
import termios
from types import SimpleNamespace

import pytest

from ddpkit.reporting.stage_report import LINE_SECONDS, ProgressBar
from ddpkit.run_opts import RunOptions


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "ddpkit.reporting.stage_report.time",
        SimpleNamespace(monotonic=lambda: clock.now),
    )
    return clock


@pytest.fixture(params=[120])
def terminal(request, monkeypatch):
    """A terminal of some columns; returns a function that reads what was written to it."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, request.param, 0, 0))
    stream = os.fdopen(slave, "w", encoding="utf-8", buffering=1)
    # pytest has its own
    monkeypatch.setattr("ddpkit.reporting.stage_report.sys", SimpleNamespace(stderr=stream))
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(master, select.POLLIN)

    def read():
        stream.flush()
        text = b""
        while poll.poll(50):
            text += os.read(master, 65536)
        return text.decode()

    yield read
    stream.close()
    os.close(master)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="ddpkit.reporting.stage_report")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_bar_on_a_terminal(terminal, lines):
    with ProgressBar("epoch 2 train", 10, colour="GREEN") as bar:
        bar.show(4, loss=0.123456, samples=64)
        shown = terminal()
        assert "epoch 2 train" in shown
        assert "4/10" in shown
        assert "loss=0.123" in shown
        assert "samples/s=" in shown
        assert "\x1b[32m" in shown, "green"
        bar.show(10, loss=0.1, samples=160)
        assert "10/10" in terminal()
    assert terminal().endswith("\n"), "the bar is left standing"
    assert lines() == []


def test_a_bar_that_goes_on_where_it_was(terminal):
    with ProgressBar("train", 10, initial=6) as bar:
        bar.show(8)
        shown = terminal()
    assert "6/10" in shown
    assert "8/10" in shown
    assert "loss" not in shown


@pytest.mark.parametrize("terminal", [60], indirect=True)
def test_a_bar_on_a_small_terminal(terminal):
    with ProgressBar("train", 10) as bar:
        bar.show(4, loss=0.5, samples=64)
    lines = re.sub(r"\x1b\[\w+", "", terminal()).replace("\n", "").split("\r")
    assert "4/10" in lines[-1] or "4/10" in lines[-2]
    assert max(map(len, lines)) <= 80


def test_a_bar_without_a_total(terminal):
    with ProgressBar("train", None) as bar:
        bar.show(3, loss=float("nan"), samples=3)
        assert "3batch" in terminal().replace(" ", "")


def test_a_part_shows_no_loss(terminal):
    with ProgressBar("valid", 10) as bar:
        bar.partial = True
        bar.show(3, loss=1.0)
        assert "loss" not in terminal()
        bar.partial = False
        bar.show(10, loss=1.0)
        assert "loss=1" in terminal()


def test_no_bar_on_a_terminal_when_disabled(terminal, lines):
    with ProgressBar("train", 10, enable=False) as bar:
        bar.show(10, loss=1.0)
    assert terminal() == ""
    assert lines() == []


def test_something_that_only_calls_itself_a_terminal(monkeypatch):
    class Console(io.StringIO):
        def isatty(self):
            return True

    console = Console()
    monkeypatch.setattr("ddpkit.reporting.stage_report.sys", SimpleNamespace(stderr=console))
    with ProgressBar("train", 10) as bar:
        bar.show(5)
    assert "5/10" in console.getvalue()


def test_without_a_terminal_a_line_every_half_minute(clock, lines, capsys):
    began = clock.now
    with ProgressBar("epoch 1 train", 1000, initial=100) as bar:
        said = []
        for second in range(1, 301):
            clock.now = began + second
            bar.show(100 + second, loss=0.5, samples=8 * second)
            if len(lines()) > len(said):
                said.append(second)
    assert (
        said == list(range(30, 301, 30)) == [int(LINE_SECONDS) * number for number in range(1, 11)]
    )
    assert lines()[0] == "epoch 1 train: batch 130/1000, loss 0.5, 8.00 samples/s, 14:30 left"
    assert lines()[-1] == "epoch 1 train: batch 400/1000, loss 0.5, 8.00 samples/s, 10:00 left"
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_lines_say_what_is_known(clock, lines):
    bar = ProgressBar("test", None)
    clock.now += 31
    bar.show(7)
    clock.now += 31
    bar.partial = True
    bar.show(8, loss=2.0, samples=62_000)
    assert lines() == ["test: batch 7, 0.00 samples/s", "test: batch 8, 1.00k samples/s"]
    bar.close()
    bar.close()


def test_nothing_when_disabled_or_without_a_stderr(clock, lines, monkeypatch):
    with ProgressBar("train", 10, enable=False) as bar:
        clock.now += 100
        bar.show(5, loss=1.0)
    assert lines() == []
    # as under pythonw
    monkeypatch.setattr("ddpkit.reporting.stage_report.sys", SimpleNamespace(stderr=None))
    with ProgressBar("train", 10) as bar:
        bar.show(5)


def test_every_stage_has_a_colour_that_tqdm_knows(terminal):
    for stage, colour in RunOptions().tqdm_barcolor.items():
        with ProgressBar(stage, 1, colour=colour) as bar:
            bar.show(1)
        assert "\x1b[" in terminal()
