"""What a process does when it fails: it says why, in the places that the launcher and the other
ranks read.

The exception that ends a process is noted twice, by :func:`watch_uncaught`'s hook: in the file from
which torchrun makes its closing summary, and in the report of the process group
(:mod:`ddpkit.base.failure_report`). Its traceback is printed once, by the rank that failed first; a
rank that fails after it, in the same way, is named beside it (:mod:`ddpkit.control.failure_order`).
torchrun's summary then has the reason alone.

Source: ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception`` defines
the file's format; torchrun takes the failure with the lowest timestamp, in whole seconds, for the
root cause.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpkit.base import (
    COUNTERS,
    PLACE,
    POSITION,
    PROCESS,
    FailureReport,
    Reason,
    code_of,
    counters_of,
    explained,
    is_second_hand,
    line_of,
    rank_if_known,
    replacing,
    spans,
    text_and_line,
)
from ddpkit.control.failure_order import OTHER, SAME, SAME_LINE, FailureOrder
from ddpkit.control.time_outs import explained_time_out, is_time_out
from ddpkit.errors import (
    BatchError,
    ConfigError,
    DataError,
    FolderInUseError,
    LaunchError,
    RankFailedError,
    RunStopped,
)
from ddpkit.launch import is_notebook_rank
from ddpkit.logger import get_logger, log_file_of, shown_path, without_console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

# attribute of an exception: the rank that failed before this one in the same call of fit
AFTER = "_ddpkit_after"
SAID = "_ddpkit_said"  # attribute of an exception: its line has been logged
LAUNCHER_SECONDS = 2.0  # for the launcher to end ranks that have failed as the first rank did
# attribute of an exception: print its message alone, and exit with this code
PLAIN = "_ddpkit_plain"
# usage errors, of what a hook has returned or a dataset has given
SHOWN_WITH_CODE = (BatchError, DataError)
USAGE_CODE = 2  # as argparse
IN_BATCH = re.compile(r" at step [1-9]")  # in the words for a place
FIRST_WORD_SECONDS = 2.0  # for the first rank of a machine to say what all of them are about to say
NAP_SECONDS = 0.02

logger = get_logger(__name__)


def show_without_traceback(error: BaseException, code: int = USAGE_CODE) -> None:
    """Mark an exception: if uncaught, only its message is printed, once, without a traceback.

    Args:
        error: it is not raised here.
        code: the exit code of the process.

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
    """Say whether an exception is a usage error, or marked by :func:`show_without_traceback`, in a
    script.

    A :class:`BatchError` or a :class:`DataError` is one wherever it comes from; its line of the
    recipe is shown. A :class:`ConfigError` of a batch has its traceback: it comes from the recipe's
    code, perhaps on one rank alone.

    Example:
        >>> is_shown_without_traceback(ValueError("a bug"))
        False
    """
    is_config = isinstance(error, ConfigError) and not _is_of_batch(error)
    is_plain = is_config or isinstance(error, SHOWN_WITH_CODE) or PLAIN in vars(error)
    return is_plain and not hasattr(sys, "ps1") and not sys.flags.interactive


def _is_of_batch(error: BaseException) -> bool:
    return IN_BATCH.search(vars(error).get(PLACE, "")) is not None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Report errors about options and launcher variables as command-line errors: one sentence, exit
    code 2.

    A caller may still catch them. If uncaught, the process prints ``train.py: error: ...``.

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
    """Print the message, unless another rank prints it; then exit.

    That is the first rank of this machine; for an error of a batch, which may be of one rank alone,
    the first that failed.
    """
    PROCESS.failed = error
    report = PROCESS.report
    reason = None
    own = Reason.of(
        rank_if_known() or 0 if report is None else report.rank,
        error,
        is_final=True,
    )
    is_first = os.environ.get("LOCAL_RANK", str(rank_if_known() or 0)) == "0"
    is_of_batch = report is not None and _is_of_batch(error)
    speaks = AFTER not in vars(error) if is_of_batch else is_first
    launcher_reads = _launcher_reads()
    if not speaks:
        _await_first(report, launcher_reads)
    if report is not None and not report.tell(own) and not (is_of_batch and speaks):
        reason = report.first_failure()
    if reason is not None:
        PROCESS.failed = RankFailedError(reason.summary())
    is_told_beside = is_of_batch and reason is not None and reason.host == own.host
    if reason is None or (is_first and not is_told_beside):
        on_rank = "" if is_first else f" on rank {own.rank}"
        text = f"{Path(sys.argv[0]).name}: error{on_rank}: {_sentence(error, own)}"
        if not (launcher_reads and _write_error_file(text, text, time.time())):
            sys.stderr.write(f"{text}\n")
    raise SystemExit(vars(error).get(PLAIN, USAGE_CODE))


