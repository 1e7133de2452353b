"""Logging for runs of one or many processes.

The main process logs everything. The others keep silent unless asked (``main_process_only=False``),
but what they have to say about an error always comes out, with their rank in front.

Nothing happens at import. Handlers are attached by :func:`setup_logging`, which
:func:`ddpkit.experiment.create_experiment_directory` calls; until then Python shows warnings and
errors on stderr.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

from ddpkit.base import get_rank
from ddpkit.errors import ConfigError, MissingFileError

__all__ = [
    "MultiProcessLoggerAdapter",
    "TqdmCompatibleStreamHandler",
    "address_of",
    "close_logging",
    "format_order_of_magnitude",
    "get_logger",
    "log_file_of",
    "setup_logging",
    "show_as",
    "shown_path",
    "without_console",
]

LEVEL_VARIABLES = ("DDPKIT_LOG_LEVEL", "SB_LOG_LEVEL")
CONSOLE_FORMAT = "%(message)s"
FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

# SI prefixes and English words by power of ten.
_PREFIXES = dict(
    zip(
        range(-24, 25, 3),
        (*"yzafpnum", "", *"kMGTPEZY"),
        strict=True,
    )
)
_WORDS = dict(
    zip(
        (-12, -9, -6, -3),
        ("trillionths", "billionths", "millionths", "thousandths"),
        strict=True,
    )
)
_WORDS |= dict(
    zip(
        (0, 3, 6, 9, 12),
        ("", "thousand", "million", "billion", "trillion"),
        strict=True,
    )
)


def _own_rank() -> int:
    """Return the rank, 0 where it is not known. Launchers report a malformed one."""
    return get_rank() or 0


class MultiProcessLoggerAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """A logger that speaks on the main process, and on the others when it must.

    Other ranks log a message when it is an error, when it carries an exception, or when the call
    says ``main_process_only=False``; ``[rank: r]`` then stands before it. The rank is found out at
    each call. Obtain one from :func:`get_logger`.

    Ranks: local.

    Example:
        >>> get_logger("ddpkit.example").isEnabledFor(logging.ERROR)
        True
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[str] = set()

    def process(
        self,
        msg: Any,
        kwargs: MutableMapping[str, Any],
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message on all ranks but the main one.

        Args:
            msg: the message.
            kwargs: the keyword arguments of the logging call.

        Returns:
            Both, with the rank added.

        Ranks: local.
        """
        rank = _own_rank()
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "ddpkit_rank": rank}
        return (f"[rank: {rank}] {msg}" if rank > 0 else msg), kwargs

    def log(
        self,
        level: int,
        msg: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Log a message; ``info``, ``warning`` and so on end here and take the same arguments.

        Args:
            level: such as ``logging.INFO``.
            msg: the message, with ``%``-style places for ``args``.
            args: what goes into those places.
            kwargs: as for Python's loggers, and ``main_process_only`` (default ``True``): ``False``
                to log on every rank that makes the call.

        Ranks: local.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        if not self.isEnabledFor(level):
            return
        everywhere = level >= logging.ERROR or bool(kwargs.get("exc_info")) or not main_process_only
        if not everywhere and _own_rank() > 0:
            return
        msg, changed = self.process(msg, kwargs)
        changed["stacklevel"] = changed.get("stacklevel", 1) + 1
        self.logger.log(level, msg, *args, **changed)

    def announce(self, msg: Any, *args: Any) -> None:
        """Tell what a user has to see: log it as information; where nobody has set logging up,
        write it to stderr.

        Args:
            msg: the message.
            args: what goes into its places.

        Ranks: local; speaks on the main process.
        """
        if self.logger.hasHandlers():
            self.log(logging.INFO, msg, *args, stacklevel=2)
        elif _own_rank() == 0:
            with _without_bars(sys.stderr):
                sys.stderr.write(f"{str(msg) % args if args else msg}\n")

    def warning_once(
        self,
        msg: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Log a warning the first time that this logger is given it, and never again in this
        process.

        Args:
            msg: the message.
            args: what goes into its places; another value makes another message.
            kwargs: as for :meth:`log`.

        Ranks: local.
        """
        text = str(msg) % args if args else str(msg)
        if text not in self._said:
            self._said.add(text)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as a person wants to read it: without the working directory, where it is in
    there.

    Args:
        path: of a file or a folder, there or not.

    Ranks: local.

    Example:
        >>> shown_path(os.path.join(os.getcwd(), "results", "1")), shown_path("/elsewhere/1")
        ('results/1', '/elsewhere/1')
    """
    shown = _shown_elsewhere(Path(path)) if _SHOWN_AS else None
    if shown is not None:
        return shown
    # the working directory is gone; or the path is not in it
    with contextlib.suppress(OSError, ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return str(path)


#: What messages show in the place of a folder, such as the URL that it is a mirror of.
_SHOWN_AS: dict[Path, str] = {}


def show_as(folder: str | os.PathLike[str], shown: str) -> None:
    """Have messages show something else in the place of a folder.

    Args:
        folder: an absolute path.
        shown: what stands for it; a path in the folder is shown as a path in that.

    Ranks: local.

    State: as long as the process.

    Example:
        >>> show_as("/tmp/ddpkit-mirrors-0/seven", "s3://bucket/seven")
        >>> shown_path("/tmp/ddpkit-mirrors-0/seven/save/CKPT+a")
        's3://bucket/seven/save/CKPT+a'
    """
    _SHOWN_AS[Path(folder)] = shown.rstrip("/")


def address_of(path: str | os.PathLike[str]) -> str:
    """Return where a file is for other processes and machines: the URL of what is in a mirror, and
    another path as it is.

    Ranks: local.

    Example:
        >>> address_of("/elsewhere/1")
        '/elsewhere/1'
    """
    return _shown_elsewhere(Path(path)) or str(path)


def _shown_elsewhere(path: Path) -> str | None:
    for folder, shown in _SHOWN_AS.items():
        if path.is_relative_to(folder):
            inside = path.relative_to(folder).as_posix()
            return shown if inside == "." else f"{shown}/{inside}"
    return None


@functools.cache
def get_logger(name: str) -> MultiProcessLoggerAdapter:
    """Return the logger of a module; the same object for the same name.

    Args:
        name: dotted, usually ``__name__``. ddpkit's own all begin with ``ddpkit``.

    Returns:
        An adapter around ``logging.getLogger(name)`` that logs on the main process unless told
        otherwise.

    Ranks: local.

    Example:
        >>> logger = get_logger("ddpkit.example")
        >>> logger.info("once"); logger.info("everywhere", main_process_only=False)
    """
    return MultiProcessLoggerAdapter(logging.getLogger(name))


def log_file_of() -> str:
    """Return the file that this process's log goes to, as :func:`setup_logging` has opened it;
    empty without any.

    On ranks above 0 there is none before their first warning.

    Ranks: local.

    Example:
        >>> log_file_of()
        ''
    """
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, _LogFile) and not handler.has_failed
    ]
    return next(
        (handler.baseFilename for handler in handlers if Path(handler.baseFilename).exists()), ""
    )


@contextlib.contextmanager
def without_console() -> Iterator[None]:
    """Send what is logged inside a ``with`` block into files alone.

    Ranks: local.

    State: the level of ddpkit's console handlers, for the block.

    Example:
        >>> with without_console():
        ...     get_logger("ddpkit.example").error("for the file")
    """
    consoles = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, TqdmCompatibleStreamHandler)
    ]
    before = [handler.level for handler in consoles]
    for handler in consoles:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in zip(consoles, before, strict=True):
            handler.setLevel(level)


def _without_bars(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no progress bar is on the screen; none is where tqdm is not
    imported.
    """
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return bars.external_write_mode(file=stream) if bars else contextlib.nullcontext()


class TqdmCompatibleStreamHandler(logging.StreamHandler):  # type: ignore[type-arg]  # likewise
    """A console handler that takes progress bars off the screen while it writes, and puts them
    back.

    tqdm is used only if it is imported already: otherwise no bar is shown.

    A program may have turned stderr into log records. What this handler writes must not come back
    to it then, without an end. A record that is made while it writes is left out. Where this
    process reads its own stderr, it writes only what ddpkit's loggers were given, and nothing where
    the root logger has another handler that takes it, and so shows it already.

    Args:
        stream: where to write; ``None`` for whatever ``sys.stderr`` is at the time of each message.

    Ranks: local.

    Example:
        >>> handler = TqdmCompatibleStreamHandler(sys.stdout)
        >>> handler.handle(logging.makeLogRecord({"msg": "between two refreshes"})) and None
        between two refreshes
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._follows_stderr = stream is None
        self._writes = False

    def filter(self, record: logging.LogRecord) -> Any:
        """Say whether to write a record; asked before any lock is taken.

        Args:
            record: what was logged.

        Returns:
            Something true where it is to be written.

        Ranks: local.
        """
        from ddpkit.base import is_read_here  # not for an import of the library

        stream = sys.stderr if self._follows_stderr else self.stream
        if is_read_here(stream) and (
            not hasattr(record, "ddpkit_rank") or _is_shown_by_another(record)
        ):
            return False
        return super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record.

        Args:
            record: what to write.

        Ranks: local.
        """
        if self._writes:  # the lock is held: it is what this thread writes that was logged
            return
        if self._follows_stderr:
            self.stream = sys.stderr
        self._writes = True
        try:
            with _without_bars(self.stream):
                super().emit(record)
        finally:
            self._writes = False


def _is_shown_by_another(record: logging.LogRecord) -> bool:
    """Say whether a handler of the root logger that is not ddpkit's takes a record."""
    silent = (TqdmCompatibleStreamHandler, _LogFile, logging.NullHandler)
    return any(
        record.levelno >= handler.level and not isinstance(handler, silent)
        for handler in logging.getLogger().handlers
    )


class _ConsoleFormatter(logging.Formatter):
    """Names the level from warnings on, and the rank where no adapter did.

    A traceback that Python prints anyway (``traceback_follows``) is left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "traceback_follows", False):
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        rank = _own_rank()
        return text if rank == 0 or hasattr(record, "ddpkit_rank") else f"[rank: {rank}] {text}"


_UNDO = contextlib.ExitStack()  # takes away what setup_logging has attached


def setup_logging(
    config_path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    default_level: int | str = logging.INFO,
    *,
    log_file: str | os.PathLike[str] | None = None,
    level: int | str | None = None,
) -> None:
    """Attach a console handler (stderr) and, if asked, a log file to the root logger.

    A second call replaces its own handlers; other handlers stay. On ranks above 0 the console shows
    what those ranks log (see :class:`MultiProcessLoggerAdapter`) and other libraries' warnings, and
    the file is ``<name>.rank<r><suffix>``, made when there is a first warning to put into it.

    Args:
        config_path: a YAML file in the form of :func:`logging.config.dictConfig` to use instead of
            all this; ``log_file`` then becomes the ``filename`` of its handler ``file_handler``, if
            it has one.
        overrides: nested values to put into that configuration.
        default_level: of the console where ``level`` is not given.
        log_file: gets everything from DEBUG on, appended.
        level: of the console: a number or a name. ``DDPKIT_LOG_LEVEL`` in the environment wins over
            it.

    Raises:
        ConfigError: a level or the configuration cannot be understood, or the file cannot be
            written.
        MissingFileError: ``config_path`` does not exist.

    Ranks: local; each rank sets up its own.

    State: the handlers of the root logger, and the levels of the loggers "root", "ddpkit" and
    "__main__".

    Example:
        >>> setup_logging(level="WARNING")
        >>> close_logging()
    """
    close_logging()
    if config_path is not None:
        _apply_config(
            Path(config_path),
            overrides or {},
            None if log_file is None else Path(log_file),
        )
        return
    console_level = _console_level(default_level if level is None else level)
    console = TqdmCompatibleStreamHandler()
    console.setFormatter(_ConsoleFormatter(CONSOLE_FORMAT))
    console.setLevel(console_level)
    handlers: list[logging.Handler] = [console]
    if log_file is not None:
        handlers += _file_handlers(Path(log_file))
    if _own_rank() > 0:
        for handler in handlers:  # what an adapter let through, and warnings of other libraries
            handler.addFilter(
                lambda record: hasattr(record, "ddpkit_rank") or record.levelno >= logging.WARNING
            )
    for handler in handlers:
        logging.getLogger().addHandler(handler)
        _UNDO.callback(handler.close)
        _UNDO.callback(logging.getLogger().removeHandler, handler)
    own_level = console_level if log_file is None else min(console_level, logging.DEBUG)
    levels = {
        "": min(console_level, logging.INFO),
        "ddpkit": own_level,
        "__main__": own_level,
    }
    for name, wanted in levels.items():
        _UNDO.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
        logging.getLogger(name).setLevel(wanted)


def close_logging() -> None:
    """Undo :func:`setup_logging`: take its handlers away, close their files, put the levels back.

    Ranks: local.

    State: the handlers of the root logger, and the levels of the loggers "root", "ddpkit" and
    "__main__".

    Example:
        >>> close_logging()
    """
    _UNDO.close()


class _LogFile(logging.FileHandler):
    """A log file that says once that it cannot be written, as where the disk is full."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            sys.stderr.write(
                f"{self.baseFilename} cannot be written: {error}. The run goes on; log lines are "
                "lost.\n"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # was told: each line is flushed
            super().close()


def _file_handlers(path: Path) -> list[logging.Handler]:
    rank = _own_rank()
    if rank > 0 and not path.parent.is_dir():
        return []  # the folder is on another machine's disk; the console still gets everything
    own = _own_file(path)
    try:
        handler = _LogFile(
            own,
            mode="a",
            encoding="utf-8",
            delay=rank > 0,
        )
    except OSError as error:
        from ddpkit.base import cannot_write

        words = "--test_only --resume=PATH evaluates a checkpoint that is elsewhere."
        raise ConfigError(f"{cannot_write(f'log_file={str(own)!r}', error)} {words}") from error
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    handler.setLevel(logging.DEBUG if rank == 0 else logging.WARNING)
    return [handler]


def _own_file(path: Path) -> Path:
    rank = _own_rank()
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _console_level(level: int | str) -> int:
    """Turn a level, or the one that the environment asks for, into a number."""
    asked = {name: os.environ[name] for name in LEVEL_VARIABLES if os.environ.get(name)}
    source, given = next(iter({**asked, "level": level}.items()))
    number: Any = given
    if isinstance(given, str):
        name = given.strip().upper()
        number = int(name) if name.isdecimal() else logging.getLevelName(name)
    if not isinstance(number, int):
        raise ConfigError(
            f"{source} expects a logging level (DEBUG, INFO, WARNING, ERROR or a number), got "
            f"{given!r}."
        )
    return number


def _apply_config(path: Path, overrides: Mapping[str, Any], log_file: Path | None) -> None:
    import logging.config

    import yaml  # not for a Brain alone

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if log_file is not None and "file_handler" in config.get("handlers", {}):
            config = _merged(
                config,
                {"handlers": {"file_handler": {"filename": str(_own_file(log_file))}}},
            )
        logging.config.dictConfig(_merged(config, overrides))
    except FileNotFoundError as error:
        raise MissingFileError(f"config_path={str(path)!r}: there is no such file.") from error
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"config_path={str(path)!r} is not a logging configuration: {error}. "
            "It has the form of logging.config.dictConfig (version, formatters, handlers, root), "
            "in YAML."
        ) from error


