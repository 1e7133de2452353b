"""Processes find each other, or say why not: stores, strange neighbours on the port, missing and
doubled ranks.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddpkit.comm import rendezvous
from ddpkit.comm.rendezvous import join_attempt, open_store
from ddpkit.errors import LaunchError
from ddpkit.launch import LaunchInfo, derived_port
from tests.launching import free_port, soon

LIMIT = timedelta(seconds=20)


def info(rank, world_size=2, **more):
    return LaunchInfo(
        "environment",
        rank,
        rank,
        world_size,
        world_size,
        **{"address": "127.0.0.1", **more},
    )


def all_of(world_size, work):
    """What `work(rank)` returned or raised for each rank, each in a thread of its own."""
    found = [None] * world_size

    def run(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 -- looked at by the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return found


def talk(stores):
    """Each can read what the other has written, which means the same prefix too."""
    stores[0].set("from 0", "zero")
    stores[1].set("from 1", "one")
    return stores[1].get("from 0") == b"zero" and stores[0].get("from 1") == b"one"


@pytest.fixture
def run_id():
    return f"test {time.time_ns()}"


@pytest.fixture
def stranger():
    """A program that has the port, takes connections and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


# ------------------------------------------------------------------------------------------- stores


def test_a_port_of_the_users(run_id):
    port = free_port()
    found = all_of(2, lambda rank: open_store(info(rank, port=port), LIMIT))
    assert [hosts for _, hosts in found] == [True, False]
    assert talk([store for store, _ in found])


def test_a_derived_port(run_id):
    found = all_of(
        2,
        lambda rank: open_store(info(rank, port=derived_port(run_id), run_id=run_id), LIMIT),
    )
    assert [hosts for _, hosts in found] == [True, False]
    assert talk([store for store, _ in found])


def test_a_derived_port_that_is_taken(run_id):
    place = {"port": derived_port(run_id), "run_id": run_id}
    words = r"made from the id .* is taken.*Give MASTER_PORT"
    with socket.create_server(("", place["port"])), pytest.raises(LaunchError, match=words):
        open_store(info(0, **place), LIMIT)


def test_a_rank_does_not_join_the_run_that_has_its_port():
    port = free_port()
    _first = open_store(info(0, 1, port=port, run_id="slurm 1.0"), LIMIT)
    with pytest.raises(
        LaunchError,
        match=r"is another run's \(slurm 1.0; this one is slurm "
        r"2.0\).* Give MASTER_PORT",
    ):
        open_store(info(1, port=port, run_id="slurm 2.0"), LIMIT)


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_rank_waits_until_an_earlier_command_of_its_job_step_has_ended(run_id, is_connected):
    """`srun bash -c "python train.py; python test.py"`: both have the same port, and the first rank
    0 may end late.

    It ends while this rank waits to look again, or when this rank has just connected and has not
    asked yet.
    """
    port = derived_port(run_id)
    earlier = [
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LIMIT)
    ]
    for key, value in {
        "run": run_id,
        "here/1": "process 1 of that command",
        f"rendezvous/done/{run_id}": "1",
    }.items():
        earlier[0].set(f"ddpkit/{key}", value)
    late = info(1, port=port, run_id=run_id)
    found = []
    calls = []
    again = threading.Event()
    connect = rendezvous.connect

    def watched(*args):
        calls.append(args)
        store = connect(*args) if is_connected else None
        if len(calls) == 2:
            earlier.clear()
            again.set()
        return store or connect(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "connect", watched)
        thread = threading.Thread(target=lambda: found.append(open_store(late, LIMIT)))
        thread.start()
        assert again.wait(20)
        store, hosts = open_store(info(0, port=port, run_id=run_id), LIMIT)
        thread.join(20)
    assert hosts
    assert talk([store, found[0][0]])


def test_a_store_that_is_lost_before_all_have_met_is_named(run_id):
    port = derived_port(run_id)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=LIMIT)
    failed = []

    def come():
        with pytest.raises(
            LaunchError,
            match=r"rank 1 has lost the store at 127.0.0.1:\d+ ",
        ) as caught:
            open_store(info(1, port=port), LIMIT)
        failed.append(caught.value)

    thread = threading.Thread(target=come)
    thread.start()
    store.get("ddpkit/rendezvous/token/1")  # waits for it
    del store
    thread.join(20)
    assert isinstance(failed[0].__cause__, dist.DistNetworkError)