def _sentence(error: BaseException, own: Reason) -> str:
    """Return what is wrong and where; below that the line of the recipe, if an error of data or of
    a batch has one.
    """
    if PLAIN in vars(error):  # what the command line says is in no line of code
        return str(error)
    if not isinstance(error, SHOWN_WITH_CODE):
        return f"{error} ({own.where()})"
    # a worker of a loader gives its whole traceback as a message
    message = own.text.partition(": ")[2] or str(error)
    code = code_of(error)
    return f"{message} ({own.where()})" + (code and f"\n    {code}")


def _launcher_reads() -> bool:
    """Say whether torchrun reads this process's error file.

    torchrun starts each rank in a session of its own; a child process inherits its
    variables, but nobody reads the file that it would write.
    """
    return "TORCHELASTIC_ERROR_FILE" in os.environ and os.getsid(0) == os.getpid()


def _await_first(report: FailureReport | None, launcher_reads: bool) -> None:
    """Wait briefly for SIGTERM or another rank's report, so that the same error is not printed by
    every rank.
    """
    end = time.monotonic() + FIRST_WORD_SECONDS
    # what ends with another code than 0 it lists as a failure of its own, without a reason
    if launcher_reads:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while time.monotonic() < end and (report is None or report.first_failure() is None):
        time.sleep(NAP_SECONDS)


def record_for_launcher(error: BaseException) -> None:
    """Write an exception into torchrun's error file, so that its closing summary shows the reason.

    Without torchrun nothing happens. A later failure of the same process takes the place of an
    earlier one. What is only second-hand is dated a second later, so that torchrun calls the
    failure behind it the root cause.

    Args:
        error: the exception that ends this process, with its traceback.
    """
    if isinstance(error, RunStopped):
        words = error.words or f"Stopped by {error.cause}."
        _write_error_file(words, words, time.time())
        return
    rank = os.environ.get("RANK", "?")
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if rank.isdecimal() and not is_second_hand(error):
        # what one sees last of all
        lines += Reason.of(int(rank), error, is_final=True).summary().splitlines()
    trace = "\n".join(f"[rank{rank}]: {line}" for line in lines)
    _write_error_file(
        text_and_line(error)[0],
        trace,
        time.time() + is_second_hand(error),
    )