def _merged(base: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged


def format_order_of_magnitude(number: float, abbreviate: bool = True) -> str:
    """Write a number with one decimal and the prefix or word of its order of magnitude.

    Args:
        number: any; what lies beyond the known orders gets the last of them.
        abbreviate: SI prefixes (k, M, G) if true, else words (thousand, million, billion).

    Returns:
        Such as ``"123.5k"`` or ``"123.5 thousand"``; whole numbers below 1000 are written as they
        are.

    Ranks: local.

    Example:
        >>> [format_order_of_magnitude(number) for number in (123456, 999999, 12)]
        ['123.5k', '1.0M', '12']
        >>> format_order_of_magnitude(0.00000123, abbreviate=False)
        '1.2 millionths'
    """
    names = _PREFIXES if abbreviate else _WORDS
    if number == 0 or not math.isfinite(number) or (isinstance(number, int) and abs(number) < 1000):  # noqa: PLR2004
        return f"{number}" if isinstance(number, int) else f"{number:.1f}"
    exponent = int(f"{number:e}".split("e")[1])
    order = min(max(3 * (exponent // 3), min(names)), max(names))
    if f"{abs(number) / 10.0**order:.1f}" == "1000.0" and order + 3 in names:
        order += 3  # rounding has reached the next order
    text = f"{number / 10.0**order:.1f}"
    return text + names[order] if abbreviate else f"{text} {names[order]}".rstrip()
