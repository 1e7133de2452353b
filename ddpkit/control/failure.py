"""What a process does when it fails: it says why, where the launcher and the other ranks will look.

A rank that fails takes the others with it: their next collective ends in "Connection closed by peer", which says
nothing. So the exception that ends a process is noted twice, by :func:`watch_uncaught`'s hook: in the file from which
torchrun makes its closing summary, and in the process group's store, where the others look it up when they lose the
connection. What they then raise is a :class:`~ddpkit.errors.RankFailedError` that names the rank and the reason.

Source: the file's format is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception``;
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpkit.base.rank import rank_if_known
from ddpkit.control.rank_status import POSITION, line_of
from ddpkit.errors import ConfigError, FolderInUseError, LaunchError, RankFailedError, RunStopped
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from torch.distributed import Store

LEFT_KEY = "ddpkit/left"
NAP_SECONDS = 0.02
LONGEST_REASON = 4000
LONGEST_TRACE = 20_000
PLACE = "_ddpkit_place"  # attribute of an exception: where in the run it has left fit or evaluate
PLAIN = "_ddpkit_plain"  # attribute of an exception: it is told in a sentence, and the process exits with this code
USAGE_CODE = 2  # that of argparse
FIRST_WORD_SECONDS = 5.0  # for the first rank of a machine to say what all of them are about to say
TURN_SECONDS = 0.5  # and for each of the next
STORE_WAIT_SECONDS = 2.0  # the same where it can be asked for; the watch gives a failed process three

# How torch raises in a rank what was raised in a worker of its loader.
OF_WORKER = re.compile(r"Caught \w+ in (?P<worker>\w+ worker process \d+)\.\nOriginal (?P<trace>.*)", re.DOTALL)

# How gloo, NCCL and torch's store say that the other side has gone.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "No route to host",
    "is unreachable",
    "Connection was likely closed",
    "Broken pipe",
    "Socket closed",
    "remote process exiting",
    "failed to recv",
)


@dataclass(frozen=True)
class Reason:
    """Which rank failed first, and why.

    Attributes:
        rank: its number.
        text: type and message of what it raised, or what became of it.
        host: name of its machine.
        pid: its process.
        place: such as ``"in TRAIN of epoch 3 at step 1204"``.
        trace: its traceback; empty where it could not tell itself.
        session: in which call of ``fit`` or ``evaluate`` it was, from 1; 0: in none.
        is_final: whether its process has ended with it.
        line: of the user's code that it has left, such as ``"train.py:12 in compute_forward"``.

    Ranks: local.

    Example:
        >>> Reason(1, "ValueError: boom", "node7", 4711, "in TRAIN of epoch 1 at step 9", "Traceback ...").summary()
        'rank 1 (node7, pid 4711) failed first, in TRAIN of epoch 1 at step 9: ValueError: boom'
    """

    rank: int
    text: str
    host: str = ""
    pid: int = 0
    place: str = ""
    trace: str = ""
    session: int = 0
    is_final: bool = False
    line: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_final: bool) -> Reason:
        """Describe an exception of this process."""
        here = POSITION.whereabouts(rank, 0.0, look=False)
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        place = here.place() or _place_of(error)
        text, line = _text_and_line(error)
        return cls(rank, text, here.host, here.pid, place, trace, here.session, is_final, line)

    def who(self) -> str:
        """Return ``"rank 1 (node7, pid 4711)"``."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.host else f"rank {self.rank}"

    def heading(self) -> str:
        """Return a line to stand above the traceback."""
        return f"{self.who()} failed{' ' if self.place else ''}{self.place}:"

    def summary(self) -> str:
        """Return one line."""
        if not self.trace:
            return f"{self.who()} {self.text}"
        where = "".join(f", {words}" for words in (self.place, self.line and f"at {self.line}") if words)
        return f"{self.who()} failed first{where}: {self.text}"


