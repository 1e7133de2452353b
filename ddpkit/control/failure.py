"""What a process does when it fails: it says why, where the launcher and the other ranks will look.

The exception that ends a process is noted twice, by :func:`watch_uncaught`'s hook: in the file from which torchrun
makes its closing summary, and in the report of the process group (:mod:`ddpkit.base.failure_report`).

Source: ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception`` defines the file's format;
torchrun takes the failure with the lowest timestamp, in whole seconds, for the root cause.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpkit.base import (
    PLACE,
    POSITION,
    PROCESS,
    FailureReport,
    Reason,
    explained,
    is_second_hand,
    line_of,
    rank_if_known,
    replacing,
    text_and_line,
)
from ddpkit.errors import ConfigError, FolderInUseError, LaunchError, RankFailedError, RunStopped
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

PLAIN = "_ddpkit_plain"  # attribute of an exception: print its message alone, and exit with this code
USAGE_CODE = 2  # as argparse
IN_BATCH = re.compile(r" at step [1-9]")  # in the words for a place
FIRST_WORD_SECONDS = 5.0  # for the first rank of a machine to say what all of them are about to say
LATE_EXIT_SINCE = 3, 13  # multiprocessing calls what ends a process once the exception is forgotten
STORE_WAIT_SECONDS = 2.0  # the same where it can be asked for; the watchdog gives a failed process three
NAP_SECONDS = 0.02

logger = get_logger(__name__)


def show_without_traceback(error: BaseException, code: int = USAGE_CODE) -> None:
    """Mark an exception: if uncaught, only its message is printed, once, without a traceback.

    Args:
        error: it is not raised here.
        code: the exit code of the process.

    Ranks: local.

    State: ``sys.excepthook``, see :func:`watch_uncaught`.

    Example:
        >>> before = sys.excepthook
        >>> error = ConfigError("precision='fp8' is not a format")
        >>> show_without_traceback(error)
        >>> is_shown_without_traceback(error)
        True
        >>> sys.excepthook = before
    """
    vars(error)[PLAIN] = code
    watch_uncaught()


def is_shown_without_traceback(error: BaseException) -> bool:
    """Say whether an exception is a :class:`ConfigError`, or marked by :func:`show_without_traceback`, in a script.

    A :class:`ConfigError` of a batch has its traceback: it comes from the recipe's code, perhaps on one rank alone.

    Ranks: local.

    Example:
        >>> is_shown_without_traceback(ValueError("a bug"))
        False
    """
    is_of_batch = IN_BATCH.search(vars(error).get(PLACE, "")) is not None
    is_plain = (isinstance(error, ConfigError) and not is_of_batch) or PLAIN in vars(error)
    return is_plain and not hasattr(sys, "ps1") and not sys.flags.interactive


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Have what is raised over options and the launcher's variables told as a command line's errors are.

    A caller may still catch them. If uncaught, the process prints ``train.py: error: ...`` and exits with 2.

    Ranks: local.

    Example:
        >>> before = sys.excepthook
        >>> try:
        ...     with usage_errors():
        ...         raise ConfigError("precision='fp8' is not a format")
        ... except ValueError as error:
        ...     is_shown_without_traceback(error)
        True
        >>> sys.excepthook = before
    """
    try:
        yield
    except (ConfigError, LaunchError) as error:
        show_without_traceback(error)
        raise


def _end_plainly(error: BaseException) -> NoReturn:
    """Say the words of an exception, unless the first rank of this machine does, and end the process."""
    _take_error_file_back()  # with the traceback, from fit
    PROCESS.failed = error
    report, reason = PROCESS.report, None
    own = Reason.of(_own_rank(), error, is_final=True)
    is_first = os.environ.get("LOCAL_RANK", str(rank_if_known() or 0)) == "0"
    # torchrun starts each rank in a session of its own; nobody reads what others write who inherit its variables.
    launcher_reads = "TORCHELASTIC_ERROR_FILE" in os.environ and os.getsid(0) == os.getpid()
    if not is_first:
        _await_first(report, launcher_reads)
    if report is not None and not report.tell(own):
        reason = report.first_failure()
    if reason is not None:
        PROCESS.failed = RankFailedError(reason.summary())
    if is_first or reason is None:
        on_rank = "" if is_first else f" on rank {_own_rank()}"
        where = "" if PLAIN in vars(error) else f" ({own.where()})"  # what the command line says is in no line of code
        text = f"{Path(sys.argv[0]).name}: error{on_rank}: {error}{where}"
        if not (launcher_reads and _write_error_file(text, text, time.time())):
            sys.stderr.write(f"{text}\n")
    raise SystemExit(vars(error).get(PLAIN, USAGE_CODE))


