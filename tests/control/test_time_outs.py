"""What is behind the time-out of a collective, by what the ranks have told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ddpkit.base import FailureReport, RankStatus, Reason, beat_key, is_second_hand
from ddpkit.control import time_outs
from ddpkit.control.time_outs import explained_time_out, is_time_out
from ddpkit.errors import RankFailedError

GLOO = RuntimeError(
    "[unbound_buffer.cc:129] Timed out waiting 90000ms for recv operation to complete"
)
NCCL = dist.DistBackendError(
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=90000) ran for 90012 milliseconds before timing out."
)


@pytest.fixture
def reports():
    store = dist.HashStore()
    return [FailureReport(store, rank, 7) for rank in range(7)]


@pytest.fixture(autouse=True)
def _no_wait_for_beats(monkeypatch):
    monkeypatch.setattr(time_outs, "FRESH_SECONDS", 0.0)


def post(report, rank, **where):
    status = RankStatus(rank, "node", 100 + rank, "TRAIN", 3, 9, beats=4, **where)
    report.store.set(beat_key(rank), status.to_json())


@pytest.mark.parametrize("error", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_late_ranks_are_told_from_those_that_wait(reports, error):
    own = reports[1]
    own.limits = {90000: "30 s more than --hang_timeout=60"}
    assert is_time_out(error)
    post(own, 0, where="train.py:7 in save")
    post(own, 3, where="train.py:3 in <module>", waits=True)
    for rank in (4, 5, 6):
        post(own, rank, where="train.py:8 in tidy")
    news = explained_time_out(error, own)
    words = str(news)
    assert "waited 90 s (30 s more than --hang_timeout=60)" in words
    assert (
        "for rank 0 (node, pid 100), which is in TRAIN of epoch 3 at step 9, at train.py:7 in save"
        in words
    )
    assert "for rank 2, which has not said where it is" in words
    assert "for rank 6." in words
    assert "rank 3" not in words
    assert news.__cause__ is error
    assert not is_second_hand(news)
    assert Reason.of(1, news, is_final=True).summary() == words


@pytest.mark.parametrize("is_final", [True, False])
def test_a_rank_that_failed_first_keeps_its_reason(reports, monkeypatch, is_final):
    monkeypatch.setattr("ddpkit.base.failure_report.POSITION", SimpleNamespace(session=1))
    reason = Reason(2, "ValueError: boom", trace="...", session=1, is_final=is_final)
    reports[2].tell(reason)
    news = explained_time_out(GLOO, reports[1])
    assert str(news) == "rank 2 failed first: ValueError: boom"
    assert is_second_hand(news)


def test_a_rank_that_has_departed_keeps_its_reason(reports):
    reports[2].depart()
    assert "rank 2 came to the end of its script" in str(explained_time_out(GLOO, reports[1]))


def test_a_rank_without_heartbeats_is_looked_for(reports):
    """Its machine may be down: the watchdog's search finds that."""
    reports[1].find_reason = lambda _: Reason(2, "disappeared: its machine is down")
    assert str(explained_time_out(GLOO, reports[1])) == "rank 2 disappeared: its machine is down"


def test_ranks_that_all_live_are_not_looked_for(reports, monkeypatch):
    own = reports[1]
    beats = iter(range(100))
    monkeypatch.setattr(
        time_outs,
        "latest_statuses",
        lambda _: [RankStatus(rank, beats=next(beats), waits=True, pid=1) for rank in range(7)],
    )
    own.find_reason = lambda _: pytest.fail("all ranks live")
    assert "All ranks wait for others" in str(explained_time_out(GLOO, own))


class GoneStore:
    def __getattr__(self, name):
        raise dist.DistNetworkError("Broken pipe")


def test_without_a_store_nothing_is_known():
    news = explained_time_out(GLOO, FailureReport(GoneStore(), 1, 2))
    assert "for rank 0, which has not said where it is" in str(news)


def test_other_errors_are_no_time_outs():
    for error in (ValueError("Timed out waiting 3ms for"), RankFailedError(str(GLOO)), KeyError()):
        assert not is_time_out(error)
    assert is_time_out(RuntimeError("[pair.cc:7] Application timeout caused pair closure"))
