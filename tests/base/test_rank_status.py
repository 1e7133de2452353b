"""Where ranks are, and the table of it."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import time
from pathlib import Path, PurePath
from types import SimpleNamespace

import pytest
import torch

import ddpkit
from ddpkit import distributed
from ddpkit.base import Position, RankStatus, is_library, table
from ddpkit.base.waiting_frames import look_at
from ddpkit.comm import late_ranks, tensor_sums
from ddpkit.optim import step, take_step


def stuck():
    """Stand where a rank is stuck."""
    time.sleep(0.001)
    return look_at(sys._getframe())


def test_the_innermost_line_of_the_users_code_is_named():
    where, waits = stuck()
    assert where.startswith("test_rank_status.py:") and where.endswith("in stuck")  # noqa: PT018 -- one text
    assert not waits


def test_a_thread_that_waits_in_a_library_is_shown_with_both_lines():
    event = threading.Event()
    thread = None

    def wait_here():
        event.wait()

    def train():  # not the outermost line, in which everything is
        wait_here()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        end = time.monotonic() + 60
        where = ""
        waits = None
        while "in wait_here, which" not in where and time.monotonic() < end:
            time.sleep(0.01)
            where, waits = look_at(sys._current_frames()[thread.ident])
    finally:
        event.set()
        thread.join()
    assert "in wait_here, which is in threading.py:" in where
    assert not waits


@pytest.mark.parametrize("with_nccl", [True, False])
def test_a_rank_that_reads_a_number_from_its_gpu_waits_for_others_under_nccl(
    monkeypatch,
    with_nccl,
):
    """NCCL's collectives return at once; where Python waits is ``.item()``, which has no frame of
    its own.
    """
    lock = threading.Lock()
    monkeypatch.setattr(step, "norm_of_all", lambda _: SimpleNamespace(item=lock.acquire))
    lock.acquire()
    thread = threading.Thread(target=take_step, args=([], None))
    thread.start()
    try:
        position = Position(main_thread=thread.ident, waits_for_device=with_nccl)
        end = time.monotonic() + 60
        while (
            "step.py" not in position.own_status(0, 1.0, look=True).where and time.monotonic() < end
        ):
            time.sleep(0.01)
        found = position.own_status(0, 1.0, look=True)
    finally:
        lock.release()
        thread.join()
    assert "in take_step" in found.where
    assert found.waits is with_nccl
    assert ("waiting for other ranks" in table([found])) is with_nccl


def test_a_dead_thread_is_nowhere():
    assert look_at(None) == ("nowhere", False)


def test_the_position_changes_with_every_batch_and_session():
    position = Position()
    progress = SimpleNamespace(epoch=1, step=0, optimizer_step=0, stage_batches=None)
    marks = [position.mark()]
    with position.inside(progress):
        marks.append(position.mark())
        progress.step = 1
        marks.append(position.mark())
        progress.stage_batches = SimpleNamespace(stage=SimpleNamespace(name="TRAIN"))
        marks.append(position.mark())
        here = position.own_status(3, 2.0, look=True)
        assert (here.rank, here.stage, here.step, here.inside) == (3, "TRAIN", 1, True)
        assert "test_rank_status.py" in here.where
    marks.append(position.mark())
    assert len(set(marks)) == 5
    assert not position.own_status(3, 0.0, look=False).inside


def test_a_nested_session_has_its_own_number_and_gives_the_outer_one_back():
    position = Position()
    with position.inside(SimpleNamespace(epoch=1, step=0, optimizer_step=0, stage_batches=None)):
        marks = [position.mark()]
        for number in (2, 3):
            with position.inside(position.progress):
                assert (position.session, position.sessions) == (number, number)
            marks.append(position.mark())
            assert position.session == 1
            assert position.own_status(0, 0.0, look=False).session == 1
        position.join_group()
        assert (position.session, position.sessions) == (1, 1)
    assert position.session == 0
    assert len(set(marks)) == 3
    position.join_group()
    assert (position.session, position.sessions) == (0, 0)


def test_before_the_first_stage_a_call_says_which_it_is_and_what_it_does():
    position = Position()
    places = []

    def note():
        places.append(position.own_status(0, 0.0, look=False).place())

    stage = SimpleNamespace(stage=SimpleNamespace(name="VALID"))
    # of a call of fit that is over
    progress = SimpleNamespace(epoch=3, step=7, optimizer_step=0, stage_batches=stage)
    note()
    with position.inside(progress, "fit"):
        note()
        with position.at("on_fit_start"):
            with position.at("recovering a checkpoint"):
                note()
            note()
        position.stage_begins()
        with position.at("comparing the ranks"):
            note()
        with position.inside(progress, "evaluate"):
            note()
        note()
    note()
    assert places == [
        "",
        "in fit, before the first stage",
        "in fit, before the first stage: recovering a checkpoint",
        "in fit, before the first stage: on_fit_start",
        "in VALID of epoch 3 at step 7",
        "in evaluate, before the first stage",
        "in VALID of epoch 3 at step 7",
        "",
    ]


def test_the_table_names_the_guilty_first_and_the_waiting_in_one_line():
    ranks = [
        RankStatus(n, "a", n, "TRAIN", 2, 9, 31.0, "train.py:1 in main", waits=True)
        for n in (0, 1, 2, 5)
    ]
    ranks += [
        RankStatus(3, "b", 33, "TRAIN", 2, 9, 40.0, "data.py:12 in load"),
        RankStatus(4, "b", 34, step=7),
    ]
    lines = table(ranks, {4: 12.0}).splitlines()
    assert lines == [
        "rank 3 (b, pid 33): in TRAIN of epoch 2 at step 9, for 40 s at data.py:12 in load",
        "rank 4 (b, pid 34): silent for 12 s, last outside of fit and evaluate",
        (
            "rank 0-2, 5: in TRAIN of epoch 2 at step 9, for 31 s waiting for other ranks at "
            "train.py:1 in main"
        ),
    ]


def test_around_an_evaluation_no_step_is_named():
    assert RankStatus(stage="VALID", epoch=2).place() == "in VALID of epoch 2"
    assert RankStatus(stage="VALID", epoch=2, step=3).place() == "in VALID of epoch 2 at step 3"
    assert RankStatus(stage="TRAIN", epoch=2).place() == "in TRAIN of epoch 2 at step 0"


@pytest.mark.parametrize("file", ["comm/late_ranks.py", "renamed.py"])
def test_a_marked_function_waits_for_others_whatever_its_file_is_called(file):
    """Its line in the report is the user's, and behind it the function of ddpkit in which the rank
    waits.
    """
    lock = threading.Lock()
    work = SimpleNamespace(is_completed=lambda: True, wait=lock.acquire)
    await_late = moved(late_ranks, file)["await_late"]

    def train():
        await_late(work, "a call")

    found = status_while_waiting(train, lock, until=PurePath(file).name)
    assert re.fullmatch(
        rf"test_rank_status\.py:\d+ in train, which is in {PurePath(file).name}:\d+ "
        r"in await_late",
        found.where,
    )
    assert found.waits
    assert "waiting for other ranks at test_rank_status.py" in table([found])


def test_what_is_defined_inside_of_a_marked_function_waits_for_others(monkeypatch):
    lock = threading.Lock()
    work = SimpleNamespace(wait=lock.acquire)
    monkeypatch.setattr(tensor_sums.dist, "all_reduce", lambda *_, **__: work)
    wait = tensor_sums.start_sum(torch.ones(2**18))

    def train():
        wait()

    found = status_while_waiting(train, lock, until="tensor_sums.py")
    assert found.waits


def test_a_function_beside_a_marked_one_does_not_wait_for_others():
    """What the main process does for all is its own work, and may be in a library."""
    lock = threading.Lock()

    def train():
        distributed.main_process_only(lock.acquire)()

    found = status_while_waiting(train, lock, until="main_work.py")
    assert not found.waits


@pytest.mark.parametrize("with_nccl", [True, False])
def test_a_read_of_a_number_in_a_renamed_file_waits_for_others_under_nccl(with_nccl):
    lock = threading.Lock()
    gradient = SimpleNamespace(
        is_sparse=True,
        coalesce=lambda: SimpleNamespace(values=lock.acquire),
    )
    dense = moved(step, "renamed.py")["_dense"]

    def train():
        dense(SimpleNamespace(grad=gradient))

    found = status_while_waiting(train, lock, until="renamed.py", with_nccl=with_nccl)
    assert "in _dense" in found.where
    assert found.waits is with_nccl


def moved(module, file):
    """Return the names of a module of ddpkit that was loaded once more, from a file of another
    name.
    """
    path = f"/usr/lib/site-packages/ddpkit/{file}"
    names = {"__name__": module.__name__, "__file__": path}
    exec(compile(inspect.getsource(module), path, "exec"), names)
    return names


def status_while_waiting(function, lock, *, until, with_nccl=False):
    """Return the status of a thread whose function stands still at a lock, in a file of ddpkit."""
    lock.acquire()
    thread = threading.Thread(target=function)
    thread.start()
    try:
        position = Position(main_thread=thread.ident, waits_for_device=with_nccl)
        end = time.monotonic() + 60
        while (
            f"which is in {until}" not in position.own_status(0, 1.0, look=True).where
            and time.monotonic() < end
        ):
            time.sleep(0.001)
        return position.own_status(0, 1.0, look=True)
    finally:
        lock.release()
        thread.join()


def test_files_of_a_user_in_a_clone_of_the_same_name_are_the_users():
    """A clone is named as the package in it, and recipes are written in the clone."""
    package = Path(ddpkit.__file__).parent
    clone = package.parent.with_name("ddpkit")
    files = [clone / "optim.py", clone / "distributed.py", clone / "recipe" / "gathering.py"]
    found = {path.name: status_in(path) for path in files}
    assert [(name, status.waits) for name, status in found.items()] == [
        (path.name, False) for path in files
    ]
    assert [name for name, status in found.items() if f"{name}:1 in" not in status.where] == []
    assert not is_library(str(package.with_name("ddpkit_recipes") / "train.py"))


def status_in(path):
    """Return the status of a thread that stands in a line of a file."""
    lock = threading.Lock()
    lock.acquire()
    code = compile("lock.acquire()", str(path), "exec")
    thread = threading.Thread(target=exec, args=(code, {"lock": lock}))
    thread.start()
    try:
        position = Position(main_thread=thread.ident, waits_for_device=True)
        end = time.monotonic() + 60
        while (
            path.name not in position.own_status(0, 1.0, look=True).where and time.monotonic() < end
        ):
            time.sleep(0.001)
        return position.own_status(0, 1.0, look=True)
    finally:
        lock.release()
        thread.join()
