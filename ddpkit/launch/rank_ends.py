"""How each forked rank has ended, and which of the ends is told where ``notebook_launch`` was
called.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.base import Reason, is_second_hand, replacing
from ddpkit.errors import RankFailedError, RunStopped

if TYPE_CHECKING:
    from collections.abc import Sequence

_KILLED = "was killed by {} (by the system, for want of memory? by a person?)"


@dataclass(frozen=True)
class RankEnd:
    """The exception that has ended a rank.

    Args:
        rank: of the process.
        time: when, in seconds since 1970.
        summary: which rank, where in the run and in the code, and why: one line.
        trace: its traceback.
        is_second_hand: whether it only tells that another rank has failed.
        cause: what has stopped the run, if it was asked to stop.
        code: exit code of the process.
        words: of a run that was stopped: where, and what it goes on from.
    """

    rank: int
    time: float
    summary: str
    trace: str
    is_second_hand: bool = False
    cause: str = ""
    code: int = 1
    words: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankEnd:
        """Describe an exception of this process."""
        reason = Reason.of(rank, error, is_final=True)
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        is_others = is_second_hand(error)
        return cls(
            rank,
            time.time(),
            str(error) if is_others else reason.in_words("failed"),
            reason.trace,
            is_others,
            error.cause if isinstance(error, RunStopped) else "",
            code,
            error.words if isinstance(error, RunStopped) else "",
        )

    def write(self, folder: Path) -> None:
        """Keep it for the process that has forked this one."""
        with replacing(_path(folder, self.rank)) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def read_ends(folder: Path, number: int) -> list[RankEnd]:
    """Return what ranks have kept, by time.

    Args:
        folder: of :meth:`RankEnd.write`.
        number: of ranks.
    """
    paths = [_path(folder, rank) for rank in range(number)]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    return sorted((RankEnd(**json.loads(text)) for text in texts), key=lambda end: end.time)


def error_of(ends: Sequence[RankEnd], codes: Sequence[int]) -> RankFailedError | RunStopped:
    r"""Make the exception that tells why the ranks have ended.

    The first rank that failed by itself is told; if none did, one that was killed; else what ranks
    know of others.

    Args:
        ends: by time.
        codes: exit codes of all ranks, as ``multiprocessing`` tells them; those that were ended
            because another one had failed have 0.

    Example:
        >>> error_of([RankEnd(1, 0.0, "rank 1 failed: ValueError: boom", "Traceback ...")], [0, 1])
        RankFailedError('rank 1 failed: ValueError: boom\n\nTraceback ...')
        >>> str(error_of([], [0, -9]))
        'rank 1 was killed by SIGKILL (by the system, for want of memory? by a person?).'
    """
    own = [end for end in ends if not (end.is_second_hand or end.cause)]
    if own:
        return RankFailedError(f"{own[0].summary}\n\n{own[0].trace}".rstrip())
    killed = [rank for rank, code in enumerate(codes) if code < 0]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name
        told = next((f" {end.summary}" for end in ends if end.is_second_hand), "")
        return RankFailedError(f"rank {killed[0]} {_KILLED.format(name)}.{told}")
    if ends and ends[0].cause:
        stopped = RunStopped(ends[0].code, ends[0].cause)
        stopped.words = ends[0].words
        return stopped
    if ends:
        return RankFailedError(ends[0].summary)
    rank = next(rank for rank, code in enumerate(codes) if code)
    return RankFailedError(
        f"rank {rank} ended with exit code {codes[rank]}, and left no reason. What it wrote last "
        "stands above."
    )
