"""When the campaign takes a rank for one that hangs."""

from __future__ import annotations

from tests.faults.campaign_ranks import Attempt, Ranks
from tests.faults.campaign_verdict import last_words


class WatchedRanks(Ranks):
    """Two ranks, of which one notes something in the first waits."""

    def __init__(self, folder, notes):
        self.folder = folder
        self.notes = notes
        self.statuses = {}
        self.waits = 0

    def _wait_for_an_end(self, deadline, how_many=1):
        self.waits += 1
        if self.waits <= self.notes:
            with (self.folder / "diary.1").open("a") as diary:
                diary.write("[0, 'step']\n")


def test_ranks_that_are_slow_are_waited_for_and_those_that_hang_are_not(tmp_path):
    for notes in (0, 3):
        ranks = WatchedRanks(tmp_path, notes)
        ranks._wait_while_they_go_on(how_many=2)
        assert ranks.waits == notes + 1


def test_what_a_rank_did_last_is_told_of_one_that_hangs():
    attempt = Attempt(hung=[1], diaries=[[], [["step", 3], ["file", "before write"]]])
    assert last_words(attempt) == "; rank 1 last noted ['file', 'before write']"
