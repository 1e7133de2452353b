"""F18: two runs in one folder, with real processes: racing, killed, stopped, and where nothing can
be locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from ddpkit.base import state_and_start
from ddpkit.checkpointing import FolderLock, verify
from ddpkit.checkpointing.storage import (
    GRACE_SECONDS,
    LOCK_NAME,
    cleaned_on_error,
    commit_staging,
    make_staging,
    remove_directory,
)
from ddpkit.errors import CheckpointError
from tests.launching import PATIENCE

from .storage_tools import names, new_folder

# ---------------------------------------------------------------------------------------- processes


class Actor:
    """A forked process that runs a function and says what became of it."""

    def __init__(self, function, *args):
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            try:
                outcome = (True, function(*args))
            except CheckpointError as error:
                outcome = (False, str(error))
            except BaseException:  # noqa: BLE001 -- raised by whoever asks for the result
                outcome = (None, traceback.format_exc())
            try:
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(outcome, pipe)
            finally:
                os._exit(0)
        os.close(writer)
        self.pipe = os.fdopen(reader, "rb")
        self.gone = False

    def signal(self, number):
        os.kill(self.pid, number)

    def stopped(self):
        """Wait until it has stopped, and say True; False where it has ended."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self.gone = not os.WIFSTOPPED(status)
        return not self.gone

    def reap(self):
        if not self.gone:
            os.waitpid(self.pid, 0)
            self.gone = True
        self.pipe.close()

    def result(self):
        """Return (True, value) or (False, the CheckpointError's words)."""
        content = self.pipe.read()
        self.reap()
        assert content, "killed"
        ok, value = pickle.loads(content)
        assert ok is not None, value
        return ok, value

    def kill(self):
        if not self.gone:
            self.signal(signal.SIGKILL)
        self.reap()


def wait_for(path, seconds=20.0):
    wait_for_one([path], Path.exists, seconds)


def wait_for_one(candidates, condition, seconds=20.0):
    """Return the first of them that meets a condition."""
    end = time.monotonic() + seconds
    while True:
        for candidate in candidates:
            if condition(candidate):
                return candidate
        assert time.monotonic() < end, f"none of {candidates}"
        time.sleep(0.002)


# -------------------------------------------------------------------------------------- one of many


def take_and_wait(folder, signs, number):
    """Take the lock when told to, say so, and hold it until told to end."""
    (signs / f"ready.{number}").touch()
    wait_for(signs / "go")
    lock = FolderLock(folder)
    try:
        lock.acquire()
    except CheckpointError as error:
        (signs / f"refused.{number}").touch()
        raise error from None
    (signs / f"won.{number}").touch()
    wait_for(signs / "end")
    lock.require()
    lock.release()
    return number


def race(before, takers):
    """Let many take the lock of a folder at once; return how many got it, and how the others were
    refused.
    """
    with new_folder() as folder, new_folder() as signs:
        LEAVINGS[before](folder)
        actors = [Actor(take_and_wait, folder, signs, number) for number in range(takers)]
        for number in range(takers):
            wait_for(signs / f"ready.{number}")
        (signs / "go").touch()
        end = time.monotonic() + 30
        while (
            len([*signs.glob("won.*"), *signs.glob("refused.*")]) < takers
            and time.monotonic() < end
        ):
            time.sleep(0.005)
        (signs / "end").touch()
        results = [actor.result() for actor in actors]
        assert not names(folder), "nothing stays behind"
        return sum(ok for ok, _ in results), [words for ok, words in results if not ok]


def leave_nothing(folder):
    pass


def leave_a_dead_lock(folder):
    def take_and_die():
        FolderLock(folder).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    Actor(take_and_die).reap()
    assert names(folder) == [LOCK_NAME]


LEAVINGS = {"nothing": leave_nothing, "dead": leave_a_dead_lock}


@pytest.mark.in_each_check(1)
@pytest.mark.parametrize("before", LEAVINGS)
def test_of_many_that_start_at_once_exactly_one_gets_the_folder(ranks, before):
    won, refusals = ranks.run(race, before, 10, world_size=1, init=False)[0]
    assert won == 1
    assert len(refusals) == 9
    assert all("in use by another run: " in words for words in refusals), refusals


def work_in_turns(folder, signs):
    """Take and release again and again; whenever inside, nobody else may be who has not been killed
    there.
    """
    while not (signs / "end").exists():
        try:
            with FolderLock(folder).hold():
                mine = signs / f"inside.{os.getpid()}"
                mine.touch()
                time.sleep(0.005)  # long enough to be killed in here
                for path in [path for path in signs.glob("inside.*") if path != mine]:
                    pid = path.suffix[1:]
                    killed = (signs / f"killed.{pid}").exists()  # made before the signal: no race
                    (signs / f"{'left' if killed else 'both'}.{pid}").touch()
                    path.unlink(missing_ok=True)
                mine.unlink(missing_ok=True)
                with (signs / "turns").open("a") as turns:
                    turns.write(".")
        except CheckpointError:
            continue