def test_the_port_of_the_user_is_taken(stranger):
    with pytest.raises(
        LaunchError,
        match=f"port {stranger} of MASTER_PORT is taken on this machine",
    ):
        open_store(info(0, port=stranger), LIMIT)


def test_a_stranger_that_does_not_answer_is_no_hang(stranger, monkeypatch):
    """torch alone waits for ever there, whatever its timeout."""
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 1.0)
    made = threading.Event()
    end = threading.Event()
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: made.set() or end.wait(60))
    with pytest.raises(LaunchError, match="does not answer as torch's store does"):
        open_store(info(1, port=stranger), LIMIT)
    assert made.wait(20)
    end.set()


@pytest.mark.parametrize(
    "place",
    [{"port": 0}, {"address": "", "port": 29500}, {"address": "", "port": 0}],
)
def test_what_is_missing_to_meet_is_named(place):
    words = (
        r"rank 1 of 2 \(environment\), but MASTER_ADDR and MASTER_PORT are not both set: the "
        r"processes cannot find"
    )
    with pytest.raises(LaunchError, match=words):
        open_store(info(1, **place), LIMIT)


def test_nobody_listens():
    began = time.monotonic()
    with pytest.raises(
        LaunchError,
        match=r"cannot connect to rank 0 at 127.0.0.1:\d+, .*Was "
        r"rank 0 started",
    ):
        open_store(info(1, port=free_port()), timedelta(seconds=0.5))
    assert soon(began, 5)


# --------------------------------------------------------------------------------------- rendezvous


def test_all_agree_on_one_name_and_attempts_on_different_ones():
    store = dist.HashStore()
    names = [
        all_of(
            3,
            lambda rank: join_attempt(store, info(rank, 3), time.monotonic() + 20, once=False),
        )
        for _ in range(4)
    ]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 4, (
        "what dead processes have left is not read again"
    )


def test_a_world_that_shrinks_and_grows_on_one_store():
    store = dist.HashStore()
    seen = set()
    for size in (3, 1, 2, 3):
        end = time.monotonic() + 20
        names = set(
            all_of(size, lambda rank: join_attempt(store, info(rank, size), end, once=False))  # noqa: B023
        )
        assert len(names) == 1
        assert not names & seen
        seen |= names


def test_a_rank_that_died_in_the_rendezvous_is_replaced():
    store = dist.HashStore()
    store.set("ddpkit/rendezvous/token/1", "the token of a dead process")
    names = all_of(
        2,
        lambda rank: join_attempt(store, info(rank), time.monotonic() + 20, once=False),
    )
    assert len(set(names)) == 1


def test_ranks_that_do_not_come_are_named(caplog, monkeypatch):
    monkeypatch.setattr(rendezvous, "WARNING_SECONDS", 0.1)
    with pytest.raises(
        LaunchError,
        match=r"ranks 1-2 \(2\) of 3 processes did not come to rank "
        r"0 at 127.0.0.1:5",
    ):
        join_attempt(dist.HashStore(), info(0, 3, port=5), time.monotonic() + 0.5, once=True)
    assert "Rank 0 waits for ranks 1-2 (2) of 3 processes." in caplog.text
    with pytest.raises(
        LaunchError,
        match="rank 1 of 2 has waited at 127.0.0.1:5 for rank 0, which did not come",
    ):
        join_attempt(dist.HashStore(), info(1, port=5), time.monotonic() + 0.1, once=True)


def test_a_rank_that_is_there_twice():
    """Two runs on the same MASTER_PORT, or one RANK given to two processes."""
    store = dist.HashStore()
    store.set("ddpkit/here/1", "process 1 on elsewhere")
    with pytest.raises(
        LaunchError,
        match="two processes are rank 1 .*: process 1 on elsewhere came first",
    ):
        join_attempt(store, info(1), time.monotonic() + 5, once=True)


def test_the_same_process_may_start_a_group_again():
    store = dist.HashStore()
    for _ in range(2):
        join_attempt(store, info(0, 1), 0.0, once=True)


def test_an_unknown_host_is_not_waited_for_half_an_hour(monkeypatch, run_id):
    monkeypatch.setattr(rendezvous, "UNKNOWN_HOST_SECONDS", 0.2)
    for place in ({"port": 29500}, {"port": derived_port(run_id), "run_id": run_id}):
        with pytest.raises(LaunchError, match="no-such-host.invalid"):
            open_store(info(1, address="no-such-host.invalid", **place), timedelta(minutes=30))