def _write_error_file(
    message: str,
    trace: str,
    timestamp: float,
    **more: str,
) -> bool:
    """Write the launcher's error file; say whether there is one, and it has been written.

    Args:
        message: type and message of the exception.
        trace: what torchrun shows in its summary.
        timestamp: seconds; it takes the lowest for the root cause.
        **more: what it leaves alone.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    info = {
        "py_callstack": trace,
        "timestamp": str(int(timestamp)),
        **more,
    }
    report = {"message": {"message": message, "extraInfo": info}}
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        with replacing(Path(path)) as unfinished:
            unfinished.write_text(json.dumps(report), encoding="utf-8")
        return True
    return False


@contextlib.contextmanager
def failure_notice() -> Iterator[None]:
    """Tell the other ranks of an exception that passes through; let it go on, or say which rank is
    behind it.

    The script may catch it. A process that a rank has forked tells nothing.

    Raises:
        RankFailedError: instead of the loss of a connection, or of a collective's time-out.

    State: ``sys.excepthook``, if the exception is a usage error, see :func:`watch_uncaught`.
    """
    if PROCESS.report is not None and PROCESS.report.is_forked:
        yield
        return
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        news = _explained(error)
        PROCESS.is_stopped = isinstance(error, RunStopped)
        PROCESS.left = not PROCESS.is_stopped
        # sys.excepthook is not called for it
        ends = isinstance(error, SystemExit) and error.code not in {None, 0}
        if ends:
            record_for_launcher(error)
        if PROCESS.left:
            _tell(news, is_final=ends)
        if POSITION.progress is not None:
            vars(news)[PLACE] = POSITION.own_status(0, 0.0, look=False).place()
            vars(news)[COUNTERS] = counters_of(POSITION.progress)
        if is_shown_without_traceback(news):
            watch_uncaught()
        if news is error:
            raise
        raise news from news.__cause__
    PROCESS.left = PROCESS.is_stopped = False


def _explained(error: BaseException) -> BaseException:
    """Return what is behind an exception, where another rank is."""
    if PROCESS.report is not None and is_time_out(error):
        return explained_time_out(error, PROCESS.report)
    return explained(error)


def _tell(error: BaseException, *, is_final: bool) -> None:
    if PROCESS.report is None:
        return
    in_child = multiprocessing.parent_process() is not None and not is_notebook_rank()
    if is_second_hand(error):
        if in_child and not is_final:
            _say_once(error, str(error))
        return
    reason = Reason.of(PROCESS.report.rank, error, is_final=is_final)
    first = None if PROCESS.report.tell(reason) else PROCESS.report.first_failure()
    if first is not None:
        vars(error)[AFTER] = first.rank
    # the end of such a process, or thread, reaches no excepthook, so that it is said here
    if in_child or threading.current_thread() is not threading.main_thread():
        words = (
            reason.summary() if first is None else reason.in_words(f"failed after {first.who()}")
        )
        _say_once(error, words)


def _say_once(error: BaseException, words: str) -> None:
    """Log the line of an exception; it may pass through several notices."""
    if SAID not in vars(error):
        vars(error)[SAID] = True
        logger.error("%s", words, main_process_only=False)


def _behind(error: BaseException) -> BaseException:
    """Return the cause of an exception that ends this process, as it is to be shown."""
    PROCESS.failed = news = _explained(error)
    # Ctrl-C ends all ranks at once, and each would print a long traceback
    if isinstance(news, KeyboardInterrupt):
        news = KeyboardInterrupt(f"at {line_of(traceback.extract_tb(news.__traceback__))}")
    elif isinstance(news, FolderInUseError) or (is_second_hand(news) and news.__cause__ is None):
        news.__suppress_context__ = True
        news.__traceback__ = None
    return news


def _log(error: BaseException, *, is_shown: bool = True) -> None:
    """Write an exception into the experiment's log; say on the console that it comes, if it
    does.
    """
    if PROCESS.log is not None and is_shown:
        PROCESS.log(error)
    elif PROCESS.log is not None:
        with without_console():
            PROCESS.log(error)


def _record_printed(
    error: BaseException,
    words: str,
    *,
    is_first: bool = True,
    is_known: bool = False,
) -> None:
    """Write the launcher's error file for an exception whose traceback is read elsewhere.

    torchrun's summary has the reason alone, unless nobody sees what its processes write: it has put
    that into files.

    Args:
        error: the exception.
        words: its reason.
        is_first: whether no other rank failed before.
        is_known: whether the rank that did has the same traceback.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    whole = "".join(traceback.format_exception(error)).rstrip()
    is_hidden = Path(path).with_name("stderr.log").exists()
    lines = [*whole.splitlines(), words] if is_hidden and not is_known else [words]
    trace = "\n".join(f"[rank{os.environ.get('RANK', '?')}]: {line}" for line in lines)
    _write_error_file(
        text_and_line(error)[0],
        trace,
        time.time() + (not is_first),
        traceback=whole,
    )


