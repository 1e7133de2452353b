"""F21: kill -9 at every request of uploads to a store, and at random moments of them."""

from __future__ import annotations

import importlib
import os
import random
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from ddpkit.object_store import Objects
from tests.checkpointing.store_trials import judge, leftovers, run, run_and_tell
from tests.faults.storage_tools import die, forked
from tests.rank_pool import RankPool
from tests.s3_server import needs_s3

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("STORE_KILLS", "12"))
LIMIT_SECONDS = 600 + 30 * KILLS
CHANGES = ("write", "create", "send", "delete")
SMALL = 50
LARGE = 20_000  # 300 kB a file


@pytest.fixture(scope="module")
def zygote():
    """One process that has imported torch and has no threads: what runs in it forks what is
    killed.
    """
    with RankPool(timeout=LIMIT_SECONDS) as pool:
        yield lambda function, *args: pool.run(function, *args, world_size=1, init=False)[0]


# ------------------------------------------------------------------------------------ every request


class Counted:
    """Counts the points that requests which change a store reach: before and after each. At one of
    them the process dies, or only when a file is half there.
    """

    def __init__(self, at=None):
        self.at = at
        self.points = 0
        for name in CHANGES:
            setattr(Objects, name, self._counted(name, getattr(Objects, name)))

    def reach(self):
        self.points += 1
        if self.points == self.at:
            die()

    def _counted(self, name, real):
        def request(objects, *args):
            if not any(".alive-" in str(arg) for arg in args):
                self.reach()
            result = real(objects, *args)
            if name == "send":
                self.reach()
            return result

        return request


def make_one_request_at_a_time():
    from ddpkit.checkpointing import object_transfer

    object_transfer.FILES_AT_ONCE = object_transfer.LOOKS_AT_ONCE = 1


def counted_run(url, disk, file, last, at=None):
    make_one_request_at_a_time()
    counted = Counted(at)
    with file.open("ab", buffering=0) as acknowledged:
        run_and_tell(acknowledged.fileno(), url, {}, disk, SMALL, last)
    return counted.points


def last_acknowledged(file):
    steps = file.read_text().split() if file.exists() else []
    return max([0, *map(int, steps)])


def every_point(last, share, start):
    """Die at each point of a run of some steps, and go on from what is found."""
    tried = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        points = forked(counted_run, f"file://{folder}/all", folder / "disk", folder / "ack", last)
        for at in range(1 + start, points, share):
            place = folder / str(at)
            (place / "back").mkdir(parents=True)
            url = f"file://{place}/store"
            done = forked(counted_run, url, place / "disk", place / "ack", last, at)
            assert done is None, "it has died"
            acknowledged = last_acknowledged(place / "ack")
            judge(url, {}, place / "back", acknowledged, SMALL)
            assert leftovers(url, {}) == []
            judge(url, {}, place / "back", acknowledged, SMALL)
            # and the same command goes on to the end
            run(url, {}, place / "disk", SMALL, lambda step: None, last)
            assert max(judge(url, {}, place / "back", last, SMALL)) == last
            shutil.rmtree(place)
            tried += 1
    return points, tried


def test_death_at_every_tenth_request(zygote):
    points, tried = zygote(every_point, 7, 10, random.randrange(10))
    assert points > 90
    assert tried >= points // 10


@pytest.mark.exhaustive
def test_death_at_every_request(zygote):
    points, tried = zygote(every_point, 7, 1, 0)
    assert tried == points - 1


# ----------------------------------------------------------------------------------- random moments


def killed_run(url, options, disk, seconds, size):
    """Fork a run, and kill it so many seconds after it has the lock.

    Returns:
        What it has acknowledged, the lock as step -1, and when: seconds since it had the lock.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_and_tell(writer, url, options, disk, size)
        finally:
            os._exit(1)
    os.close(writer)
    told = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        assert select.select([pipe], [], [], 600)[0], "it does not have the lock"
        begin = time.monotonic()
        while (left := begin + seconds - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                told += [(int(step), time.monotonic() - begin) for step in pipe.read(999).split()]
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run has ended with status {status}"
        while rest := pipe.read(999):
            told += [(int(step), seconds) for step in rest.split()]
    return told


def random_kills(url, options, kills, seed):
    """Kill a run again and again, near its first or second save, each time going on where the one
    before has died.

    Returns:
        How many kills there were, and in how many a step was complete that was not acknowledged.
    """
    draw = random.Random(seed)
    ahead = newest = 0
    window = 3.0  # seconds: to the end of the first save, and half as long again; as measured
    if url.startswith("s3://"):
        importlib.import_module("s3fs")  # once, and not in each of the processes that are forked
    with tempfile.TemporaryDirectory() as name:
        disk = Path(name, "disk")
        disk.mkdir()
        for kill in range(kills):
            told = killed_run(url, options, disk, draw.uniform(0.0, window), LARGE)
            saved = [(step, when) for step, when in told if step >= 0]
            window = 1.5 * saved[0][1] if saved else 1.2 * window
            acknowledged = max([newest, *(step for step, _ in saved)])
            back = Path(name, str(kill))
            back.mkdir()
            steps = forked(judge, url, options, back, acknowledged, LARGE)
            newest = max(steps, default=0)
            ahead += newest > acknowledged
            shutil.rmtree(back)
            print(
                f"kill {kill + 1}: {acknowledged} acknowledged, found {sorted(steps)}", flush=True
            )
        assert forked(leftovers, url, options) == []
    return kills, ahead


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.in_each_check(1)
@pytest.mark.parametrize("store", ["file", pytest.param("s3", marks=needs_s3)])
def test_kills_at_random_moments(zygote, store, tmp_path, request):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    if store == "s3":
        server = request.getfixturevalue("s3")
        where = server.folder(), server.options
    else:
        where = f"file://{tmp_path}/store", {}
    kills, ahead = zygote(random_kills, *where, KILLS, seed)
    print(f"{kills} kills, {ahead} of them between a manifest and its acknowledgement")
    assert kills == KILLS