def turns_and_kills(kills):
    """Kill owners while others wait; return how many turns there were, who died inside, and who was
    not alone.
    """
    with new_folder() as folder, new_folder() as signs:
        turns = signs / "turns"
        turns.touch()
        actors = [Actor(work_in_turns, folder, signs) for _ in range(4)]
        for number in range(kills):
            enough = turns.stat().st_size + number % 5  # not always as many in between
            wait_for_one(
                [turns],
                lambda path, enough=enough: path.stat().st_size >= enough,
                20.0 * PATIENCE,
            )
            victim = wait_for_one(
                actors,
                lambda actor: (signs / f"inside.{actor.pid}").exists(),
                20.0 * PATIENCE,
            )
            (signs / f"killed.{victim.pid}").touch()
            victim.kill()
            actors[actors.index(victim)] = Actor(work_in_turns, folder, signs)
        (signs / "end").touch()
        for actor in actors:
            actor.result()
        return (
            turns.stat().st_size,
            len([*signs.glob("left.*")]),
            sorted(path.name for path in signs.glob("both.*")),
        )


def test_never_two_at_a_time_while_owners_are_killed(ranks):
    turns, left, both = ranks.run(turns_and_kills, 20, world_size=1, init=False)[0]
    assert turns >= 40
    assert left > 0, "some died while they had the folder"
    assert both == []


# ------------------------------------------------------------------------------------ dead or alive


def hold_until(folder, signs, leaves_a_child=False):
    lock = FolderLock(folder)
    lock.acquire()
    # as a worker of a loader, which outlives its rank for a moment
    if leaves_a_child and os.fork() == 0:
        try:
            (signs / f"child.{os.getpid()}").touch()
            # the folder goes right after the sign
            while signs.exists() and not (signs / "end").exists():
                time.sleep(0.01)
        finally:
            os._exit(0)
    (signs / "held").touch()
    wait_for(signs / "end")
    try:
        lock.require()
    finally:
        lock.release()


def take_from_the_killed(reaped, leaves_a_child):
    with new_folder() as folder, new_folder() as signs:
        owner = Actor(hold_until, folder, signs, leaves_a_child)
        wait_for(signs / "held")
        while leaves_a_child and not any(signs.glob("child.*")):
            time.sleep(0.002)
        make_staging(folder / "CKPT+half")
        owner.signal(signal.SIGKILL)
        if reaped:
            owner.reap()
        lock = FolderLock(folder)
        with lock.hold():
            lock.clean()
            left = [name for name in names(folder) if name != LOCK_NAME]
            mine = f"process {os.getpid()} on " in (folder / LOCK_NAME).read_text()
            children = [int(path.suffix[1:]) for path in signs.glob("child.*")]
            alive = [pid for pid in children if state_and_start(pid)[0] not in {"", "Z", "X"}]
        (signs / "end").touch()
        owner.kill()
        return left, mine, len(alive)


@pytest.mark.parametrize(
    ("reaped", "leaves_a_child"),
    [(True, False), (False, False), (True, True)],
    ids=["gone", "zombie", "orphan"],
)
def test_kill_9_frees_the_folder_for_the_next_run(ranks, reaped, leaves_a_child):
    left, mine, alive = ranks.run(
        take_from_the_killed,
        reaped,
        leaves_a_child,
        world_size=1,
        init=False,
    )[0]
    assert left == [], "what the dead run had half-made is gone with the first save"
    assert mine
    assert alive == leaves_a_child


def take_from_the_living(state):
    """Try to take the lock of a run that is alive; return what was said, how long it took, and what
    became of it.
    """
    with new_folder() as folder, new_folder() as signs:
        owner = Actor(hold_until, folder, signs)
        wait_for(signs / "held")
        if state == "stopped":
            owner.signal(signal.SIGSTOP)
        start = time.monotonic()
        said = ""
        try:
            FolderLock(folder).acquire()
        except CheckpointError as error:
            said = str(error)
        seconds = time.monotonic() - start
        if state == "stopped":
            owner.signal(signal.SIGCONT)
        (signs / "end").touch()
        return said.replace(str(folder), "FOLDER"), owner.pid, seconds, owner.result()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_second_run_is_refused(ranks, state):
    said, pid, seconds, became = ranks.run(take_from_the_living, state, world_size=1, init=False)[0]
    assert (
        f"FOLDER is in use by another run: process {pid} on {os.uname().nodename}, since 2" in said
    )
    assert GRACE_SECONDS <= seconds < 2 * GRACE_SECONDS * PATIENCE
    assert became == (True, None), "it never noticed"


