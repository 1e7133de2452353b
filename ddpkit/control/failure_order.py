"""Which of the ranks that fail together is the first, and which of the others fail in the same way.

An exception that ends one rank often ends all: the same wrong line runs on each. Its traceback is
to be read once. So the ranks agree over the store which of them is first. That rank prints its
traceback, and names those with the same.

Nothing is lost by that. A failure that differs from the first is told by its own rank. So is an
equal one, if that rank writes to another terminal or file than the first, or comes too late to be
named.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

from ddpkit.base import FailureReport, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

TURN_SECONDS = 0.5  # for the rank that failed first in fit to come to its end first, too
KNOWN_SECONDS = 0.5  # for the first failure to be written down, once its place is taken
OTHERS_SECONDS = 0.7  # for other ranks to come with the same failure
SHOWN_SECONDS = 1.2  # for the first to have told of this rank
NAP_SECONDS = 0.02

SAME = "same"
SAME_LINE = "same line"
OTHER = "other"

_FRAME = re.compile(r'File "[^"]+", line \d+, in \S+')
# Numbers that differ between ranks though nothing else does: addresses in memory, and devices.
_OWN_NUMBER = re.compile(r"\b0x[0-9a-f]+\b|\b(?:cuda|xpu):\d+\b")
_SHOWN = "shown failures"


class FailureOrder:
    """Where the failure of this rank stands among those of the ranks that fail with it.

    Args:
        report: of the process group.
        own: the failure that ends this rank.

    Attributes:
        first: the failure of the rank that came first; None: this rank did, or the store is gone.

    Ranks: local; uses the store of the process group.

    Example:
        >>> from torch.distributed import HashStore
        >>> store, error = HashStore(), ValueError("boom")
        >>> reports = [FailureReport(store, rank, 2) for rank in range(2)]
        >>> orders = [
        ...     FailureOrder(one, Reason.of(one.rank, error, is_final=True)) for one in reports
        ... ]
        >>> for order in orders:
        ...     order.take_turn(None)
        >>> orders[0].first is None, orders[1].first.rank, orders[1].compared_with_first()
        (True, 0, 'same')
    """

    def __init__(self, report: FailureReport, own: Reason) -> None:
        self.report = report
        self.own = own
        self.first: Reason | None = None

    def take_turn(self, after: int | None) -> None:
        """Report this failure as the first, or learn which rank's came first.

        Args:
            after: the rank that failed before this one in the same call of ``fit``; None: no rank
                did. That rank is let pass, so that all ranks name the same one.
        """
        if after is not None:
            self._await_first(TURN_SECONDS)
        if self.report.tell(self.own):
            return
        self.first = self._await_first(KNOWN_SECONDS)

    def _await_first(self, seconds: float) -> Reason | None:
        _wait(lambda: self.report.store_is_lost or self._final_failure() is not None, seconds)
        return self._final_failure()

    def _final_failure(self) -> Reason | None:
        reason = self.report.first_failure()
        return reason if reason is not None and reason.is_final else None

    def summary(self) -> str:
        """Return one line: that this rank failed first; without the store, only that it failed."""
        return self.own.in_words("failed") if self.report.store_is_lost else self.own.summary()

    def compared_with_first(self) -> str:
        """Say how this failure is like the first.

        Returns:
            ``"same"``: the same traceback and message; ``"same line"``: the same traceback with
            another message; ``"other"``: else.
        """
        theirs = "" if self.first is None else self.first.trace
        if not theirs:  # that rank was lost, and shows nothing
            return OTHER
        if _OWN_NUMBER.sub("", theirs) == _OWN_NUMBER.sub("", self.own.trace):
            return SAME
        frames = _FRAME.findall(self.own.trace)
        return SAME_LINE if frames and frames == _FRAME.findall(theirs) else OTHER

    def is_read_beside_first(self) -> bool:
        """Say whether this rank and the first write to the same output."""
        return self.first is not None and self.first.output == self.own.output != ""

    # ------------------------------------------------------------------ of the first

    def await_others(self) -> list[int]:
        """Wait briefly for other ranks that fail; return those that this rank is to report."""
        others = [rank for rank in range(self.report.world_size) if rank != self.own.rank]
        if not others:
            return []
        _wait(lambda: self.report.has_notes([_key(rank) for rank in others]), OTHERS_SECONDS)
        silent = [rank for rank in others if self.report.noted(_key(rank)) == self.own.output]
        return silent if self.own.output else []

    def note_shown(self, ranks: list[int]) -> None:
        """Tell the other ranks that all of the failure has been printed.

        Args:
            ranks: the ranks that were named with it.
        """
        self.report.note(_SHOWN, json.dumps(ranks))

    # ------------------------------------------------------------------ of the others

    def come_after(self, *, is_silent: bool) -> bool:
        """Tell the first rank of this failure, and wait briefly until the first has printed its
        own.

        Args:
            is_silent: whether to leave it to the first to tell of this rank.

        Returns:
            Whether the first has told of this rank.
        """
        self.report.note(_key(self.own.rank), self.own.output if is_silent else "told")
        _wait(lambda: self.report.has_notes([_SHOWN]), SHOWN_SECONDS)
        return self.own.rank in json.loads(self.report.noted(_SHOWN) or "[]")


def _key(rank: int) -> str:
    return f"failed after/{rank}"


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(NAP_SECONDS)
