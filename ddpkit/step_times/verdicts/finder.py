"""Looks at each second of a run for what makes it slow, and says it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpkit.step_times.verdicts.history import AGREEING, History
from ddpkit.step_times.verdicts.no_verdict import FiguresOfRun
from ddpkit.step_times.verdicts.order import FINDERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpkit.step_times.seconds import SecondOfSteps
    from ddpkit.step_times.verdicts.verdict import Verdict

#: Verdicts of one kind in a run: of a hundred late ranks the first few tell enough.
MOST_OF_A_KIND = 8


class VerdictFinder:
    """Finds what makes a run slow, from the measured steps of the last seconds.

    It needs some seconds before it says anything, and it says nothing twice.

    Args:
        hosts: the machine of each rank; empty where they are not known. Seconds with ``host_names``
            bring them along.
        num_workers: of the training loader in each rank; None where that is not known. It may be
            set later.

    Ranks: local; where all ranks give it the same seconds, they get the same verdicts.
    """

    def __init__(self, hosts: Sequence[str] = (), num_workers: int | None = None) -> None:
        self._history = History(hosts, num_workers)
        self._figures = FiguresOfRun()
        self._said: set[tuple[str, int | None, str | None]] = set()

    @property
    def num_workers(self) -> int | None:
        """Workers of the training loader in each rank; None: not known."""
        return self._history.num_workers

    @num_workers.setter
    def num_workers(self, number: int | None) -> None:
        self._history.num_workers = number

    def note(self, second: SecondOfSteps) -> list[Verdict]:
        """Take a second of steps; return what was found for the first time.

        Args:
            second: what the last sync of the ranks has told.

        Returns:
            Verdicts, in the order of :data:`~ddpkit.step_times.verdicts.order.KINDS`; mostly none.
        """
        history = self._history
        if not history.note(second):
            return []
        self._figures.note(history.newest)
        if not history.is_long_enough:
            return []
        found = [verdict for finder in FINDERS for verdict in finder.find(history)]
        return [verdict for verdict in found if self._is_new(verdict)]

    def words_if_nothing_found(self) -> str:
        """Return what to say at the end of a training without a verdict, and on what figures that
        rests; empty where there was a verdict, or too little to look at.

        What comes after the call is looked at anew.
        """
        figures = self._figures
        self._figures = FiguresOfRun()
        return "" if self._said or figures.stretches < AGREEING else figures.words()

    def _is_new(self, verdict: Verdict) -> bool:
        """Say whether nothing has been said of this subject yet, and note that it is said now."""
        of_kind = sum(kind == verdict.kind for kind, *_ in self._said)
        if verdict.subject in self._said or of_kind >= MOST_OF_A_KIND:
            return False
        self._said.add(verdict.subject)
        return True