def _show(error: BaseException, previous: Callable[..., object]) -> None:
    """Print an exception that ends this process, and its reason last; a line where the first rank
    shows the same.
    """
    report = PROCESS.report
    own = Reason.of(
        rank_if_known() or 0 if report is None else report.rank,
        error,
        is_final=True,
    )
    if report is None:
        _log(error)
        _record_printed(error, own.in_words("failed"))
        previous(type(error), error, error.__traceback__)
        return
    order = FailureOrder(report, own)
    order.take_turn(vars(error).get(AFTER))
    report.await_silence()
    if order.first is None:
        _show_as_first(order, error, previous)
    else:
        _show_after(order, order.first, error, previous)


def _show_as_first(
    order: FailureOrder,
    error: BaseException,
    previous: Callable[..., object],
) -> None:
    _log(error)
    _record_printed(error, order.summary())
    previous(type(error), error, error.__traceback__)
    ranks = order.await_others()
    if ranks:
        logger.error(
            "The same on rank%s %s.",
            "s" if len(ranks) > 1 else "",
            spans(ranks),
            main_process_only=False,
        )
    logger.error("%s", order.summary(), main_process_only=False)  # below the long traceback
    order.note_shown(ranks)


_LIKENESS = {SAME: "the same traceback", SAME_LINE: "the same traceback and another message"}


def _show_after(
    order: FailureOrder,
    first: Reason,
    error: BaseException,
    previous: Callable[..., object],
) -> None:
    _log(error, is_shown=False)
    likeness = order.compared_with_first()
    place = _written_traceback()
    words = _LIKENESS.get(likeness, f"another traceback ({place or 'above'})")
    line = order.own.in_words(f"failed after {first.who()}, with {words}")
    _record_printed(error, line, is_first=False, is_known=likeness != OTHER)
    is_silent = likeness == SAME and order.is_read_beside_first()
    if is_silent and order.come_after(is_silent=True):
        _leave_to_launcher()
        return
    if likeness == OTHER and not place:
        previous(type(error), error, error.__traceback__)
    logger.error("%s", line, main_process_only=False)
    if not is_silent:
        order.come_after(is_silent=False)


def _written_traceback() -> str:
    """Return the file that has, or gets, the traceback of this rank; empty without any."""
    path = log_file_of() if PROCESS.log is not None else ""
    return shown_path(path) if path else os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def _leave_to_launcher() -> None:
    """Wait briefly for torchrun to end this process: what ends by itself it lists as one more
    failure.
    """
    if not _launcher_reads():
        return
    asked: list[int] = []
    signal.signal(
        signal.SIGTERM,
        lambda number, _: asked.append(number),
    )
    end = time.monotonic() + LAUNCHER_SECONDS
    while time.monotonic() < end:
        if asked:  # what then ends with another code than 0 it lists, too
            raise SystemExit(0)
        time.sleep(NAP_SECONDS)


class UncaughtHook:
    """Takes note of the exception that ends this process, then does what was done before.

    Prints no traceback of what only tells of another rank's failure, and one line for Ctrl-C.

    Args:
        previous: the hook that prints it.
    """

    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous
        self.process = os.getpid()

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Note the exception, and print it, or the failure behind it."""
        if os.getpid() != self.process or PROCESS.failed is not None:
            self.previous(kind, error, trace)
            return
        if is_shown_without_traceback(error):
            _log(error)
            _end_plainly(error)
        news = _behind(error)
        if isinstance(news, (KeyboardInterrupt, FolderInUseError)) or is_second_hand(news):
            _log(error)
            record_for_launcher(news)
            _tell(news, is_final=True)
            # torch writes at length that a store is gone, and the reason comes last
            if PROCESS.report is not None:
                PROCESS.report.await_silence()
            self.previous(type(news), news, news.__traceback__)
        else:
            _show(news, self.previous)


def watch_uncaught(report: FailureReport | None = None) -> None:
    """Record the exception that ends this process: for torchrun's summary, for the other ranks, and
    in the log.

    Args:
        report: read by the other ranks; None without a process group.

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
