"""Logging: who speaks, with which prefix, where to; and nothing before it is asked for."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import subprocess
import sys
import threading

import pytest

from ddpkit.errors import ConfigError, MissingFileError
from ddpkit.logger import (
    TqdmCompatibleStreamHandler,
    close_logging,
    format_order_of_magnitude,
    get_logger,
    setup_logging,
)
from tests.launching import wait_until

log = get_logger("ddpkit.tests")


@pytest.fixture(autouse=True)
def _close():
    yield
    close_logging()


@pytest.fixture
def as_rank(monkeypatch):
    return lambda rank: monkeypatch.setenv("RANK", str(rank))


def test_main_logs_everything_without_prefix(caplog, as_rank):
    caplog.set_level(logging.DEBUG)
    for rank in (None, 0, "no-number"):
        if rank is not None:
            as_rank(rank)
        log.info("epoch %d", 3)
    assert caplog.messages == ["epoch 3"] * 3


def test_other_ranks_keep_silent_unless_asked(caplog, as_rank):
    caplog.set_level(logging.DEBUG)
    as_rank(1)
    log.info("not shown")
    log.warning("not shown either")
    log.info("asked for", main_process_only=False)
    assert caplog.messages == ["[rank: 1] asked for"]


def test_2_5_errors_and_exceptions_of_other_ranks_do_not_vanish(caplog, as_rank):
    as_rank(2)
    log.error("broken %s", "disk")
    try:
        raise ValueError("the cause")
    except ValueError:
        log.exception("with its context")
        log.warning("also below ERROR", exc_info=True)
    assert caplog.messages == [
        "[rank: 2] broken disk", "[rank: 2] with its context", "[rank: 2] also below ERROR",
    ]  # fmt: skip
    assert "the cause" in caplog.text


def test_the_rank_is_read_at_call_time(caplog, as_rank):
    caplog.set_level(logging.INFO)
    as_rank(1)
    log.info("not shown")
    as_rank(0)
    log.info("shown")
    assert caplog.messages == ["shown"]


def test_warning_once(caplog):
    for number in (1, 1, 2):
        get_logger("ddpkit.once").warning_once("number %d", number)
    assert caplog.messages == ["number 1", "number 2"]


def test_records_name_the_line_that_logs(caplog):
    caplog.set_level(logging.DEBUG)
    log.info("a")
    log.log(logging.INFO, "b")
    get_logger("ddpkit.lines").warning_once("c")
    assert {record.funcName for record in caplog.records} == {
        "test_records_name_the_line_that_logs"
    }


def test_the_caller_s_extra_is_kept(caplog):
    log.warning("m", extra={"mine": 1})
    assert caplog.records[0].mine == 1


# ------------------------------------------------------------------------------------------- set-up


def test_console_and_file(tmp_path, capsys):
    setup_logging(log_file=tmp_path / "log.txt")
    log.debug("detail")
    log.info("news")
    log.warning("odd")
    logging.getLogger("other.library").debug("noise")
    logging.getLogger("other.library").info("of another library")
    captured = capsys.readouterr()
    assert captured.err == "news\nWARNING: odd\nof another library\n"
    assert captured.out == ""
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "detail",
        "news",
        "odd",
        ("of another library"),
    ]
    assert "WARNING ddpkit.tests: odd" in lines[2]


def test_a_second_set_up_replaces_the_first_and_leaves_others_handlers(tmp_path, capsys):
    mine = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(mine)
    try:
        setup_logging(log_file=tmp_path / "a.txt")
        setup_logging(log_file=tmp_path / "b.txt")
        log.info("once")
        assert capsys.readouterr().err == "once\n"
        assert (tmp_path / "a.txt").read_text() == ""
        assert mine.stream.getvalue() == "once\n"
    finally:
        logging.getLogger().removeHandler(mine)


def test_closing_puts_levels_back(tmp_path):
    names = ("", "ddpkit", "__main__")
    before = [logging.getLogger(name).level for name in names]
    setup_logging(log_file=tmp_path / "log.txt", level="ERROR")
    setup_logging(level="DEBUG")
    close_logging()
    assert [logging.getLogger(name).level for name in names] == before


@pytest.mark.parametrize("variable", ["DDPKIT_LOG_LEVEL", "SB_LOG_LEVEL"])
@pytest.mark.parametrize("value", ["debug", "10"])
def test_the_environment_sets_the_level(variable, value, monkeypatch, capsys):
    monkeypatch.setenv(variable, value)
    setup_logging(level=logging.ERROR)
    log.debug("detail")
    assert capsys.readouterr().err == "detail\n"


def test_an_unknown_level_is_an_error(monkeypatch):
    monkeypatch.setenv("DDPKIT_LOG_LEVEL", "loud")
    with pytest.raises(
        ConfigError,
        match="DDPKIT_LOG_LEVEL expects a logging level .*, got 'loud'",
    ):
        setup_logging()
    monkeypatch.delenv("DDPKIT_LOG_LEVEL")
    with pytest.raises(ConfigError, match="level expects a logging level .*, got 'quiet'"):
        setup_logging(level="quiet")


def test_other_ranks_show_warnings_of_libraries_and_what_is_meant_for_all(
    tmp_path,
    capsys,
    as_rank,
):
    as_rank(1)
    setup_logging(log_file=tmp_path / "log.txt")
    library = logging.getLogger("other.library")
    library.info("not shown")
    library.warning("library's warning")
    log.warning("not shown")
    assert not list(tmp_path.glob("log.txt"))
    log.info("for all", main_process_only=False)
    log.error("error")
    assert capsys.readouterr().err == (
        "[rank: 1] WARNING: library's warning\n[rank: 1] for all\nERROR: [rank: 1] error\n"
    )
    lines = (tmp_path / "log.rank1.txt").read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["library's warning", "[rank: 1] error"]


def test_another_rank_whose_folder_is_not_there_logs_to_the_console(tmp_path, capsys, as_rank):
    as_rank(1)
    setup_logging(log_file=tmp_path / "elsewhere" / "log.txt")
    log.error("error")
    assert capsys.readouterr().err == "ERROR: [rank: 1] error\n"


def test_a_log_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="log_file='.*log.txt' cannot be written: No such file"):
        setup_logging(log_file=tmp_path / "elsewhere" / "log.txt")


# -------------------------------------------------------------------------------- own configuration

CONFIG = """
version: 1
disable_existing_loggers: false
handlers:
    console: {class: ddpkit.logger.TqdmCompatibleStreamHandler, level: WARNING}
    file_handler: {class: logging.FileHandler, filename: nowhere.txt}
