"""Which rank failed, where in the run and in the user's code, and why."""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass

from ddpkit.base.position import POSITION
from ddpkit.base.processes import this_place
from ddpkit.base.rank_status import name_of_rank
from ddpkit.base.user_frames import line_of

LONGEST_REASON = 4000
LONGEST_TRACE = 20_000
# attribute of an exception: the line of the recipe that it is about
HOOK_LINE = "_ddpkit_hook_line"
# attribute of an exception that names the ranks that a collective has waited for in vain
WAITED = "_ddpkit_waited"
NOTE = "(in {}, an event of a part)"
IN_PART = "_ddpkit_in_part"  # attribute of an exception: the part and its event that raised it
PLACE = "_ddpkit_place"  # attribute of an exception: where in the run it has left fit or evaluate

# How torch raises in a rank what was raised in a worker of its loader.
OF_WORKER = re.compile(
    r"Caught \w+ in (?P<worker>\w+ worker process \d+)\.\nOriginal "
    r"(?P<trace>.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Reason:
    """Which rank failed first, and why.

    Attributes:
        rank: its number.
        text: type and message of its exception, or how the process ended.
        host: name of its machine.
        pid: its process.
        place: such as ``"in TRAIN of epoch 3 at step 1204"``.
        trace: its traceback; empty if another process reported the failure.
        session: in which call of ``fit`` or ``evaluate`` it was, from 1; 0: in none.
        is_final: whether its process has ended with it.
        line: of the user's code where it failed, such as ``"train.py:12 in compute_forward"``.
        output: of :func:`output_identity`: where its process writes.
        words: all of the one line, where another rank than this is the cause; else empty.

    Example:
        >>> Reason(
        ...     1,
        ...     "ValueError: boom",
        ...     "node7",
        ...     4711,
        ...     "in TRAIN of epoch 1 at step 9",
        ...     "Traceback ...",
        ... ).summary()
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
    output: str = ""
    words: str = ""

    @classmethod
    def of(
        cls,
        rank: int,
        error: BaseException,
        *,
        is_final: bool,
    ) -> Reason:
        """Describe an exception of this process."""
        here = POSITION.own_status(rank, 0.0, look=False)
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
        place = here.place() or str(vars(error).get(PLACE, ""))
        if IN_PART in vars(error):
            in_part = f"in {vars(error)[IN_PART]}"
            place = f"{in_part}, {place}" if place else in_part
        text, line = text_and_line(error)
        output = output_identity()
        words = str(error) if WAITED in vars(error) else ""
        return cls(
            rank,
            text,
            here.host,
            here.pid,
            place,
            trace,
            here.session,
            is_final,
            line,
            output,
            words,
        )

    def who(self) -> str:
        """Return ``"rank 1 (node7, pid 4711)"``."""
        return name_of_rank(self.rank, self.host, self.pid)

    def summary(self) -> str:
        """Return one line."""
        if self.words:
            return self.words
        if not self.trace:
            return f"{self.who()} {self.text}"
        return self.in_words("failed first")

    def in_words(self, how: str) -> str:
        """Return one line with other words than "failed first"."""
        return f"{self.who()} {how}{self.where() and f', {self.where()}'}: {self.text}"

    def where(self) -> str:
        """Return ``"in TRAIN of epoch 3 at step 1204, at train.py:12 in compute_forward"``, or what
        is known of it.
        """
        return ", ".join(words for words in (self.place, self.line and f"at {self.line}") if words)


def output_identity() -> str:
    """Return what is equal for processes that write their errors to one terminal, pipe or file;
    empty if unknown.
    """
    try:
        status = os.fstat(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or no file: as in a notebook
        return ""
    return "/".join(map(str, (*this_place(), status.st_dev, status.st_ino)))


def text_and_line(error: BaseException) -> tuple[str, str]:
    """Return the type and message of an exception, cut where very long, and the line of user code
    where it was raised.

    The worker's traceback is left out of an exception from a loader's worker: the rank itself
    prints it.

    Example:
        >>> text_and_line(ValueError("boom"))
        ('ValueError: boom', '')
    """
    of_worker = OF_WORKER.search(str(error))
    if of_worker is None:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        if IN_PART in vars(error):  # the place says it
            text = text.removesuffix(NOTE.format(vars(error)[IN_PART])).strip()
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
        return text, line_of(frames_of(error))
    last = of_worker["trace"].rstrip().splitlines()[-1]
    return f"{last} (in {of_worker['worker']})", line_of(frames_of(error))


def note_part(error: BaseException, event: str) -> None:
    """Note in an exception which part of a run has raised it, and in which event.

    Args:
        error: of the innermost part, if one calls another.
        event: such as ``"EarlyStopping.on_stage_end"``.

    Example:
        >>> error = ValueError("boom")
        >>> note_part(error, "Heartbeat.on_sync")
        >>> Reason.of(1, error, is_final=True).where()
        'in Heartbeat.on_sync'
    """
    if IN_PART in vars(error):
        return
    vars(error)[IN_PART] = event
    if hasattr(error, "add_note"):  # since Python 3.11; it stands below the traceback
        error.add_note(NOTE.format(event))


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the lines that lead to an exception, those of its cause last; or the one line that it
    is about.

    Example:
        >>> frames_of(ValueError("never raised"))
        []
    """
    if HOOK_LINE in vars(error):
        return [vars(error)[HOOK_LINE]]
    of_worker = OF_WORKER.search(str(error))
    if of_worker is not None:
        found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', of_worker["trace"])
        return [
            traceback.FrameSummary(file, int(line), name, lookup_line=False)
            for file, line, name in found
        ]
    causes = [failure.__traceback__ for failure in (error, error.__cause__) if failure is not None]
    return [frame for trace in causes for frame in traceback.extract_tb(trace)]
