"""F18: two runs in one folder, with real processes: racing, killed, stopped at every point, and coming late."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from ddpkit.base import has_ended, is_ending, state_and_start
from ddpkit.checkpointing import FolderLock, holder, run_lock, storage, verify
from ddpkit.checkpointing.run_lock import LOCK_NAME
from ddpkit.checkpointing.storage import cleaned_on_error, commit_staging, make_staging
from ddpkit.errors import CheckpointError
from tests.launching import PATIENCE

from .storage_tools import names, new_folder

RENEWAL = 0.3  # seconds: a lease is 0.9 s
SLOW_RENEWAL = 10.0


# ------------------------------------------------------------------------------------------------ processes


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
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(outcome, pipe)
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
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.002)


def elsewhere():
    """Make this process one of another host, for those here and in its own eyes."""
    run_lock.this_place = lambda: ("elsewhere", "another boot", "another namespace")


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


# ------------------------------------------------------------------------------------------------ one of many


def take_and_wait(folder, signs, number, renewal, away):
    """Take the lock when told to, say so, and hold it until told to end."""
    if away:
        elsewhere()
    (signs / f"ready.{number}").touch()
    wait_for(signs / "go")
    lock = FolderLock(folder, renewal_seconds=renewal)
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


def race(before, away, takers):
    """Let many take the lock of a folder at once; return how many got it, and how the others were refused."""
    with new_folder() as folder, new_folder() as signs:
        LEAVINGS[before](folder)
        actors = [Actor(take_and_wait, folder, signs, number, RENEWAL, away) for number in range(takers)]
        for number in range(takers):
            wait_for(signs / f"ready.{number}")
        (signs / "go").touch()
        end = time.monotonic() + 30
        while len([*signs.glob("won.*"), *signs.glob("refused.*")]) < takers and time.monotonic() < end:
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
    assert holder(folder).has_ended()


def leave_a_damaged_lock(folder):
    (folder / LOCK_NAME).mkdir()
    (folder / LOCK_NAME / "0123").write_bytes(b"\0" * 100)


def leave_a_plain_file(folder):
    (folder / LOCK_NAME).touch()


LEAVINGS = {"nothing": leave_nothing, "dead": leave_a_dead_lock, "damaged": leave_a_damaged_lock}
LEAVINGS["file"] = leave_a_plain_file


@pytest.mark.parametrize("before", LEAVINGS)
@pytest.mark.parametrize("away", [False, True], ids=["here", "elsewhere"])
def test_f18_of_many_that_start_at_once_exactly_one_gets_the_folder(ranks, before, away):
    for _ in range(2):
        won, refusals = ranks.run(race, before, away, 10, world_size=1, init=False)[0]
        assert won == 1
        assert len(refusals) == 9
        assert all("in use by another run: " in words for words in refusals), refusals


def work_in_turns(folder, signs, seconds):
    """Take and release again and again; whenever inside, nobody else who lives may be."""
    end, turns = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            with FolderLock(folder, renewal_seconds=1.0).hold():
                mine = signs / f"inside.{os.getpid()}"
                mine.touch()
                others = [path for path in signs.glob("inside.*") if path != mine]
                for path in others:
                    pid = int(path.suffix[1:])
                    if not has_ended(pid, state_and_start(pid)[1]):
                        (signs / f"both.{pid}.{os.getpid()}").touch()
                    path.unlink(missing_ok=True)
                mine.unlink(missing_ok=True)
                turns += 1
        except CheckpointError:
            continue
    return turns


def turns_and_kills(seconds, kills):
    with new_folder() as folder, new_folder() as signs:
        actors = [Actor(work_in_turns, folder, signs, seconds) for _ in range(4)]
        killed = 0
        for _ in range(kills):
            time.sleep(seconds / (kills + 2))
            victim = actors.pop(0)
            os.kill(victim.pid, signal.SIGKILL)
            victim.reap()
            killed += 1
            actors.append(Actor(work_in_turns, folder, signs, seconds / 2))
        turns = sum(actor.result()[1] for actor in actors)
        return killed, turns, sorted(path.name for path in signs.glob("both.*"))


def test_f18_never_two_at_a_time_while_owners_are_killed(ranks):
    killed, turns, both = ranks.run(turns_and_kills, 4.0, 20, world_size=1, init=False)[0]
    assert killed == 20
    assert turns > 20
    assert both == []


# ------------------------------------------------------------------------------------------------ dead or alive


def hold_until(folder, signs, renewal=SLOW_RENEWAL, away=False):
    if away:
        elsewhere()
    lock = FolderLock(folder, renewal_seconds=renewal)
    lock.acquire()
    (signs / "held").touch()
    wait_for(signs / "end")
    try:
        lock.require()
    finally:
        lock.release()


def take_from_the_killed(reaped):
    with new_folder() as folder, new_folder() as signs:
        owner = Actor(hold_until, folder, signs)
        wait_for(signs / "held")
        storage.make_staging(folder / "CKPT+half")
        owner.signal(signal.SIGKILL)
        if reaped:
            owner.reap()
        start = time.monotonic()
        with FolderLock(folder).hold():
            seconds = time.monotonic() - start
            left = [name for name in names(folder) if name != LOCK_NAME]
            mine = holder(folder).pid == os.getpid()
        owner.kill()
        return seconds, left, mine


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_f18_kill_9_leaves_a_lock_that_the_next_run_takes_at_once(ranks, reaped):
    seconds, left, mine = ranks.run(take_from_the_killed, reaped, world_size=1, init=False)[0]
    assert seconds < 15.0, "the lease of 30 s is not waited for"
    assert left == [], "what the dead run had half-made is gone"
    assert mine


def take_from_the_living(state, away, renewal):
    """Try to take the lock of a run that is alive; return what was said, how long it took, and what became of it."""
    with new_folder() as folder, new_folder() as signs:
        owner = Actor(hold_until, folder, signs, renewal, away)
        wait_for(signs / "held")
        if state == "stopped":
            owner.signal(signal.SIGSTOP)
        start, said = time.monotonic(), ""
        lock = FolderLock(folder, renewal_seconds=renewal)
        try:
            lock.acquire()
        except CheckpointError as error:
            said = str(error)
        seconds = time.monotonic() - start
        if state == "stopped":
            owner.signal(signal.SIGCONT)
        (signs / "end").touch()
        became = owner.result()
        if lock.held:
            lock.require()  # what became of the owner has not taken it away
            lock.release()
        return said.replace(str(folder), "FOLDER"), owner.pid, seconds, became


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_f18_a_second_run_on_the_same_host_is_refused(ranks, state):
    said, pid, seconds, became = ranks.run(take_from_the_living, state, False, 0.5, world_size=1, init=False)[0]
    assert f"FOLDER is in use by another run: process {pid} on " in said
    assert "it is alive" in said
    assert f"end it (kill {pid})" in said
    assert 0.5 <= seconds < 1.5 * PATIENCE
    assert became == (True, None), "it never noticed"


def die_slowly(folder, signs, seconds):
    """Take the lock and end, but for a thread: what a killed process looks like whose last write is not done yet."""
    FolderLock(folder, renewal_seconds=RENEWAL).acquire()

    def end():
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=end).start()
    (signs / "held").touch()
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(number, 0)  # exit(2): of this thread alone


def take_from_the_dying(seconds):
    """Take the lock of a run that takes its time to die; return what was said, whether it was ending, and how long."""
    with new_folder() as folder, new_folder() as signs:
        owner = Actor(die_slowly, folder, signs, seconds)
        wait_for(signs / "held")
        time.sleep(0.1)
        found = holder(folder)
        seen = found.has_ended(), is_ending(found.pid)
        start, said = time.monotonic(), ""
        lock = FolderLock(folder, renewal_seconds=RENEWAL)
        try:
            lock.acquire()
        except CheckpointError as error:
            said = str(error)
        lock.release()
        waited = time.monotonic() - start
        owner.kill()
        return said, seen, waited


def test_f18_a_run_that_is_dying_is_waited_for(ranks):
    said, seen, seconds = ranks.run(take_from_the_dying, 2.2 * RENEWAL, world_size=1, init=False)[0]
    assert seen == (False, True)
    assert not said, "refused"
    assert RENEWAL < seconds < 3 * RENEWAL * PATIENCE


def test_f18_a_run_that_never_dies_is_not_waited_for_without_end(ranks):
    said, _, seconds = ranks.run(take_from_the_dying, 60.0, world_size=1, init=False)[0]
    assert "it is alive" in said
    assert 3 * RENEWAL <= seconds < 6 * RENEWAL * PATIENCE


def test_f18_a_second_run_on_another_host_is_refused_while_the_first_renews(ranks):
    said, pid, seconds, became = ranks.run(take_from_the_living, "running", True, 0.3, world_size=1, init=False)[0]
    assert f"process {pid} on elsewhere" in said
    assert "renewed while this process watched" in said
    assert seconds < 3 * 0.3 * PATIENCE
    assert became == (True, None)


def test_f18_a_run_that_was_cut_off_finds_its_folder_taken(ranks):
    said, _, seconds, became = ranks.run(take_from_the_living, "stopped", True, 0.2, world_size=1, init=False)[0]
    assert not said
    assert 3 * 0.2 <= seconds < 9 * 0.2 * PATIENCE
    assert became[0] is False
    assert "no longer this run's: it was taken over by process" in became[1]


# ------------------------------------------------------------------------------------------------ coming late


EVERYTHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


class Stops:
    """Stops the process before its main thread looks, makes, writes, moves or deletes in a folder for the n-th time."""

    def __init__(self, folder, at, events):
        self.folder, self.at, self.events = str(folder), at, events
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
                stop()

    def is_inside(self, event, args):
        if event == "open":
            writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return str(args[0]).startswith(self.folder) and (writes or LOCK_NAME in str(args[0]))
        inside_open_folder = event in {"os.remove", "os.rmdir"} and args[-1] != -1  # as shutil.rmtree works
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


def old_run(folder, stops_at, events):
    """Save, replace and delete, and stop at one of the points on the way. Says how many there were."""
    lock = FolderLock(folder, renewal_seconds=1.0)
    stops = Stops(folder, stops_at, events)
    with lock.hold():
        save(lock, folder, "first", "old")
        save(lock, folder, "latest", "old, before")
        save(lock, folder, "latest", "old")  # replaces
        lock.remove(folder / "CKPT+first")
        save(lock, folder, "other", "old")
    return len(stops.points)


def late(stops_at, events, saves_before):
    """Stop the old run at a point, let a new run take over and save, let the old one go on. None, or its points."""
    with new_folder() as folder:
        old = Actor(old_run, folder, stops_at, events)
        if not old.stopped():
            return old.result()[1]
        try:
            new_run(folder, old, saves_before)
        finally:
            old.kill()
        return None


def new_run(folder, old, saves_before):
    elsewhere()
    lock = FolderLock(folder, renewal_seconds=0.05)  # takes the old one for dead after 0.15 s
    with lock.hold():
        storage.restore_replaced(folder)  # as whoever looks for checkpoints does first
        seen = found = checkpoints(folder)
        if saves_before:
            save(lock, folder, "latest", "new")
            seen = {**found, "CKPT+latest": "new"}
        staging = make_staging(folder / "CKPT+mine")  # a save of the new run is under way ...
        (staging / "weights").write_text("new")
        old.signal(signal.SIGCONT)
        ok, words = old.result()
        was_done = found == {"CKPT+latest": "old", "CKPT+other": "old"}  # then the old run may end in peace
        assert ok is False or was_done, f"the old run has noticed nothing: {words}"
        lock.require()
        commit_staging(staging, folder / "CKPT+mine")  # ... and has not been disturbed
        lock.clean()
        assert checkpoints(folder) == {**seen, "CKPT+mine": "new"}
    left = [name for name in names(folder) if not name.startswith("CKPT")]
    assert left == []


def late_at_every_point(events, saves_before):
    """Return how many points there were; the old run was stopped at each."""
    place = run_lock.this_place
    for stops_at in range(1, 500):
        try:
            points = late(stops_at, events, saves_before)
        except AssertionError as error:
            raise AssertionError(f"stopped before point {stops_at}: {error}") from error
        finally:
            run_lock.this_place = place
        if points is not None:
            assert points == stops_at - 1
            return points
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("events", "saves_before", "at_least"),
    [(EVERYTHING, True, 60), ({"os.rename"}, False, 8)],
    ids=["after the new run has saved", "before the new run saves"],
)
def test_f18_an_old_run_that_wakes_up_late_changes_nothing(ranks, events, saves_before, at_least):
    """Stopped at every point of three saves, a replacement and a deletion, and of taking and releasing the lock."""
    run = ranks.run(late_at_every_point, events, saves_before, world_size=1, init=False, timeout=560)
    assert run[0] >= at_least