def _await_first(report: FailureReport | None, launcher_reads: bool) -> None:
    """Wait a little to be ended by the launcher, or for another rank to tell: all may be about to say the same."""
    end = time.monotonic() + (FIRST_WORD_SECONDS if report is None else STORE_WAIT_SECONDS)
    if launcher_reads:  # what ends with another code than 0 it lists as a failure of its own, without a reason
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while time.monotonic() < end and (report is None or report.first_failure() is None):
        time.sleep(NAP_SECONDS)


def record_for_launcher(error: BaseException) -> None:
    """Write an exception into torchrun's error file, so that its closing summary shows the reason.

    Without torchrun nothing happens. A later failure of the same process takes the place of an earlier one. What is
    only second-hand is dated a second later, so that torchrun calls the failure behind it the root cause.

    Args:
        error: the exception, with its traceback.

    Ranks: local.

    Example:
        >>> record_for_launcher(ValueError("nothing happens without torchrun"))
    """
    if isinstance(error, RunStopped):
        words = error.words or f"Stopped by {error.cause}."
        _write_error_file(words, words, time.time())
        return
    rank, lines = os.environ.get("RANK", "?"), "".join(traceback.format_exception(error)).rstrip().splitlines()
    if rank.isdecimal() and not is_second_hand(error):
        lines += Reason.of(int(rank), error, is_final=True).summary().splitlines()  # what one sees last of all
    trace = "\n".join(f"[rank{rank}]: {line}" for line in lines)
    _write_error_file(text_and_line(error)[0], trace, time.time() + is_second_hand(error))


def _write_error_file(message: str, trace: str, timestamp: float) -> bool:
    """Write the launcher's error file; say whether there is one, and it has been written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    info = {"py_callstack": trace, "timestamp": str(int(timestamp))}
    report = {"message": {"message": message, "extraInfo": info}}
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        with replacing(Path(path)) as unfinished:
            unfinished.write_text(json.dumps(report), encoding="utf-8")
        PROCESS.file = Path(path)
        return True
    return False


def _take_error_file_back() -> None:
    """Remove what was written for the launcher, because the script has caught it and gone on."""
    PROCESS.left = None
    if PROCESS.file is not None:
        with contextlib.suppress(OSError):
            PROCESS.file.unlink(missing_ok=True)
        PROCESS.file = None


@contextlib.contextmanager
def failure_notice() -> Iterator[None]:
    """Record an exception that passes through for the launcher; let it go on, or say which rank is behind it.

    If none passes through, one that was recorded before has been caught: the record is removed. A process that a rank
    has forked records nothing.

    Raises:
        RankFailedError: instead of the loss of a connection.

    Ranks: local.

    Example:
        >>> with failure_notice():
        ...     pass
    """
    if PROCESS.report is not None and PROCESS.report.is_forked:
        yield
        return
    try:
        yield
    except SystemExit as error:
        _note_exit(error)
        raise
    except (Exception, KeyboardInterrupt) as error:
        news = _noted(error)
        if news is error:
            raise
        raise news from news.__cause__
    _take_error_file_back()


def _note_exit(error: SystemExit) -> None:
    """Note that the script ends this process with an exit code. ``sys.excepthook`` is not called for SystemExit."""
    if error.code in {None, 0}:
        if PROCESS.report is not None and PROCESS.report.world_size > 1:
            PROCESS.report.tell(_early_exit(error, PROCESS.report.rank))
        return
    record_for_launcher(error)
    if not isinstance(error, RunStopped):
        _tell(error, is_final=True)


def _early_exit(error: SystemExit, rank: int) -> Reason:
    """Describe an early exit of this rank from ``fit`` or ``evaluate``; the other ranks may be about to exit too."""
    here = POSITION.own_status(rank, 0.0, look=False)
    code = "" if error.code is None else error.code
    text = (
        f"called sys.exit({code}){' ' if here.place() else ''}{here.place()}, at "
        f"{line_of(traceback.extract_tb(error.__traceback__))}, and others wait for it: all ranks have to leave at the "
        "same place. An exception ends them all."
    )
    return Reason(rank, text, here.host, here.pid, session=here.session)


def note_end_of_child(handled: BaseException | None = None) -> None:
    """Take note of the exception that ends a process of ``multiprocessing``: it reaches no ``sys.excepthook`` there.

    Args:
        handled: an exception that may still be being handled around all of this, and is not what ends the process.

    Ranks: local; called while the process ends.

    Example:
        >>> note_end_of_child()  # this process was started by hand
    """
    error = sys.exc_info()[1]
    if multiprocessing.parent_process() is None or PROCESS.failed is not None:
        return
    if error is None and PROCESS.left is not None and sys.version_info >= LATE_EXIT_SINCE:
        words = "%s (unless the script has caught it)"
        logger.error(words, PROCESS.left.summary(), main_process_only=False)
    if error is None or error is handled:
        return
    if isinstance(error, RunStopped) or (isinstance(error, SystemExit) and error.code in {None, 0}):
        return
    if isinstance(error, SystemExit) and error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__  # as torch.multiprocessing ends a process
    news = _note_uncaught(error)
    if PROCESS.report is not None and not is_second_hand(news):
        logger.error("%s", Reason.of(PROCESS.report.rank, news, is_final=True).summary(), main_process_only=False)


def _note_uncaught(error: BaseException) -> BaseException:
    """Note an exception that ends this process; return what is behind it, as it is to be shown."""
    PROCESS.failed = news = explained(error)
    if isinstance(news, KeyboardInterrupt):
        news = KeyboardInterrupt(f"at {_path_to(news)}")
    elif isinstance(news, FolderInUseError) or (is_second_hand(news) and news.__cause__ is None):
        news.__suppress_context__, news.__traceback__ = True, None
    record_for_launcher(news)
    if not is_second_hand(news):
        _tell(news, is_final=True)
    return news


def _noted(error: BaseException) -> BaseException:
    """Note an exception that leaves ``fit`` or ``evaluate``, which the script may catch; return what is behind it."""
    news = explained(error)
    if not is_second_hand(news):
        PROCESS.left = Reason.of(_own_rank(), news, is_final=False)
        if PROCESS.report is not None:
            PROCESS.report.tell(PROCESS.left)
    elif PROCESS.left is not None and type(news) is RankFailedError:
        here = f"an exception ended fit or evaluate on rank {_own_rank()} alone: {PROCESS.left.text}"
        news, PROCESS.left = RankFailedError(f"{news}. Before that, {here}"), None
    if POSITION.progress is not None:
        vars(news)[PLACE] = POSITION.own_status(0, 0.0, look=False).place()
    record_for_launcher(news)
    return news


def _own_rank() -> int:
    return PROCESS.report.rank if PROCESS.report is not None else rank_if_known() or 0


def _tell(error: BaseException, *, is_final: bool) -> None:
    if PROCESS.report is not None:
        PROCESS.report.tell(Reason.of(PROCESS.report.rank, error, is_final=is_final))


def _path_to(error: BaseException) -> str:
    """Format a traceback on one line: Ctrl-C ends all ranks at once, and each would print a long one."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)