loggers:
    ddpkit.configured: {handlers: [console, file_handler], level: INFO, propagate: false}
"""


@pytest.fixture
def _forget_configuration():
    yield
    configured = logging.getLogger("ddpkit.configured")
    for handler in list(configured.handlers):
        configured.removeHandler(handler)
        handler.close()
    configured.propagate = True


@pytest.mark.usefixtures("_forget_configuration")
@pytest.mark.parametrize("way", ["keyword", "first argument", "overrides"])
def test_a_configuration_file(tmp_path, capsys, way):
    path = tmp_path / "log-config.yaml"
    path.write_text(CONFIG)
    file = tmp_path / "log.txt"
    if way == "keyword":
        setup_logging(config_path=path, log_file=file)
    elif way == "first argument":
        setup_logging(path, {"handlers": {"file_handler": {"filename": str(file)}}}, logging.INFO)
    else:
        setup_logging(
            config_path=path,
            overrides={"handlers": {"file_handler": {"filename": str(file), "delay": True}}},
        )
    get_logger("ddpkit.configured").info("news")
    get_logger("ddpkit.configured").warning("odd")
    assert file.read_text() == "news\nodd\n"
    assert capsys.readouterr().err == "odd\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a logging configuration"),
        ("handlers: {a: {class: no.such.Class}}\nversion: 1", "is not a logging configuration"),
        ("", "is not a logging configuration"),
    ],
)
def test_a_bad_configuration_file(tmp_path, text, reason):
    path = tmp_path / "log-config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        setup_logging(config_path=path)


def test_a_missing_configuration_file(tmp_path):
    with pytest.raises(MissingFileError, match="there is no such file"):
        setup_logging(config_path=tmp_path / "log-config.yaml")
    with pytest.raises(ConfigError, match="is not a logging configuration: .*Is a directory"):
        setup_logging(config_path=tmp_path)


# ---------------------------------------------------------------------- stderr that becomes records


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def shown_by(logger):
    """Return what a handler of this logger gets. No other one is there: pytest has some."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers.clear()
    handler = Lines()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        close_logging()
        logger.removeHandler(handler)
        root.handlers[:] = before