class LastWords:
    """What the ranks of a run tell each other when they end; kept in the store of the process group.

    Args:
        store: of the process group.
        rank: this process.
        world_size: number of processes.

    Attributes:
        store_is_lost: whether the store has gone with the process that held it. It is not asked again: torch logs each
            attempt to reach it at length.

    Ranks: local; only :meth:`await_goodbyes` waits for others.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> LastWords(store, rank=1, world_size=2).tell_failure(ValueError("boom"))
        >>> LastWords(store, rank=0, world_size=2).first_failure()
        Reason(rank=1, text='ValueError: boom', ...)
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.store_is_lost = False

    def tell_failure(self, error: BaseException, *, is_final: bool = True) -> None:
        """Note that this rank has failed, unless another one has before it.

        Args:
            error: what it has raised.
            is_final: whether that ends its process; otherwise the script may catch it, and it counts for those only
                that are in the same call of ``fit`` or ``evaluate``.
        """
        self.tell_reason(Reason.of(self.rank, error, is_final=is_final))

    def tell_reason(self, reason: Reason) -> bool:
        """Note which rank has failed, unless another one has before it; say whether it was noted."""
        key = _reason_key(None if reason.is_final else reason.session)
        if self.store_is_lost:
            return False
        with self._asking():
            if self.store.add(f"{key}/count", 1) == 1:
                self.store.set(key, json.dumps(asdict(reason)))
                return True
        return False

    def tell_gone(self, reason: Reason) -> None:
        """Note that a rank has disappeared: as the failure, unless one came before it, and for who waits for it."""
        self.tell_reason(reason)
        self.note_gone(reason.rank)

    def note_gone(self, rank: int) -> None:
        """Note that nothing more will come from a rank that can say no goodbye itself."""
        if self.store_is_lost:
            return
        with self._asking():
            if not self.has_left(rank) and self.store.add(f"{_left_key(rank)}/gone", 1) == 1:
                self.store.set(_left_key(rank), "1")
                self.store.add(LEFT_KEY, 1)

    def first_failure(self) -> Reason | None:
        """Return what another rank has noted, in this call of ``fit`` or ``evaluate`` or for good; or None."""
        if self.store_is_lost:
            return None
        with self._asking():
            for session in (None, POSITION.session):
                key = _reason_key(session)
                if session != 0 and self.store.check([key]):  # 0: outside of any, where a failure counts only for good
                    reason = Reason(**json.loads(self.store.get(key)))
                    if reason.rank != self.rank:
                        return reason
        return None

    def claim_telling(self, machine: str) -> bool:
        """Say whether this rank is the first of a machine to ask: it shall tell the reason there."""
        try:
            return bool(self.store.add(f"ddpkit/told/{machine}", 1) == 1)
        except RuntimeError:
            self.store_is_lost = True
            return True

    def note_trouble(self, *, failed: bool) -> None:
        """Note that fit or evaluate has failed on this rank, or that it has worked again since."""
        if self.store_is_lost:
            return
        with self._asking():
            if failed:
                self.store.set(_trouble_key(self.rank), "1")
            else:
                self.store.delete_key(_trouble_key(self.rank))

    def is_alone_in_trouble(self, other: int) -> bool:
        """Say whether fit or evaluate has failed on this rank and not on another."""
        return self.store.check([_trouble_key(self.rank)]) and not self.store.check([_trouble_key(other)])

    def say_goodbye(self) -> None:
        """Tell ranks that wait for this one that nothing more will come from it."""
        if self.store_is_lost:
            return
        with self._asking():
            self.store.set(_left_key(self.rank), "1")
            self.store.add(LEFT_KEY, 1)

    def await_goodbyes(self, seconds: float) -> None:
        """Wait, for so long at most, until every rank has said goodbye."""
        end = time.monotonic() + seconds
        with self._asking():
            while time.monotonic() < end and self.store.add(LEFT_KEY, 0) < self.world_size:
                time.sleep(NAP_SECONDS)

    def has_left(self, rank: int) -> bool:
        """Say whether a rank has said goodbye."""
        return bool(self.store.check([_left_key(rank)]))

    def others_that_left(self) -> list[int]:
        """Return the other ranks that have said goodbye."""
        left: list[int] = []
        if self.store_is_lost:
            return left
        with self._asking():
            left += [rank for rank in range(self.world_size) if rank != self.rank and self.has_left(rank)]
        return left

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.store_is_lost = True


def _reason_key(session: int | None) -> str:
    return f"ddpkit/failure/{'final' if session is None else session}"


def _left_key(rank: int) -> str:
    return f"{LEFT_KEY}/{rank}"


def _trouble_key(rank: int) -> str:
    return f"ddpkit/trouble/{rank}"


logger = get_logger(__name__)


class _Here:
    """What this module knows about its own process."""

    last_words: LastWords | None = None
    find_reason: Callable[[], Reason | None] | None = None  # may wait a little
    failed = False
    second_hand = False
    culprit: Reason | None = None  # if so, as far as it is known
    in_trouble = False
    process = 0  # the rank's own, whose group this is; one that it forks inherits all of this, and must not use it
    report: Path | None = None  # what was written for the launcher


def short_text(error: BaseException) -> str:
    """Return the type and the message of an exception, as Python would print them, cut where it gets very long.

    Ranks: local.

    Example:
        >>> short_text(ValueError("boom"))
        'ValueError: boom'
    """
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def _text_and_line(error: BaseException) -> tuple[str, str]:
    """Return what was raised, without the traceback of a loader's worker, and the line of the user's that it has left.

    The whole is printed by the rank itself; what others say of it shall not be as long.
    """
    of_worker = OF_WORKER.search(str(error))
    if of_worker is None:
        return short_text(error), line_of(traceback.extract_tb(error.__traceback__))
    last = of_worker["trace"].rstrip().splitlines()[-1]
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', of_worker["trace"])
    frames = [traceback.FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in found]
    return f"{last} (in {of_worker['worker']})", line_of(frames)


def has_failed() -> bool:
    """Say whether an exception that nobody caught is ending this process.

    Ranks: local.

    Example:
        >>> has_failed()
        False
    """
    return _Here.failed


def failed_second_hand() -> bool:
    """Say whether what ends this process is the failure of another rank.

    Ranks: local.

    Example:
        >>> failed_second_hand()
        False
    """
    return _Here.second_hand


def culprit() -> Reason | None:
    """Return which other rank's failure this process has met with, if it has and knows.

    Ranks: local; may ask the process group's store.

    Example:
        >>> culprit() is None
        True
    """
    if _Here.culprit is None and _Here.last_words is not None:
        return _Here.last_words.first_failure()
    return _Here.culprit


def is_second_hand(error: BaseException) -> bool:
    """Say whether an exception only tells that another rank has failed.

    Ranks: local.

    Example:
        >>> is_second_hand(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:9"))
        True
        >>> is_second_hand(RuntimeError("shapes do not fit"))
        False
    """
    return isinstance(error, RankFailedError) or _is_lost_connection(error)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, RankFailedError) or not isinstance(error, (RuntimeError, ConnectionError)):
        return False
    text = str(error)
    return any(words in text for words in LOST_CONNECTION)


def explained(error: BaseException) -> BaseException:
    """Turn the loss of a connection into the failure of the rank that was lost; leave all else as it is.

    Args:
        error: what this rank raised.

    Returns:
        A :class:`~ddpkit.errors.RankFailedError`, or ``error`` itself. Only where nobody knows the reason is ``error``
        the cause of what is returned; otherwise its traceback leads nowhere.

    Ranks: local; asks the process group's store.

    Example:
        >>> explained(ValueError("own fault"))
        ValueError('own fault')
    """
    if not _is_lost_connection(error):
        return error
    words = _Here.last_words
    reason = None if words is None else words.first_failure()
    ended = [] if words is None or reason is not None else words.others_that_left()
    if reason is None and not ended and _Here.find_reason is not None:
        reason = _Here.find_reason()
    if reason is not None:
        _Here.culprit = reason
        return RankFailedError(reason.summary())
    if ended:
        return RankFailedError(
            f"rank {', '.join(map(str, ended))} came to the end of its script or function, while this one still waits "
            "for it: they took different paths. Do all ranks run the same number of epochs and of collective calls?"
        )
    news = RankFailedError(
        "the connection to another rank was lost, and no rank has left a reason: a process has ended early, or was "
        "killed (out of memory? a signal?). Look at the output and the exit codes of the other processes."
    )
    news.__cause__ = error
    return news


def tell_plainly(error: BaseException, code: int = USAGE_CODE) -> None:
    """Have an exception, if nobody catches it, told in its own words alone: once, and without a traceback.

    Args:
        error: it is not raised here.
        code: what the process then exits with.

    Ranks: local.

    State: ``sys.excepthook``, see :func:`watch_uncaught`.

    Example:
        >>> before = sys.excepthook
        >>> error = ConfigError("precision='fp8' is no format")
        >>> tell_plainly(error)
        >>> told_plainly(error)
        True
        >>> sys.excepthook = before
    """
    vars(error)[PLAIN] = code
    watch_uncaught()


def told_plainly(error: BaseException) -> bool:
    """Say whether :func:`tell_plainly` was called for an exception, and this process is a script's.

    Ranks: local.

    Example:
        >>> told_plainly(ValueError("a bug"))
        False
    """
    return PLAIN in vars(error) and not hasattr(sys, "ps1") and not sys.flags.interactive


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Have what is raised over options and the launcher's variables told as a command line's errors are.

    A caller may still catch them. If nobody does, the process says ``train.py: error: ...`` and exits with 2.

    Ranks: local.

    Example:
        >>> before = sys.excepthook
        >>> try:
        ...     with usage_errors():
        ...         raise ConfigError("precision='fp8' is no format")
        ... except ValueError as error:
        ...     told_plainly(error)
        True
        >>> sys.excepthook = before
    """
    try:
        yield
    except (ConfigError, LaunchError) as error:
        tell_plainly(error)
        raise


def _end_plainly(error: BaseException) -> NoReturn:
    """Say the words of an exception, unless another rank does, and end the process."""
    _Here.failed = True
    words, is_first, launcher_tells = _Here.last_words, _is_first_of_machine(), _launcher_tells()
    if not is_first:
        _await_first(launcher_tells)
    if words is not None and not words.tell_reason(Reason.of(words.rank, error, is_final=True)):
        _Here.culprit = words.first_failure()
        _Here.second_hand = _Here.culprit is not None
    if not _Here.second_hand or (is_first and launcher_tells):
        on_rank = "" if is_first else f" on rank {rank_if_known()}"
        text = f"{Path(sys.argv[0]).name}: error{on_rank}: {error}"
        if not (launcher_tells and _report(text, text, time.time(), plain=True)):
            sys.stderr.write(f"{text}\n")
    raise SystemExit(vars(error)[PLAIN])


def _is_first_of_machine() -> bool:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher of this machine ends the other ranks
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return not rank_if_known()


def _await_first(launcher_tells: bool) -> None:
    """Wait a little to be ended by the launcher, or for another rank to tell: all may be about to say the same."""
    words, local_rank = _Here.last_words, os.environ.get("LOCAL_RANK", "0")
    turn = TURN_SECONDS * (int(local_rank) if local_rank.isdecimal() else 0)
    end = time.monotonic() + (STORE_WAIT_SECONDS if words is not None else FIRST_WORD_SECONDS + turn)
    if launcher_tells:  # what ends with another code than 0 it lists as a failure of its own, without a reason
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while time.monotonic() < end and (words is None or words.first_failure() is None):
        time.sleep(NAP_SECONDS)


def _launcher_tells() -> bool:
    """Say whether this process's parent shows what is in its error file: one who inherits its name does not."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    try:
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"TORCHELASTIC_ERROR_FILE={path}".encode() not in inherited


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
        _report(words, words, time.time(), plain=True)
        return
    rank, lines = os.environ.get("RANK", "?"), "".join(traceback.format_exception(error)).rstrip().splitlines()
    if rank.isdecimal() and not is_second_hand(error):
        lines += Reason.of(int(rank), error, is_final=True).summary().splitlines()  # what one sees last of all
    trace = "\n".join(f"[rank{rank}]: {line}" for line in lines)
    _report(_text_and_line(error)[0], trace, time.time() + is_second_hand(error))


def _report(message: str, trace: str, timestamp: float, *, plain: bool = False) -> bool:
    """Write the launcher's error file; say whether there is one, and it has been written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    info = {"py_callstack": trace, "timestamp": str(int(timestamp)), "plain": plain}
    report = {"message": {"message": message, "extraInfo": info}}
    temporary = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        temporary.write_text(json.dumps(report), encoding="utf-8")
        temporary.replace(path)
        _Here.report = Path(path)
        return True
    return False


def _take_report_back() -> None:
    """Remove what was written for the launcher, because the script has caught it and gone on."""
    if _Here.report is not None:
        with contextlib.suppress(OSError):
            _Here.report.unlink(missing_ok=True)
        _Here.report = None


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
    try:
        yield
    except SystemExit as error:
        if not _is_forked():
            _note_exit(error)
        raise
    except (Exception, KeyboardInterrupt) as error:
        news = error if _is_forked() else _noted(error)
        if news is error:
            raise
        raise news from news.__cause__
    if not _is_forked():
        _note_trouble(failed=False)
        _take_report_back()


def _note_exit(error: SystemExit) -> None:
    """Note that the script ends this process with an exit code, of which Python tells no hook."""
    if error.code in {None, 0}:
        _tell_reason(_way_out(error))
        return
    record_for_launcher(error)
    if not isinstance(error, RunStopped):
        _note_trouble(failed=True)
        _tell(error, is_final=True)


def _way_out(error: SystemExit) -> Reason:
    """Describe that this rank leaves ``fit`` or ``evaluate`` as if it had come to its end; all may be about to."""
    here = POSITION.whereabouts(0, 0.0, look=False)
    place = f" {here.place()}" if here.place() else ""
    code = "" if error.code is None else error.code
    text = (
        f"called sys.exit({code}){place}, at {line_of(traceback.extract_tb(error.__traceback__))}, and others wait for "
        "it: all ranks have to leave at the same place. An exception ends them all."
    )
    rank = 0 if _Here.last_words is None else _Here.last_words.rank
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
    if multiprocessing.parent_process() is None or error is None or error is handled or _Here.failed:
        return
    if isinstance(error, RunStopped) or (isinstance(error, SystemExit) and error.code in {None, 0}):
        return
    if isinstance(error, SystemExit) and error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__  # as torch.multiprocessing ends a process
    news = _note_uncaught(error)
    if _Here.last_words is not None and not _Here.second_hand:
        logger.error("%s", Reason.of(_Here.last_words.rank, news, is_final=True).summary(), main_process_only=False)


def _note_uncaught(error: BaseException) -> BaseException:
    """Note an exception that ends this process; return what is behind it, as it is to be shown."""
    _Here.failed = True
    news = explained(error)
    _Here.second_hand = is_second_hand(news)
    if isinstance(news, KeyboardInterrupt):
        news = KeyboardInterrupt(f"at {_path_to(news)}")
    elif isinstance(news, FolderInUseError) or (_Here.second_hand and news.__cause__ is None):
        news.__suppress_context__, news.__traceback__ = True, None
    record_for_launcher(news)
    if not _Here.second_hand:
        _tell(news, is_final=True)
    return news


def _noted(error: BaseException) -> BaseException:
    """Note an exception that leaves ``fit`` or ``evaluate``, which the script may catch; return what is behind it."""
    news = explained(error)
    if POSITION.progress is not None:
        vars(news)[PLACE] = POSITION.whereabouts(0, 0.0, look=False).place()
    if not is_second_hand(news):
        _tell(news, is_final=False)
    record_for_launcher(news)
    _note_trouble(failed=True)
    return news


def _is_forked() -> bool:
    return _Here.process not in {0, os.getpid()}


def _place_of(error: BaseException) -> str:
    """Return where in the run an exception has left ``fit`` or ``evaluate``, or nothing."""
    return str(vars(error).get(PLACE, ""))


def _tell(error: BaseException, *, is_final: bool) -> None:
    if _Here.last_words is not None:
        _Here.last_words.tell_failure(error, is_final=is_final)


def _tell_reason(reason: Reason) -> None:
    if _Here.last_words is not None and _Here.last_words.world_size > 1:
        _Here.last_words.tell_reason(reason)


def _note_trouble(*, failed: bool) -> None:
    if _Here.last_words is not None and failed != _Here.in_trouble:
        _Here.in_trouble = failed
        _Here.last_words.note_trouble(failed=failed)


def _path_to(error: BaseException) -> str:
    """Write a traceback on one line: Ctrl-C ends all ranks at once, and nobody wants to read all of theirs."""
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
        if os.getpid() != self.process or _Here.failed:
            self.previous(kind, error, trace)
            return
        if told_plainly(error):
            _end_plainly(error)
        news = _note_uncaught(error)
        is_short = isinstance(news, (KeyboardInterrupt, FolderInUseError))
        if _Here.last_words is None or _Here.second_hand or is_short:
            self.previous(type(news), news, news.__traceback__)
            return
        reason = Reason.of(_Here.last_words.rank, news, is_final=True)
        logger.error("%s", reason.heading(), main_process_only=False)
        self.previous(type(news), news, news.__traceback__)
        logger.error("%s", reason.summary(), main_process_only=False)  # nobody looks for it above a long traceback


def set_reason_finder(find: Callable[[], Reason | None] | None) -> None:
    """Say what shall be asked for the rank behind a lost connection, if none has told of itself.

    Args:
        find: may wait for a few seconds; None: nothing.

    Ranks: local.

    Example:
        >>> set_reason_finder(None)
    """
    _Here.find_reason = find


def forget_words(last_words: LastWords) -> None:
    """Leave a process group behind: nobody of it is told, or asked, of a failure any more.

    Args:
        last_words: what the ranks of that group tell each other; nothing happens if it is not in use.

    Ranks: local.

    Example:
        >>> from torch.distributed import HashStore
        >>> forget_words(LastWords(HashStore(), rank=0, world_size=1))
    """
    if _Here.last_words is last_words:
        _Here.last_words, _Here.find_reason, _Here.culprit, _Here.in_trouble = None, None, None, False


def watch_uncaught(last_words: LastWords | None = None) -> None:
    """Take note of the exception that ends this process: for torchrun's summary, and for the other ranks.

    Args:
        last_words: where these look; None as long as there is no process group.

    Ranks: local.

    State: ``sys.excepthook``; what it was before is still called.

    Example:
        >>> before = sys.excepthook
        >>> watch_uncaught(); isinstance(sys.excepthook, UncaughtHook)
        True
        >>> sys.excepthook = before
    """
    if last_words is not None:
        if last_words is not _Here.last_words:
            _Here.in_trouble = False  # which nobody has been told in this group
        _Here.last_words, _Here.process = last_words, os.getpid()
    hook = sys.excepthook
    while not isinstance(hook, UncaughtHook) and hasattr(hook, "previous"):
        hook = hook.previous
    if not isinstance(hook, UncaughtHook):
        sys.excepthook = UncaughtHook(sys.excepthook)
    elif last_words is not None:
        hook.process = os.getpid()  # a process that was forked, and is a rank itself