class UncaughtHook:
    """Takes note of the exception that ends this process, then does what was done before.

    Prints no traceback of what only tells of another rank's failure, and one line for Ctrl-C.

    Args:
        previous: the hook that prints it.

    Ranks: local.

    Example:
        >>> UncaughtHook(sys.excepthook).previous is sys.excepthook
        True
    """

    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous
        self.process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Note the exception, and print it, or the failure behind it."""
        if os.getpid() != self.process or PROCESS.failed is not None:
            self.previous(kind, error, trace)
            return
        if PROCESS.log is not None:
            PROCESS.log(error)
        if is_shown_without_traceback(error):
            _end_plainly(error)
        news = _note_uncaught(error)
        is_short = isinstance(news, (KeyboardInterrupt, FolderInUseError)) or is_second_hand(news)
        if PROCESS.report is None or is_short:
            self.previous(type(news), news, news.__traceback__)
            return
        reason = Reason.of(PROCESS.report.rank, news, is_final=True)
        logger.error("%s", reason.heading(), main_process_only=False)
        self.previous(type(news), news, news.__traceback__)
        logger.error("%s", reason.summary(), main_process_only=False)  # below the long traceback, where users look


def watch_uncaught(report: FailureReport | None = None) -> None:
    """Record the exception that ends this process: for torchrun's summary, for the other ranks, and in the log.

    Args:
        report: read by the other ranks; None without a process group.

    Ranks: local.

    State: ``sys.excepthook``; the previous hook is still called.

    Example:
        >>> before = sys.excepthook
        >>> watch_uncaught(); isinstance(sys.excepthook, UncaughtHook)
        True
        >>> sys.excepthook = before
    """
    PROCESS.report = report or PROCESS.report
    hook = sys.excepthook
    if not isinstance(hook, UncaughtHook):
        sys.excepthook = UncaughtHook(hook)
    elif report is not None:
        hook.process = os.getpid()  # a process that was forked, and is a rank itself