@contextlib.contextmanager
def read_back():
    """Let a thread log each line of stderr, as some starters do; ten at most."""
    reading, writing = os.pipe()

    def log_lines():
        with os.fdopen(reading) as lines:
            for line in itertools.islice(lines, 10):
                logging.getLogger("starter").error(line.rstrip())

    reader = threading.Thread(target=log_lines)
    reader.start()
    with os.fdopen(writing, "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
        yield
    reader.join(10)
    assert not reader.is_alive()


def lines_of_two(lines):
    """Log a line and write one; what comes of them, until a third that comes after their echoes."""
    setup_logging()
    log.warning("odd")
    sys.stderr.write("of a library in C\n")
    assert wait_until(lambda: len(lines) >= 2, 10)
    sys.stderr.write("the end\n")
    assert wait_until(lambda: lines[-1] == "ERROR the end" or len(lines) >= 10, 10)
    return lines[:-1]


def test_what_is_read_back_from_stderr_by_the_root_logger_s_handler_is_there_once():
    with shown_by(logging.getLogger()) as lines, read_back():
        assert lines_of_two(lines) == ["WARNING odd", "ERROR of a library in C"]


def test_what_is_read_back_from_stderr_by_another_logger_s_handler_is_there_once():
    """Its records come to the root logger too, where ddpkit's handler is the only one."""
    with shown_by(logging.getLogger("starter")) as lines, read_back():
        assert lines_of_two(lines) == ["ERROR WARNING: odd", "ERROR of a library in C"]


def test_what_is_written_to_a_stderr_that_logs_it_comes_once():
    class Logging(io.StringIO):
        def write(self, text):
            if text.strip():
                logging.getLogger("starter").error(text.strip())
            return len(text)

    with shown_by(logging.getLogger("starter")) as lines, contextlib.redirect_stderr(Logging()):
        setup_logging()
        log.warning("odd")
        log.warning("again")
    assert lines == ["ERROR WARNING: odd", "ERROR WARNING: again"]


@pytest.mark.parametrize("handler", [logging.NullHandler(), logging.StreamHandler(io.StringIO())])
def test_a_handler_that_does_not_show_a_line_takes_it_from_no_console(handler):
    """Where the program reads its own stderr."""
    handler.setLevel(logging.CRITICAL if type(handler) is logging.StreamHandler else 0)
    reading, writing = os.pipe()
    with shown_by(logging.getLogger("nobody")), os.fdopen(reading) as lines:
        logging.getLogger().addHandler(handler)
        with os.fdopen(writing, "w", buffering=1) as stream, contextlib.redirect_stderr(stream):
            setup_logging()
            log.warning("odd")
        assert lines.read() == "WARNING: odd\n"


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, io.UnsupportedOperation])
def test_a_stderr_without_a_file_is_a_console(error):
    class Screen(io.StringIO):
        def fileno(self):
            raise error

    with shown_by(logging.getLogger("nobody")), contextlib.redirect_stderr(Screen()) as screen:
        setup_logging()
        log.warning("odd")
    assert screen.getvalue() == "WARNING: odd\n"


def test_a_pipe_to_another_process_is_a_console():
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with shown_by(logging.getLogger()), contextlib.redirect_stderr(reader.stdin):
        setup_logging()
        log.warning("odd")
    assert reader.communicate(timeout=60)[0] == "WARNING: odd\n"


# ------------------------------------------------------------------------------------ progress bars


def test_messages_do_not_break_a_progress_bar():
    from tqdm import tqdm

    screen = io.StringIO()
    handler = TqdmCompatibleStreamHandler(screen)
    with tqdm(total=2, file=screen, ascii=True) as bar:
        bar.update(1)
        screen.truncate(0)
        screen.seek(0)
        handler.handle(logging.makeLogRecord({"msg": "between"}))
        shown = screen.getvalue()
    before, _, after = shown.partition("between\n")
    assert before.strip("\r ") == ""  # the bar was wiped off first
    assert "50%" in after  # and put back below the message


def test_without_tqdm_the_handler_just_writes(monkeypatch):
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    screen = io.StringIO()
    TqdmCompatibleStreamHandler(screen).handle(logging.makeLogRecord({"msg": "alone"}))
    assert screen.getvalue() == "alone\n"
    assert "tqdm" not in sys.modules


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("number", "short", "long"),
    [
        (0, "0", "0"),
        (7, "7", "7"),
        (999, "999", "999"),
        (999.0, "999.0", "999.0"),
        (1000, "1.0k", "1.0 thousand"),
        (123456, "123.5k", "123.5 thousand"),
        (-123456, "-123.5k", "-123.5 thousand"),
        (999_949, "999.9k", "999.9 thousand"),
        (999_999, "1.0M", "1.0 million"),
        (21_200_000_000, "21.2G", "21.2 billion"),
        (1e30, "1000000.0Y", "1000000000000000000.0 trillion"),
        (0.00123, "1.2m", "1.2 thousandths"),
        (float("inf"), "inf", "inf"),
        (float("nan"), "nan", "nan"),
    ],
)
def test_orders_of_magnitude(number, short, long):
    assert format_order_of_magnitude(number) == short
    assert format_order_of_magnitude(number, abbreviate=False) == long


def test_what_a_user_has_to_see_is_seen_without_any_set_up(monkeypatch, capsys, caplog):
    logger = get_logger("ddpkit.announces")
    logger.setLevel(logging.INFO)
    logger.announce("number %d", 1)
    assert "number 1" in caplog.text
    assert "number 1" not in capsys.readouterr().err
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    logger.announce("number %d of 100 %%", 2)
    assert capsys.readouterr().err == "number 2 of 100 %\n"
    monkeypatch.setenv("RANK", "1")
    logger.announce("number %d", 3)
    assert capsys.readouterr().err == ""


def test_a_log_file_that_cannot_be_written_says_so_once(capsys):
    setup_logging(log_file="/dev/full", level="ERROR")
    try:
        for number in range(3):
            logging.getLogger("ddpkit").warning("line %d", number)
    finally:
        close_logging()  # which writes what is left in the file's buffer
    err = capsys.readouterr().err
    assert (
        err.count(
            "/dev/full cannot be written: [Errno 28] No space left on device. The run goes on"
        )
        == 1
    )
    assert "--- Logging error ---" not in err