def a_child_takes_nothing_away():
    with new_folder() as folder:
        lock = FolderLock(folder)

        def in_child():
            said = [lock.held]
            lock.release()
            for call in (lock.require, lock.acquire):
                try:
                    call()
                except CheckpointError as error:
                    said.append(str(error))
            return said

        with lock.hold():
            said = Actor(in_child).result()[1]
            lock.require()
        return os.getpid(), said


def test_a_forked_child_holds_nothing_and_takes_nothing_away(ranks):
    pid, (held, required, acquired) = ranks.run(
        a_child_takes_nothing_away,
        world_size=1,
        init=False,
    )[0]
    assert not held
    assert "not held: acquire it first" in required
    assert f"in use by another run: process {pid} on " in acquired


# ---------------------------------------------------------------------------- nothing can be locked


EVERYTHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


class Stops:
    """Stops the process before its main thread looks, makes, writes, moves or deletes in a folder
    for the n-th time.
    """

    def __init__(self, folder, at, events):
        self.folder = str(folder)
        self.at = at
        self.events = events
        self.points = []
        sys.addaudithook(self)

    def __call__(self, event, args):
        if (
            event in self.events
            and self.is_inside(event, args)
            and threading.current_thread() is threading.main_thread()
        ):
            self.points.append(event)
            if len(self.points) == self.at:
                os.kill(os.getpid(), signal.SIGSTOP)

    def is_inside(self, event, args):
        if event == "open":
            writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return str(args[0]).startswith(self.folder) and (writes or LOCK_NAME in str(args[0]))
        # as shutil.rmtree works
        inside_open_folder = event in {"os.remove", "os.rmdir"} and args[-1] != -1
        return inside_open_folder or str(args[0]).startswith(self.folder)


def save(lock, folder, name, text):
    """Save as the checkpointer does, under the lock."""
    lock.clean()
    final = folder / f"CKPT+{name}"
    staging = make_staging(final)
    with cleaned_on_error(staging, final):
        (staging / "weights").write_text(text)
        commit_staging(staging, final, before_rename=lock.require)


def checkpoints(folder):
    """Return what readers see: the text of every checkpoint, by name."""
    found = {path.name: path for path in Path(folder).glob("CKPT*")}
    assert all(verify(path) == [] for path in found.values())
    return {name: (path / "weights").read_text() for name, path in found.items()}


def old_run(folder, stops_at):
    """Save, replace and delete, and stop at one of the points on the way. Says how many there
    were.
    """
    lock = FolderLock(folder)
    with lock.hold():
        stops = Stops(folder, stops_at, EVERYTHING)
        save(lock, folder, "first", "old")
        save(lock, folder, "latest", "old, before")
        save(lock, folder, "latest", "old")  # replaces
        lock.require()
        remove_directory(folder / "CKPT+first")
        save(lock, folder, "other", "old")
        stops.events = set()
    return len(stops.points)


def late(stops_at):
    """Stop the old run at a point, let a new run start and save, let the old one go on. None, or
    its points.
    """
    with new_folder() as folder:
        old = Actor(old_run, folder, stops_at)
        if not old.stopped():
            return old.result()[1]
        try:
            new_run(folder, old)
        finally:
            old.kill()
        return None


def new_run(folder, old):
    lock = FolderLock(folder)
    with lock.hold():
        save(lock, folder, "latest", "new")
        seen = checkpoints(folder)
        staging = make_staging(folder / "CKPT+mine")  # a save of the new run is under way ...
        (staging / "weights").write_text("new")
        old.signal(signal.SIGCONT)
        ok, words = old.result()
        assert ok is False or seen == {"CKPT+latest": "new", "CKPT+other": "old"}, (
            f"it has noticed nothing: {words}"
        )
        lock.require()
        commit_staging(staging, folder / "CKPT+mine")  # ... and has not been disturbed
        lock.clean()
        found = checkpoints(folder)
        assert found["CKPT+mine"] == "new"
        assert found["CKPT+latest"] in {"new", "old"}
    assert [name for name in names(folder) if not name.startswith("CKPT")] == []


def late_at_every_point():
    """Return how many points there were; the old run was stopped at each."""

    def cannot_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    flock = fcntl.flock
    fcntl.flock = cannot_lock
    try:
        for stops_at in range(1, 500):
            try:
                points = late(stops_at)
            except AssertionError as error:
                raise AssertionError(f"stopped before point {stops_at}: {error}") from error
            if points is not None:
                assert points == stops_at - 1
                return points
    finally:
        fcntl.flock = flock
    raise AssertionError("no end")


@pytest.mark.slow
def test_where_nothing_can_be_locked_an_old_run_that_wakes_up_late_stops_and_nothing_is_mixed(
    ranks,
):
    """Stopped at every point of three saves, a replacement and a deletion."""
    assert ranks.run(late_at_every_point, world_size=1, init=False, timeout=560)[0] >= 40
